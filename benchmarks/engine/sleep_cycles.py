"""Sleeping and waking a hundred times: what a GPU's replica computes afterwards, how fast, and what it holds.

    python -m benchmarks.engine.sleep_cycles [--model llama-3.1-8b] [--cycles 100]

Needs a GPU. Weights are made up. Tokens have to be the same after each wake, free memory the same to the byte, awake
and asleep; the row is the time of a decode step, which replays a graph, after the cycles ÷ before them.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.record import record
from engine.bench.geometries import GEOMETRIES, write_folder
from engine.execution.gpu_runner import GpuRunner
from engine.execution.open import inference_mode, open_model
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.step.executor import LoadedModel
from engine.step.layout import Int32s, SequenceSlice, pack_step

CONTEXT_TOKENS: Final = 8192
DEVICE_BYTES: Final = 24 << 30
SEQUENCES: Final = 32  # of the step whose time is taken
WARM_S: Final = 2.0  # until clocks are up
ROUNDS: Final = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(GEOMETRIES), default="llama-3.1-8b")
    parser.add_argument("--cycles", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hearth-cycles-") as name:
        folder = write_folder(options.model, Path(name) / "model")
        model = ModelSpec(
            name="@cf/bench/cycles", folder=str(folder), random_weights=True, context_tokens=CONTEXT_TOKENS
        )
        with (
            inference_mode(),
            closing(open_model(model, "cuda", None, lambda: None, DEVICE_BYTES, standby=True)) as runner,
        ):
            while runner.executor.warm_up():
                pass
            ratio = measure(runner, options.cycles)
    record("cycles", f"cycles-{options.cycles}-step", round(ratio, 4), "ratio", bound=1.0)


def measure(runner: LoadedModel, cycles: int) -> float:
    """Raises AssertionError where a cycle left a trace."""
    steps = [_step(runner, count, length) for count, length in ((1, 1), (SEQUENCES, 1), (3, 40), (5, 700))]
    expected = [_tokens(runner, step) for step in steps]
    began = time.monotonic()
    while time.monotonic() < began + WARM_S:
        _step_ms(runner, steps[1])
    before = [_step_ms(runner, steps[1]) for _ in range(ROUNDS)]
    extents, took = runner.paged.mapped, []
    for step in steps:  # torch takes what steps without graphs need
        _cycle(runner, extents)
        _tokens(runner, step)
    awake, asleep = torch.cuda.mem_get_info()[0], None
    for count in tqdm(range(cycles), desc="cycles"):
        runner.sleeper.sleep([])
        free = torch.cuda.mem_get_info()[0]
        asleep = asleep or free
        assert free == asleep, f"{asleep - free} bytes more are held asleep after {count} cycles"
        began = time.monotonic()
        runner.sleeper.wake(extents, [])
        index = count % len(steps)
        assert _tokens(runner, steps[index]) == expected[index], f"other tokens after {count} cycles"
        took.append(time.monotonic() - began)
        free = torch.cuda.mem_get_info()[0]
        assert free == awake, f"{awake - free} bytes more are held awake after {count} cycles"
    while not runner.sleeper.arrived():
        time.sleep(0.001)
    assert [_tokens(runner, step) for step in steps] == expected, "graphs give other tokens"
    after = [_step_ms(runner, steps[1]) for _ in range(ROUNDS)]
    print(f"wake to the tokens of a step: {statistics.median(took):.3f} s, at most {max(took):.3f} s")
    print(f"a step before: {statistics.median(before):.3f} ms, after: {statistics.median(after):.3f} ms")
    return statistics.median(after) / statistics.median(before)


def _step(runner: LoadedModel, count: int, length: int) -> Int32s:
    """So many prompts in blocks of their own."""
    rng, width = np.random.default_rng(count), -(-length // runner.paged.layout.block_tokens)
    return pack_step(
        [
            SequenceSlice(
                rng.integers(0, runner.executor.limits.vocabulary, length).tolist(), 0,
                [list(range(n * width, (n + 1) * width))],
                SamplingParams(), None,
            )
            for n in range(count)
        ],
        runner.paged.layout.block_tokens,
    )  # fmt: skip


def _cycle(runner: LoadedModel, extents: list[int]) -> None:
    runner.sleeper.sleep([])
    runner.sleeper.wake(extents, [])


def _tokens(runner: LoadedModel, step: Int32s) -> list[int]:
    tokens: list[int] = runner.executor.launch(step).wait().tokens_R.tolist()
    return tokens


def _step_ms(runner: LoadedModel, step: Int32s) -> float:
    assert isinstance(runner.executor, GpuRunner)
    return runner.executor.launch_ms(step, 50)


if __name__ == "__main__":
    main()
