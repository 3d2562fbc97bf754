"""This host as such: Python, torch, GPUs, what compiles kernels, the disk, and open files."""

import importlib.metadata
import os
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from engine.hostinfo import gpus
from gateway.commands.checks.finding import Finding, good, note, wrong
from gateway.commands.terminal.output import format_bytes
from gateway.config import Config, ServerConfig

_MIN_DISK_BYTES: Final = 1 << 30
_MIN_PYTHON: Final = (3, 11)
_MIN_FREE_SHARE: Final = 0.9  # of a GPU that nobody uses


def python() -> Finding:
    text = f"Python {sys.version.split()[0]}, Hearth {importlib.metadata.version('hearth')}"
    if sys.version_info < _MIN_PYTHON:
        return wrong("python", text, "install Python 3.11 or newer and run `make serve` again")
    return good("python", text)


def engine(installed: list[gpus.Gpu]) -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield wrong("engine", "torch is not installed", "pip install hearth again")
        return
    cuda = gpus.torch_cuda_version()
    yield good("engine", f"torch {version}, {f'built for CUDA {cuda}' if cuda else 'without CUDA'}")
    if not installed:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        text = f"none; models run on {cores} CPU cores"
        advice = "one core is shared by gateway and model: expect slow answers"
        yield good("gpu", text) if cores >= 2 else note("gpu", text, advice)
    elif cuda is None:
        advice = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        text = f"{installed[0].name}, but torch was built without CUDA: models run on the CPU"
        yield note("gpu", text, advice)
    else:
        yield from map(_gpu, installed)


def _gpu(gpu: gpus.Gpu) -> Finding:
    total, free = format_bytes(gpu.total_bytes), format_bytes(gpu.free_bytes)
    text = f"{gpu.name}, {free} of {total} free, driver {gpu.driver}"
    if gpu.capability < gpus.MIN_CAPABILITY:
        actual, minimum = (".".join(map(str, numbers)) for numbers in (gpu.capability, gpus.MIN_CAPABILITY))
        advice = f"its compute capability is {actual}, kernels need {minimum}: with device auto, models run on the CPU"
        return note("gpu", text, advice)
    if gpu.free_bytes < _MIN_FREE_SHARE * gpu.total_bytes:
        return note("gpu", text, "the rest is in use, by Hearth or others: `nvidia-smi` says by whom")
    return good("gpu", text)


def kernels(config: Config) -> Finding:
    """Triton compiles kernels by itself, and with a C compiler the few lines that launch them."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return wrong("kernels", "no C compiler, which Triton needs", "apt install gcc, or set CC")
    headers = Path(sysconfig.get_paths("posix_prefix")["include"])
    if not (headers / "Python.h").exists():
        advice = "apt install python3-dev, or the like"
        return wrong("kernels", f"no Python.h in {headers}, which Triton needs", advice)
    cache = os.environ.get(gpus.KERNEL_CACHE_VARIABLE, str(config.kernels_folder))
    return good("kernels", f"compiled with {compiler}, kept in {cache}")


def disk(config: Config) -> Finding:
    folder = config.state
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{format_bytes(free)} free at {folder}"
    if not os.access(folder, os.W_OK):
        return wrong("disk", f"{folder} cannot be written", "change its owner, or use --state")
    if free < _MIN_DISK_BYTES:
        return wrong("disk", text, "make room: accounts and usage are kept there")
    return good("disk", text)


def descriptors(server: ServerConfig) -> Iterator[Finding]:
    """Notes a limit of open files below that of connections."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit != resource.RLIM_INFINITY and hard_limit < server.connections:
        advice = "raise the limit (ulimit -Hn, LimitNOFILE), or set [server] connections lower"
        yield note("files", f"{server.connections} connections, but {hard_limit} open files", advice)
