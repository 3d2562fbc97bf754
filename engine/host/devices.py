"""The devices of a host that an agent's replicas may be on. It knows no replicas."""

import contextlib
import os
from collections.abc import Sequence
from typing import Final

from engine.host.paths import AgentStartError, kernel_cache
from engine.hostinfo import cpu, gpus
from engine.hostinfo.memory import HostDevice, cpu_device, gpu_devices
from engine.protocol.rank_layout import UNKNOWN_LINK, PeerLink, RankLayout, layout_on
from engine.protocol.specs import MachineSpec, ModelSpec

_UNKNOWN_BYTES: Final = 1 << 60  # of a GPU whose size nobody knows: a model is given one, and says what it lacks
# oneDNN compiles its kernels for each count of rows and keeps 1,024 of them, some hundred megabytes; so does PyTorch's
# own cache of them, which the second name bounds. Making one anew takes no longer than can be measured.
_CPU_ENVIRONMENT: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


def open_devices(spec: MachineSpec, scratch: contextlib.ExitStack) -> list[HostDevice]:
    """The devices that replicas may be on: all GPUs of this host, the one that the spec names, or the CPU. Raises
    AgentStartError."""
    names = gpus.visible_gpus(os.environ)
    kind, _, number = spec.device.partition(":")
    if number and int(number) >= len(names):
        raise AgentStartError(f"there is no {spec.device}: this host has {len(names)} GPUs, counted from 0")
    if kind == "cpu" or not names:
        caches = {name: os.environ.get(name, value) for name, value in _CPU_ENVIRONMENT.items()}
        return [cpu_device(spec, {**caches, **cpu.waiting_environment(os.environ)})]
    chosen = [names[int(number)]] if number else names
    return gpu_devices(spec, chosen, {gpus.KERNEL_CACHE_VARIABLE: kernel_cache(spec, scratch)})


def layout_of(model: ModelSpec, devices: Sequence[HostDevice]) -> RankLayout:
    """How a model is shared out to these devices. Where its spec leaves stages open it asks the driver what links the
    GPUs, which takes some 10 ms."""
    if not devices[0].name:  # a CPU
        return RankLayout(max(1, model.gpus), max(1, model.stages))
    budgets = [device.budget.max_bytes if device.total_bytes else _UNKNOWN_BYTES for device in devices]
    return layout_on(model, budgets, UNKNOWN_LINK if model.stages else _peer_link(devices))


def _peer_link(devices: Sequence[HostDevice]) -> PeerLink:
    """The weakest between these GPUs."""
    names = {device.name for device in devices}
    indices = [gpu.index for gpu in gpus.installed_gpus() if {str(gpu.index), gpu.uuid} & names]
    return gpus.weakest_link(gpus.gpu_pairs(indices))
