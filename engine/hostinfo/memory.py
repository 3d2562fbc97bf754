"""How many bytes of a host's devices and of its memory replicas may hold. It knows no replicas."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import psutil

from engine.hostinfo import gpus
from engine.protocol.frames import DeviceState
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import DRIVER_RESERVE_BYTES, HOST_MEMORY_SHARE, MachineSpec

_CGROUP: Final = Path("/sys/fs/cgroup")


class ByteBudget:
    """A number of bytes, which may turn out to be too high for a while."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._withheld_to = most_bytes
        self._until = 0.0

    def at(self, now: float) -> int:
        return min(self.most_bytes, self._withheld_to) if now < self._until else self.most_bytes

    def withhold(self, to_bytes: int, until: float) -> None:
        """Somebody found less than was reckoned with: until then it is no more than this."""
        self._withheld_to, self._until = max(0, to_bytes), until


@dataclass(slots=True)
class HostDevice:
    """A GPU, or the memory of a machine without one. While its bytes are not known, total_bytes is 0.

    name         as CUDA_VISIBLE_DEVICES takes it; empty for a CPU.
    label        for people.
    environment  what a process on it has beyond this one's own.
    asked_bytes  the most that the operator leaves to replicas; None: all.
    """

    name: str
    label: str
    environment: dict[str, str]
    asked_bytes: int | None
    total_bytes: int = 0
    budget: ByteBudget = field(default_factory=lambda: ByteBudget(0))

    def measured(self, total_bytes: int, room_bytes: int) -> None:
        """It has so many bytes, of which replicas could have `room_bytes`."""
        self.total_bytes = total_bytes
        self.budget = ByteBudget(room_bytes if self.asked_bytes is None else min(self.asked_bytes, room_bytes))

    def read(self, memory: Path) -> None:
        """Takes its size from the file that a replica on it wrote, where nobody said it yet."""
        try:
            told = msgspec.json.decode(memory.read_bytes(), type=MemoryReport)
        except (OSError, msgspec.MsgspecError):
            return
        self.measured(told.device_bytes, max(0, told.device_bytes - DRIVER_RESERVE_BYTES))

    def state(self, held_bytes: int, now: float) -> DeviceState:
        return DeviceState(self.label, self.total_bytes, self.budget.at(now), held_bytes)


def gpu_devices(spec: MachineSpec, names: list[str], environment: dict[str, str]) -> list[HostDevice]:
    """The GPUs of these names, in their order. Each is alone in its process's environment."""
    known = gpus.gpu_memory(names)
    devices = []
    for name in names:
        label, total_bytes = known.get(name, (f"cuda:{name}", 0))
        device = HostDevice(name, label, {**environment, gpus.VISIBLE_DEVICES_VARIABLE: name}, spec.device_bytes)
        if total_bytes:
            device.measured(total_bytes, max(0, total_bytes - DRIVER_RESERVE_BYTES))
        devices.append(device)
    return devices


def cpu_device(spec: MachineSpec, environment: dict[str, str]) -> HostDevice:
    """The memory of this host, as far as it is free now."""
    device = HostDevice("", "cpu", environment, spec.device_bytes)
    device.measured(int(psutil.virtual_memory().total), available_memory_bytes())
    return device


def host_memory_budget(spec: MachineSpec) -> ByteBudget:
    """For what sleeps."""
    return ByteBudget(
        int(available_memory_bytes() * HOST_MEMORY_SHARE) if spec.memory_bytes is None else spec.memory_bytes
    )


def available_memory_bytes() -> int:
    """Free memory of the host, or of the control group that this process is confined to, if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used, parts = (
            (_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current", "memory.stat")
        )
    except OSError:
        return available
    if limit == "max":
        return available
    # What is used holds the page cache too: weights that were read would count against the models they are for.
    sizes = dict(line.split() for line in parts.splitlines())
    cached = sum(int(sizes.get(name, 0)) for name in ("active_file", "inactive_file"))
    return min(available, int(limit) - int(used) + cached)
