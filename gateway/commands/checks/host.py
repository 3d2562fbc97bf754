"""This host as such: Python, torch, GPUs, what compiles kernels, the disk, and open files."""

import importlib
import importlib.metadata
import os
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from engine.hostinfo import gpus
from engine.hostinfo.cpu import usable_cores
from gateway import __version__
from gateway.commands.checks.finding import Finding, good, note, wrong
from gateway.commands.model_tools.layout import is_shared_out, layout_text, layouts_on
from gateway.commands.terminal.output import format_bytes
from gateway.settings.config import Config, ModelEntryConfig
from gateway.settings.server import ServerConfig

_MIN_DISK_BYTES: Final = 1 << 30
_MIN_PYTHON: Final = (3, 11)
_MIN_FREE_SHARE: Final = 0.9  # of a GPU that nobody uses


def python() -> Finding:
    text = f"Python {sys.version.split()[0]}, Hearth {__version__}"
    if sys.version_info < _MIN_PYTHON:
        return wrong("python", text, "install Python 3.11 or newer and run `make serve` again")
    return good("python", text)


def engine(installed: list[gpus.Gpu]) -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield wrong("engine", "torch is not installed", "pip install hearth-server again")
        return
    cuda = gpus.torch_cuda_version()
    yield good("engine", f"torch {version}, {f'built for CUDA {cuda}' if cuda else 'without CUDA'}")
    if not installed:
        cores = usable_cores()
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


def ranks(config: Config, entries: Sequence[ModelEntryConfig], usable: list[gpus.Gpu]) -> Iterator[Finding]:
    """Whether the GPUs are such that a model can be on several, and how it is; nothing where no model is, or there is
    one GPU."""
    cut = [entry.name for entry in entries if is_shared_out(entry)]
    if not cut or len(usable) < 2:
        return
    wanted = f"{', '.join(cut)} {'are' if len(cut) > 1 else 'is'} for several"
    if len({gpu.name for gpu in usable}) > 1:
        text = "; ".join(f"GPU {gpu.index} is {gpu.name}" for gpu in usable)
        yield wrong("ranks", f"{text}: {wanted}, which must be alike", "show those of one kind: CUDA_VISIBLE_DEVICES")
    pairs = gpus.gpu_pairs([gpu.index for gpu in usable])
    apart = [f"{pair.first} and {pair.second}" for pair in pairs if not pair.reaches]
    linked = [pair for pair in pairs if pair.reaches and pair.nvlink]
    slow = [f"{pair.first} and {pair.second}{_rate(pair)}" for pair in pairs if pair.reaches and not pair.nvlink]
    fastest = max((pair.bytes_per_s for pair in linked), default=0)
    weak = [f"{pair.first} and {pair.second}{_rate(pair)}" for pair in linked if pair.bytes_per_s < fastest]
    if apart:
        advice = (
            "show GPUs that do: CUDA_VISIBLE_DEVICES; `nvidia-smi topo -p2p rw` says which, IOMMU settings may be why"
        )
        yield wrong("ranks", f"GPUs {', '.join(apart)} do not reach each other's memory: {wanted}", advice)
    if slow:
        advice = (
            'ranks wait for PCI Express in each layer, stages once: set `stages = "auto"` with `gpus = "auto"`, or '
            "use one GPU with more memory"
        )
        yield note("ranks", f"GPUs {', '.join(slow)} have no NVLink between them: {wanted}", advice)
    if weak:
        advice = "all ranks wait for the slowest pair: `nvidia-smi nvlink -s` says which links are down"
        yield note(
            "ranks", f"GPUs {', '.join(weak)}: NVLink carries less than the {fastest / 1e9:.0f} GB/s of others", advice
        )
    if pairs and not apart and not slow and not weak:
        yield good("ranks", f"{len(usable)} GPUs reach each other over NVLink{_rate(pairs[0])}")
    for entry, layout in layouts_on(config, entries, usable):
        if entry.stages == "auto":
            yield good("ranks", f"{entry.name}: {layout_text(config, entry, layout)}")


def _rate(pair: gpus.GpuPair) -> str:
    """What its links carry, where the driver tells."""
    return f" ({pair.bytes_per_s / 1e9:.0f} GB/s each way)" if pair.bytes_per_s else ""


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


def fabric(config: Config, entries: Sequence[ModelEntryConfig]) -> Iterator[Finding]:
    """Whether NIXL is there, and whether any model's KV goes over the fabric; nothing where none is declared."""
    if not (name := config.machine.fabric):
        return
    elsewhere = "KV goes to other hosts over TLS until then"
    try:
        importlib.import_module("nixl")
        text = f"{name}, by NIXL {importlib.metadata.version('nixl')}"
    except ImportError as error:
        yield note(
            "fabric", f"{name}, but NIXL is not here: {error}", f"pip install 'hearth-server[nixl]'; {elsewhere}"
        )
        return
    if any(entry.handover_bytes for entry in entries):
        yield good("fabric", text)
    else:
        yield note("fabric", f"{text}, and no model hands KV over", "set handover_bytes of [[models]]")


def descriptors(server: ServerConfig) -> Iterator[Finding]:
    """Notes a limit of open files below that of connections."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit != resource.RLIM_INFINITY and hard_limit < server.connections:
        advice = "raise the limit (ulimit -Hn, LimitNOFILE), or set [server] connections lower"
        yield note("files", f"{server.connections} connections, but {hard_limit} open files", advice)
