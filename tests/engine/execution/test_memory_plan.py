"""engine/execution/memory_plan.py: how many blocks there is room for, and what is refused with which advice."""

from dataclasses import replace

import msgspec
import pytest
import torch

from engine.execution.memory_plan import (
    DoesNotFit,
    host_tier_bytes,
    initial_extents,
    kv_blocks,
    min_extents,
    min_kv_blocks,
    require_sizes,
)
from engine.kvcache.tensors import KVPool, KVShape
from engine.protocol.specs import ModelSpec
from engine.step.key_span import FULL, KeySpan

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=64, block_tokens=16, dtype=torch.bfloat16)
BLOCK = SHAPE.block_bytes


def spec(kv_bytes: int | None = None) -> ModelSpec:
    return ModelSpec(name="m", folder="", kv_bytes=kv_bytes)


def test_a_chunk_that_is_no_multiple_of_the_block_is_refused() -> None:
    require_sizes(spec(), [FULL, KeySpan(window=37), KeySpan(chunk=8192)], "cpu")
    with pytest.raises(DoesNotFit, match="attention_chunk_size 40 is no multiple of 16"):
        require_sizes(spec(), [KeySpan(chunk=40)], "cpu")
    with pytest.raises(DoesNotFit, match="attention_chunk_size 96 is no multiple of 64"):
        require_sizes(msgspec.structs.replace(spec(), block_tokens=64), [KeySpan(chunk=96)], "cpu")


def test_blocks_smaller_than_what_a_gpu_reads_at_once_are_refused_where_tables_begin_late() -> None:
    """A window's first keys would be looked up in what lies before its table."""
    small = msgspec.structs.replace(spec(), block_tokens=8)
    require_sizes(small, [FULL, KeySpan(window=37)], "cpu")
    require_sizes(small, [FULL, KeySpan(chunk=32)], "cuda")
    with pytest.raises(DoesNotFit, match="block_tokens 8 is for CPUs where layers see a window"):
        require_sizes(small, [FULL, KeySpan(window=37)], "cuda")


def test_a_window_has_room_for_a_sequence_beside_what_is_public() -> None:
    """Its public blocks stay for good: a sequence that found too few beside them would wait for ever."""
    window = replace(SHAPE, span=KeySpan(window=64))  # of which a sequence holds 6 blocks
    public = msgspec.structs.replace(spec(), public_prefixes=[list(range(64))])  # 4 blocks
    assert kv_blocks(public, [SHAPE, window], 160, 1, room_bytes=0, free_bytes=99 * BLOCK) == [10, 10]
    few = msgspec.structs.replace(public, kv_bytes=10 * BLOCK)
    with pytest.raises(DoesNotFit, match=f"windows of public prefixes and one sequence needs, {11 * BLOCK}"):
        kv_blocks(few, [SHAPE, window], 160, 64, room_bytes=0, free_bytes=99 * BLOCK)
    enough = msgspec.structs.replace(public, kv_bytes=11 * BLOCK)
    assert kv_blocks(enough, [SHAPE, window], 160, 64, room_bytes=0, free_bytes=99 * BLOCK) == [11, 11]


def test_the_pool_takes_the_room_there_is_and_no_more_than_all_sequences_need() -> None:
    assert kv_blocks(spec(), [SHAPE], 160, 64, room_bytes=99 * BLOCK + 5, free_bytes=200 * BLOCK) == [99]
    assert kv_blocks(spec(), [SHAPE], 160, 4, room_bytes=99 * BLOCK, free_bytes=200 * BLOCK) == [40]


def test_one_context_gets_its_blocks_where_they_are_free() -> None:
    assert kv_blocks(spec(), [SHAPE], 160, 64, room_bytes=3 * BLOCK, free_bytes=10 * BLOCK) == [10]


def test_a_context_that_does_not_fit_is_refused_with_the_one_that_would() -> None:
    with pytest.raises(DoesNotFit, match="set context_tokens to at most 144"):
        kv_blocks(spec(), [SHAPE], 160, 64, room_bytes=3 * BLOCK, free_bytes=10 * BLOCK - 1)


def test_the_context_that_would_fit_counts_a_full_window_once() -> None:
    windowed = replace(SHAPE, span=KeySpan(window=32))
    shapes = [SHAPE, windowed]
    window_blocks = windowed.span.held_blocks(1600, SHAPE.block_tokens)
    free = (window_blocks + 40) * BLOCK
    with pytest.raises(DoesNotFit, match=f"at most {40 * SHAPE.block_tokens}$"):
        kv_blocks(spec(), shapes, 1600, 64, room_bytes=3 * BLOCK, free_bytes=free)
    assert sum(kv_blocks(spec(), shapes, 40 * SHAPE.block_tokens, 1, room_bytes=0, free_bytes=free)) * BLOCK == free


def test_where_nothing_is_free_no_context_is_advised() -> None:
    with pytest.raises(DoesNotFit, match="a device with more memory"):
        kv_blocks(spec(), [SHAPE], 160, 64, room_bytes=-5, free_bytes=-5)


def test_kv_bytes_are_kept_to() -> None:
    assert kv_blocks(spec(7 * BLOCK + 1), [SHAPE], 160, 64, room_bytes=0, free_bytes=7 * BLOCK) == [7]
    with pytest.raises(DoesNotFit, match="less than one block"):
        kv_blocks(spec(BLOCK - 1), [SHAPE], 160, 64, room_bytes=BLOCK, free_bytes=BLOCK)
    with pytest.raises(DoesNotFit, match="more than the"):
        kv_blocks(spec(9 * BLOCK), [SHAPE], 160, 64, room_bytes=BLOCK, free_bytes=8 * BLOCK)


def pool_of(extents: int) -> KVPool:
    """Of extents of four blocks, without memory."""
    shape = KVShape(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype=torch.float32)  # 4 blocks are a page
    pool = KVPool(shape, 4 * extents, extents=0)
    assert (pool.extents, pool.extent_blocks) == (extents, 4)
    return pool


def test_no_more_is_kept_than_one_asks_for_or_wakes_with_and_public_prefixes_always() -> None:
    pool = pool_of(20)
    block, least = pool.shape.block_bytes, 3 * pool.extent_bytes
    model = ModelSpec(name="m", folder="", kept_kv_bytes=2 * block)
    assert host_tier_bytes(model, [pool], 160) == [2 * block]
    assert host_tier_bytes(msgspec.structs.replace(model, kept_kv_bytes=1 << 40), [pool], 160) == [least]
    assert host_tier_bytes(msgspec.structs.replace(model, public_prefixes=[[1] * 90]), [pool], 160) == [5 * block]


def test_a_pool_opens_with_the_extents_that_there_is_room_for() -> None:
    pool = pool_of(20)
    size = pool.extent_bytes
    assert initial_extents(spec(), [pool], 160, room_bytes=7 * size + 5, free_bytes=9 * size) == [7]
    assert initial_extents(spec(), [pool], 160, room_bytes=99 * size, free_bytes=99 * size) == [20]
    assert initial_extents(spec(), [pool], 160, room_bytes=-5, free_bytes=9 * size) == [3], (
        "of one context's ten blocks"
    )
    with pytest.raises(DoesNotFit, match="one context of 160 tokens"):
        initial_extents(spec(), [pool], 160, room_bytes=0, free_bytes=3 * size - 1)


def test_the_least_is_one_context_beside_what_is_published() -> None:
    model = ModelSpec(name="m", folder="", public_prefixes=[[1] * 95, [2] * 33])
    assert min_kv_blocks(model, SHAPE, 160) == 5 + 2 + 10
    assert min_extents(model, pool_of(20), 160) == 5
    assert min_extents(model, pool_of(2), 160) == 2, "no more than there are"
