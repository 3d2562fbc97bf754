"""engine/kv.py: what is written is read, what was left behind is not, and the empty block stays empty."""

import psutil
import pytest
import torch

from engine.kv import KvPool, KvShape

SHAPE = KvShape(layers=2, kv_heads=3, head_dim=8, block_tokens=4, dtype=torch.bfloat16)


def test_block_bytes_count_k_and_v_of_all_layers() -> None:
    pool = KvPool(SHAPE, 5)
    held = sum(rows.nbytes for rows in pool.layers)
    assert held == SHAPE.block_bytes * (pool.blocks + 1)
    assert pool.bytes == SHAPE.block_bytes * 5


def test_layout_names_everything_that_gives_the_bytes_their_meaning() -> None:
    others = [
        KvShape(3, 3, 8, 4, torch.bfloat16),
        KvShape(2, 1, 8, 4, torch.bfloat16),
        KvShape(2, 3, 16, 4, torch.bfloat16),
        KvShape(2, 3, 8, 8, torch.bfloat16),
        KvShape(2, 3, 8, 4, torch.float32),
    ]
    assert len({SHAPE.layout, *(other.layout for other in others)}) == 6


def test_reads_what_was_written_block_by_block_and_clears_the_rest() -> None:
    pool = KvPool(SHAPE, 6)
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
    pool = KvPool(KvShape(3, 1, head_dim, 1, dtype), 6)
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
    pool = KvPool(SHAPE, 2)
    pool.write(0, torch.tensor([pool.empty * 4]), torch.ones(1, SHAPE.slot_width, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="empty block"):
        pool.check()


def test_a_pool_takes_memory_only_as_it_fills() -> None:
    resident = psutil.Process().memory_info().rss
    pool = KvPool(KvShape(8, 2, 64, 16, torch.bfloat16), 16384)  # 1 GiB
    assert psutil.Process().memory_info().rss - resident < 64 << 20
    pool.check()
