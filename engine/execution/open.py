"""One rank of one model: opens a folder, takes packed steps, gives sampled tokens. It knows no network, no tenants."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from engine.execution.artifact_keys import CpuArtifact, GpuArtifact, cpu_artifacts, gpu_artifacts
from engine.execution.artifacts import ArtifactFiles
from engine.execution.cpu_runner import CpuRunner, fastest_dtype
from engine.execution.device_select import select_device
from engine.execution.encoder_runner import EncoderRunner
from engine.execution.memory_plan import DoesNotFit, context_tokens, require_sizes
from engine.models.config import ModelConfig, read_decoder_config
from engine.models.encoder_config import is_encoder
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Pooling
from engine.step.executor import InflightStep, MemoryUsage
from engine.step.layout import Int32s, unpack_step
from engine.weights.load import ModelFiles
from engine.weights.source import WeightSource

if TYPE_CHECKING:
    from engine.execution.gpu_runner import GpuRunner

__all__ = ["DecoderRunner", "DoesNotFit"]

log = logging.getLogger(__name__)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DecoderRunner:
    """A loaded model with its KV pool, on a CPU (host.py) or a GPU (device.py).

    revision            names the weights; KV of other revisions must not be used.
    context_tokens      the longest sequence it runs.
    stop_ids            tokens that end a sequence, from the model's own configuration.
    blocks              of block_tokens slots each: the most it can have; tables may name 0 … blocks−1 of those mapped.
    memory              where it went as the runner was opened.
    All else is as in batch.Runs.
    """

    def __init__(self, config: ModelConfig, place: "CpuRunner | GpuRunner", context_tokens: int, revision: str) -> None:
        self.revision = revision
        self.context_tokens = context_tokens
        self.vocabulary = config.vocabulary
        self.stop_ids = list(config.stop_ids)
        self.poolings = frozenset({Pooling.LAST} if config.vectors else ())
        self.blocks = place.pool.blocks
        self.extent_blocks = place.pool.extent_blocks
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
    def open(
        cls, model: ModelSpec, device: str, threads: int | None, beat: Callable[[], None],
        device_bytes: int | None = None, standby: bool = False,
    ) -> "DecoderRunner":  # fmt: skip
        """Loads `model.folder`. Calls `beat` after each tensor; afterwards each launch calls it after each layer.

        It maps as much KV as device_bytes leave beside its weights, but what one context takes in any case; None: all.
        With `standby` it makes ready to sleep. The caller closes it. Raises ConfigError, CheckpointError, DoesNotFit
        or Unusable, each saying what to change.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        folder = Path(model.folder)
        config = read_decoder_config(folder, vectors=model.vectors)
        tokens = context_tokens(model, config)
        where = select_device(device)
        require_sizes(model, where.type)
        with torch.inference_mode():
            dtype = _dtype(model, config, where)
            files = ModelFiles(folder, model.random_weights)
            source = WeightSource.open(folder, config, dtype, where, model.random_weights)
            opened: CpuRunner | GpuRunner
            if where.type == "cpu":
                opened = CpuRunner(model, config, source, files, tokens, beat, device_bytes)
            else:
                from engine.execution import gpu_runner as gpu  # only here: a CPU needs no Triton

                gpu.require_weights_fit(source)
                opened = gpu.GpuRunner.open(model, config, source, tokens, beat, device_bytes, standby)
        blocks, size = opened.pool.blocks, opened.pool.shape.block_tokens
        log.info(
            "%s: %d KV blocks of %d tokens, %.1f MB, %d full contexts of %d tokens",
            model.name, blocks, size, opened.pool.bytes / 1e6, blocks * size // tokens, tokens,
        )  # fmt: skip
        return cls(config, opened, tokens, files.revision)

    @property
    def mapped(self) -> list[int]:
        """The extents of its KV pool that have memory."""
        return self.place.pool.mapped

    @torch.inference_mode()
    def idle(self) -> bool:
        """Prepares a little more of what makes steps faster; False when there is nothing left."""
        return self.place.idle()

    @torch.inference_mode()
    def erase(self, blocks: Items[int]) -> None:
        """Zeroes these blocks between the steps launched before and those launched later."""
        self.place.erase(blocks)

    @torch.inference_mode()
    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        """Copies whole blocks, in the order of launches as `erase`. No target is a source."""
        self.place.copy(sources, targets)

    def map(self, extents: Items[int]) -> None:
        """Gives these extents memory, or raises OutOfDeviceMemory."""
        self.place.map(extents)

    @torch.inference_mode()
    def unmap(self, extents: Items[int]) -> None:
        """Gives the memory of these extents back; what was queued before is done with it."""
        self.place.unmap(extents)

    @torch.inference_mode()
    def prepare(self) -> int:
        """As in batch.Moves, like the next ones."""
        return self.place.prepare()

    @torch.inference_mode()
    def sleep(self, kept: Items[int]) -> int:
        return self.place.sleep(kept)

    @torch.inference_mode()
    def wake(self, extents: Items[int], restored: Items[int]) -> int:
        return self.place.wake(extents, restored)

    def arrived(self) -> bool:
        return self.place.arrived()

    def sizes(self) -> MemoryUsage:
        return self.place.sizes()

    def close(self) -> None:
        """As in replica.Served."""
        self.place.close()

    @torch.inference_mode()
    def launch(self, packed: Int32s) -> InflightStep:
        """Begins one step. Positions must lie below `context_tokens` and tables below `blocks`."""
        batch = unpack_step(packed)
        assert batch.positions_T.max() < self.context_tokens, "a position past the context"
        assert batch.tokens_T.max() < self.vocabulary, "a token past the vocabulary"
        assert 0 <= batch.tables_SW.min() <= batch.tables_SW.max() < self.blocks, "a block past the pool"
        return self.place.launch(packed, batch)

    @torch.inference_mode()
    def sample(self, flight: InflightStep, masks_MW: Int32s) -> None:
        """Gives a step with masked rows their masks, of `vocabulary` bits."""
        assert masks_MW.shape[1] == -(-self.vocabulary // 32)
        self.place.sample(flight, masks_MW)


def open_model(
    model: ModelSpec, device: str, threads: int | None, beat: Callable[[], None], device_bytes: int | None = None,
    standby: bool = False,
) -> DecoderRunner | EncoderRunner:  # fmt: skip
    """What the folder's config.json says: a decoder, or an encoder, to be closed. Raises as their `open`."""
    if is_encoder(Path(model.folder)):
        return EncoderRunner.open(model, device, threads, beat)
    return DecoderRunner.open(model, device, threads, beat, device_bytes, standby)


def model_artifacts(model: ModelSpec, device: str) -> ArtifactFiles[CpuArtifact] | ArtifactFiles[GpuArtifact] | None:
    """What `open_model` takes over where it is there, and leaves where it is not; None where nothing needs to be kept.

    Raises as `open_model`, and loads nothing.
    """
    folder = Path(model.folder)
    if is_encoder(folder):
        return None
    config, where = read_decoder_config(folder, vectors=model.vectors), select_device(device)
    if where.type == "cpu":
        measured = model.dtype == "auto" and not config.vectors
        return cpu_artifacts(model, config) if measured else None
    source = WeightSource.open(folder, config, _dtype(model, config, where), where, model.random_weights)
    tokens, device_name = context_tokens(model, config), torch.cuda.get_device_name(where)
    return gpu_artifacts(model, config, tokens, str(source.dtype), source.bf12_parameters, device_name)


def _dtype(model: ModelSpec, config: ModelConfig, where: torch.device) -> torch.dtype:
    """`auto` is what a CPU is fastest with, float32 there for vectors, which are kept and compared by their owners; on
    a GPU the checkpoint's own, of half the bytes at least."""
    if model.dtype != "auto":
        return _DTYPES[model.dtype]
    if where.type == "cpu" and config.vectors:
        return torch.float32
    if where.type == "cpu":
        return _fastest_dtype(model, config)
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def _fastest_dtype(model: ModelSpec, config: ModelConfig) -> torch.dtype:
    """Measured once, which takes seconds for a large model; its replicas then all compute in the same."""
    kept = cpu_artifacts(model, config)
    found = kept.read()
    if found is None:
        found = CpuArtifact("bfloat16" if fastest_dtype(config) is torch.bfloat16 else "float32")
        kept.write(found)
    return _DTYPES[found.dtype]
