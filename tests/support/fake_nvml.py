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
    links: int = 18  # that lead to a switch and are up
    wired: tuple[tuple[str, int], ...] = ()  # that lead to the GPU of a uuid, so many each


class FakeNvmlError(Exception):
    """Whatever NVML refuses."""


def install_nvml(
    monkeypatch: pytest.MonkeyPatch, gpus: Sequence[FakeGpu] = (), driver: str | None = "580.65.06",
    lacking: Sequence[str] = (),
) -> None:  # fmt: skip
    """From now on `import pynvml` finds a driver with these GPUs; with `driver` None there is none. `lacking` are ways
    that lead from none of them to another: READ, WRITE, NVLINK."""

    def init() -> None:
        if driver is None:
            raise FakeNvmlError("Driver Not Loaded")

    def memory(handle: FakeGpu) -> SimpleNamespace:
        if handle.mebibytes is None:
            raise FakeNvmlError("Not Supported")
        free = handle.mebibytes if handle.free_mebibytes is None else handle.free_mebibytes
        return SimpleNamespace(total=handle.mebibytes << 20, free=free << 20)

    def remote(handle: FakeGpu, link: int) -> str | None:
        """The GPU that a link leads to, None: a switch."""
        ends = [None] * handle.links + [uuid for uuid, count in handle.wired for _ in range(count)]
        if link >= len(ends):
            raise FakeNvmlError("Not Supported")
        return ends[link]

    def state(handle: FakeGpu, link: int) -> int:
        remote(handle, link)
        return 1

    module = SimpleNamespace(
        NVML_SUCCESS=0,
        NVML_FEATURE_ENABLED=1,
        NVML_NVLINK_MAX_LINKS=36,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=2,
        NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON=90,
        nvmlDeviceGetFieldValues=lambda handle, fields: [
            SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=26562)) for _ in fields
        ],
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=handle.uuid),
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, link: 2 if remote(handle, link) is None else 0,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: SimpleNamespace(busId=remote(handle, link)),
        nvmlDeviceGetMaxPcieLinkGeneration=lambda handle: 5,
        nvmlDeviceGetMaxPcieLinkWidth=lambda handle: 16,
        NVMLError=FakeNvmlError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: driver,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetMemoryInfo=memory,
        NVML_P2P_STATUS_OK=0,
        NVML_P2P_CAPS_INDEX_READ="READ",
        NVML_P2P_CAPS_INDEX_WRITE="WRITE",
        NVML_P2P_CAPS_INDEX_NVLINK="NVLINK",
        nvmlDeviceGetP2PStatus=lambda first, second, way: int(way in lacking),
        nvmlDeviceGetUUID=lambda handle: handle.uuid,
        nvmlDeviceGetName=lambda handle: handle.name,
        nvmlDeviceGetCudaComputeCapability=lambda handle: handle.capability,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
