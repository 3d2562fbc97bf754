"""engine/kvcache/tensors.py: what is written is read, what was left behind is not, and the empty block stays empty."""

import psutil
import pytest
import torch

from engine.kvcache.tensors import EXTENT_BYTES, KVPool, KVShape, extent_blocks
from engine.memory.virtual_memory import Arena

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=8, block_tokens=4, dtype=torch.bfloat16)


def test_block_bytes_count_k_and_v_of_all_layers() -> None:
    pool = KVPool(SHAPE, 5)
    held = sum(rows.nbytes for rows in pool.layers)
    assert held == SHAPE.block_bytes * (pool.blocks + 1)
    assert pool.bytes == SHAPE.block_bytes * 5


def test_layout_names_everything_that_gives_the_bytes_their_meaning() -> None:
    others = [
        KVShape(3, 3, 8, 4, torch.bfloat16),
        KVShape(2, 1, 8, 4, torch.bfloat16),
        KVShape(2, 3, 16, 4, torch.bfloat16),
        KVShape(2, 3, 8, 8, torch.bfloat16),
        KVShape(2, 3, 8, 4, torch.float32),
    ]
    assert len({SHAPE.layout, *(other.layout for other in others)}) == 6


def test_reads_what_was_written_block_by_block_and_clears_the_rest() -> None:
    pool = KVPool(SHAPE, 6)
    for rows in pool.layers:
        rows[: 6 * 4] = float("nan")
    written = torch.randn(6, SHAPE.slot_width).bfloat16()
    slots = torch.tensor([12, 13, 14, 15, 4, 5])  # blocks 3 and 1, the second half full
    pool.write(1, slots, written)
    into = torch.full((12, SHAPE.slot_width), 7.0, dtype=torch.bfloat16)
    pool.read(1, torch.tensor([3, 1, pool.empty]), torch.tensor([6, 7]), into)
    assert torch.equal(into[:6], written)
    assert not into[6:].any()
    assert pool.layers[0][:24].isnan().all(), "another layer was written"
    pool.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [8, 5])  # with blocks of whole words, and without
def test_erasing_zeroes_the_blocks_in_all_layers_and_no_others(dtype: torch.dtype, head_dim: int) -> None:
    pool = KVPool(KVShape(3, 1, head_dim, 1, dtype), 6)
    for rows in pool.layers:
        rows[: pool.blocks].view(torch.uint8).fill_(0xFF)  # a NaN in each of them
    pool.erase(torch.tensor([4, 0, 1]))
    for rows in pool.layers:
        assert [bool(row.view(torch.uint8).any()) for row in rows[: pool.blocks]] == [False] * 2 + [True] * 2 + [
            False,
            True,
        ]
    pool.check()


def test_check_notices_a_write_into_the_empty_block() -> None:
    pool = KVPool(SHAPE, 2)
    pool.write(0, torch.tensor([pool.empty * 4]), torch.ones(1, SHAPE.slot_width, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="empty block"):
        pool.check()


def test_a_pool_takes_memory_only_as_it_fills() -> None:
    resident = psutil.Process().memory_info().rss
    pool = KVPool(KVShape(8, 2, 64, 16, torch.bfloat16), 16384)  # 1 GiB
    assert psutil.Process().memory_info().rss - resident < 64 << 20
    pool.check()


def extents_pool(blocks: int = 300) -> KVPool:
    """Several extents, the last one short, with a number of its own in every block and layer."""
    pool = KVPool(KVShape(2, 1, 8, 16, torch.float32), blocks)
    for layer, rows in enumerate(pool.layers):
        numbers = torch.arange(blocks).repeat_interleave(16) + 1000 * (layer + 1)
        rows[: blocks * 16] = numbers[:, None].float()
    return pool


def numbers(pool: KVPool, layer: int = 0) -> list[int]:
    """The first number of each block."""
    return pool.layers[layer][: pool.blocks * 16 : 16, 0].int().tolist()


def test_extents_are_whole_pieces_of_memory_and_neither_too_many_nor_too_large() -> None:
    shape = KVShape(32, 8, 128, 16, torch.bfloat16)  # 64 KiB in each layer
    assert extent_blocks(shape, 1 << 20, 2 << 20) * shape.block_bytes == EXTENT_BYTES
    small = extent_blocks(shape, 6400, 2 << 20)
    assert small == 96  # of the 100 that would make 64 extents, whole units of 32
    assert extent_blocks(shape, 1, 2 << 20) == 32
    odd = KVShape(3, 1, 5, 3, torch.float32)
    assert extent_blocks(odd, 10**6, 4096) * odd.layer_block_bytes % 4096 == 0


def test_an_extent_comes_and_goes_in_all_layers_and_the_others_stay() -> None:
    pool = extents_pool()
    size = pool.extent_blocks
    assert pool.extents == -(-300 // size) > 4
    assert pool.mapped == list(range(pool.extents))
    before = [numbers(pool, layer) for layer in (0, 1)]
    pool.unmap([1, pool.extents - 1])
    assert pool.mapped == [0, *range(2, pool.extents - 1)]
    assert pool.mapped_bytes == len(pool.mapped) * pool.extent_bytes
    for layer, found in enumerate([numbers(pool, layer) for layer in (0, 1)]):
        gone = {*range(size, 2 * size), *range((pool.extents - 1) * size, 300)}
        assert found == [0 if block in gone else number for block, number in enumerate(before[layer])]
    pool.map([1])
    assert 1 in pool.mapped
    pool.check()


def test_clearing_zeroes_extents_and_no_others() -> None:
    pool = extents_pool()
    size = pool.extent_blocks
    before = numbers(pool)
    pool.clear([3, 1, 2])
    assert numbers(pool) == before[:size] + [0] * 3 * size + before[4 * size :]


def test_blocks_are_copied_in_all_layers() -> None:
    pool = extents_pool()
    pool.copy(torch.tensor([5, 299, 17]), torch.tensor([100, 0, 7]))
    for layer in (0, 1):
        found = numbers(pool, layer)
        assert [found[block] - 1000 * (layer + 1) for block in (100, 0, 7, 5, 299, 17)] == [5, 299, 17, 5, 299, 17]
    pool.check()


@pytest.mark.parametrize("head_dim", [8, 5])  # with blocks of whole words, and without
def test_what_is_taken_out_of_blocks_comes_back_into_others(head_dim: int) -> None:
    shape = KVShape(2, 1, head_dim, 1, torch.bfloat16)
    pool = KVPool(shape, 6)
    for rows in pool.layers:
        rows[:6] = torch.randn(6, shape.slot_width).bfloat16()
    taken = torch.empty(3, shape.layer_block_bytes, dtype=torch.uint8)
    wanted = pool.layers[1][[4, 0, 2]].clone()
    pool.take(1, torch.tensor([4, 0, 2]), taken)
    pool.erase(torch.arange(6))
    pool.put(1, torch.tensor([1, 5, 3]), taken)
    assert torch.equal(pool.layers[1][[1, 5, 3]], wanted)
    assert not pool.layers[0].any()
    pool.check()


def test_a_pool_opens_with_as_many_extents_as_it_is_told() -> None:
    arena = Arena.of(torch.device("cpu"))
    pool = KVPool(KVShape(2, 1, 8, 16, torch.float32), 300, arena, extents=2)
    assert pool.mapped == [0, 1]
    assert arena.mapped_bytes == pool.mapped_bytes == 2 * pool.extent_bytes
