"""What a start takes over from an earlier one, and everything that this depends on. It knows no tensors."""

import os
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

import msgspec

from engine.execution.artifacts import ArtifactFiles, ArtifactKey, digest_files
from engine.models.config import ModelConfig
from engine.protocol.specs import ModelSpec
from engine.step.cost_model import CostModel

_ENGINE: Final = Path(__file__).parents[1]
# What decides which kernels a step on a GPU has and how it is measured, and on a CPU how a dtype is chosen.
_GPU_SOURCES: Final = (
    *("kernels/**/*.py", "kernels/tables/*.json", "layers/*.py", "models/*.py", "step/*.py"),
    "execution/profiling.py",
    *("execution/gpu_runner.py", "execution/cuda_graphs.py", "execution/gpu_sampler.py", "execution/gpu_trial.py"),
)
_CPU_SOURCES: Final = ("execution/dtype_select.py", "layers/linear_cpu.py")
_DRIVER: Final = Path("/sys/module/nvidia/version")
_PROCESSORS: Final = Path("/proc/cpuinfo")
_PROCESSOR: Final = ("model name", "flags", "Features", "CPU part")  # of its lines, on x86 and on ARM


class GpuArtifact(msgspec.Struct, frozen=True):
    """Of a model on a GPU. `segments` are what steps of all sizes compute in, as workspace.Workspace has it, beside
    what is there before any; `blocks` the Room.used_blocks of the costs."""

    segments: list[int]
    blocks: int
    costs: CostModel


class CpuArtifact(msgspec.Struct, frozen=True):
    """Of a model on a CPU: the dtype it is fastest in."""

    dtype: Literal["float32", "bfloat16"]


def gpu_artifacts(
    model: ModelSpec, config: ModelConfig, context_tokens: int, dtype: str, coded: Sequence[str], device: str
) -> ArtifactFiles[GpuArtifact]:
    """`coded` are the parameters in 12 bits a number, which other kernels take; `device` as its driver names it."""
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
        "sequences": model.sequences,
    }
    return ArtifactFiles(Path(model.folder), key, GpuArtifact)


def cpu_artifacts(model: ModelSpec, config: ModelConfig) -> ArtifactFiles[CpuArtifact]:
    key: ArtifactKey = {
        "processor": _processor(),
        "torch": version("torch"),
        "source": _source(_CPU_SOURCES),
        "config": repr(config),
        "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
    }
    return ArtifactFiles(Path(model.folder), key, CpuArtifact)


def _triton() -> str:
    """GPUs need it, and there it may be one that was built for them under another name."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


@cache
def _source(patterns: tuple[str, ...]) -> str:
    return digest_files(file for pattern in patterns for file in _ENGINE.glob(pattern))


def _processor() -> str:
    """The first one's name and what it can do; empty where the system does not tell."""
    try:
        lines = _PROCESSORS.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.startswith(_PROCESSOR))
