"""One model on several GPUs of a host: exchanges beside NCCL, steps, first tokens and wakes, all rows in one call.

    python -m benchmarks.engine.ranks [--gpus 2] [--part exchange|engine|large|mixture|wake|stages]

Each part is a process of its own, since ranks are forked before a driver is touched. Rows are called tp2-…, for as many
GPUs as there are, and pp2-… where they are stages; Llama-3.1-8B's geometry with random weights, Qwen3-32B's beside the
same on one GPU (large), and Llama 4 Scout's text (mixture, scout-…). `bound` is what issue and arithmetic allow, the
peer's figures are vLLM 0.24.0's on the same kind of machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from benchmarks.record import record
from engine.bench.geometries import write_folder
from engine.bench.session import BenchEngine
from engine.execution.open import inference_mode
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.step.executor import InflightStep
from engine.step.layout import SequenceSlice, awaited_token, pack_step

HIDDEN: Final = 4096
EPSILON: Final = 1e-5
CALLS: Final = 64  # of a graph
SIZES: Final = {"16k": 16 << 10, "64k": 64 << 10, "256k": 256 << 10, "1m": 1 << 20, "4m": 4 << 20, "16m": 16 << 20}
BOUNDS_US: Final = {"64k": 8.0, "1m": 14.0}
# Shape: the bound of two GPUs, and vLLM's figure there.
SHAPES: Final = {
    "decode-1": (2.75, "vLLM 3.51"), "decode-64": (3.8, "vLLM 4.44"), "decode-256": (7.6, "vLLM 8.5"),
    "prefix-256": (8.0, "vLLM 16.4"), "ttft-8192": (118.0, "vLLM 130"),
}  # fmt: skip
LARGE: Final = "qwen3-32b"
LARGE_GAINS: Final = {2: 1.70, 4: 2.7}
# Scout's shapes: the row, its unit, how it comes of milliseconds, what two GPUs are to give, and vLLM's figure there.
MIXTURE: Final[dict[str, tuple[str, str, Callable[[float], float], float, str | None]]] = {
    "kv": ("scout-kv-gib", "GiB", float, 73.0, "vLLM 56.9"),
    **{
        f"decode-{rows}": (f"scout-decode-{rows}", "tok/s", lambda ms, rows=rows: 1e3 * rows / ms, least, peer)
        for rows, least, peer in ((1, 185.0, "vLLM 55"), (64, 2000.0, "vLLM 2,032"), (256, 6300.0, "vLLM 6,475"))
    },
    "prefix-256": ("scout-prefix-256", "ms", float, 35.0, "vLLM 52.2"),
    "ttft-1024": ("scout-ttft-1024", "ms", float, 45.0, "vLLM 110"),
    "ttft-8192": ("scout-prefill-8192", "tok/s", lambda ms: 8192e3 / ms, 33000.0, "vLLM 24,300"),
}  # fmt: skip
STAGED_SHAPES: Final = ("decode-64", "decode-256", "ttft-8192")
BUBBLE_BOUND: Final = 0.05  # of the stages' time, at twice as many micro-batches as stages
BUBBLE_ROWS: Final = 1024  # decoded at once: four micro-batches of two stages
BUBBLE_STEPS: Final = 20
WAKE_BOUND_S: Final = 0.22
WAKE_KV_BYTES: Final = 8 << 30
MODEL: Final = "llama-3.1-8b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--part", choices=("exchange", "engine", "large", "mixture", "wake", "stages"))
    options = parser.parse_args()
    parts: dict[str, Callable[[int], None]] = {
        "exchange": measure_exchanges,
        "engine": measure_steps,
        "large": measure_large,
        "mixture": measure_mixture,
        "wake": measure_wake,
        "stages": measure_stages,
    }
    if options.part:
        parts[options.part](options.gpus)
        return
    command = [sys.executable, "-m", "benchmarks.engine.ranks", "--gpus", str(options.gpus), "--part"]
    failed = [part for part in parts if subprocess.run([*command, part]).returncode]
    if failed:
        sys.exit(f"no figures of {', '.join(failed)}")


# Exchanges


def measure_exchanges(gpus: int) -> None:
    """Microseconds of one sum over all ranks with residual and norm, in a graph, ours and NCCL's. What ours gives is
    compared with torch's sum first, and between ranks."""
    from engine.ranks.channel import RankChannel, swap_as_follower, swap_as_leader

    def wait(done: Callable[[], bool]) -> None:
        while not done():
            time.sleep(1e-3)

    with tempfile.TemporaryDirectory() as folder:
        meeting, pairs, pids = f"file://{folder}/nccl", [RankChannel.pair() for _ in range(1, gpus)], []
        for rank in range(1, gpus):
            if (pid := os.fork()) == 0:
                status = 1
                try:
                    _exchange_on(rank, gpus, swap_as_follower(pairs[rank - 1][1], wait), meeting)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                os._exit(status)
            pids.append(pid)
        took_us = _exchange_on(0, gpus, swap_as_leader([first for first, _ in pairs], wait), meeting)
        assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids), "a rank failed"
    for name, (ours_us, nccl_us) in took_us.items():
        shape = f"tp{gpus}-allreduce-norm-{name}"
        record(
            "ranks", shape, round(ours_us, 2), "us", bound=BOUNDS_US.get(name), peer=f"NCCL and a norm {nccl_us:.1f}"
        )


def _exchange_on(
    rank: int, gpus: int, swap: Callable[[int], list[int]], meeting: str
) -> dict[str, tuple[float, float]]:
    from engine.kernels.ranks.exchange import add_norm_ranks
    from engine.kernels.ranks.windows import RankWindows
    from engine.kernels.rms_norm import add_norm
    from engine.memory.symmetric import share_windows, window_driver
    from engine.ranks.gpu_part import WINDOW_BYTES

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    windows = RankWindows(share_windows(window_driver(device), WINDOW_BYTES, rank, gpus, swap), rank)
    torch.distributed.init_process_group("nccl", init_method=meeting, rank=rank, world_size=gpus)
    took_us = {}
    for name, size in SIZES.items():
        rows = size // (2 * HIDDEN)
        generator = torch.Generator(device).manual_seed(1)  # the same numbers on all ranks
        parts_WTH = torch.randn(gpus, rows, HIDDEN, device=device, generator=generator).bfloat16()
        weight_H = torch.ones(HIDDEN, device=device)
        own_1TH, out_TH = parts_WTH[rank][None].contiguous(), torch.empty(rows, HIDDEN, device=device).bfloat16()
        sum_TH = torch.zeros(rows, HIDDEN, device=device)

        def ours(
            sum_TH: Tensor = sum_TH, own: Tensor = own_1TH, weight: Tensor = weight_H, out: Tensor = out_TH
        ) -> None:
            add_norm_ranks(windows, sum_TH, own, weight, EPSILON, out)

        def nccl(
            sum_TH: Tensor = sum_TH, own: Tensor = own_1TH, weight: Tensor = weight_H, out: Tensor = out_TH
        ) -> None:
            torch.distributed.all_reduce(own[0])
            add_norm(sum_TH, own, weight, EPSILON, out)

        ours()
        expected_TH = parts_WTH.float().sum(0)
        torch.testing.assert_close(sum_TH, expected_TH, rtol=2e-2, atol=2e-2)
        others = [torch.empty_like(sum_TH) for _ in range(gpus)]
        torch.distributed.all_gather(others, sum_TH)
        assert all(torch.equal(other, sum_TH) for other in others), "ranks have other bits"
        own_1TH.zero_()  # NCCL adds up in place, again and again
        took_us[name] = _graph_us(ours), _graph_us(nccl)
    torch.distributed.destroy_process_group()
    return took_us


def _graph_us(run: Callable[[], None]) -> float:
    """Microseconds of a call among CALLS in a graph, the best of five replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            for _ in range(CALLS):
                run()
        took_ms = []
        for _ in range(6):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(stream)
            graph.replay()
            ended.record(stream)
            stream.synchronize()
            took_ms.append(begun.elapsed_time(ended))
    return 1e3 * min(took_ms[1:]) / CALLS


# Steps and wakes


def measure_steps(gpus: int) -> None:
    for shape, row in _benched(MODEL, gpus, SHAPES).items():
        bound, peer = SHAPES.get(shape, (None, None)) if gpus == 2 else (None, None)
        record("ranks", f"tp{gpus}-{shape}", row["value"], row["unit"], bound=bound, peer=peer)


def measure_large(gpus: int) -> None:
    """How much sooner a step of one sequence is than on one GPU."""
    one, all_ = (_benched(LARGE, count, ("decode-1",))["decode-1"]["value"] for count in (1, gpus))
    record("ranks", f"tp{gpus}-32b-decode-1", all_, "ms")
    record("ranks", f"tp{gpus}-32b-gain", round(one / all_, 3), "x", bound=LARGE_GAINS.get(gpus))


def measure_mixture(gpus: int) -> None:
    for shape, row in _benched("scout", gpus, MIXTURE).items():
        name, unit, figure, bound, peer = MIXTURE[shape]
        record("ranks", name, round(figure(row["value"]), 2), unit, bound=bound, peer=peer)


def _benched(model: str, gpus: int, shapes: Iterable[str], stages: int = 1) -> dict[str, dict[str, Any]]:
    """The rows of the engine's own shapes, as `python -m engine.bench` measures them."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "engine.bench", "--model", model, "--gpus", str(gpus)]
        command += ["--stages", str(stages), "--verbose"]
        subprocess.run([*command, "--shapes", ",".join(shapes), "--json", str(rows)], check=True)
        return {
            row["shape"].removeprefix(f"{model}-").removeprefix(f"{model} "): row
            for row in json.loads(rows.read_text())
        }


def measure_stages(gpus: int) -> None:
    """The engine's own shapes with as many stages as GPUs, and how much of the time a stage waits: this first, since
    whoever records a row asks for GPUs, and ranks are forked before."""
    with tempfile.TemporaryDirectory() as folder:
        spec = ModelSpec(
            name=MODEL, folder=str(write_folder(MODEL, Path(folder) / MODEL)), random_weights=True,
            context_tokens=1024, sequences=BUBBLE_ROWS, stages=gpus,
        )  # fmt: skip
        with inference_mode(), BenchEngine(spec, "cuda") as engine:
            engine.prepare()
            share = _bubble_share(engine)
    for shape, row in _benched(MODEL, 1, STAGED_SHAPES, stages=gpus).items():
        record("ranks", f"pp{gpus}-{shape}", row["value"], row["unit"])
    record("ranks", f"pp{gpus}-bubbles", round(share, 4), "of the time of a stage", bound=BUBBLE_BOUND)


def _bubble_share(engine: BenchEngine) -> float:
    """Which part of its time the first stage waits in steps of decodes that are launched one ahead: its busy time is
    that of its kernels but those that wait for what comes back, whose least is what they take by themselves."""
    executor = engine.model.executor
    rows, groups = BUBBLE_ROWS, executor.limits.groups

    def step(position: int, token: int | None) -> InflightStep:
        slices = [
            SequenceSlice(
                [awaited_token(row) if token is None else token], position, [[2 * row, 2 * row + 1]] * groups,
                SamplingParams(),
            )
            for row in range(rows)
        ]  # fmt: skip
        return executor.launch(pack_step(slices, engine.spec.block_tokens))

    inflight = [step(0, 1)]
    for position in range(1, 5):
        inflight.append(step(position, None))
        inflight.pop(0).wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for position in range(5, 5 + BUBBLE_STEPS):
            inflight.append(step(position, None))
            inflight.pop(0).wait()
        inflight.pop(0).wait()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    waits = [end - start for start, end, name in kernels if "_take_over" in name or "_hand_on" in name]
    least_us = min(waits)
    whole_us = kernels[-1][1] - kernels[0][0]
    busy_us, until = 0.0, 0.0
    for start, end, name in kernels:
        if "_take_over" in name or "_hand_on" in name:
            end = start + least_us
        busy_us += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - busy_us / whole_us


def measure_wake(gpus: int) -> None:
    """Seconds from the order to wake until all weights are on all GPUs and KV has memory, as much as a model gets that
    shares its GPUs, the best of three; and what stays there asleep."""
    with tempfile.TemporaryDirectory() as folder:
        spec = ModelSpec(
            name=MODEL, folder=str(write_folder(MODEL, Path(folder) / MODEL)), random_weights=True,
            context_tokens=20480, gpus=gpus, kv_bytes=WAKE_KV_BYTES,
        )  # fmt: skip
        with inference_mode(), BenchEngine(spec, "cuda") as engine:
            sleeper, memories = engine.model.sleeper, engine.model.memories
            nothing: list[list[int]] = [[] for _ in memories]
            took_s, asleep_bytes = [], 0
            for _ in range(4):
                mapped = [memory.mapped for memory in memories]
                sleeper.sleep(nothing)
                asleep_bytes = sleeper.usage().asleep_bytes
                began = time.perf_counter()
                sleeper.wake(mapped, nothing)
                while not sleeper.arrived():
                    time.sleep(1e-3)
                took_s.append(time.perf_counter() - began)
    record("ranks", f"tp{gpus}-wake-8b", round(min(took_s[1:]), 3), "s", bound=WAKE_BOUND_S if gpus == 2 else None)
    record("ranks", f"tp{gpus}-asleep-8b", round(asleep_bytes / (1 << 20)), "MiB of each GPU")


if __name__ == "__main__":
    main()
