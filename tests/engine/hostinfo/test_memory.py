from pathlib import Path

import msgspec
import pytest

from engine.hostinfo import gpus, memory
from engine.hostinfo.memory import ByteBudget, HostDevice
from engine.protocol.frames import DeviceState
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import DRIVER_RESERVE_BYTES, MachineSpec
from tests.support.fake_nvml import FakeGpu, install_nvml

GIB = 1 << 30


def spec(device_bytes: int | None = None, memory_bytes: int | None = None) -> MachineSpec:
    return MachineSpec(
        name="m", address="unix:/m", folder="/m", models=[], device_bytes=device_bytes, memory_bytes=memory_bytes
    )


def test_what_is_withheld_is_given_back_after_its_time() -> None:
    budget = ByteBudget(100)
    budget.withhold(60, until=5.0)
    assert [budget.at(now) for now in (4.9, 5.0)] == [60, 100]
    budget.withhold(200, until=9.0)
    assert budget.at(6.0) == 100


def test_an_operators_bound_holds_and_the_driver_keeps_its_own() -> None:
    for asked, room in (
        (None, 80 * GIB - DRIVER_RESERVE_BYTES),
        (50 * GIB, 50 * GIB),
        (200 * GIB, 80 * GIB - DRIVER_RESERVE_BYTES),
    ):
        device = HostDevice("0", "H", {}, asked)
        device.set_size(80 * GIB, 80 * GIB - DRIVER_RESERVE_BYTES)
        assert device.state(7, 0.0) == DeviceState("H", 80 * GIB, room, 7)


def test_a_device_that_nobody_measured_is_as_large_as_the_first_replica_on_it_says(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    device = HostDevice("0", "H", {}, None)
    device.read_size(path)
    path.write_text("{}")
    device.read_size(path)
    assert device.total_bytes == 0
    path.write_bytes(
        msgspec.json.encode(
            MemoryReport(model="a", pid=1, device="H", device_bytes=80 * GIB, weights_bytes=0, kv_blocks=0,
                   kv_block_tokens=0, kv_bytes=0, free_bytes=0)
        )
    )  # fmt: skip
    device.read_size(path)
    assert (device.total_bytes, device.budget.at(0.0)) == (80 * GIB, 80 * GIB - DRIVER_RESERVE_BYTES)


def test_each_gpu_is_alone_in_its_processs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, driver=None)
    devices = memory.gpu_devices(spec(), ["3", "5"], {"X": "y"})
    assert [device.environment for device in devices] == [
        {"X": "y", "CUDA_VISIBLE_DEVICES": "3"},
        {"X": "y", "CUDA_VISIBLE_DEVICES": "5"},
    ]
    assert [device.total_bytes for device in devices] == [0, 0]


def test_gpus_that_the_driver_knows_have_their_size_and_the_operators_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, [FakeGpu("H", 80 << 10, uuid="GPU-a"), FakeGpu("H", 40 << 10, uuid="GPU-b")])
    devices = memory.gpu_devices(spec(50 * GIB), ["0", "GPU-b", "MIG-c"], {})
    assert [(device.label, device.total_bytes) for device in devices] == [
        ("H", 80 * GIB),
        ("H", 40 * GIB),
        ("cuda:MIG-c", 0),
    ]
    assert [device.budget.at(0.0) for device in devices] == [50 * GIB, 39 * GIB, 0]


def test_a_command_sees_the_gpus_or_else_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, [FakeGpu("H", 80 << 10, 70 << 10)])
    assert memory.device_budgets(50 * GIB, gpus.installed_gpus()) == [("H", 50 * GIB, 79 * GIB, 70 * GIB)]
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: (8 * GIB, 3 * GIB))
    assert memory.device_budgets(None, []) == [("memory", 8 * GIB, 8 * GIB, 3 * GIB)]


def test_a_cpus_memory_is_one_device_and_bounded_by_what_is_free() -> None:
    device = memory.cpu_device(spec(device_bytes=1 << 20), {})
    assert (device.name, device.label, device.budget.at(0.0)) == ("", "cpu", 1 << 20)
    assert 0 < memory.cpu_device(spec(), {}).budget.at(0.0) <= device.total_bytes


def test_host_memory_is_a_share_of_what_is_free_or_what_an_operator_says() -> None:
    assert memory.host_memory_budget(spec(memory_bytes=5)).at(0.0) == 5
    assert 0 < memory.host_memory_budget(spec()).at(0.0) < memory.available_memory_bytes()


def test_the_page_cache_of_a_control_group_is_free_and_all_else_that_it_uses_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    files = {"memory.max": "1000\n", "memory.current": "900\n"}
    files["memory.stat"] = "anon 300\nfile 600\nshmem 100\ninactive_file 400\nactive_file 100\n"
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert memory.host_memory_bytes() == (1000, 1000 - 900 + 500)
    (tmp_path / "memory.max").write_text("max\n")
    assert min(memory.host_memory_bytes()) > 1000
