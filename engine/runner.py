"""One rank of one model: opens a folder, takes packed steps, gives sampled tokens. It knows no network, no tenants."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch

from engine.batch import Flight, Int32s, Sampled, unpack
from engine.costs import Costs
from engine.kernels import pick
from engine.kernels.reference import KEY_STEP
from engine.kv import KvPool, KvShape
from engine.model.config import ModelConfig, read_config
from engine.model.decoder import Decoder
from engine.model.layers import Parameters
from engine.sampler import sample
from engine.weights.assembly import weights_bytes
from engine.weights.checkpoint import Checkpoint
from engine.weights.load import load
from engine.weights.random import random_parameters, random_revision
from engine.weights.storage import Dense
from engine.wire import Memory, ModelSpec

log = logging.getLogger(__name__)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STEP_TOKENS: Final = 512
_SEQUENCES: Final = 64
_KV_SHARE: Final = 0.25  # of the memory that is available after the weights are loaded
_CGROUP: Final = Path("/sys/fs/cgroup")


class DoesNotFit(RuntimeError):
    """The model and one full context do not fit into memory, or the spec's sizes contradict each other."""


@dataclass(frozen=True, slots=True)
class Landed:
    """A flight whose step is already done, as on a CPU, where launching computes."""

    sampled: Sampled

    def wait(self) -> Sampled:
        return self.sampled


class Runner:
    """A loaded model with its KV pool.

    revision            names the weights; KV of other revisions must not be used.
    context_tokens      the longest sequence it runs.
    stop_ids            tokens that end a sequence, from the model's own configuration.
    blocks              of block_tokens slots each; tables may name 0 … blocks−1.
    depth               launches that may be in flight at once: one, since launching computes.
    costs               what steps take; not measured on a CPU.
    step_tokens         a step's budget of tokens while others decode, and prompt_step_tokens while nobody does.
    sequences           how many may be in one step.
    memory              where it went as the runner was opened; a KV pool on a CPU takes its share as it fills.
    """

    depth: int = 1
    costs: Costs | None = None

    def __init__(
        self, config: ModelConfig, decoder: Decoder, pool: KvPool, context_tokens: int, revision: str, memory: Memory,
        step_tokens: int, sequences: int, beat: Callable[[], None],
    ) -> None:  # fmt: skip
        self.revision = revision
        self.context_tokens = context_tokens
        self.vocabulary = config.vocabulary
        self.stop_ids = list(config.stop_ids)
        self.blocks = pool.blocks
        self.block_tokens = pool.shape.block_tokens
        self.kv_layout = pool.shape.layout
        self.memory = memory
        self.step_tokens = self.prompt_step_tokens = step_tokens
        self.sequences = sequences
        self._decoder = decoder
        self._pool = pool
        self._beat = beat

    @classmethod
    def open(cls, model: ModelSpec, device: str, threads: int | None, beat: Callable[[], None]) -> "Runner":
        """Loads `model.folder`. Calls `beat` after each tensor; afterwards each launch calls it after each layer.

        Raises ConfigError, CheckpointError or DoesNotFit, each saying what to change.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        folder = Path(model.folder)
        config = read_config(folder)
        ops = pick("cpu" if device == "auto" else device)
        context_tokens = _context_tokens(model, config)
        dtype = _dtype(model.dtype, config)
        with torch.inference_mode():
            parameters, revision = _parameters(model, config, dtype, torch.device("cpu"), beat)
            shape = KvShape.of(config, model.block_tokens, dtype)
            blocks = _blocks(model, shape, context_tokens)
            pool = KvPool(shape, blocks)
            decoder = Decoder(config, parameters, context_tokens, ops)
        log.info(
            "%s: %d KV blocks of %d tokens, %.1f MB, %d full contexts of %d tokens",
            model.name, blocks, shape.block_tokens, blocks * shape.block_bytes / 1e6,
            blocks * shape.block_tokens // context_tokens, context_tokens,
        )  # fmt: skip
        memory = Memory(
            model=model.name, pid=os.getpid(), device="cpu", device_bytes=int(psutil.virtual_memory().total),
            weights_bytes=weights_bytes(parameters), kv_blocks=blocks, kv_block_tokens=shape.block_tokens,
            kv_bytes=blocks * shape.block_bytes, free_bytes=max(0, _available_bytes() - blocks * shape.block_bytes),
        )  # fmt: skip
        return cls(
            config, decoder, pool, context_tokens, revision, memory,
            model.step_tokens or _STEP_TOKENS, model.sequences or _SEQUENCES, beat,
        )  # fmt: skip

    @torch.inference_mode()
    def launch(self, packed: Int32s) -> Flight:
        """Runs one step. Positions must lie below `context_tokens` and tables below `blocks`."""
        batch = unpack(packed)
        assert batch.positions_T.max() < self.context_tokens, "a position past the context"
        assert 0 <= batch.tokens_T.min() <= batch.tokens_T.max() < self.vocabulary, "a token past the vocabulary"
        assert 0 <= batch.tables_SW.min() <= batch.tables_SW.max() < self.blocks, "a block past the pool"
        logits_RV = self._decoder.forward(batch, self._pool, self._beat)
        return Landed(sample(logits_RV, batch))


def _parameters(
    model: ModelSpec, config: ModelConfig, dtype: torch.dtype, device: torch.device, beat: Callable[[], None]
) -> tuple[Parameters, str]:
    """What the folder holds, or made up, and the revision that names it."""
    folder = Path(model.folder)
    if model.random_weights:
        return random_parameters(config, dtype, device, beat), random_revision(folder)
    checkpoint = Checkpoint(folder)
    return load(checkpoint, config, dtype, device, beat), checkpoint.revision()


def _context_tokens(model: ModelSpec, config: ModelConfig) -> int:
    asked = model.context_tokens
    if asked is not None and asked > config.context_tokens:
        raise DoesNotFit(f"context_tokens {asked} is more than the model's {config.context_tokens}")
    return asked or config.context_tokens


def _dtype(asked: str, config: ModelConfig) -> torch.dtype:
    """`auto` measures one layer's widest matmul in both: which is faster differs between processors."""
    if asked != "auto":
        return _DTYPES[asked]
    took = {dtype: _matmul_seconds(config, dtype) for dtype in (torch.bfloat16, torch.float32)}
    fastest = min(took, key=lambda dtype: took[dtype])
    log.info("dtype auto: %s (%s)", fastest, ", ".join(f"{dtype} {1e6 * s:.0f} µs" for dtype, s in took.items()))
    return fastest


def _matmul_seconds(config: ModelConfig, dtype: torch.dtype) -> float:
    """The fastest of a few rounds of one row and of 64 rows, as decoding and prefill have them."""
    inputs, outputs = min(config.hidden, 2048), min(config.intermediate, 8192)
    with torch.inference_mode():
        linear = Dense(torch.zeros(outputs, inputs, dtype=dtype))
        rows = [torch.zeros(count, inputs, dtype=dtype) for count in (1, 64)]
        fastest = float("inf")
        for _ in range(8):
            started = time.perf_counter()
            for x_TK in rows:
                linear(x_TK)
            fastest = min(fastest, time.perf_counter() - started)
    return fastest


def _blocks(model: ModelSpec, shape: KvShape, context_tokens: int) -> int:
    """As many as kv_bytes hold; else a share of what is free, enough for one context, at most for all sequences."""
    if KEY_STEP % shape.block_tokens:
        raise DoesNotFit(f"block_tokens {shape.block_tokens} does not divide {KEY_STEP}: 8, 16, 32 and 64 do")
    context_blocks = -(-context_tokens // shape.block_tokens)
    if model.kv_bytes is not None:
        blocks = model.kv_bytes // shape.block_bytes
        if blocks < 1:
            raise DoesNotFit(f"kv_bytes {model.kv_bytes} is less than one block's {shape.block_bytes}")
        return blocks
    available = _available_bytes()
    wanted = min(int(available * _KV_SHARE) // shape.block_bytes, (model.sequences or _SEQUENCES) * context_blocks)
    blocks = max(wanted, context_blocks)
    if blocks * shape.block_bytes > available:
        raise DoesNotFit(
            f"one context of {context_tokens} tokens takes {blocks * shape.block_bytes / 1e9:.1f} GB of KV, "
            f"{available / 1e9:.1f} GB are free: set a smaller context_tokens"
        )
    return blocks


def _available_bytes() -> int:
    """Free memory of the machine, or of the control group that this process is confined to, if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))
