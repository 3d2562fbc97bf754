"""engine/gpus.py: which GPUs a host's replicas may use."""

from pathlib import Path

import pytest

from engine.gpus import visible


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_every_device_file_is_a_gpu(devices: Path) -> None:
    assert visible({}, devices) == ["0", "1", "2"]


def test_a_host_without_a_driver_has_none(tmp_path: Path) -> None:
    assert visible({}, tmp_path) == []


@pytest.mark.parametrize(
    ("said", "meant"),
    [("2", ["2"]), ("1, 0", ["1", "0"]), ("GPU-8f3,MIG-2a", ["GPU-8f3", "MIG-2a"]), ("0,-1,1", ["0"]), ("", [])],
)
def test_what_the_environment_says_is_kept(devices: Path, said: str, meant: list[str]) -> None:
    assert visible({"CUDA_VISIBLE_DEVICES": said}, devices) == meant
