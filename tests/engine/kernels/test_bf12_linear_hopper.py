"""Without a GPU the kernel runs in torch (gluon_in_torch.py) and is compiled for its GPU, in a process that does not
interpret. What registers, barriers and tensor cores make of it is tested on one."""

import os
import re
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from engine.bf12.codec import Bf12Weight
from engine.bf12.layout import BASES, CODES
from engine.kernels import bf12_hopper_layout, bf12_linear_hopper
from engine.kernels.bf12_decode import expand
from engine.kernels.bf12_linear_hopper import HopperTiling, multiply, multiply_gated, serves
from engine.kernels.tuning import fastest_tiling
from tests.support.bf12_weights import coded, every_value, same_bits, weights, without_escapes
from tests.support.gluon_in_torch import in_torch
from tests.support.steps import DEVICE, error, random

BF16 = torch.bfloat16
SHARED_MOST = 232_448  # bytes of an H200's multiprocessor that one program may have
MULTIPROCESSORS = 132
ROUNDED = 4e-3  # of a result in bfloat16
SUMMED = 1e-5  # of float32 sums in another order
TRUE = [(6144, 4096), (4096, 14336), (28672, 4096)]
VARIANTS: dict[str, dict[str, Any]] = {
    "large tiles": {"ROWS": 256, "out": "*fp32"},
    "of 16 lanes, gated": {"ROWS": 128, "LANES": 16, "GATED": True},
}


def with_escapes(weight_NK: Tensor, rate: float, seed: int = 5) -> Tensor:
    """The same with some numbers that are much larger, much smaller or 0."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.rand(weight_NK.shape, generator=generator)
    for part, factor in enumerate((2.0**12, 2.0**-30, 0.0)):
        hit = (kind >= part * rate / 3) & (kind < (part + 1) * rate / 3)
        weight_NK = torch.where(hit, weight_NK * factor, weight_NK)
    return weight_NK


def multiplied(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    return x_TK.double() @ weight_NK.to(x_TK.device).double().T


def silu_and_multiply(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def simulated(x_TK: Tensor, weight: Bf12Weight, tile: HopperTiling, programs: int, gated: bool = False) -> Tensor:
    """As by multiply, or multiply_gated."""
    on_cpu = Bf12Weight(weight.words_NW.cpu(), type(weight.index)(**{
        name: getattr(weight.index, name).cpu() for name in type(weight.index).__slots__
    }))  # fmt: skip
    with in_torch(bf12_hopper_layout, bf12_linear_hopper) as kernels:
        kernels.multiprocessors_of = lambda _: programs
        call = kernels.multiply_gated if gated else kernels.multiply
        result: Tensor = call(x_TK.cpu(), on_cpu, kernels.HopperTiling(tile.rows, tile.parts))
        return result


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tile", "programs"),
    [
        (1, 16, 128, HopperTiling(128, 1), 1),  # a tile that is nearly empty, in 16 lanes
        (129, 144, 256, HopperTiling(128, 1), 3),  # a row and a few outputs more than tiles
        (257, 128, 384, HopperTiling(256, 1), 1),  # rings go round, in 16 lanes
        (100, 256, 1280, HopperTiling(128, 3), 2),  # parts of unequal length
        (70, 40, 512, HopperTiling(256, 2), 2),
    ],
)
def test_many_rows(rows: int, outputs: int, inputs: int, tile: HopperTiling, programs: int) -> None:
    below = [with_escapes(weights(outputs, inputs, sigma), 0.002) for sigma in (0.02, 3.0)]
    x_TK = random(rows, inputs, dtype=BF16, seed=1)
    found_PTN = simulated(x_TK, coded(*below), tile, programs)
    assert found_PTN.shape == (tile.parts, rows, 2 * outputs)
    assert found_PTN.dtype == (BF16 if tile.parts == 1 else torch.float32)
    wanted = multiplied(x_TK.cpu(), torch.cat(below))
    for half in (slice(0, outputs), slice(outputs, None)):
        assert error(found_PTN.sum(0)[:, half], wanted[:, half]) < (ROUNDED if tile.parts == 1 else SUMMED)


@pytest.mark.parametrize(
    ("inner", "inputs", "tile"),
    [(32, 256, HopperTiling(128, 1)), (80, 512, HopperTiling(128, 1)), (80, 384, HopperTiling(256, 1))],
)
def test_gating_in_the_epilogue(inner: int, inputs: int, tile: HopperTiling) -> None:
    gate, up = (with_escapes(weights(inner, inputs, sigma, seed=7), 0.002) for sigma in (0.5, 0.02))
    x_TK = random(131, inputs, dtype=BF16, seed=1)
    found_TI = simulated(x_TK, coded(gate, up), tile, 2, gated=True)
    assert error(found_TI, silu_and_multiply(multiplied(x_TK.cpu(), torch.cat((gate, up))))) < ROUNDED


def test_hundreds_of_escapes_of_one_warpgroup_beside_none_of_the_other() -> None:
    weight_NK = without_escapes(weights(128, 512))
    weight_NK[3, ::2] = 0
    weight_NK[17, 5::9] = 2.0**40
    weight_NK[5] = -0.0
    x_TK = random(66, 512, dtype=BF16, seed=1)
    weight = coded(weight_NK)
    assert len(weight.index.places_E) > 300
    found_TN, wanted_TN = simulated(x_TK, weight, HopperTiling(128, 2), 1).sum(0), multiplied(x_TK.cpu(), weight_NK)
    for output in (3, 17, 70):
        assert error(found_TN[:, output], wanted_TN[:, output]) < SUMMED
    assert (found_TN[:, 5] == 0).all()


def ones(columns: range, inputs: int) -> Tensor:
    """A row for each of these columns, which alone it takes."""
    x_TK = torch.zeros(len(columns), inputs, dtype=BF16)
    x_TK[torch.arange(len(columns)), torch.tensor(columns)] = 1
    return x_TK.to(DEVICE)


def finite(weight_NK: Tensor) -> Tensor:
    """0 where a number is not finite, which would make NaN of a whole output, or a subnormal, which sums are not."""
    return torch.where(weight_NK.isfinite() & (weight_NK.abs() >= 2.0**-126), weight_NK, 0.0)


@pytest.mark.parametrize("base", [BASES[0], 113, BASES[-1]])
def test_each_number_that_has_a_code_and_some_that_have_none_are_multiplied_as_themselves(base: int) -> None:
    exponent = every_value().view(torch.int16)[:, 0] >> 7 & 0xFF
    has_code = (exponent >= base) & (exponent < base + CODES)
    weight_NK = finite(torch.cat((every_value()[has_code], every_value()[::16])))
    found_TN = simulated(ones(range(128), 128), coded(weight_NK, base=base), HopperTiling(128, 1), 1)[0]
    assert same_bits(found_TN, weight_NK.T + 0.0)


def test_what_is_not_finite_is_only_in_its_own_output() -> None:
    weight_NK = weights(64, 256)
    weight_NK[5, 100], weight_NK[40, 7] = float("nan"), float("inf")
    found_TN = simulated(random(3, 256, dtype=BF16), coded(weight_NK), HopperTiling(128, 1), 1)[0]
    assert found_TN[:, 5].isnan().all()
    assert not found_TN[:, 40].isfinite().any()
    assert found_TN.isfinite().sum() == 3 * 62


@pytest.mark.parametrize("gated", [False, True])
def test_threads_that_read_words_at_once_read_different_banks(gated: bool) -> None:
    """Half a warp reads two words each: of rows 0 … 3, from words 0, 2, 4 and 6 on."""
    at = torch.zeros(64, 32, dtype=torch.int64)
    for position in range(64 * 32):
        m = word = 0
        for bit, (row, column) in enumerate(bf12_hopper_layout.words_bases(32, gated)):
            m, word = m ^ (position >> bit & 1) * row, word ^ (position >> bit & 1) * column
        at[m, word] = position
    for rows, words in product(range(0, 64, 4), range(0, 32, 8)):
        assert at[rows : rows + 4, words : words + 8].remainder(32).unique().numel() == 32


def test_a_tile_is_chosen_that_keeps_multiprocessors_busy() -> None:
    assert fastest_tiling(4096, 4096, 100, False, MULTIPROCESSORS) == HopperTiling(128, 4)
    assert fastest_tiling(28672, 4096, 100, True, MULTIPROCESSORS) == HopperTiling(128, 1)
    assert fastest_tiling(28672, 4096, 256, True, MULTIPROCESSORS) == HopperTiling(256, 1)  # in two waves, not four
    assert fastest_tiling(28672, 4096, 4096, False, MULTIPROCESSORS) == HopperTiling(256, 1)
    assert fastest_tiling(128, 128, 100, False, MULTIPROCESSORS).parts == 1  # one block is not divided


def test_it_is_not_for_other_devices() -> None:
    assert not serves(32, False, torch.device("cpu"))


@pytest.mark.timeout(300)  # a loaded machine compiles for a minute
@pytest.mark.parametrize("name", VARIANTS)
def test_it_compiles_to_matmuls_that_do_not_wait_for_each_other(name: str) -> None:
    told = subprocess.run(
        [sys.executable, "-m", __spec__.name, name], env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    shared, copies, loads, decoded, matmuls, waits = map(int, re.findall(r"\d+", told))
    lanes = VARIANTS[name].get("LANES", 32)
    assert shared <= SHARED_MOST
    assert copies == 4 + 1
    assert loads == 2 * (3 * lanes // 4 + 2)  # as wide as they may be: two words
    assert decoded == 2 * lanes  # times four numbers of a thread, in two warpgroups
    assert matmuls == 2 * (8 * lanes // 16 + 2)  # a block's, and two for escapes
    assert waits == 2 * (8 * lanes // 64 + 1)


def compile_variant(name: str) -> str:
    told: dict[str, Any] = {"out": "*bf16", "LANES": 32, "GATED": False} | VARIANTS[name]
    rows, lanes = told["ROWS"], told["LANES"]
    ring = bf12_linear_hopper._RING[rows]
    constants = {
        "GATED": told["GATED"], "LANES": lanes, "ROWS": rows, "X_RING": ring, "WORDS_RING": ring,
    }  # fmt: skip
    kernel = bf12_linear_hopper._matmul
    names = kernel.arg_names
    types = dict.fromkeys(names, "i32") | {
        "x": f"tensordesc<bf16[{rows}, 64],{gl.NVMMASharedLayout(128, 16, rank=2)!r}>",
        "words": f"tensordesc<i32[32, {lanes}],{gl.NVMMASharedLayout(4 * lanes, 32, rank=2)!r}>",
        "out": told["out"], "x_flat": "*bf16", "scales": "*fp32", "firsts": "*i32", "places": "*i32",
        "values": "*bf16", **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    aligned = ["out", "N", "K", "inner"]
    source = GluonASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    program = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with NamedTemporaryFile() as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        machine = subprocess.run([program, "-c", binary.name], capture_output=True, text=True, check=True).stdout
    words = ("cp.async.bulk.tensor.2d", "ld.shared.v2", "0x5140")
    counted = [compiled.metadata.shared, *map(compiled.asm["ptx"].count, words)]
    return " ".join(map(str, [*counted, machine.count("HGMMA."), machine.count("WARPGROUP.DEPBAR")]))


@cache
def true_weight(outputs: int, inputs: int, rate: float = 0.0001) -> tuple[Tensor, Bf12Weight]:
    """On the device."""
    weight_NK = with_escapes(random(outputs, inputs).cpu() * 0.02, rate).bfloat16()
    return weight_NK.to(DEVICE), coded(weight_NK)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 128, 200, 256, 1000, 4100])
@pytest.mark.parametrize(("outputs", "inputs"), [*TRUE, (1040, 896), (24, 128)])
def test_true_shapes(outputs: int, inputs: int, rows: int) -> None:
    weight_NK, weight = true_weight(outputs, inputs)
    x_TK = random(rows, inputs, dtype=BF16, seed=1)
    wanted = x_TK.float() @ weight_NK.float().T
    for size in (128, 256):
        for parts in {1, min(2, inputs // 256 or 1), min(4, inputs // 256 or 1)}:
            found_PTN = multiply(x_TK, weight, HopperTiling(size, parts))
            assert error(found_PTN.sum(0), wanted) < (ROUNDED if parts == 1 else SUMMED)
            assert torch.equal(multiply(x_TK, weight, HopperTiling(size, parts)), found_PTN)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 256, 777])
@pytest.mark.parametrize(("inner", "inputs"), [(14336, 4096), (176, 896)])
def test_true_shapes_gated(inner: int, inputs: int, rows: int) -> None:
    weight_NK, weight = true_weight(2 * inner, inputs)
    x_TK = random(rows, inputs, dtype=BF16, seed=1)
    wanted = silu_and_multiply(x_TK.float() @ weight_NK.float().T)
    for size in (128, 256):
        assert error(multiply_gated(x_TK, weight, HopperTiling(size, 1)), wanted) < ROUNDED


@pytest.mark.gpu
@pytest.mark.parametrize("base", [BASES[0], 113, BASES[-1]])
@pytest.mark.parametrize("size", [128, 256])
def test_each_of_all_values_is_multiplied_as_itself_on_a_gpu(size: int, base: int) -> None:
    weight_NK = finite(every_value())
    found_TN = multiply(ones(range(128), 128), coded(weight_NK, base=base), HopperTiling(size, 1))[0]
    assert same_bits(found_TN, weight_NK.T + 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("rate", [0.0, 0.0002, 0.01])
def test_it_gives_what_the_simulation_gives(rate: float) -> None:
    weight_NK = with_escapes(without_escapes(weights(320, 1280)), rate)
    weight, x_TK = coded(weight_NK), random(300, 1280, dtype=BF16, seed=1)
    for tile in (HopperTiling(128, 1), HopperTiling(128, 3), HopperTiling(256, 2)):
        wanted = simulated(x_TK, weight, tile, 3).to(DEVICE)
        assert error(multiply(x_TK, weight, tile), wanted) < (ROUNDED if tile.parts == 1 else SUMMED)


@pytest.mark.gpu
def test_weights_are_those_of_bf16_to_the_bit() -> None:
    """Escapes as natural weights have them: of one that is 2^-30 of others the sum of it and these keeps little."""
    weight_NK, weight = true_weight(4096, 4096, rate=0.0)
    expanded_NK = torch.empty_like(weight_NK)
    expand(weight, expanded_NK, range(4096))
    x_TK = ones(range(0, 4096, 16), 4096)
    assert same_bits(multiply(x_TK, weight, HopperTiling(256, 1))[0], x_TK @ expanded_NK.T)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [HopperTiling(128, 4), HopperTiling(256, 1)], ids=str)
def test_a_captured_graph_gives_what_was_captured(tile: HopperTiling) -> None:
    weight_NK, weight = true_weight(4096, 4096)
    x_TK = random(200, 4096, dtype=BF16, seed=1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        multiply(x_TK, weight, tile)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = multiply(x_TK, weight, tile)
    x_TK.copy_(random(200, 4096, dtype=BF16, seed=2))
    graph.replay()
    assert torch.equal(found, multiply(x_TK, weight, tile))
    assert error(found.sum(0), multiplied(x_TK, weight_NK)) < ROUNDED


if __name__ == "__main__":
    print(compile_variant(sys.argv[1]))
