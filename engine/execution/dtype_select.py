"""Which dtype a model computes in on its device: the one asked for where the device can, and on a CPU the fastest where
none is."""

import logging
import time
from collections.abc import Iterable
from typing import Final

import torch

from engine.execution.artifacts import CpuArtifact, cpu_artifacts
from engine.layers.linear_cpu import CpuLinear, is_batch_invariant
from engine.models.config import EncoderConfig, ModelConfig
from engine.protocol.specs import ModelSpec

log = logging.getLogger(__name__)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def decoder_dtype(model: ModelSpec, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The spec's dtype, float32 where a CPU cannot. `auto` is what a CPU is fastest with, float32 there for vectors,
    which their owners keep and compare; on a GPU the checkpoint's own, in 16 bits."""
    if model.dtype != "auto":
        return _possible_dtype(model, _matmuls(config), device)
    if device.type == "cpu":
        return torch.float32 if config.vectors else _fastest_dtype(model, config)
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def encoder_dtype(model: ModelSpec, config: EncoderConfig, device: torch.device) -> torch.dtype:
    """The spec's dtype, float32 where a CPU cannot. `auto` is float32 on a CPU, and on a GPU the checkpoint's own:
    vectors are compared."""
    if model.dtype != "auto":
        return _possible_dtype(model, _encoder_matmuls(config), device)
    return torch.float32 if device.type == "cpu" else _DTYPES.get(config.dtype, torch.float32)


def dtype_note(model: ModelSpec, dtype: torch.dtype) -> str:
    """What people are to know of a model that computes in another dtype than its spec's; empty where there is none."""
    if model.dtype == "auto" or _DTYPES[model.dtype] is dtype:
        return ""
    return (
        f"computes in float32: in {model.dtype} this processor has no matmul that keeps a request's bits in any company"
    )


def _possible_dtype(model: ModelSpec, shapes: Iterable[tuple[int, int]], device: torch.device) -> torch.dtype:
    """The spec's dtype, or float32 where a CPU has none of that one, or lets a row depend on its company in it."""
    dtype = _DTYPES[model.dtype]
    if device.type != "cpu" or dtype is torch.float32 or is_batch_invariant(shapes, dtype):
        return dtype
    log.warning("%s: %s", model.name, dtype_note(model, torch.float32))
    return torch.float32


def _fastest_dtype(model: ModelSpec, config: ModelConfig) -> torch.dtype:
    """Measures once per model, which takes seconds for a large one; its replicas then all compute in the same dtype."""
    artifacts = cpu_artifacts(model, config)
    earlier = artifacts.read()
    if earlier is None:
        earlier = CpuArtifact("bfloat16" if measure_fastest_dtype(config) is torch.bfloat16 else "float32")
        artifacts.write(earlier)
    return _DTYPES[earlier.dtype]


def measure_fastest_dtype(config: ModelConfig) -> torch.dtype:
    """Measures one layer's widest matmul in both dtypes: which is faster differs between processors. A dtype in which
    this processor lets a row depend on its company is left out, as newer ones' bfloat16 may be."""
    dtypes = (torch.bfloat16, torch.float32)
    took_s = {dtype: _matmul_seconds(config, dtype) for dtype in dtypes if is_batch_invariant(_matmuls(config), dtype)}
    if not took_s:
        return torch.float32  # which says what is wrong when it is loaded
    fastest = min(took_s, key=lambda dtype: took_s[dtype])
    log.info("dtype auto: %s (%s)", fastest, ", ".join(f"{dtype} {1e6 * s:.0f} µs" for dtype, s in took_s.items()))
    return fastest


def _matmuls(config: ModelConfig) -> list[tuple[int, int]]:
    """The inputs and outputs of a layer's matmuls and the head's."""
    queries, mixture = config.heads * config.head_dim, config.mixture
    return [
        (config.hidden, queries + 2 * config.kv_heads * config.head_dim),
        (queries, config.hidden),
        *((config.hidden, 2 * inner) for inner in config.inner_sizes),
        *((inner, config.hidden) for inner in config.inner_sizes),
        *([(config.hidden, mixture.rule.experts)] if mixture is not None else []),
        (config.hidden, config.vocabulary),
    ]


def _encoder_matmuls(config: EncoderConfig) -> list[tuple[int, int]]:
    """The same of an encoder, whose head ends in one number."""
    hidden, inner = config.hidden, config.intermediate
    layer = [(hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)]
    return [*layer, (hidden, 1)] if config.scores else layer


def _matmul_seconds(config: ModelConfig, dtype: torch.dtype) -> float:
    """The fastest of a few rounds of one row and of 64 rows, as decoding and prefill have them."""
    inputs, outputs = min(config.hidden, 2048), min(max(config.inner_sizes), 8192)
    linear = CpuLinear(torch.zeros(outputs, inputs, dtype=dtype))
    rows = [torch.zeros(count, inputs, dtype=dtype) for count in (1, 64)]
    fastest = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        for x_TK in rows:
            linear(x_TK)
        fastest = min(fastest, time.perf_counter() - started)
    return fastest
