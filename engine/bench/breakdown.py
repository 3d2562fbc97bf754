"""Where one step's time goes: its kernels by kind, with the bytes each kind must move, and what is idle."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine.bench.geometries import RooflineBound

_KINDS: Final = (  # the first that a kernel's name contains
    ("attention", ("_narrow", "_wide", "_merge_rows", "attention")),
    ("linear", ("_multiply", "_gate_row", "nvjet", "gemm", "cutlass", "cublas", "splitK", "aten::mm", "linear")),
    ("add + norm", ("_add_norm", "_gather")),
    ("rotary + KV write", ("_rotate_and_write",)),
    ("silu · up", ("_silu_and_multiply", "_silu_and_pack")),
    ("rows to 8 bits", ("_quantize",)),
    ("routing", ("_route", "_list_blocks")),
    ("sampling", ("_draw", "_cut", "_penalise", "_count", "_add_biases", "_forbid", "reduce_kernel")),
    ("embedding", ("_embed",)),
    ("copies", ("Memcpy", "Memset", "copy")),
)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kind of kernel in one step; `bytes_` is what it must move at the least, 0 where that is little."""

    kind: str
    launches: float
    us: float
    share: float
    bytes_: float

    @property
    def terabytes_per_s(self) -> float:
        return self.bytes_ / self.us / 1e6 if self.us else 0.0


def break_down(
    turn: Callable[[], Any], steps: int, bound: RooflineBound, keys: float, trace: Path | None
) -> list[KernelTime]:
    """Profiles `steps` turns of a loop; the last part is the time in which the device did nothing.

    keys: that a step's rows read, each once. Writes a Chrome trace where a path is given.
    """
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiled:
        for _ in range(steps):
            turn()
        if on_gpu:
            torch.cuda.synchronize()
    if trace is not None:
        profiled.export_chrome_trace(str(trace))
    events = profiled.events()
    if on_gpu:
        ran = [event for event in events if event.device_type == DeviceType.CUDA]
    else:  # operators that no others call stand for kernels
        ran = [event for event in events if event.cpu_parent is None]
    return kernel_times(
        ((event.name, event.time_range.start, event.time_range.end) for event in ran), steps, bound, keys
    )


def kernel_times(
    ran: Iterable[tuple[str, float, float]], steps: int, bound: RooflineBound, keys: float
) -> list[KernelTime]:
    """(kernel, start µs, end µs) of `steps` steps, at least one kernel → the parts of one."""
    launches: defaultdict[str, int] = defaultdict(int)
    took: defaultdict[str, float] = defaultdict(float)
    in_order = sorted(ran, key=lambda kernel: kernel[1])
    first = at = in_order[0][1]
    busy = 0.0
    for name, start, end in in_order:
        kind = next((kind for kind, names in _KINDS if any(part in name for part in names)), name[:40])
        launches[kind] += 1
        took[kind] += end - start
        busy += max(0.0, end - max(at, start))
        at = max(at, end)
    span = at - first
    bytes_ = {"linear": bound.weights_bytes, "attention": keys * bound.kv_token_bytes}
    parts = [
        KernelTime(kind, launches[kind] / steps, us / steps, us / span, bytes_.get(kind, 0.0))
        for kind, us in took.items()
    ]
    parts.sort(key=lambda part: -part.us)
    return [*parts, KernelTime("idle", 0, (span - busy) / steps, (span - busy) / span, 0.0)]
