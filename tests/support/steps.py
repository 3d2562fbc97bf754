"""What kernel tests share: the device to run on, packed steps, poisoned outputs and the error of a result."""

import numpy as np
import torch
from torch import Tensor

from engine.protocol.types import SamplingParams
from engine.step.layout import SequenceSlice, pack_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step_of(
    chunks: list[int], starts: list[int], vocabulary: int = 50, seed: int = 0, block_tokens: int = 16, groups: int = 1
) -> Tensor:
    """A packed step on the device: slice i computes chunks[i] tokens from position starts[i], in shuffled blocks, those
    of each group in another order."""
    rng = np.random.default_rng(seed)
    blocks = [-(-(start + chunk) // block_tokens) for start, chunk in zip(starts, chunks, strict=True)]
    order = rng.permutation(sum(blocks) + 3)
    slices, first = [], 0
    for chunk, start, count in zip(chunks, starts, blocks, strict=True):
        tables = [np.roll(order, group)[first : first + count].astype(np.int32) for group in range(groups)]
        slices.append(SequenceSlice(rng.integers(0, vocabulary, chunk).tolist(), start, tables, SamplingParams()))
        first += count
    return torch.from_numpy(pack_step(slices, block_tokens)).to(DEVICE)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """NaN everywhere: what is not written shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ ÷ ‖wanted‖, in float64; NaN where either has one."""
    found64, wanted64 = found.double(), wanted.double()
    return float((found64 - wanted64).norm() / wanted64.norm().clamp_min(1e-30))
