"""A loaded encoder as the loop runs it: takes the packed texts of a step, gives a vector for each. It knows no network.

On a GPU launching does not wait: the next step is packed while this one is computed. Encoders are small: one that
sleeps leaves its weights to the page cache, on a GPU too, and reads them again when it wakes.
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

from engine.execution.cpu_runner import pooling_output, trim_memory
from engine.execution.device_select import select_device
from engine.execution.memory_plan import CONTEXT_BYTES, DoesNotFit
from engine.memory.errors import OutOfDeviceMemory
from engine.memory.streams import DeviceStream, StreamEvent
from engine.models.bert import BertEncoder, EncoderParameters, assemble_encoder
from engine.models.encoder_config import EncoderConfig, read_encoder_config
from engine.models.encoder_names import encoder_entries, encoder_prefix, is_unused_encoder_tensor
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Pooling
from engine.step.cost_model import CostModel
from engine.step.encoder_layout import unpack_texts
from engine.step.executor import InflightStep, MemoryUsage, RunnerOutput
from engine.step.layout import Int32s
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import plain_formats
from engine.weights.load import ModelFiles, load_tensors
from engine.weights.random import random_tensors

log = logging.getLogger(__name__)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STEP_TOKENS: Final = {"cpu": 512, "cuda": 16384}
_SEQUENCES: Final = {"cpu": 64, "cuda": 1024}


@dataclass(frozen=True, slots=True)
class InflightVectors:
    """A step's vectors on their way to the host."""

    vectors_SH: Tensor
    mark: StreamEvent

    def wait(self) -> RunnerOutput:
        self.mark.wait()
        return pooling_output(self.vectors_SH)


class EncoderRunner:
    """A loaded encoder; attributes as in replica.Served. It has no KV and so no blocks, and texts do not end by tokens
    of theirs."""

    kv_layout = ""
    blocks, extent_blocks, block_tokens = 0, 1, 1
    costs: CostModel | None = None

    def __init__(
        self, model: ModelSpec, config: EncoderConfig, load: Callable[[], EncoderParameters], files: ModelFiles,
        device: torch.device, beat: Callable[[], None],
    ) -> None:  # fmt: skip
        """`load` reads the files, now and at each wake."""
        asked = model.context_tokens
        if asked is not None and asked > config.context_tokens:
            raise DoesNotFit(f"context_tokens {asked} is more than the model's {config.context_tokens}")
        self.revision = files.revision
        self.context_tokens = asked or config.context_tokens
        self.vocabulary = config.vocabulary
        self.stop_ids: list[int] = []
        self.poolings = frozenset({Pooling.SCORE} if config.scores else {Pooling.MEAN, Pooling.CLS})
        self.depth = 2 if device.type == "cuda" else 1
        self.step_tokens = self.prompt_step_tokens = model.step_tokens or _STEP_TOKENS[device.type]
        self.sequences = model.sequences or _SEQUENCES[device.type]
        self.mapped: list[int] = []
        self._config = config
        self._load = load
        self._files = files
        self._stream = DeviceStream(device)
        self._beat = beat
        parameters = load()
        self._encoder: BertEncoder | None = BertEncoder(config, parameters)
        self._weights_bytes = parameters.bytes
        self.memory = _memory(model, parameters, device)

    @classmethod
    def open(cls, model: ModelSpec, device: str, threads: int | None, beat: Callable[[], None]) -> "EncoderRunner":
        """Loads `model.folder`. Calls `beat` after each tensor; afterwards each launch calls it after each layer.

        Raises ConfigError, CheckpointError, DoesNotFit or Unusable, each saying what to change.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        folder = Path(model.folder)
        config = read_encoder_config(folder)
        where = select_device(device)
        dtype = _dtype(model, config, where)

        def load() -> EncoderParameters:
            return assemble_encoder(config, _tensors(model, config, dtype, where, beat), beat)

        with torch.inference_mode():
            opened = cls(model, config, load, ModelFiles(folder, model.random_weights), where, beat)
        log.info("%s: %.1f MB as %s", model.name, opened.memory.weights_bytes / 1e6, dtype)
        return opened

    def idle(self) -> bool:
        """There is nothing to prepare."""
        return False

    def prepare(self) -> int:
        """Weights come from their files again."""
        return 0

    def sleep(self, kept: Items[int]) -> int:
        """Lets the weights go."""
        assert not kept
        self.close()
        return 0

    def close(self) -> None:
        """Gives everything back. It may be called again."""
        self._stream.wait()
        self._encoder = None
        trim_memory(self._stream.device)

    @torch.inference_mode()
    def wake(self, extents: Items[int], restored: Items[int]) -> int:
        """Reads the weights again; gives their bytes. Raises OutOfDeviceMemory, or CheckpointError where the folder is
        not what it was."""
        assert self._encoder is None
        try:
            with self._stream.entered():
                self._encoder = BertEncoder(self._config, self._files.reread(self._load))
        except torch.OutOfMemoryError as error:
            trim_memory(self._stream.device)
            raise OutOfDeviceMemory(str(error)) from error
        return self._weights_bytes

    def arrived(self) -> bool:
        """`wake` returns when all is there."""
        return True

    def sizes(self) -> MemoryUsage:
        """Of a GPU what torch has got, and what the driver keeps for the process."""
        held, asleep_bytes = self._weights_bytes, 0
        if self._stream.queues:
            held, asleep_bytes = torch.cuda.memory_reserved(self._stream.device), CONTEXT_BYTES
        awake = self._encoder is not None
        return MemoryUsage(
            device_bytes=asleep_bytes + (held if awake else 0),
            asleep_bytes=asleep_bytes,
            least_bytes=asleep_bytes + self._weights_bytes,
            most_bytes=asleep_bytes + max(held, self._weights_bytes),
            memory_bytes=0,
            weights_bytes=self._weights_bytes,
            kv_bytes=0,
            kept_bytes=0,
            standby_bytes=0,
            extent_bytes=0,
            extents_least=0,
        )

    @torch.inference_mode()
    def launch(self, packed: Int32s) -> InflightStep:
        assert self._encoder is not None, "asleep"
        texts = unpack_texts(packed)
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
        return InflightVectors(vectors_SH, mark)

    def erase(self, blocks: Items[int]) -> None:
        """There are none."""
        assert not blocks

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        raise AssertionError("there are no blocks")

    def map(self, extents: Items[int]) -> None:
        raise AssertionError("there are no extents")

    def unmap(self, extents: Items[int]) -> None:
        raise AssertionError("there are no extents")

    def sample(self, flight: InflightStep, masks_MW: Int32s) -> None:
        raise AssertionError("no row of a text has a mask")


def _dtype(model: ModelSpec, config: EncoderConfig, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, and on a GPU the checkpoint's own: vectors are kept and compared by their owners."""
    if model.dtype != "auto":
        return _DTYPES[model.dtype]
    return torch.float32 if device.type == "cpu" else _DTYPES.get(config.dtype, torch.float32)


def _tensors(
    model: ModelSpec, config: EncoderConfig, dtype: torch.dtype, device: torch.device, beat: Callable[[], None]
) -> dict[str, Tensor]:
    """What the folder holds, or made up."""
    if model.random_weights:
        return random_tensors(encoder_entries(config, ""), dtype, device, beat)
    checkpoint = Checkpoint(Path(model.folder))
    prefix = encoder_prefix(checkpoint.tensors)
    table = encoder_entries(config, prefix)
    sources = (source for entry in table for source in entry.sources)
    checkpoint.require(sources, lambda name: is_unused_encoder_tensor(config, prefix, name))
    return load_tensors(checkpoint, table, plain_formats(table, dtype), device, beat)


def _memory(model: ModelSpec, parameters: EncoderParameters, device: torch.device) -> MemoryReport:
    name, total, free = "cpu", int(psutil.virtual_memory().total), int(psutil.virtual_memory().available)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free, total = torch.cuda.mem_get_info(device)
    return MemoryReport(
        model=model.name, pid=os.getpid(), device=name, device_bytes=total, weights_bytes=parameters.bytes,
        kv_blocks=0, kv_block_tokens=1, kv_bytes=0, free_bytes=free,
    )  # fmt: skip
