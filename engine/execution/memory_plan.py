"""How a replica's memory is shared out: what a context needs, how much KV there is room for, what does not fit.

Arithmetic only: it does not measure what is free or what a step needs.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence as Items
from typing import Final

from engine.kernels.reference import KEY_STEP
from engine.kvcache.tensors import KVPool, KVShape
from engine.models.config import ModelConfig
from engine.protocol.specs import ModelSpec
from engine.step.attention_plan import KEYS_UNIT
from engine.step.executor import PagedLayout, split_extents
from engine.step.key_span import FULL, KeySpan

_UNKEPT_BLOCKS_MAX: Final = 1 << 20
BOUNCE_BYTES: Final = 1 << 20  # of blocks that ranks put into one buffer, but for a block that alone is larger
_NUMBER_BYTES_MAX: Final = 4  # that one number of KV takes: the type is not chosen yet where ranks are forked
_WINDOWS_PART: Final = 32  # of a device at most one such part is for blocks that come from other replicas
GRAPH_BYTES: Final = 1 << 20  # what each captured graph takes
CONTEXT_BYTES: Final = 752 << 20  # what the driver keeps of a GPU for a process, kernels included, as measured


class DoesNotFit(RuntimeError):
    """The model and one full context do not fit into memory, or the spec's sizes contradict each other."""


def require_sizes(model: ModelSpec, spans: Items[KeySpan], device: str) -> None:
    """Raises DoesNotFit where the spec, or the spans of the model's layers, ask for what the device type has no kernels
    for."""
    if KEY_STEP % model.block_tokens:
        raise DoesNotFit(f"block_tokens {model.block_tokens} does not divide {KEY_STEP}: 8, 16, 32 and 64 do")
    unit = math.lcm(model.block_tokens, KEYS_UNIT)
    for span in spans:
        if (span.chunk or 0) % unit:
            raise DoesNotFit(f"attention_chunk_size {span.chunk} is no multiple of {unit}, of which KV is read at once")
    if device != "cpu" and model.block_tokens % KEYS_UNIT and any(span.window for span in spans):
        raise DoesNotFit(
            f"block_tokens {model.block_tokens} is for CPUs where layers see a window: a GPU reads KV of {KEYS_UNIT} "
            "tokens at once, set no less"
        )
    if model.host_kv_bytes and (model.stages > 1 or any(span != FULL for span in spans)):
        raise DoesNotFit("host_kv_bytes is for models in one stage whose layers all see everything: leave it out")
    if model.disk_kv_bytes and model.gpus > 1:
        raise DoesNotFit("disk_kv_bytes is for models on one GPU: leave it out")
    if model.disk_kv_bytes and not (model.host_kv_bytes and model.disk_kv_folder):
        raise DoesNotFit("disk_kv_bytes is for what host memory has no more room for: set host_kv_bytes too")
    if device == "cpu" and model.kv_dtype == "fp8":
        raise DoesNotFit("kv_dtype fp8 is for GPUs; on a CPU leave it out")


def context_tokens(model: ModelSpec, trained_tokens: int) -> int:
    """The longest sequence that will be run, of a model made for trained_tokens. Raises DoesNotFit."""
    requested = model.context_tokens
    if requested is not None and requested > trained_tokens:
        raise DoesNotFit(f"context_tokens {requested} is more than the model's {trained_tokens}")
    return requested or trained_tokens


def min_kv_blocks(model: ModelSpec, shape: KVShape, tokens: int) -> int:
    """How many blocks of a group a replica has whenever it is awake: enough for one context and its public prefixes."""
    return _public_prefix_blocks(model) + shape.span.held_blocks(tokens, model.block_tokens)


def host_tier_bytes(model: ModelSpec, pools: Items[KVPool], tokens: int) -> list[int]:
    """How much KV of each pool is kept at most while the model sleeps: its public prefixes in any case, and no more
    than it wakes with. With host_kv_bytes all else is there anyway."""
    block_bytes = sum(pool.shape.block_bytes for pool in pools)
    kept_bytes = 0 if model.host_kv_bytes else model.kept_kv_bytes
    return [
        min(
            max(kept_bytes // block_bytes, _public_prefix_blocks(model)) * pool.shape.block_bytes,
            min_extents(model, pool, tokens) * pool.extent_bytes,
        )
        for pool in pools
    ]


def windows_bytes(model: ModelSpec, pools: Items[KVPool], device_bytes: int) -> int:
    """How much of a device is left to windows, into which other replicas hand over blocks."""
    if len(pools) > 1 or pools[0].shape.span != FULL or pools[0].shape.layer_block_bytes % 8:
        return 0
    return min(model.handover_bytes, device_bytes // _WINDOWS_PART)


def bounce_bytes(model: ModelSpec, config: ModelConfig) -> int:
    """How large a buffer is made in which ranks put their parts of blocks that go to other replicas, of whatever type:
    what is not written takes no memory. 0 where none go: a stage has some layers of each, and layers that do not all
    see everything keep unlike ones."""
    spans = [group.span for group in config.kv_groups]
    if not model.handover_bytes or model.stages > 1 or spans != [FULL]:
        return 0
    slot_bytes = 2 * config.kv_heads * config.head_dim * _NUMBER_BYTES_MAX
    return max(BOUNCE_BYTES, config.layers * model.block_tokens * slot_bytes)


def _public_prefix_blocks(model: ModelSpec) -> int:
    return sum(len(prefix) // model.block_tokens for prefix in model.public_prefixes)


def _context_bytes(shapes: Items[KVShape], tokens: int) -> int:
    return sum(shape.span.held_blocks(tokens, shape.block_tokens) * shape.block_bytes for shape in shapes)


def kv_blocks(
    model: ModelSpec, shapes: Items[KVShape], tokens: int, sequences: int, room_bytes: int, free_bytes: int
) -> list[int]:
    """How many blocks the pool of each shape has, if the others had none: as kv_bytes hold; else as room_bytes hold, at
    most for all sequences of `tokens` each.

    One context gets its blocks where free_bytes hold it, though there be less room. Raises DoesNotFit.
    """
    public = _public_prefix_blocks(model)  # which stay for good, also in windows
    held = [shape.span.held_blocks(tokens, shape.block_tokens) + public * (shape.span != FULL) for shape in shapes]
    context_bytes = _context_bytes(shapes, tokens)
    if model.kv_bytes is not None:
        _require_kv_bytes(model.kv_bytes, shapes, held, free_bytes)
        return [model.kv_bytes // shape.block_bytes for shape in shapes]
    kv_bytes = max(min(room_bytes, sequences * context_bytes), context_bytes)
    if context_bytes > free_bytes:
        lengths = range(block_tokens := shapes[0].block_tokens, tokens, block_tokens)
        fitting = block_tokens * bisect_right(lengths, free_bytes, key=lambda length: _context_bytes(shapes, length))
        advice = f"set context_tokens to at most {fitting}" if fitting else "use a device with more memory"
        raise DoesNotFit(
            f"one context of {tokens} tokens takes {context_bytes / 1e9:.1f} GB of KV, "
            f"{max(0, free_bytes) / 1e9:.1f} GB are free: {advice}"
        )
    return [
        max(min(kv_bytes // shape.block_bytes, sequences * count), count)
        for count, shape in zip(held, shapes, strict=True)
    ]


def _require_kv_bytes(kv_bytes: int, shapes: Items[KVShape], held: Items[int], free_bytes: int) -> None:
    """Raises DoesNotFit where kv_bytes are too many, or too few for one block, and what a sequence sees near it."""
    needed = sum(
        shape.block_bytes * (1 if shape.span == FULL else count) for shape, count in zip(shapes, held, strict=True)
    )
    if kv_bytes < needed:
        least = "one block" if len(shapes) == 1 else "one block and the windows of public prefixes and one sequence"
        raise DoesNotFit(f"kv_bytes {kv_bytes} is less than {least} needs, {needed}")
    if max(kv_bytes // shape.block_bytes * shape.block_bytes for shape in shapes) > free_bytes:
        raise DoesNotFit(f"kv_bytes {kv_bytes} is more than the {free_bytes} that are free: set less, or leave it out")


def initial_extents(model: ModelSpec, pools: Items[KVPool], tokens: int, room_bytes: int, free_bytes: int) -> list[int]:
    """How many extents of each pool get memory as they are opened: together as many as room_bytes, and kv_bytes, hold;
    beyond the min_extents in the proportions of these.

    The min_extents get memory where free_bytes hold them, though there be less room. Raises DoesNotFit.
    """
    layouts = [paged_layout(model, pool, tokens) for pool in pools]
    if model.kv_bytes is not None and len(pools) > 1:
        room_bytes = min(room_bytes, model.kv_bytes)
    least_bytes = [layout.min_extents * layout.extent_bytes for layout in layouts]
    counts = split_extents(layouts, max(0, room_bytes - sum(least_bytes)), least_bytes)
    needed = sum(count * layout.extent_bytes for count, layout in zip(counts, layouts, strict=True))
    if needed > free_bytes:
        raise DoesNotFit(
            f"one context of {tokens} tokens takes {needed / 1e9:.1f} GB of KV, "
            f"{max(0, free_bytes) / 1e9:.1f} GB are free: set a smaller context_tokens, "
            "end what else uses the device, or give the machine more of it"
        )
    return counts


def min_extents(model: ModelSpec, pool: KVPool, tokens: int) -> int:
    """The extents that hold min_kv_blocks, or all where the pool is smaller."""
    return min(-(-min_kv_blocks(model, pool.shape, tokens) // pool.extent_blocks), pool.extents)


def paged_layout(model: ModelSpec, pool: KVPool, tokens: int) -> PagedLayout:
    """A pool's blocks and extents, as its users see them."""
    shape = pool.shape
    return PagedLayout(
        shape.layout, pool.blocks, shape.block_tokens, shape.block_bytes, pool.extent_blocks,
        min_extents(model, pool, tokens), shape.span,
    )  # fmt: skip


def unkept_layout(layouts: Items[PagedLayout], tokens: int, sequences: int) -> PagedLayout:
    """The tree's blocks where no layer sees everything: they name what the others hold, and have no bytes. There are
    enough for all sequences, and for eight times what the others hold."""
    block_tokens = layouts[0].block_tokens
    running = sequences * -(-tokens // block_tokens)
    blocks = max(2 * -(-tokens // block_tokens), min(_UNKEPT_BLOCKS_MAX, max(running, 8 * layouts[0].blocks)))
    return PagedLayout("", blocks, block_tokens, 0, blocks, 1)
