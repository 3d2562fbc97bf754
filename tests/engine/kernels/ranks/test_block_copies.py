"""engine/kernels/ranks/block_copies.py: blocks go out of a pool and come back to the bit, and what changed is summed up
otherwise."""

import os
import random
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import reference
from engine.kernels.ranks import block_copies
from tests.support.steps import DEVICE

MODULES = pytest.mark.parametrize("copies", [block_copies, reference], ids=["kernel", "reference"])


def pool_of(layers: int, blocks: int, words: int) -> torch.Tensor:
    """As a pool's: layers lie apart, and not everything between them is its."""
    whole = torch.randint(-(2**63), 2**63 - 1, (layers, blocks + 3, words), dtype=torch.int64).to(DEVICE)
    return whole[:, :blocks]


def gathered(copies: Any, pool: torch.Tensor, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    into = torch.zeros(len(ids), pool.shape[0], pool.shape[2], dtype=torch.int64, device=DEVICE)
    sums = torch.zeros(into.shape[:2], dtype=torch.int64, device=DEVICE)
    copies.gather_blocks(pool, torch.tensor(ids, device=DEVICE), into, sums)
    return into, sums


@MODULES
@pytest.mark.parametrize("words", [8, 1000, 5000])
def test_blocks_go_out_and_come_back(copies: Any, words: int) -> None:
    pool, other = pool_of(3, 7, words), pool_of(3, 7, words)
    before = other.clone()
    into, sums = gathered(copies, pool, [4, 0, 6])
    assert torch.equal(into, pool[:, [4, 0, 6]].transpose(0, 1))
    again = torch.zeros_like(sums)
    copies.sum_blocks(into, again)
    assert torch.equal(again, sums)
    copies.scatter_blocks(into, other, torch.tensor([2, 5, 1], device=DEVICE))
    assert torch.equal(other[:, [2, 5, 1]], pool[:, [4, 0, 6]])
    rest = [0, 3, 4, 6]
    assert torch.equal(other[:, rest], before[:, rest]), "nothing else is written"


def test_kernel_and_reference_sum_up_alike() -> None:
    pool = pool_of(2, 5, 3000)
    _, sums = gathered(block_copies, pool, [1, 3])
    _, expected = gathered(reference, pool, [1, 3])
    assert torch.equal(sums, expected)
    assert len({*sums.flatten().tolist()}) == 4


def test_a_sum_is_that_of_its_definition() -> None:
    """Of words that are counted by hand, so that both sides of a handover stay what other versions compute."""
    mask = (1 << 64) - 1

    def mixed(word: int, place: int) -> int:
        number = (word + (place + 1) * 0x9E3779B97F4A7C15) & mask
        number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
        number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
        return number ^ (number >> 31)

    words = [0, 1, -1, 2**62, -(2**63), 12345, 0, 7]
    blocks = torch.tensor(words, dtype=torch.int64).view(1, 2, 4)
    sums = torch.zeros(1, 2, dtype=torch.int64)
    reference.sum_blocks(blocks, sums)
    for layer in range(2):
        places = range(4 * layer, 4 * layer + 4)
        assert int(sums[0, layer]) & mask == sum(mixed(words[place] & mask, place) for place in places) & mask


@MODULES
def test_one_bit_two_words_and_swapped_words_are_noticed(copies: Any) -> None:
    rng, blocks = random.Random(5), pool_of(1, 2, 512).transpose(0, 1).contiguous()
    sums, other = (torch.zeros(2, 1, dtype=torch.int64, device=DEVICE) for _ in range(2))
    copies.sum_blocks(blocks, sums)
    for _ in range(20):
        changed = blocks.clone()
        words = changed[1, 0]
        at, to = rng.sample(range(512), 2)
        match rng.randrange(3):
            case 0:
                words[at] ^= 1 << rng.randrange(63)
            case 1:
                words[at], words[to] = words[to].clone(), words[at].clone()
            case 2:
                words[at] += 1
                words[to] -= 1
        copies.sum_blocks(changed, other)
        assert (other == sums).flatten().tolist() == [True, False]
    copies.sum_blocks(torch.zeros_like(blocks), other)
    assert (other != sums).all(), "memory that nothing came to"


def test_kernels_compile_for_a_gpu_and_move_16_bytes_at_once() -> None:
    """A new process compiles them for an H100, without one; the interpreter would take them here."""
    program = "from tests.engine.kernels.ranks.test_block_copies import compiled; compiled()"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.getcwd()}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["ld.global.v2 st.global.v2", "ld.global.v2", "ld.global.v2 st.global.v2"]


def compiled() -> None:
    """Prints how a gather, a sum and a scatter read and write words."""
    kernel, names = block_copies._copy, block_copies._copy.arg_names
    types = {"source": "*i64", "target": "*i64", "sums": "*i64", "source_ids": "*i64", "target_ids": "*i64"}
    for absent in (("target_ids",), ("target", "source_ids", "target_ids"), ("sums", "source_ids")):
        constants: dict[str, Any] = {"W": 8192, "L": 32, "BLOCK": 2048, **dict.fromkeys(absent)}
        known = {name: types.get(name, "i64") for name in names} | dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            kernel, known, {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in constants},
        )  # fmt: skip
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
        print(*sorted({*re.findall(r"(?:ld|st)\.global\.v2", code)}))
