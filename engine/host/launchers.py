"""How an agent's replicas are started: as forks of a zygote, or as programs of their own."""

import os
import sys
import time
from collections.abc import Sequence

import msgspec

from engine.host.forkserver import ForkserverLauncher
from engine.host.supervisor import ReplicaLauncher, SubprocessLauncher
from engine.hostinfo import cpu, gpus
from engine.protocol.specs import MachineSpec, ReplicaSpec


def replica_command(spec: ReplicaSpec) -> Sequence[str]:
    """The command line of a replica as a program of its own."""
    return [sys.executable, "-P", "-m", "engine.replica.server", msgspec.json.encode(spec).decode()]


def open_launcher(spec: MachineSpec) -> ReplicaLauncher:
    """Forks of a zygote that has imported what this machine's replicas need; programs where Linux is missing, which
    alone makes a zygote's forks this process's children."""
    programs = SubprocessLauncher(replica_command)
    if sys.platform != "linux":
        return programs
    environment = {**cpu.waiting_environment(os.environ), **cpu.paging_environment(os.environ)}
    return ForkserverLauncher(zygote_modules(spec), programs, time.monotonic, environment)


def zygote_modules(spec: MachineSpec) -> list[str]:
    """The modules that a zygote imports, and functions that it calls, so that no replica of this machine has to."""
    modules = ["engine.layers.cpu_row:start_compiling", "engine.replica.server", "engine.execution.open"]
    modules.append("engine.layers.cpu_row:row_functions")
    if spec.telemetry is not None:
        modules.append("engine.replica.tracing")
    if spec.device != "cpu" and gpus.visible_gpus(os.environ):
        modules += ["engine.execution.open_gpu", "engine.layers.linear_gpu", "cuda.bindings.driver"]
        modules.append("engine.kernels.compile_cache:name_kernels")
    return modules
