"""Times how tokens are drawn from logits, at Llama-3.1's vocabulary of 128,256, on the GPU at hand.

    python -m benchmarks.engine.sampling                        prints, and records in results/sampling.json

From CUDA graphs over several copies of the logits, more than the L2 cache holds. The bound: the logits' bytes, read
once, ÷ 4.3 TB/s. The logits are bfloat16, normal, with a standard deviation of 2: nearly as flat as a model's get, and
the flatter the more tokens top_p leaves.
"""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.record import record
from engine.execution.gpu_sampler import SamplingFeatures, sample_tokens
from engine.protocol.types import SamplingParams
from engine.step.layout import SequenceSlice, pack_step, unpack_step

VOCABULARY, ROWS = 128256, (1, 64, 256)
BYTES_PER_S = 4.3e12
COPIES_BYTES = 400 << 20
DEMANDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "temperature, masked": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k": SamplingParams(temperature=0.8, top_k=50),
    "top-k, top-p, min-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
}
REPEATS = 7


def microseconds(call: Callable[[Tensor], None], copies: list[Tensor]) -> float:
    """The median time of one call."""
    call(copies[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for logits_RV in copies:
            call(logits_RV)
    took = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) * 1e3 / len(copies))
    return statistics.median(took[1:])


def measure(rows: int, params: SamplingParams, masked: bool) -> float:
    slices = [SequenceSlice([5], 3, [[0]], params, masked=masked) for _ in range(rows)]
    packed = pack_step(slices, 16)
    words, wants = torch.from_numpy(packed).cuda(), SamplingFeatures.of(unpack_step(packed))
    count = min(64, -(-COPIES_BYTES // (rows * VOCABULARY * 2)))
    copies = [(torch.randn(rows, VOCABULARY, device="cuda") * 2).bfloat16() for _ in range(count)]
    sampled_R = torch.zeros(rows, dtype=torch.int32, device="cuda")
    masks_RW = torch.full((rows, VOCABULARY // 32), 0x55555555, dtype=torch.int32, device="cuda")
    return microseconds(lambda logits_RV: sample_tokens(words, logits_RV, sampled_R, masks_RW, wants), copies)


def main() -> None:
    for name, params in DEMANDS.items():
        for rows in ROWS:
            bound_us = rows * VOCABULARY * 2 / BYTES_PER_S * 1e6
            took_us = measure(rows, params, masked=name.endswith("masked"))
            record("sampling", f"{name}, {rows} rows", took_us, "µs", bound=bound_us)


if __name__ == "__main__":
    main()
