"""Which GPUs this host's replicas may use and how large they are, without torch. It knows nothing of models."""

import contextlib
import ctypes
import importlib.util
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any, Final

from engine.protocol.rank_layout import UNKNOWN_LINK, PeerLink

VISIBLE_DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
KERNEL_CACHE_VARIABLE: Final = "TRITON_CACHE_DIR"  # where Triton keeps compiled kernels
MIN_CAPABILITY: Final = (8, 0)  # bfloat16 on tensor cores, and asynchronous copies
_DEVICE_FILE: Final = re.compile(r"nvidia\d+")
_PCI_LANE_BYTES_PER_S: Final = {3: 985_000_000, 4: 1_969_000_000, 5: 3_938_000_000, 6: 7_563_000_000}
_LIST_ENDS: Final = ("", "-1", "NoDevFiles")  # CUDA_VISIBLE_DEVICES ends at the first of these


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver describes it; `index` counts in the order of the PCI bus, as nvidia-smi does."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    driver: str
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class GpuPair:
    """Two GPUs by their indices: whether each can read and write the other's memory, and whether over NVLink; and what
    their links carry each way at best, 0 where the driver does not tell."""

    first: int
    second: int
    reaches: bool
    nvlink: bool
    bytes_per_s: int


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """A name for each GPU, as CUDA_VISIBLE_DEVICES takes it; empty without a driver. A list that the variable holds
    already is kept.

    A container sees its own device files, while /proc names all GPUs of the host.
    """
    listed = environment.get(VISIBLE_DEVICES_VARIABLE)
    if listed is not None:
        return list(takewhile(lambda name: name not in _LIST_ENDS, (name.strip() for name in listed.split(","))))
    count = sum(1 for path in devices.glob("nvidia*") if _DEVICE_FILE.fullmatch(path.name))
    return [str(index) for index in range(count)]


def installed_gpus() -> list[Gpu]:
    """All GPUs of this host, whatever CUDA_VISIBLE_DEVICES holds; without those of which the driver cannot say all, and
    empty without a driver. It takes up to a second or two, where the driver has to be woken."""
    import pynvml  # only here: most commands ask nothing of it

    gpus = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            driver = pynvml.nvmlSystemGetDriverVersion()
            for index in range(pynvml.nvmlDeviceGetCount()):
                with contextlib.suppress(pynvml.NVMLError):
                    gpus.append(_describe(pynvml, index, driver))
        finally:
            pynvml.nvmlShutdown()
    return gpus


def gpu_pairs(indices: Sequence[int]) -> list[GpuPair]:
    """All pairs of these GPUs; empty without a driver. What the driver cannot say counts as lacking."""
    import pynvml  # only here: most commands ask nothing of it

    pairs = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            handles = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
            for first, second in combinations(indices, 2):
                both = (handles[first], handles[second])
                ways = (pynvml.NVML_P2P_CAPS_INDEX_READ, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
                reaches = all(_has(pynvml, *both, way) for way in ways)
                nvlink = _has(pynvml, *both, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
                bandwidth = _nvlink_bytes_per_s if nvlink else _pci_bytes_per_s
                ways_bytes = (bandwidth(pynvml, *both), bandwidth(pynvml, *reversed(both)))
                pairs.append(GpuPair(first, second, reaches, nvlink, min(ways_bytes)))
        finally:
            pynvml.nvmlShutdown()
    return pairs


def weakest_link(pairs: Sequence[GpuPair]) -> PeerLink:
    """What the weakest pair has; as if nobody knew where there is none."""
    if not pairs:
        return UNKNOWN_LINK
    return PeerLink(min(pair.bytes_per_s for pair in pairs), all(pair.nvlink for pair in pairs))


def _nvlink_bytes_per_s(nvml: Any, own: Any, other: Any) -> int:
    """What the active links carry that lead to the other GPU, or to switches, which lead to all."""
    try:
        (speed,) = nvml.nvmlDeviceGetFieldValues(own, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
        bus = nvml.nvmlDeviceGetPciInfo(other).busId
    except nvml.NVMLError:
        return 0
    links = sum(_leads_to(nvml, own, link, bus) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    return links * int(speed.value.uiVal) * 1_000_000 if speed.nvmlReturn == nvml.NVML_SUCCESS else 0


def _leads_to(nvml: Any, own: Any, link: int, bus: Any) -> bool:
    try:
        if nvml.nvmlDeviceGetNvLinkState(own, link) != nvml.NVML_FEATURE_ENABLED:
            return False
        if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(own, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return True
        return bool(nvml.nvmlDeviceGetNvLinkRemotePciInfo(own, link).busId == bus)
    except nvml.NVMLError:
        return False


def _pci_bytes_per_s(nvml: Any, own: Any, other: Any) -> int:
    """What PCI Express carries to this GPU at best."""
    try:
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(own)
        return int(nvml.nvmlDeviceGetMaxPcieLinkWidth(own)) * _PCI_LANE_BYTES_PER_S.get(generation, 0)
    except nvml.NVMLError:
        return 0


def _has(nvml: Any, first: Any, second: Any, way: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetP2PStatus(first, second, way) == nvml.NVML_P2P_STATUS_OK)
    except nvml.NVMLError:
        return False


def _describe(nvml: Any, index: int, driver: str) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index, uuid=nvml.nvmlDeviceGetUUID(handle), name=nvml.nvmlDeviceGetName(handle),
        total_bytes=int(memory.total), free_bytes=int(memory.free), driver=driver,
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )  # fmt: skip


def gpu_memory(names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """The driver's label and the bytes of each of these GPUs; names that it does not know, as parts of a GPU, are left
    out."""
    matches = {}
    for gpu in installed_gpus():
        for name in names:
            if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
                matches[name] = (gpu.name, gpu.total_bytes)
    return matches


def torch_cuda_version() -> str | None:
    """The CUDA version that the installed torch was built for, without importing it."""
    spec, source = importlib.util.find_spec("torch"), ""
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError):
            source = Path(spec.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda\b.*= *'([\d.]+)'", source, re.MULTILINE)
    return match.group(1) if match else None


def usable_gpus(device: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that models run on, where `device` is that of [machine]; none where the CPU does it."""
    if device == "cpu" or torch_cuda_version() is None:
        return []
    return [gpu for gpu in gpus if gpu.capability >= MIN_CAPABILITY]


def prewarm_driver(load: Callable[[str], Any] = ctypes.CDLL) -> threading.Thread:
    """Begins to wake the driver and the first GPU that this process sees: some 0.4 s, in which modules are imported.
    Where that is not possible it does nothing: torch says why. `load` opens a library by its name."""

    def wake() -> None:
        with contextlib.suppress(OSError, AttributeError):
            driver, context = load("libcuda.so.1"), ctypes.c_void_p()
            if driver.cuInit(0) == 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)  # the one that torch takes too

    thread = threading.Thread(target=wake, name="driver", daemon=True)
    thread.start()
    return thread
