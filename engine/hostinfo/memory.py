"""How many bytes of a host's devices and of its memory replicas may hold. It knows no replicas."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from engine.hostinfo import gpus
from engine.protocol.frames import DeviceState
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import DRIVER_RESERVE_BYTES, HOST_MEMORY_SHARE, MachineSpec

HOST_MEMORY_DEVICE: Final = "memory"  # the device of a DeviceBudget where there is no GPU
_CGROUP: Final = Path("/sys/fs/cgroup")


class DeviceBudget(NamedTuple):
    """What replicas may hold of a device, could hold without [machine] device_bytes, and what nobody uses now."""

    device: str
    budget_bytes: int
    max_bytes: int
    free_bytes: int


class ByteBudget:
    """A number of bytes, which may turn out to be too high for a while."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._reduced_bytes = max_bytes
        self._until = 0.0

    def at(self, now: float) -> int:
        return min(self.max_bytes, self._reduced_bytes) if now < self._until else self.max_bytes

    def withhold(self, to_bytes: int, until: float) -> None:
        """Reduces the budget to what somebody found in fact, until then."""
        self._reduced_bytes, self._until = max(0, to_bytes), until


@dataclass(slots=True)
class HostDevice:
    """A GPU, or the memory of a machine without one. While its bytes are not known, total_bytes is 0.

    name         as CUDA_VISIBLE_DEVICES takes it; empty for a CPU.
    label        for people.
    environment  what a process on it has beyond this one's own.
    limit_bytes  the most that the operator leaves to replicas; None: all.
    """

    name: str
    label: str
    environment: dict[str, str]
    limit_bytes: int | None
    total_bytes: int = 0
    budget: ByteBudget = field(default_factory=lambda: ByteBudget(0))

    def set_size(self, total_bytes: int, usable_bytes: int) -> None:
        """The device has so many bytes, of which replicas could have `usable_bytes`."""
        self.total_bytes = total_bytes
        self.budget = ByteBudget(usable_bytes if self.limit_bytes is None else min(self.limit_bytes, usable_bytes))

    def read_size(self, report: Path) -> None:
        """Takes the size from the file that a replica on the device wrote, where there is one."""
        with suppress(OSError, msgspec.MsgspecError):
            memory = msgspec.json.decode(report.read_bytes(), type=MemoryReport)
            self.set_size(memory.device_bytes, max(0, memory.device_bytes - DRIVER_RESERVE_BYTES))

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
            device.set_size(total_bytes, max(0, total_bytes - DRIVER_RESERVE_BYTES))
        devices.append(device)
    return devices


def environment_on(devices: Sequence[HostDevice]) -> dict[str, str]:
    """What a process on all of these devices has beyond this one's own environment: it sees them in this order."""
    environment = dict(devices[0].environment)
    if gpus.VISIBLE_DEVICES_VARIABLE in environment:
        environment[gpus.VISIBLE_DEVICES_VARIABLE] = ",".join(device.name for device in devices)
    return environment


def cpu_device(spec: MachineSpec, environment: dict[str, str]) -> HostDevice:
    """The memory of this host, as far as it is free now."""
    device = HostDevice("", "cpu", environment, spec.device_bytes)
    device.set_size(*host_memory_bytes())
    return device


def device_budgets(limit_bytes: int | None, usable: Sequence[gpus.Gpu]) -> list[DeviceBudget]:
    """One for each of these GPUs, of which the driver keeps a little, else the host's memory; `limit_bytes` is that of
    [machine] device_bytes."""
    devices = [(gpu.name, gpu.total_bytes - DRIVER_RESERVE_BYTES, gpu.free_bytes) for gpu in usable] or [
        (HOST_MEMORY_DEVICE, *host_memory_bytes())
    ]
    return [
        DeviceBudget(name, min(max_bytes, limit_bytes or max_bytes), max_bytes, free)
        for name, max_bytes, free in devices
    ]


def host_memory_budget(spec: MachineSpec) -> ByteBudget:
    """The memory for replicas that sleep."""
    return ByteBudget(
        int(available_memory_bytes() * HOST_MEMORY_SHARE) if spec.memory_bytes is None else spec.memory_bytes
    )


def available_memory_bytes() -> int:
    """Free memory of the host, or of the control group that this process is confined to, if that is less."""
    return host_memory_bytes()[1]


def host_memory_bytes() -> tuple[int, int]:
    """(all, free) bytes of the host's memory, or of the control group that this process is confined to."""
    import psutil  # only here: most commands ask nothing of it

    host = psutil.virtual_memory()
    total, available = int(host.total), int(host.available)
    try:
        limit, used, parts = (
            (_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current", "memory.stat")
        )
    except OSError:
        return total, available
    if limit == "max":
        return total, available
    # What is used holds the page cache too: weights that were read would count against the models they are for.
    sizes = dict(line.split() for line in parts.splitlines())
    cached = sum(int(sizes.get(name, 0)) for name in ("active_file", "inactive_file"))
    return min(total, int(limit)), min(available, int(limit) - int(used) + cached)
