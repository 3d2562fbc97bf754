"""A model on a CPU: where its KV pool's memory comes from, and steps that are computed as they are launched."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import psutil
import torch
from torch import Tensor

from engine.batch import Batch, Flight, Int32s, Sampled
from engine.costs import Costs
from engine.kv import KvPool, KvShape
from engine.memory import kv_blocks
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.host import HostStep
from engine.model.layers import Parameters, rotary_tables
from engine.sampler import sample
from engine.weights.assembly import weights_bytes
from engine.weights.storage import Dense, rows_agree
from engine.wire import Memory, ModelSpec

log = logging.getLogger(__name__)

_STEP_TOKENS: Final = 512
_SEQUENCES: Final = 64
_KV_SHARE: Final = 0.25  # of the memory that is available after the weights are loaded
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(slots=True)
class Landed:
    """A flight whose step is already done, since launching computes; or all but its sampling, until there are masks."""

    outcome: Sampled | tuple[Tensor, Batch]

    def wait(self) -> Sampled:
        assert isinstance(self.outcome, Sampled), "masked rows without their masks"
        return self.outcome


class Host:
    """Attributes as in batch.Runs. A KV pool here takes its share of `memory` as it fills."""

    depth = 1
    costs: Costs | None = None

    def __init__(
        self, model: ModelSpec, config: ModelConfig, parameters: Parameters, pool: KvPool, context_tokens: int,
        beat: Callable[[], None],
    ) -> None:  # fmt: skip
        self.pool = pool
        self.step_tokens = self.prompt_step_tokens = model.step_tokens or _STEP_TOKENS
        self.sequences = model.sequences or _SEQUENCES
        self.memory = Memory(
            model=model.name, pid=os.getpid(), device="cpu", device_bytes=int(psutil.virtual_memory().total),
            weights_bytes=weights_bytes(parameters), kv_blocks=pool.blocks, kv_block_tokens=pool.shape.block_tokens,
            kv_bytes=pool.bytes, free_bytes=max(0, _available_bytes() - pool.bytes),
        )  # fmt: skip
        self._config = config
        self._decoder = Decoder(parameters)
        self._rotary = rotary_tables(config.rope, config.head_dim, context_tokens)
        self._beat = beat

    @classmethod
    def open(
        cls, model: ModelSpec, config: ModelConfig, parameters: Parameters, context_tokens: int,
        beat: Callable[[], None],
    ) -> Self:  # fmt: skip
        """Raises DoesNotFit."""
        shape = KvShape.of(config, model.block_tokens, parameters.embedding.dtype)
        free = _available_bytes()
        sequences = model.sequences or _SEQUENCES
        blocks = kv_blocks(model, shape, context_tokens, sequences, int(free * _KV_SHARE), free)
        return cls(model, config, parameters, KvPool(shape, blocks), context_tokens, beat)

    def idle(self) -> bool:
        """There is nothing to prepare."""
        return False

    def launch(self, packed: Int32s, batch: Batch) -> Flight:
        assert batch.tokens_T.min() >= 0, "a token that is not known yet, though every flight has landed"
        logits_RV = self.logits(batch)
        if logits_RV is None:
            return Landed(Sampled(np.empty(0, np.int32), {}))
        if batch.masked:
            return Landed((logits_RV, batch))
        return Landed(given(logits_RV) if self._config.vectors else sample(logits_RV, batch))

    def sample(self, flight: Flight, masks_MW: Int32s) -> None:
        assert isinstance(flight, Landed)
        assert isinstance(flight.outcome, tuple)
        flight.outcome = sample(*flight.outcome, masks_MW)

    def erase(self, blocks_B: Tensor) -> None:
        self.pool.erase(blocks_B)

    def logits(self, batch: Batch) -> Tensor | None:
        """Runs the step: float32 [R, V], or [R, H] of a model that gives vectors; None where no row is wanted."""
        step = HostStep(batch, self._config, self._rotary, self.pool)
        self._decoder.body(step, self._beat)
        return self._decoder.head(step) if len(batch.rows_R) else None


def given(vectors_RH: Tensor) -> Sampled:
    """What rows became in a model that gives vectors."""
    vectors = vectors_RH.numpy()
    return Sampled(np.where(np.isfinite(vectors).all(1), 0, -1).astype(np.int32), {}, vectors)


def fastest_dtype(config: ModelConfig) -> torch.dtype:
    """Measures one layer's widest matmul in both: which is faster differs between processors. One in which this
    processor lets a row depend on its company is left out, as newer ones' bfloat16 may."""
    both = (torch.bfloat16, torch.float32)
    took = {dtype: _matmul_seconds(config, dtype) for dtype in both if rows_agree(_matmuls(config), dtype)}
    if not took:
        return torch.float32  # which says what is wrong when it is loaded
    fastest = min(took, key=lambda dtype: took[dtype])
    log.info("dtype auto: %s (%s)", fastest, ", ".join(f"{dtype} {1e6 * s:.0f} µs" for dtype, s in took.items()))
    return fastest


def _matmuls(config: ModelConfig) -> list[tuple[int, int]]:
    """The inputs and outputs of a layer's matmuls and the head's."""
    queries = config.heads * config.head_dim
    return [
        (config.hidden, queries + 2 * config.kv_heads * config.head_dim),
        (queries, config.hidden),
        (config.hidden, 2 * config.intermediate),
        (config.intermediate, config.hidden),
        (config.hidden, config.vocabulary),
    ]


def _matmul_seconds(config: ModelConfig, dtype: torch.dtype) -> float:
    """The fastest of a few rounds of one row and of 64 rows, as decoding and prefill have them."""
    inputs, outputs = min(config.hidden, 2048), min(config.intermediate, 8192)
    linear = Dense(torch.zeros(outputs, inputs, dtype=dtype))
    rows = [torch.zeros(count, inputs, dtype=dtype) for count in (1, 64)]
    fastest = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        for x_TK in rows:
            linear(x_TK)
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def _available_bytes() -> int:
    """Free memory of the machine, or of the control group that this process is confined to, if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))
