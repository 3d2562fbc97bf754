"""A driver in place of NVIDIA's: the module `pynvml` with the GPUs that a test names."""

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import pytest


class FakeGpu(NamedTuple):
    """A GPU of the fake driver; without `mebibytes` its memory cannot be asked for."""

    name: str = "NVIDIA H200"
    mebibytes: int | None = 143771
    free_mebibytes: int | None = None  # None: all
    capability: tuple[int, int] = (9, 0)
    uuid: str = "GPU-0"


class FakeNvmlError(Exception):
    """Whatever NVML refuses."""


def install_nvml(
    monkeypatch: pytest.MonkeyPatch, gpus: Sequence[FakeGpu] = (), driver: str | None = "580.65.06"
) -> None:
    """From now on `import pynvml` finds a driver with these GPUs; with `driver` None there is none."""

    def init() -> None:
        if driver is None:
            raise FakeNvmlError("Driver Not Loaded")

    def memory(handle: FakeGpu) -> SimpleNamespace:
        if handle.mebibytes is None:
            raise FakeNvmlError("Not Supported")
        free = handle.mebibytes if handle.free_mebibytes is None else handle.free_mebibytes
        return SimpleNamespace(total=handle.mebibytes << 20, free=free << 20)

    module = SimpleNamespace(
        NVMLError=FakeNvmlError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: driver,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetUUID=lambda handle: handle.uuid,
        nvmlDeviceGetName=lambda handle: handle.name,
        nvmlDeviceGetCudaComputeCapability=lambda handle: handle.capability,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
