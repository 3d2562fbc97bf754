"""Which GPUs this host's replicas may use and how large they are, without torch. It knows nothing of models."""

import contextlib
import ctypes
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

VISIBLE_DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_DEVICE: Final = re.compile(r"nvidia\d+")
_ANSWER_S: Final = 20.0  # of nvidia-smi, where the driver has to be woken first
_HIDDEN: Final = ("", "-1", "NoDevFiles")  # the list ends at the first of these


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """A name for each, as CUDA_VISIBLE_DEVICES takes them; empty without a driver. What it says already is kept.

    A container sees its own device files, while /proc names all GPUs of the host.
    """
    said = environment.get(VISIBLE_DEVICES_VARIABLE)
    if said is not None:
        return list(takewhile(lambda name: name not in _HIDDEN, (name.strip() for name in said.split(","))))
    count = sum(1 for path in devices.glob("nvidia*") if _DEVICE.fullmatch(path.name))
    return [str(index) for index in range(count)]


def gpu_memory(names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """What the driver calls the GPUs of these names, and their bytes; without those that nvidia-smi does not know, as
    parts of a GPU, or all where there is no nvidia-smi. It takes up to a second or two."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for line in asked.stdout.splitlines():
        with contextlib.suppress(ValueError):
            index, uuid, label, mebibytes = (part.strip() for part in line.split(","))
            for name in names:
                if name == index or (name.startswith("GPU-") and uuid.startswith(name)):
                    found[name] = (label, int(mebibytes) << 20)
    return found


def prewarm_driver(load: Callable[[str], Any] = ctypes.CDLL) -> threading.Thread:
    """Begins to wake the driver and the first GPU that this process sees: some 0.4 s, in which modules are imported.
    Where that is not possible it does nothing: torch says why. `load` opens a library by its name."""

    def waking() -> None:
        with contextlib.suppress(OSError, AttributeError):
            driver, context = load("libcuda.so.1"), ctypes.c_void_p()
            if driver.cuInit(0) == 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)  # the one that torch takes too

    thread = threading.Thread(target=waking, name="driver", daemon=True)
    thread.start()
    return thread
