"""What this host has for models: its GPUs as the driver describes them, and memory. It imports no torch and changes
nothing."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from engine.protocol.specs import DRIVER_RESERVE_BYTES
from gateway.config import MachineConfig

MEMORY: Final = "memory"
ARCHITECTURE: Final = (8, 0)  # the first with bfloat16
_CGROUP: Final = Path("/sys/fs/cgroup")
_FIELDS: Final = ("name", "memory.total", "memory.free", "driver_version", "compute_cap")


class Gpu(NamedTuple):
    """What the driver says of one."""

    name: str
    total_bytes: int
    free_bytes: int
    driver: str
    architecture: tuple[int, int]


class DeviceBudget(NamedTuple):
    """A device: what replicas may hold of its memory, what they could hold without [machine] device_bytes, and what
    nobody uses now."""

    device: str
    budget_bytes: int
    most_bytes: int
    free_bytes: int


def gpus() -> list[Gpu]:
    """Empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return [_parse_gpu(line) for line in asked.stdout.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _parse_gpu(line: str) -> Gpu:
    name, total, free, driver, architecture = (part.strip() for part in line.split(","))
    major, minor = map(int, architecture.split("."))
    return Gpu(name, int(total) << 20, int(free) << 20, driver, (major, minor))


def cuda_of_torch() -> str | None:
    """The CUDA version that the installed torch was built for, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        said = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b.*= *'([\d.]+)'", said, re.MULTILINE)
    return found.group(1) if found else None


def usable_gpus(machine: MachineConfig, found: list[Gpu]) -> list[Gpu]:
    """The GPUs that models run on; none where the CPU does it."""
    if machine.device == "cpu" or cuda_of_torch() is None:
        return []
    return [gpu for gpu in found if gpu.architecture >= ARCHITECTURE]


def device_budgets(machine: MachineConfig, usable: list[Gpu]) -> list[DeviceBudget]:
    """One for each of these GPUs, of which the driver keeps a little, else the host's memory, whose device is
    `memory`."""
    devices = [(gpu.name, gpu.total_bytes - DRIVER_RESERVE_BYTES, gpu.free_bytes) for gpu in usable] or [
        (MEMORY, *memory())
    ]
    return [DeviceBudget(name, min(most, machine.device_bytes or most), most, free) for name, most, free in devices]


def memory() -> tuple[int, int]:
    """Of the host, or of the control group that this process is confined to: in all and free, in bytes."""
    import psutil  # only here: most commands ask nothing of it

    found = psutil.virtual_memory()
    total, available = int(found.total), int(found.available)
    try:
        limit, used, parts = (
            (_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current", "memory.stat")
        )
    except OSError:
        return total, available
    if limit == "max":
        return total, available
    sizes = dict(line.split() for line in parts.splitlines())
    cached = sum(int(sizes.get(name, 0)) for name in ("active_file", "inactive_file"))  # of what is used, but free
    return min(total, int(limit)), min(available, int(limit) - int(used) + cached)
