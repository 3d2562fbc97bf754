"""What a start takes over from an earlier one: what was measured for a model on one kind of device, kept beside its
weights under a key that says everything that it depends on. It knows files, and neither tensors nor devices.

    MODEL/.hearth/KEY.json      what was measured, for one key
    MODEL/.hearth/kernels/      compiled kernels, which have keys of their own (kernels/compile_cache.py)

Where the model's folder cannot be written the files are in the cache of compiled kernels alone, which all models share;
there a model also finds what was measured for another of the same sizes. A file with other content than its name says
is ignored.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

import msgspec

from engine.hostinfo.gpus import KERNEL_CACHE_VARIABLE
from engine.layers.cpu_row import row_functions
from engine.models.config import ModelConfig
from engine.process.files import replace_file
from engine.protocol.specs import ModelSpec
from engine.step.cost_model import CostModel

log = logging.getLogger(__name__)

_FOLDER: Final = ".hearth"
_KEYS_MAX: Final = 16  # in a folder; the oldest go
Artifact = TypeVar("Artifact", bound=msgspec.Struct)
ArtifactKey = Mapping[str, str | int | None]

_ENGINE: Final = Path(__file__).parents[1]
# What decides which kernels a step on a GPU has and how it is measured, and on a CPU how a dtype is chosen.
_GPU_SOURCES: Final = (
    *("kernels/**/*.py", "kernels/tables/*.json", "layers/*.py", "models/*.py", "step/*.py", "bf12/*.py"),
    *("execution/gpu_runner.py", "execution/gpu_sampler.py", "execution/cuda_graphs.py"),
    *("execution/gpu_trial.py", "execution/open_gpu.py", "pipeline/*.py"),
)
_CPU_SOURCES: Final = ("execution/dtype_select.py", "layers/linear_cpu.py", "layers/cpu_*.*")
_DRIVER: Final = Path("/sys/module/nvidia/version")
_PROCESSORS: Final = Path("/proc/cpuinfo")
_PROCESSOR: Final = ("model name", "flags", "Features", "CPU part")  # of its lines, on x86 and on ARM


class GpuArtifact(msgspec.Struct, frozen=True):
    """What was measured for a model on a GPU.

    segments    sizes of the workspace's segments that steps of all sizes take, in their order.
    blocks      ProfilingLimits.used_blocks of the costs.
    """

    segments: list[int]
    blocks: int
    costs: CostModel


class CpuArtifact(msgspec.Struct, frozen=True):
    """The dtype in which a model is fastest on a CPU."""

    dtype: Literal["float32", "bfloat16"]


def gpu_artifacts(
    model: ModelSpec, config: ModelConfig, context_tokens: int, dtype: str, coded: Sequence[str], device: str
) -> "ArtifactFiles[GpuArtifact]":
    """The files for a model on a GPU. `coded` are the parameters in 12 bits a number, which take other kernels.
    `device` is the driver's name for it."""
    key: ArtifactKey = {
        "device": device,
        "driver": _DRIVER.read_text().strip() if _DRIVER.exists() else "",
        "torch": version("torch"),
        "triton": _triton(),
        "source": _source(_GPU_SOURCES),
        "config": repr(config),
        "dtype": dtype,
        "coded": " ".join(coded),
        "kv_dtype": model.kv_dtype,
        "context_tokens": context_tokens,
        "block_tokens": model.block_tokens,
        "step_tokens": model.step_tokens,
        "stages": model.stages,
        "sequences": model.sequences,
    }
    return ArtifactFiles(Path(model.folder), key, GpuArtifact)


def cpu_artifacts(model: ModelSpec, config: ModelConfig) -> "ArtifactFiles[CpuArtifact]":
    """The files for a model on this host's CPU."""
    key: ArtifactKey = {
        "processor": _processor(),
        "torch": version("torch"),
        "source": _source(_CPU_SOURCES),
        "config": repr(config),
        "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        "compiled": _compiled(),
    }
    return ArtifactFiles(Path(model.folder), key, CpuArtifact)


def _triton() -> str:
    """Triton's version; empty where it was installed under another name."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _compiled() -> str:
    """Which functions of layers/cpu_row.py there are, without which a dtype may be slower, or none at all."""
    functions = row_functions()
    return "" if functions is None else " ".join(name for name, made in functions._asdict().items() if made is not None)


@cache
def _source(patterns: tuple[str, ...]) -> str:
    return digest_files(file for pattern in patterns for file in _ENGINE.glob(pattern))


def _processor() -> str:
    """The first processor's name and features; empty where the system does not say."""
    first = ""
    with suppress(OSError):
        first, _, _ = _PROCESSORS.read_text().partition("\n\n")
    return "\n".join(line for line in first.splitlines() if line.startswith(_PROCESSOR))


class ArtifactFiles(Generic[Artifact]):
    """The files of one model for one key and one kind of artifact."""

    def __init__(self, folder: Path, key: ArtifactKey, kind: type[Artifact]) -> None:
        """`folder` is the model's."""
        self._key = dict(key)
        self._kind = kind
        name = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:16] + ".json"
        shared = os.environ.get(KERNEL_CACHE_VARIABLE)
        self.files = [root / name for root in (folder / _FOLDER, *([Path(shared)] if shared else []))]

    def read(self) -> Artifact | None:
        """Returns what was written, or None. A file that is odd in any way is ignored."""
        for file in self.files:
            with suppress(OSError, ValueError, TypeError, KeyError):  # msgspec's errors are ValueErrors
                document = json.loads(file.read_bytes())
                if document["key"] == self._key:
                    artifact = msgspec.convert(document["found"], self._kind)
                    log.info("found by an earlier start: %s", file)
                    return artifact
        return None

    def write(self, artifact: Artifact) -> list[Path]:
        """Writes it wherever that is possible. Returns those files. It never fails: only time is lost."""
        # JSON of the standard library, because what never pays costs infinitely much.
        document = json.dumps({"key": self._key, "found": msgspec.to_builtins(artifact)}, indent=1).encode()
        return [file for file in self.files if _write_atomically(file, document)]

    def spread(self) -> None:
        """Copies what one place has to all places."""
        if (artifact := self.read()) is not None:
            self.write(artifact)


def kernels_folder(folder: Path) -> Path:
    """Where compiled kernels lie beside the model of this folder."""
    return folder / _FOLDER / "kernels"


def digest_files(files: Iterable[Path]) -> str:
    """A digest of the files' names and contents."""
    digest = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def _write_atomically(file: Path, content: bytes) -> bool:
    """At once or not at all. The oldest files of the folder go."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)
        files_by_age = sorted(file.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for oldest in files_by_age[:-_KEYS_MAX]:
            oldest.unlink(missing_ok=True)
    except OSError as error:
        log.info("not kept for the next start in %s: %s", file.parent, error)
        return False
    return True
