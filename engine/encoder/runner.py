"""A loaded encoder as the loop runs it: takes the packed texts of a step, gives a vector for each. It knows no network.

On a GPU launching does not wait: the next step is packed while this one is computed.
"""

import logging
import os
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch
from torch import Tensor

from engine.batch import Flight, Int32s, OutOfDeviceMemory, Sampled
from engine.costs import Costs
from engine.encoder.config import EncoderConfig, read_encoder_config
from engine.encoder.model import Encoder, EncoderParameters, assemble
from engine.encoder.names import encoder_entries, encoder_spare, prefix_of
from engine.encoder.packed import unpack
from engine.host import given
from engine.memory import DoesNotFit
from engine.places import place
from engine.streams import Mark, Stream
from engine.weights.checkpoint import Checkpoint
from engine.weights.load import fetch
from engine.weights.random import random_revision, random_tensors
from engine.wire import Memory, ModelSpec, Pooling

log = logging.getLogger(__name__)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STEP_TOKENS: Final = {"cpu": 512, "cuda": 16384}
_SEQUENCES: Final = {"cpu": 64, "cuda": 1024}


@dataclass(frozen=True, slots=True)
class Landing:
    """A step's vectors on their way to the host."""

    vectors_SH: Tensor
    mark: Mark

    def wait(self) -> Sampled:
        self.mark.wait()
        return given(self.vectors_SH)


class EncoderRunner:
    """A loaded encoder; attributes as in replica.Served. It has no KV and so no blocks, and texts do not end by tokens
    of theirs."""

    kv_layout = ""
    blocks, block_tokens = 0, 1
    costs: Costs | None = None

    def __init__(
        self, model: ModelSpec, config: EncoderConfig, parameters: EncoderParameters, revision: str,
        device: torch.device, beat: Callable[[], None],
    ) -> None:  # fmt: skip
        asked = model.context_tokens
        if asked is not None and asked > config.context_tokens:
            raise DoesNotFit(f"context_tokens {asked} is more than the model's {config.context_tokens}")
        self.revision = revision
        self.context_tokens = asked or config.context_tokens
        self.vocabulary = config.vocabulary
        self.stop_ids: list[int] = []
        self.poolings = frozenset({Pooling.SCORE} if config.scores else {Pooling.MEAN, Pooling.CLS})
        self.depth = 2 if device.type == "cuda" else 1
        self.step_tokens = self.prompt_step_tokens = model.step_tokens or _STEP_TOKENS[device.type]
        self.sequences = model.sequences or _SEQUENCES[device.type]
        self.memory = _memory(model, parameters, device)
        self._encoder = Encoder(config, parameters)
        self._stream = Stream(device)
        self._beat = beat

    @classmethod
    def open(cls, model: ModelSpec, device: str, threads: int | None, beat: Callable[[], None]) -> "EncoderRunner":
        """Loads `model.folder`. Calls `beat` after each tensor; afterwards each launch calls it after each layer.

        Raises ConfigError, CheckpointError, DoesNotFit or Unusable, each saying what to change.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        folder = Path(model.folder)
        config = read_encoder_config(folder)
        where = place(device)
        dtype = _dtype(model, config, where)
        with torch.inference_mode():
            tensors, revision = _tensors(model, config, dtype, where, beat)
            parameters = assemble(config, tensors, beat)
        log.info("%s: %.1f MB as %s", model.name, parameters.bytes / 1e6, dtype)
        return cls(model, config, parameters, revision, where, beat)

    def idle(self) -> bool:
        """There is nothing to prepare."""
        return False

    @torch.inference_mode()
    def launch(self, packed: Int32s) -> Flight:
        texts = unpack(packed)
        assert max(texts.lengths) <= self.context_tokens, "a text past the context"
        assert 0 <= texts.tokens_T.min() <= texts.tokens_T.max() < self.vocabulary, "a token past the vocabulary"
        mark = self._stream.mark()
        try:
            with self._stream.entered():
                vectors_SH = self._encoder.vectors(texts, self._beat)
                if self._stream.queues:
                    landed_SH = self._stream.staging(*vectors_SH.shape, dtype=torch.float32)
                    vectors_SH = landed_SH.copy_(vectors_SH, non_blocking=True)
                mark.set()
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(str(error)) from error
        return Landing(vectors_SH, mark)

    def erase(self, blocks: Items[int]) -> None:
        """There are none."""
        assert not blocks

    def sample(self, flight: Flight, masks_MW: Int32s) -> None:
        raise AssertionError("no row of a text has a mask")


def _dtype(model: ModelSpec, config: EncoderConfig, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, and on a GPU the checkpoint's own: vectors are kept and compared by their owners."""
    if model.dtype != "auto":
        return _DTYPES[model.dtype]
    return torch.float32 if device.type == "cpu" else _DTYPES.get(config.dtype, torch.float32)


def _tensors(
    model: ModelSpec, config: EncoderConfig, dtype: torch.dtype, device: torch.device, beat: Callable[[], None]
) -> tuple[dict[str, Tensor], str]:
    """What the folder holds, or made up, and the revision that names it."""
    folder = Path(model.folder)
    if model.random_weights:
        return random_tensors(encoder_entries(config, ""), dtype, device, beat), random_revision(folder)
    checkpoint = Checkpoint(folder)
    prefix = prefix_of(checkpoint.tensors)
    table = encoder_entries(config, prefix)
    tensors = fetch(checkpoint, table, lambda name: encoder_spare(config, prefix, name), dtype, device, beat)
    return tensors, checkpoint.revision()


def _memory(model: ModelSpec, parameters: EncoderParameters, device: torch.device) -> Memory:
    name, total, free = "cpu", int(psutil.virtual_memory().total), int(psutil.virtual_memory().available)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free, total = torch.cuda.mem_get_info(device)
    return Memory(
        model=model.name, pid=os.getpid(), device=name, device_bytes=total, weights_bytes=parameters.bytes,
        kv_blocks=0, kv_block_tokens=1, kv_bytes=0, free_bytes=free,
    )  # fmt: skip
