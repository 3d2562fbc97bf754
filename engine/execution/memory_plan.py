"""How a replica's memory is shared out: what a context needs, how much KV there is room for, what does not fit.

Arithmetic only: it does not measure what is free or what a step needs.
"""

from typing import Final

from engine.kernels.reference import KEY_STEP
from engine.kvcache.tensors import KVPool, KVShape
from engine.protocol.specs import ModelSpec
from engine.step.executor import PagedLayout

GRAPH_BYTES: Final = 1 << 20  # what each captured graph takes
CONTEXT_BYTES: Final = 752 << 20  # what the driver keeps of a GPU for a process, kernels included, as measured


class DoesNotFit(RuntimeError):
    """The model and one full context do not fit into memory, or the spec's sizes contradict each other."""


def require_sizes(model: ModelSpec, device: str) -> None:
    """Raises DoesNotFit where the spec asks for what the device type has no kernels for."""
    if KEY_STEP % model.block_tokens:
        raise DoesNotFit(f"block_tokens {model.block_tokens} does not divide {KEY_STEP}: 8, 16, 32 and 64 do")
    if device == "cpu" and model.kv_dtype == "fp8":
        raise DoesNotFit("kv_dtype fp8 is for GPUs; on a CPU leave it out")


def context_tokens(model: ModelSpec, trained_tokens: int) -> int:
    """The longest sequence that will be run, of a model made for trained_tokens. Raises DoesNotFit."""
    requested = model.context_tokens
    if requested is not None and requested > trained_tokens:
        raise DoesNotFit(f"context_tokens {requested} is more than the model's {trained_tokens}")
    return requested or trained_tokens


def min_kv_blocks(model: ModelSpec, tokens: int) -> int:
    """How many blocks a replica has whenever it is awake: enough for one context and its public prefixes."""
    return _public_prefix_blocks(model) - (-tokens // model.block_tokens)


def host_tier_bytes(model: ModelSpec, pool: KVPool, tokens: int) -> int:
    """How much KV is kept at most while it sleeps: its public prefixes in any case, and no more than it wakes with."""
    published = _public_prefix_blocks(model) * pool.shape.block_bytes
    return min(max(model.kept_kv_bytes, published), min_extents(model, pool, tokens) * pool.extent_bytes)


def _public_prefix_blocks(model: ModelSpec) -> int:
    return sum(len(prefix) // model.block_tokens for prefix in model.public_prefixes)


def kv_blocks(model: ModelSpec, shape: KVShape, tokens: int, sequences: int, room_bytes: int, free_bytes: int) -> int:
    """How many blocks the pool has: as kv_bytes hold; else as room_bytes hold, at most for all sequences of `tokens`
    each.

    One context gets its blocks where free_bytes hold it, though there be less room. Raises DoesNotFit.
    """
    context_blocks = -(-tokens // shape.block_tokens)
    if model.kv_bytes is not None:
        blocks = model.kv_bytes // shape.block_bytes
        if blocks < 1:
            raise DoesNotFit(f"kv_bytes {model.kv_bytes} is less than one block's {shape.block_bytes}")
        if blocks * shape.block_bytes > free_bytes:
            raise DoesNotFit(
                f"kv_bytes {model.kv_bytes} is more than the {free_bytes} that are free: set less, or leave it out"
            )
        return blocks
    blocks = max(min(room_bytes // shape.block_bytes, sequences * context_blocks), context_blocks)
    if blocks * shape.block_bytes > free_bytes:
        fitting = max(0, free_bytes) // shape.block_bytes * shape.block_tokens
        advice = f"set context_tokens to at most {fitting}" if fitting else "use a device with more memory"
        raise DoesNotFit(
            f"one context of {tokens} tokens takes {blocks * shape.block_bytes / 1e9:.1f} GB of KV, "
            f"{max(0, free_bytes) / 1e9:.1f} GB are free: {advice}"
        )
    return blocks


def initial_extents(model: ModelSpec, pool: KVPool, tokens: int, room_bytes: int, free_bytes: int) -> int:
    """How many extents of the pool get memory as it is opened: as many as room_bytes hold.

    The min_extents get memory where free_bytes hold them, though there be less room. Raises DoesNotFit.
    """
    count = min(max(room_bytes // pool.extent_bytes, min_extents(model, pool, tokens)), pool.extents)
    needed = count * pool.extent_bytes
    if needed > free_bytes:
        raise DoesNotFit(
            f"one context of {tokens} tokens takes {needed / 1e9:.1f} GB of KV, "
            f"{max(0, free_bytes) / 1e9:.1f} GB are free: set a smaller context_tokens, "
            "end what else uses the device, or give the machine more of it"
        )
    return count


def min_extents(model: ModelSpec, pool: KVPool, tokens: int) -> int:
    """The extents that hold min_kv_blocks, or all where the pool is smaller."""
    return min(-(-min_kv_blocks(model, tokens) // pool.extent_blocks), pool.extents)


def paged_layout(model: ModelSpec, pool: KVPool, tokens: int) -> PagedLayout:
    """The pool's blocks and extents, as its users see them."""
    shape = pool.shape
    return PagedLayout(
        shape.layout, pool.blocks, shape.block_tokens, shape.block_bytes, pool.extent_blocks,
        min_extents(model, pool, tokens),
    )  # fmt: skip
