"""engine/hostinfo/gpus.py: which GPUs a host's replicas may use, and how large they are."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.hostinfo.gpus import gpu_memory, prewarm_driver, visible_gpus


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


def asked(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """nvidia-smi is this script."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_nvidia_smi_says_how_large_gpus_are_by_index_or_by_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "0, GPU-8f31, NVIDIA H200, 143771\n1, GPU-aa02, NVIDIA L4, 23034\n2, GPU-bb03, ?, [N/A]\nnonsense"
    asked(tmp_path, monkeypatch, f"printf '{said}'")
    assert gpu_memory(["1", "GPU-8f", "2", "7", "MIG-1"]) == {
        "1": ("NVIDIA L4", 23034 << 20),
        "GPU-8f": ("NVIDIA H200", 143771 << 20),
    }


@pytest.mark.parametrize("script", ["exit 9", "echo no driver", "exit 127"])
def test_a_broken_nvidia_smi_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    asked(tmp_path, monkeypatch, script)
    assert gpu_memory(["0"]) == {}


def test_without_nvidia_smi_no_size_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory(["0"]) == {}


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
