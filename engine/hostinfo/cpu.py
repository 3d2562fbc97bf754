"""How many cores this process may keep busy, and how the threads that multiply on them wait for one another. It knows
no replicas and no models."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")

# libgomp's threads look for their next work 300,000 times, some 6 ms, before they sleep. Where others want the cores,
# one of them waits that long in nearly every matmul for a thread that has no core, and takes it one. 4,000 times,
# some 80 µs, are as long as a step of a small model computes on one thread between two matmuls: with fewer a quiet
# machine decodes slower, for each matmul wakes its threads anew (benchmarks/engine/busy_cpu.py).
_SPINS: Final = {"GOMP_SPINCOUNT": "4000"}
_TUNABLES: Final = "GLIBC_TUNABLES"
_LARGE_PAGES: Final = "glibc.malloc.hugetlb=1"
_WAITING_VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def waiting_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that bound how long idle threads keep a core busy, to be set before torch is imported: none where
    the operator's own `environment` says how threads wait."""
    return {} if any(name in environment for name in _WAITING_VARIABLES) else dict(_SPINS)


def paging_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable by which glibc asks for large pages for what is large, to be set before a process begins: none where
    the operator's own `environment` says so or otherwise. A step reads all weights, and with pages of 4 KiB looks up
    where each of them lies for as long as it reads (benchmarks/engine/cpu_engine.py)."""
    tunables = environment.get(_TUNABLES, "")
    return {} if _LARGE_PAGES.partition("=")[0] in tunables else {_TUNABLES: f"{tunables}:{_LARGE_PAGES}".strip(":")}


def usable_cores(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """The cores that this process may be on, at most as many whole ones as its control groups' quotas give it time of,
    and at least one. Threads beyond a quota stop one another: all stand still when it is spent."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _quotas(cgroups, membership))]))


def _quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    """In cores, the quotas of this process's control groups and of all above them, of either version."""
    for folder in _own_groups(cgroups, membership):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                yield int(quota) / int(period)
        with suppress(OSError, ValueError):
            quota_us, period_us = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota_us > 0:
                yield quota_us / period_us


def _own_groups(cgroups: Path, membership: Path) -> Iterator[Path]:
    """Folders that may hold a quota. In a container the paths of /proc may be the host's, and then are not there."""
    lines: list[str] = []
    with suppress(OSError):
        lines = membership.read_text().splitlines()
    for line in ("0::/", "1:cpu:/", *lines):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = cgroups / controllers
        group = top / path.lstrip("/")
        yield from (group, *(parent for parent in group.parents if parent.is_relative_to(top)))
