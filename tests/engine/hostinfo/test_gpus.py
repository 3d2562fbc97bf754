"""engine/hostinfo/gpus.py: which GPUs a host's replicas may use, and how large they are."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.hostinfo import gpus
from engine.hostinfo.gpus import Gpu, gpu_memory, installed_gpus, prewarm_driver, visible_gpus
from tests.support.fake_nvml import FakeGpu, install_nvml


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_every_device_file_is_a_gpu(devices: Path) -> None:
    assert visible_gpus({}, devices) == ["0", "1", "2"]


def test_a_host_without_a_driver_has_none(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path) == []


@pytest.mark.parametrize(
    ("said", "meant"),
    [("2", ["2"]), ("1, 0", ["1", "0"]), ("GPU-8f3,MIG-2a", ["GPU-8f3", "MIG-2a"]), ("0,-1,1", ["0"]), ("", [])],
)
def test_what_the_environment_says_is_kept(devices: Path, said: str, meant: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": said}, devices) == meant


def test_the_driver_says_how_large_gpus_are_by_index_or_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(
        monkeypatch,
        [FakeGpu(uuid="GPU-8f31"), FakeGpu("NVIDIA L4", 23034, uuid="GPU-aa02"), FakeGpu("?", None, uuid="GPU-bb03")],
    )
    assert gpu_memory(["1", "GPU-8f", "2", "7", "MIG-1"]) == {
        "1": ("NVIDIA L4", 23034 << 20),
        "GPU-8f": ("NVIDIA H200", 143771 << 20),
    }


def test_a_gpu_is_described_in_full_whatever_the_environment_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    install_nvml(monkeypatch, [FakeGpu(free_mebibytes=5, capability=(8, 9), uuid="GPU-8f31")])
    assert installed_gpus() == [Gpu(0, "GPU-8f31", "NVIDIA H200", 143771 << 20, 5 << 20, "580.65.06", (8, 9))]


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_gpus() == [] or visible_gpus({})  # with the real module, whatever this host has
    install_nvml(monkeypatch, [FakeGpu()], driver=None)
    assert installed_gpus() == []
    assert gpu_memory(["0"]) == {}


def test_models_run_on_gpus_with_bfloat16_where_torch_and_the_operator_want_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_nvml(monkeypatch, [FakeGpu(), FakeGpu("Tesla T4", capability=(7, 5))])
    monkeypatch.setattr(gpus, "torch_cuda_version", lambda: "13.0")
    assert [gpu.name for gpu in gpus.usable_gpus("auto", installed_gpus())] == ["NVIDIA H200"]
    assert gpus.usable_gpus("cpu", installed_gpus()) == []
    monkeypatch.setattr(gpus, "torch_cuda_version", lambda: None)
    assert gpus.usable_gpus("auto", installed_gpus()) == []


def test_the_driver_and_a_context_are_woken_beside_what_else_is_done() -> None:
    called: list[tuple[str, int]] = []

    def load(name: str) -> SimpleNamespace:
        assert name == "libcuda.so.1"
        return SimpleNamespace(
            cuInit=lambda flags: called.append(("init", flags)) or 0,
            cuDevicePrimaryCtxRetain=lambda context, device: called.append(("retain", device)),
        )

    prewarm_driver(load).join(5)
    assert called == [("init", 0), ("retain", 0)]


def test_without_a_driver_nothing_is_woken(capfd: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> object:
        raise OSError(name)

    prewarm_driver(missing).join(5)
    prewarm_driver(lambda name: SimpleNamespace(cuInit=lambda flags: 100)).join(5)
    assert capfd.readouterr() == ("", "")
