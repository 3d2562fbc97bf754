"""engine/hostinfo/cpu.py: threads are as many as affinity and quotas allow, and an operator's own way to wait stays."""

import os
from pathlib import Path

import pytest

from engine.hostinfo.cpu import paging_environment, usable_cores, waiting_environment


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def groups(folder: Path, membership: str, **files: str) -> tuple[Path, Path]:
    """A folder of control groups, whose files' names have __ for a slash and _dot_ for a dot, and /proc/self/cgroup."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "membership").write_text(membership)
    return folder, folder / "membership"


def test_without_control_groups_there_are_as_many_as_the_affinity_has(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "none") == 8


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_a_containers_quota_gives_whole_cores_and_at_least_one(tmp_path: Path, quota: str, cores: int) -> None:
    assert usable_cores(*groups(tmp_path, "0::/", cpu_dot_max=quota + "\n")) == cores


def test_the_smallest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    where = groups(
        tmp_path, "0::/team.slice/hearth.service\n", cpu_dot_max="max 100000",
        **{"team.slice__cpu_dot_max": "300000 100000", "team.slice__hearth.service__cpu_dot_max": "500000 100000",
           "other.slice__cpu_dot_max": "100000 100000"},
    )  # fmt: skip
    assert usable_cores(*where) == 3


def test_quotas_of_the_first_version_count(tmp_path: Path) -> None:
    where = groups(
        tmp_path, "4:memory:/m\n2:cpu,cpuacct:/jobs/a\n",
        **{"cpu,cpuacct__jobs__cpu_dot_cfs_quota_us": "400000", "cpu,cpuacct__jobs__cpu_dot_cfs_period_us": "100000",
           "cpu,cpuacct__jobs__a__cpu_dot_cfs_quota_us": "-1", "cpu,cpuacct__jobs__a__cpu_dot_cfs_period_us": "100000"},
    )  # fmt: skip
    assert usable_cores(*where) == 4


def test_a_container_of_the_first_version_finds_its_own_quota_at_the_top(tmp_path: Path) -> None:
    where = groups(
        tmp_path, "2:cpu:/docker/0123\n", cpu__cpu_dot_cfs_quota_us="200000", cpu__cpu_dot_cfs_period_us="100000"
    )
    assert usable_cores(*where) == 2


def test_pages_are_large_beside_what_the_operator_says() -> None:
    large = "glibc.malloc.hugetlb=1"
    assert paging_environment({"PATH": "/bin"}) == {"GLIBC_TUNABLES": large}
    assert paging_environment({"GLIBC_TUNABLES": "glibc.malloc.perturb=255"}) == {
        "GLIBC_TUNABLES": f"glibc.malloc.perturb=255:{large}"
    }
    assert paging_environment({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == {}


def test_threads_wait_as_the_operator_says() -> None:
    assert set(waiting_environment({"PATH": "/bin"})) == {"GOMP_SPINCOUNT"}
    assert waiting_environment({"OMP_WAIT_POLICY": "active"}) == {}
    assert waiting_environment({"GOMP_SPINCOUNT": "7"}) == {}
