"""Where a model runs: the device that was asked for, checked before anything is loaded. It knows no model."""

import importlib.util
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Final

import psutil
import torch

from engine.hostinfo.gpus import KERNEL_CACHE_VARIABLE, MIN_CAPABILITY

log = logging.getLogger(__name__)

_NAMES: Final = re.compile(r"auto|cuda(:\d+)?")


class DeviceUnusable(RuntimeError):
    """The requested device cannot run models; the message says why and what to do."""


def select_device(requested: str) -> torch.device:
    """`auto` is the first GPU, or the CPU with a line in the log where no GPU can be used.

    Raises DeviceUnusable for a GPU that is named: cuda, or cuda:N.
    """
    if requested == "cpu":
        return torch.device("cpu")
    if not _NAMES.fullmatch(requested):
        raise DeviceUnusable(f"device {requested!r} is not supported: auto, cpu, cuda and cuda:N are")
    device = torch.device("cuda", int(requested.partition(":")[2] or 0))
    reason = _reason_against(device)
    if reason is None:
        _require_kernel_cache()
        return device
    if requested != "auto":
        raise DeviceUnusable(f"device {requested!r} cannot be used: {reason}")
    log.info("device auto: cpu (%s)", reason)
    return torch.device("cpu")


def device_facts(device: torch.device) -> tuple[str, int, int]:
    """The device's name, and how many bytes it has free and in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), *torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return "cpu", int(memory.available), int(memory.total)


def _reason_against(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no GPU; check the driver, CUDA_VISIBLE_DEVICES and that this torch was built for CUDA"
    index, count = device.index, torch.cuda.device_count()
    if index >= count:
        return f"there are {count} GPUs, counted from 0"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        has, needs = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        return f"{torch.cuda.get_device_name(device)} has compute capability {has}, at least {needs} is needed"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, which compiles the kernels: pip install triton"
    return None


def _require_kernel_cache() -> None:
    """Compiled kernels go where the environment says; if that cannot be written, each start makes them anew."""
    folder = Path(os.environ.get(KERNEL_CACHE_VARIABLE) or Path.home() / ".triton" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        os.environ[KERNEL_CACHE_VARIABLE] = tempfile.mkdtemp(prefix="hearth-kernels-")
        log.info("the kernel cache %s cannot be written (%s): every start compiles anew", folder, error)
