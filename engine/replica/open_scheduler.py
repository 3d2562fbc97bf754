"""What a replica builds around a loaded model: a scheduler, what checks its requests, its public prefixes. It knows no
sockets."""

from array import array
from collections.abc import Callable

from engine.execution.step_loop import SampleMasked, StepLoop
from engine.protocol.specs import ModelSpec
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.encoder_scheduler import EncoderScheduler
from engine.scheduling.kv_manager import KVManager
from engine.scheduling.public_prefixes import InvalidPublicPrefix, whole_blocks
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import GrammarMatcher, Sequence
from engine.scheduling.token_budget import SchedulerConfig
from engine.scheduling.validation import RequestValidator
from engine.step.executor import LoadedModel
from engine.step.layout import Int32s
from prefixcache.namespace import CacheShare
from prefixcache.tree import PrefixTree

MaskWriter = Callable[[list[GrammarMatcher | None]], Int32s]


def open_scheduler(model: LoadedModel, spec: ModelSpec, clock: Callable[[], float]) -> Scheduler | EncoderScheduler:
    """A scheduler for all of a model's blocks, or of texts where it has none, within what the executor and the spec
    allow."""
    limits, paged = model.executor.limits, model.paged
    config = SchedulerConfig(
        step_tokens=limits.step_tokens,
        prompt_step_tokens=limits.prompt_step_tokens,
        max_sequences=limits.sequences,
        max_waiting=spec.waiting,
        gap_ms=spec.gap_ms,
        costs=model.executor.costs,
    )
    if paged is None:
        return EncoderScheduler(config, clock)
    layout = paged.layout
    pool = BlockPool(layout.blocks, layout.extent_blocks, paged.mapped, layout.min_blocks)
    return Scheduler(KVManager(PrefixTree(layout.blocks, layout.block_tokens, clock), pool), config, clock)


def open_validator(model: LoadedModel, spec: ModelSpec, tokens_max: int) -> RequestValidator:
    """What checks requests for this model, with sequences of at most tokens_max tokens."""
    return RequestValidator(
        model_revision=model.revision,
        kv_layout=model.paged.layout.name if model.paged is not None else "",
        block_tokens=model.paged.layout.block_tokens if model.paged is not None else 1,
        max_total_tokens=tokens_max,
        vocabulary=model.executor.limits.vocabulary,
        stop_ids=model.stop_ids,
        share=CacheShare(spec.scope_floor_blocks, spec.scope_cap_blocks),
        poolings=model.poolings,
    )


def max_sequence_tokens(model: LoadedModel, published_tokens: int) -> int:
    """The length of the longest sequence that there is room for whenever the replica is on its device."""
    context_tokens = model.executor.limits.context_tokens
    if model.paged is None:
        return context_tokens
    layout = model.paged.layout
    return min(context_tokens, layout.min_blocks * layout.block_tokens - published_tokens)


def public_prefixes(model: LoadedModel, spec: ModelSpec) -> list["array[int]"]:
    """The spec's public prefixes as far as whole blocks go. Raises InvalidPublicPrefix."""
    limits, paged = model.executor.limits, model.paged
    block_tokens = paged.layout.block_tokens if paged is not None else 1
    return whole_blocks(spec.public_prefixes, limits.blocks, block_tokens, limits.vocabulary)


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


def masked_sampler(model: LoadedModel, write_masks: MaskWriter) -> SampleMasked | None:
    """What samples masked rows with the masks of their matchers; None where no row can have one."""
    sampler = model.sampler
    if sampler is None:
        return None
    return lambda step, matchers: sampler.sample(step, write_masks(matchers))
