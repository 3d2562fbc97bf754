"""Which GPUs this host's replicas may use and how large they are, without torch. It knows nothing of models."""

import contextlib
import ctypes
import importlib.util
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

VISIBLE_DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
KERNEL_CACHE_VARIABLE: Final = "TRITON_CACHE_DIR"  # where Triton keeps compiled kernels
MIN_CAPABILITY: Final = (8, 0)  # bfloat16 on tensor cores, and asynchronous copies
_DEVICE_FILE: Final = re.compile(r"nvidia\d+")
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
