"""What is measured: models' matrices by numbers of rows, and the tilings that are worth trying. It runs no kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import torch

from engine.bf12.layout import lanes_of
from engine.kernels import bf12_linear_hopper, tuning
from engine.kernels.bf12_linear import Bf12Tiling
from engine.kernels.bf12_linear_hopper import HopperTiling
from engine.kernels.linear import LinearTiling
from engine.kernels.tuning import BF12_ROW_BUCKETS, ROW_BUCKETS
from engine.kernels.tuning_tables import tiling_key

CODED_CANDIDATES_MOST: Final = 16
BYTES_PER_S: Final = 4.3e12
_FLOP_PER_S: Final = 790e12
_SHARED_BYTES: Final = 200 << 10
_FEW_ROWS = 64  # for which Hopper's tiles, made for more, never won
_WORDS_MIN: Final = 2  # of a thread at once: bf12_linear.py takes no fewer
_HEAD_ROWS_MOST: Final = 512  # a head multiplies a row of each sequence, not of each token

Shape = tuple[int, int, bool]  # outputs, inputs, gated
AnyTiling = LinearTiling | Bf12Tiling | HopperTiling


@dataclass(frozen=True, slots=True)
class Model:
    """The matrices of a decoder: each layer has one of each, gate above up in one."""

    layers: int
    qkv: Shape
    output: Shape
    gate_up: Shape
    down: Shape
    head: Shape

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (self.qkv, self.output, self.gate_up, self.down, self.head)

    def copies(self, shape: Shape) -> int:
        return 1 if shape == self.head else self.layers


def _model(layers: int, hidden: int, qkv: int, attended: int, inner: int, vocabulary: int) -> Model:
    return Model(
        layers, (qkv, hidden, False), (hidden, attended, False), (2 * inner, hidden, True), (hidden, inner, False),
        (vocabulary, hidden, False),
    )  # fmt: skip


MODELS: Final = {
    "llama-3.1-8b": _model(32, 4096, 6144, 4096, 14336, 128256),
    "llama-3.1-8b-of-2": _model(32, 4096, 3072, 2048, 7168, 64128),  # what one of two ranks has
    "qwen3-8b": _model(36, 4096, 6144, 4096, 12288, 151936),
    "qwen3-14b": _model(40, 5120, 7168, 5120, 17408, 151936),
    "qwen3-0.6b": _model(28, 1024, 4096, 2048, 3072, 151936),
}


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured by one process."""

    shape: Shape
    rows: int
    is_coded: bool

    @property
    def key(self) -> str:
        outputs, inputs, gated = self.shape
        return tiling_key(outputs, inputs, gated, self.is_coded)

    @property
    def weight_bytes(self) -> float:
        return self.shape[0] * self.shape[1] * (1.5 if self.is_coded else 2)

    @property
    def bound_us(self) -> float:
        flop = 2 * self.rows * self.shape[0] * self.shape[1]
        return max(self.weight_bytes / BYTES_PER_S, flop / _FLOP_PER_S) * 1e6


def buckets_of(is_coded: bool) -> tuple[int, ...]:
    return BF12_ROW_BUCKETS if is_coded else ROW_BUCKETS


def works_of(models: Sequence[str], rows: Sequence[int] | None, only: str | None) -> list[Work]:
    shapes = dict.fromkeys(shape for model in models for shape in MODELS[model].shapes)
    heads = {model.head for model in MODELS.values()}
    return [
        Work(shape, bucket, is_coded)
        for is_coded in storages_of(only)
        for shape in shapes
        for bucket in buckets_of(is_coded)
        if (rows is None or bucket in rows) and (shape not in heads or bucket <= _HEAD_ROWS_MOST)
    ]


def storages_of(only: str | None) -> list[bool]:
    """Whether in 12 bits, bf16 first."""
    return [is_coded for is_coded in (False, True) if only is None or is_coded == (only == "bf12")]


def candidates(outputs: int, inputs: int, bucket: int, gated: bool) -> list[LinearTiling]:
    """Tilings whose tiles fit the shape and the shared memory, with enough programs to keep the GPU reading."""
    if bucket == 1:
        grid = product((4, 8, 16, 32), (256, 512, 1024), (1, 2, 4), (2, 3, 4), (2, 4))
    else:
        grid = product((32, 64, 128), (64, 128, 256), (1, 2, 3, 4), (3, 4, 5, 6), (4, 8))
    tilings = []
    for block_n, block_k, parts, stages, warps in grid:
        weights = 2 if gated else 1
        programs = outputs // weights // block_n * parts
        staged = stages * block_k * 2 * (block_n * weights + max(16, bucket)) if bucket > 1 else 0
        if (gated and parts > 1) or inputs % block_k or outputs // weights % block_n or staged > _SHARED_BYTES:
            continue
        if inputs // block_k // parts < 2 or (programs < 90 and parts < 8) or (parts > 1 and programs > 1600):
            continue
        if bucket == 1 and not 8 <= block_n * block_k * weights // (warps * 32) <= 128:
            continue
        if bucket > 1 and (warps == 8) != (block_n * weights * max(64, bucket) > 64 * 128):
            continue
        tilings.append(LinearTiling(block_n, block_k, parts, stages, warps))
    return tilings


def coded_candidates(outputs: int, inputs: int, bucket: int, gated: bool) -> list[Bf12Tiling]:
    """As `candidates`, for 12 bits a number: what was fast on an H200, and its neighbours."""
    lanes, inner, weights = lanes_of(inputs), outputs // 2 if gated else outputs, 2 if gated else 1
    grid: list[tuple[int, int, int, int, int, int]] = []
    if bucket == 1:
        grid += product((16,), (2,), (1, 2), (3, 4, 5), (4,), (0,))
        grid += product((8, 32), (2,), (1, 2), (4,), (4,), (0,))
        grid += product((32,), (1,), (1, 2), (4,), (4,), (0,))
        grid += product((8, 16), (1,), (1,), (4,), (2,), (0,))
        grid.append((8, 2, 1, 3, 4, 0))
    elif bucket <= 64:
        grid += product((64,), (1,), (1, 2, 4), (2, 3, 4), (4,), (4,))
        grid += product((32,), (1,), (1, 2, 4), (3, 4), (2,), (4,)) if bucket <= 16 else [(128, 1, 2, 3, 8, 4)]
    tilings = []
    for block_n, blocks, parts, stages, warps, joined in grid:
        if (gated and parts > 1) or inner % block_n or inputs % (8 * lanes * blocks):
            continue
        programs, turns = inner // block_n * parts, inputs // (8 * lanes * blocks) // parts
        if turns < 1 or (parts > 1 and programs > 1600) or block_n * blocks * lanes < _WORDS_MIN * 32 * warps:
            continue
        read = 8 * lanes * blocks * (1.5 * block_n * weights + (2 * max(16, bucket) if joined else 2))
        if (stages - 1) * read > _SHARED_BYTES:
            continue
        tilings.append(Bf12Tiling(block_n, blocks, parts, stages, warps, joined))
    return tilings


def tilings_of(work: Work, device: torch.device) -> list[AnyTiling]:
    outputs, inputs, gated = work.shape
    if not work.is_coded:
        return [*candidates(outputs, inputs, work.rows, gated)]
    few = coded_candidates(outputs, inputs, work.rows, gated)
    if work.rows <= _FEW_ROWS or not bf12_linear_hopper.serves(outputs, gated, device):
        return [*few]
    multiprocessors = bf12_linear_hopper.multiprocessors_of(device)
    return [*few, *tuning.candidate_tilings(outputs, inputs, work.rows, gated, multiprocessors)]
