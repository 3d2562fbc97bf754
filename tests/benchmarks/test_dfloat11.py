"""benchmarks/bf12/dfloat11.py: its packing is the format that DFloat11's kernel reads. The package itself needs a
GPU."""

import random
from bisect import bisect_left
from dataclasses import dataclass, field

import pytest
import torch

from benchmarks.bf12.dfloat11 import packed

THREAD_BITS, BLOCK_BITS = 64, 64 * 512


@dataclass
class Codec:
    """A prefix code: symbol 120 + i has i ones and a zero, and a text ends with ones alone."""

    _eof: str = "end"
    _table: dict[int | str, tuple[int, int]] = field(
        default_factory=lambda: {
            **{120 + i: (i + 1, ((1 << i) - 1) << 1) for i in range(12)},
            "end": (12, (1 << 12) - 1),
        }
    )

    def bits(self, symbol: int | str) -> str:
        length, code = self._table[symbol]
        return format(code, f"0{length}b")


@pytest.mark.parametrize("count", [1, 3, 64, 1000, 20_011])
@pytest.mark.parametrize("seed", [0, 1])
def test_codes_follow_each_other_and_each_thread_knows_where_its_first_one_begins(count: int, seed: int) -> None:
    codec = Codec()
    symbols = random.Random(seed).choices(range(120, 132), weights=[2**-i for i in range(12)], k=count)
    encoded, gaps, positions = packed(torch.tensor(symbols, dtype=torch.uint8), codec)
    pieces = [codec.bits(symbol) for symbol in symbols]
    begins = [0]
    for piece in pieces:
        begins.append(begins[-1] + len(piece))
    total = begins.pop()
    if total % 8:
        pieces.append(codec.bits("end"))
        begins.append(total)
    text = "".join(pieces)[: -(-total // 8) * 8]
    assert "".join(format(byte, "08b") for byte in encoded.tolist()) == text
    told = "".join(format(byte, "08b") for byte in gaps.tolist())
    for thread in range(-(-len(text) // THREAD_BITS)):
        first = bisect_left(begins, thread * THREAD_BITS)
        if first < len(begins) and begins[first] < (thread + 1) * THREAD_BITS:
            assert int(told[5 * thread : 5 * thread + 5], 2) == begins[first] - thread * THREAD_BITS
    for block, position in enumerate(positions.tolist()[:-1]):
        assert begins[position] >= block * BLOCK_BITS
        assert position == 0 or begins[position - 1] < block * BLOCK_BITS
    assert positions[-1] == count
    assert len(told) >= 5 * 512 * -(-len(encoded) // 4096)
