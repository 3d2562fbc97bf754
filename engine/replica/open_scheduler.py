"""What a replica builds around a loaded model: a scheduler, and what checks its requests. It knows no sockets."""

from collections.abc import Callable

from engine.kv_blocks.block_pool import BlockPool
from engine.kv_blocks.kv_manager import KVManager
from engine.kv_blocks.windowed_group import WindowedGroup
from engine.protocol.specs import ModelSpec
from engine.scheduling.encoder_scheduler import EncoderScheduler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.token_budget import SchedulerConfig
from engine.sequences.prompt_images import ImageElements
from engine.sequences.sequence import Sequence
from engine.sequences.validation import RequestValidator
from engine.step.executor import LoadedModel
from engine.tiers.host_blocks import HostBlocks, open_tree
from prefixcache.namespace import CacheShare


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
        groups=limits.groups,
    )
    if paged is None:
        return EncoderScheduler(config, clock)
    pools = [
        BlockPool(memory.layout.blocks, memory.layout.extent_blocks, memory.mapped, memory.layout.min_blocks)
        for memory in model.memories
    ]
    windowed = [
        WindowedGroup(index, memory.layout.span, memory.layout.block_tokens, pool, clock)
        for index, (memory, pool) in enumerate(zip(model.memories[1:], pools[1:], strict=True))
    ]
    layout = paged.layout
    host: HostBlocks[Sequence] | None
    tree, host = open_tree(layout.blocks, layout.block_tokens, layout.block_bytes, clock, model.tier)
    return Scheduler(KVManager(tree, pools[0], windowed, host), config, clock)


def open_validator(model: LoadedModel, spec: ModelSpec, tokens_max: int) -> RequestValidator:
    """What checks requests for this model, with sequences of at most tokens_max tokens."""
    images = model.images
    return RequestValidator(
        model_revision=model.revision,
        kv_layout="+".join(memory.layout.name for memory in model.memories),
        block_tokens=model.paged.layout.block_tokens if model.paged is not None else 1,
        max_total_tokens=tokens_max,
        vocabulary=model.executor.limits.vocabulary,
        stop_ids=model.stop_ids,
        share=CacheShare(spec.scope_floor_blocks, spec.scope_cap_blocks),
        poolings=model.poolings,
        images=None if images is None else ImageElements(images.side, images.tokens, images.token),
    )


def max_sequence_tokens(model: LoadedModel, published_tokens: int) -> int:
    """The length of the longest sequence that there is room for whenever the replica is on its device."""
    context_tokens = model.executor.limits.context_tokens
    if model.paged is None:
        return context_tokens
    layout = model.paged.layout
    return min(context_tokens, layout.min_blocks * layout.block_tokens - published_tokens)
