"""engine/execution/device_select.py: which device a spec's word means, and what is said where it cannot be used."""

import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engine.execution.device_select import DeviceUnusable, select_device


def gpus(count: int = 1, capability: tuple[int, int] = (9, 0)) -> Any:
    return patch.multiple(
        torch.cuda,
        is_available=lambda: count > 0,
        device_count=lambda: count,
        get_device_capability=lambda device: capability,
        get_device_name=lambda device: "Some GPU",
    )


def test_a_cpu_is_asked_nothing() -> None:
    assert select_device("cpu") == torch.device("cpu")


def test_a_gpu_that_can_be_used_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with gpus(2):
        assert select_device("auto") == select_device("cuda") == torch.device("cuda", 0)
        assert select_device("cuda:1") == torch.device("cuda", 1)


def test_auto_without_a_gpu_is_the_cpu_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with gpus(0), caplog.at_level(logging.INFO, "engine"):
        assert select_device("auto") == torch.device("cpu")
    assert "finds no GPU" in caplog.text


@pytest.mark.parametrize(
    ("asked", "count", "capability", "said"),
    [
        ("cuda", 0, (9, 0), "finds no GPU"),
        ("cuda:2", 2, (9, 0), "2 GPUs"),
        ("cuda", 1, (7, 5), "capability 7.5, at least 8.0"),
        ("abacus", 1, (9, 0), "auto, cpu, cuda and cuda:N"),
        ("cuda:first", 1, (9, 0), "auto, cpu, cuda and cuda:N"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(
    asked: str, count: int, capability: tuple[int, int], said: str
) -> None:
    with gpus(count, capability), pytest.raises(DeviceUnusable, match=said):
        select_device(asked)


def test_without_triton_there_is_no_gpu() -> None:
    with (
        gpus(),
        patch("importlib.util.find_spec", lambda name: None),
        pytest.raises(DeviceUnusable, match="pip install"),
    ):
        select_device("cuda")


def test_kernels_that_cannot_be_kept_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with gpus(), caplog.at_level(logging.INFO, "engine"):
        select_device("cuda")
    assert "compiles anew" in caplog.text
    assert Path(os.environ["TRITON_CACHE_DIR"]).is_dir()
