"""A replica's public prefixes, computed before it serves. It knows no sockets."""

from array import array

from engine.kv_blocks.public_prefixes import InvalidPublicPrefix, whole_blocks
from engine.protocol.specs import ModelSpec
from engine.scheduling.encoder_scheduler import EncoderScheduler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_loop import StepLoop
from engine.sequences.sequence import Sequence
from engine.step.executor import LoadedModel


def public_prefixes(model: LoadedModel, spec: ModelSpec) -> list["array[int]"]:
    """The spec's public prefixes as far as whole blocks go. Raises InvalidPublicPrefix."""
    limits, paged = model.executor.limits, model.paged
    block_tokens = paged.layout.block_tokens if paged is not None else 1
    blocks = min((memory.layout.blocks for memory in model.memories), default=0)  # each group pins its own
    return whole_blocks(spec.public_prefixes, blocks, block_tokens, limits.vocabulary)


def publish_prefixes(loop: StepLoop, scheduler: Scheduler | EncoderScheduler, sequences: list[Sequence]) -> None:
    """Computes prompts whose KV stays, for everybody to read; before anything else. Raises InvalidPublicPrefix."""
    if isinstance(scheduler, EncoderScheduler):
        assert not sequences, "an encoder has no prefixes"
        return
    for sequence in sequences:
        scheduler.intake.add([sequence])
        while loop.turn():
            pass
    scheduler.intake.take_outputs()
    for number, sequence in enumerate(sequences):
        if not scheduler.kv.publish(sequence):
            raise InvalidPublicPrefix(f"public_prefixes[{number}] could not be computed by this model: change it")
