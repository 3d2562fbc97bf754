"""One rank of one model: opens a folder, takes packed steps, gives sampled tokens. It knows no network, no tenants."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from engine.batch import Flight, Int32s, unpack
from engine.encoder.config import is_encoder
from engine.encoder.runner import EncoderRunner
from engine.host import Host, fastest_dtype
from engine.memory import DoesNotFit, context_tokens, require_sizes
from engine.model.config import ModelConfig, read_config
from engine.model.layers import Parameters
from engine.places import place
from engine.weights.checkpoint import Checkpoint
from engine.weights.load import load
from engine.weights.random import random_parameters, random_revision
from engine.wire import ModelSpec, Pooling

if TYPE_CHECKING:
    from engine.device import Device

__all__ = ["DoesNotFit", "Runner"]

log = logging.getLogger(__name__)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Runner:
    """A loaded model with its KV pool, on a CPU (host.py) or a GPU (device.py).

    revision            names the weights; KV of other revisions must not be used.
    context_tokens      the longest sequence it runs.
    stop_ids            tokens that end a sequence, from the model's own configuration.
    blocks              of block_tokens slots each; tables may name 0 … blocks−1.
    memory              where it went as the runner was opened.
    All else is as in batch.Runs.
    """

    def __init__(self, config: ModelConfig, place: "Host | Device", context_tokens: int, revision: str) -> None:
        self.revision = revision
        self.context_tokens = context_tokens
        self.vocabulary = config.vocabulary
        self.stop_ids = list(config.stop_ids)
        self.poolings = frozenset({Pooling.LAST} if config.vectors else ())
        self.blocks = place.pool.blocks
        self.block_tokens = place.pool.shape.block_tokens
        self.kv_layout = place.pool.shape.layout
        self.memory = place.memory
        self.depth = place.depth
        self.costs = place.costs
        self.step_tokens = place.step_tokens
        self.prompt_step_tokens = place.prompt_step_tokens
        self.sequences = place.sequences
        self.place = place

    @classmethod
    def open(cls, model: ModelSpec, device: str, threads: int | None, beat: Callable[[], None]) -> "Runner":
        """Loads `model.folder`. Calls `beat` after each tensor; afterwards each launch calls it after each layer.

        Raises ConfigError, CheckpointError, DoesNotFit or Unusable, each saying what to change.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        folder = Path(model.folder)
        config = read_config(folder, vectors=model.vectors)
        tokens = context_tokens(model, config)
        where = place(device)
        require_sizes(model, where.type)
        with torch.inference_mode():
            dtype = _dtype(model, config, where)
            parameters, revision = _parameters(model, config, dtype, where, beat)
            opened = _open(model, config, parameters, tokens, where, beat)
        blocks, size = opened.pool.blocks, opened.pool.shape.block_tokens
        log.info(
            "%s: %d KV blocks of %d tokens, %.1f MB, %d full contexts of %d tokens",
            model.name, blocks, size, opened.pool.bytes / 1e6, blocks * size // tokens, tokens,
        )  # fmt: skip
        return cls(config, opened, tokens, revision)

    @torch.inference_mode()
    def idle(self) -> bool:
        """Prepares a little more of what makes steps faster; False when there is nothing left."""
        return self.place.idle()

    @torch.inference_mode()
    def erase(self, blocks: Items[int]) -> None:
        """Zeroes these blocks between the steps launched before and those launched later."""
        self.place.erase(torch.tensor(blocks, dtype=torch.int64))

    @torch.inference_mode()
    def launch(self, packed: Int32s) -> Flight:
        """Begins one step. Positions must lie below `context_tokens` and tables below `blocks`."""
        batch = unpack(packed)
        assert batch.positions_T.max() < self.context_tokens, "a position past the context"
        assert batch.tokens_T.max() < self.vocabulary, "a token past the vocabulary"
        assert 0 <= batch.tables_SW.min() <= batch.tables_SW.max() < self.blocks, "a block past the pool"
        return self.place.launch(packed, batch)

    @torch.inference_mode()
    def sample(self, flight: Flight, masks_MW: Int32s) -> None:
        """Gives a step with masked rows their masks, of `vocabulary` bits."""
        assert masks_MW.shape[1] == -(-self.vocabulary // 32)
        self.place.sample(flight, masks_MW)


def open_model(model: ModelSpec, device: str, threads: int | None, beat: Callable[[], None]) -> Runner | EncoderRunner:
    """What the folder's config.json says: a decoder, or an encoder. Raises as their `open`."""
    opened = EncoderRunner if is_encoder(Path(model.folder)) else Runner
    return opened.open(model, device, threads, beat)


def _dtype(model: ModelSpec, config: ModelConfig, where: torch.device) -> torch.dtype:
    """`auto` is what a CPU is fastest with, float32 there for vectors, which are kept and compared by their owners; on
    a GPU the checkpoint's own, of half the bytes at least."""
    if model.dtype != "auto":
        return _DTYPES[model.dtype]
    if where.type == "cpu" and config.vectors:
        return torch.float32
    if where.type == "cpu":
        return fastest_dtype(config)
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def _open(
    model: ModelSpec, config: ModelConfig, parameters: Parameters, tokens: int, where: torch.device,
    beat: Callable[[], None],
) -> "Host | Device":  # fmt: skip
    if where.type == "cpu":
        return Host.open(model, config, parameters, tokens, beat)
    from engine.device import Device  # only here: a CPU needs no Triton

    return Device.open(model, config, parameters, tokens, where, beat)


def _parameters(
    model: ModelSpec, config: ModelConfig, dtype: torch.dtype, device: torch.device, beat: Callable[[], None]
) -> tuple[Parameters, str]:
    """What the folder holds, or made up, and the revision that names it."""
    if device.type != "cpu":
        from engine.device import require_room  # only here: a CPU needs no Triton

        require_room(config, dtype, device)
    folder = Path(model.folder)
    if model.random_weights:
        return random_parameters(config, dtype, device, beat), random_revision(folder)
    checkpoint = Checkpoint(folder)
    return load(checkpoint, config, dtype, device, beat), checkpoint.revision()
