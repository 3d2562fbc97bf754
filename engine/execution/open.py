"""Opens a model's folder on a device, as the parts that compute its steps. It knows no network and no tenants."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from engine.execution.artifacts import ArtifactFiles, CpuArtifact, GpuArtifact, cpu_artifacts, gpu_artifacts
from engine.execution.device_select import DeviceUnusable, select_device
from engine.execution.dtype_select import decoder_dtype
from engine.execution.memory_plan import DoesNotFit, context_tokens, require_sizes
from engine.execution.open_cpu import block_exchange, open_cpu
from engine.execution.open_encoder import open_encoder
from engine.memory.errors import OutOfDeviceMemory
from engine.models.config import ModelConfig, ModelConfigError, is_encoder, read_decoder_config
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Pooling
from engine.step.executor import DecoderExecutor, DecoderMemory, LoadedModel
from engine.weights.load import CheckpointError, ModelFiles
from engine.weights.source import WeightSource

log = logging.getLogger(__name__)

# What a model's folder, its settings or the device are the reason of: each says what to change.
UNSERVABLE: Final = (ModelConfigError, CheckpointError, DoesNotFit, DeviceUnusable)

DecoderParts = tuple[DecoderExecutor, DecoderMemory, MemoryReport]

inference_mode = torch.inference_mode
"""What a thread enters once, before it opens a model, and stays in while it uses the model's parts."""


def open_model(
    model: ModelSpec, device: str, threads: int | None, beat: Callable[[], None], device_bytes: int | None = None,
    standby: bool = False,
) -> LoadedModel:  # fmt: skip
    """Loads `model.folder`, a decoder or an encoder as its config.json says. The caller closes it, and stays within
    `inference_mode` meanwhile. Calls `beat` after each tensor; afterwards each launch calls it after each layer.

    A decoder maps as much KV as device_bytes leave beside its weights, but what one context takes in any case; None:
    all. With `standby` it makes ready to sleep. Raises one of UNSERVABLE.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if is_encoder(Path(model.folder)):
        return open_encoder(model, select_device(device), beat)
    return _open_decoder(model, device, beat, device_bytes, standby)


def _open_decoder(
    model: ModelSpec, device: str, beat: Callable[[], None], device_bytes: int | None, standby: bool
) -> LoadedModel:
    where = select_device(device)
    config, tokens, files, source = read_decoder(model, where)
    source = seeing_source(model, source)
    with ExitStack() as resources:
        parts: DecoderParts
        if where.type == "cpu":
            parts = open_cpu(model, source, files, tokens, beat, device_bytes, resources)
            exchange = block_exchange(parts[1].memories)
        else:
            from engine.execution.open_gpu import open_exchange, open_gpu  # only here: a CPU needs no Triton

            try:
                parts = open_gpu(model, source.config, source, tokens, beat, device_bytes, standby, resources)
                exchange = open_exchange(parts[1], resources)
            except OutOfDeviceMemory as error:
                raise DoesNotFit(f"{model.name}: {error}") from error
        loaded = loaded_decoder(model, config, tokens, files, parts, resources)
        return replace(loaded, exchange=exchange)


def read_decoder(model: ModelSpec, where: torch.device) -> tuple[ModelConfig, int, ModelFiles, WeightSource]:
    """What of a decoder is known before its weights are loaded: its config, the longest context that is served, its
    files and where on the device they go. Raises as `open_model`."""
    folder = Path(model.folder)
    config = read_decoder_config(folder, vectors=model.vectors)
    tokens = context_tokens(model, config.context_tokens)
    require_sizes(model, config.spans, where.type)
    dtype = decoder_dtype(model, config, where)
    files = ModelFiles(folder, model.random_weights)
    return config, tokens, files, WeightSource.open(folder, config, dtype, where, model.random_weights)


def seeing_source(model: ModelSpec, source: WeightSource) -> WeightSource:
    """The source with what encodes images, where steps can take these: on a GPU no row sees ahead, as Gemma 3's do, and
    a stage has no images. Raises as WeightSource.with_vision."""
    seeing = source.with_vision(Path(model.folder))
    vision = seeing.config.vision
    if source.device.type == "cuda" and vision is not None and (vision.bidirectional or model.stages > 1):
        return source
    return seeing


def open_follower_source(model: ModelSpec, dtype: torch.dtype, device: torch.device) -> WeightSource:
    """What a follower of a decoder's rank 0 reads its part from. Rank 0 alone encodes images; steps with their rows are
    as large on all ranks. Raises as `read_decoder`."""
    folder = Path(model.folder)
    config = read_decoder_config(folder, vectors=model.vectors)
    source = WeightSource.open(folder, config, dtype, device, model.random_weights)
    return replace(seeing_source(model, source), vision_table=())


def loaded_decoder(
    model: ModelSpec, config: ModelConfig, tokens: int, files: ModelFiles, parts: DecoderParts, resources: ExitStack
) -> LoadedModel:
    """The open model of these parts, which takes over what closes them."""
    runner, memory, report = parts
    for layout in [group.layout for group in memory.memories if group.layout.block_bytes]:
        log.info(
            "%s: %d KV blocks of %d tokens, %.1f MB, %d full contexts of %d tokens",
            model.name, layout.blocks, layout.block_tokens, layout.blocks * layout.block_bytes / 1e6,
            layout.blocks // layout.span.held_blocks(tokens, layout.block_tokens), tokens,
        )  # fmt: skip
    return LoadedModel(
        revision=files.revision, stop_ids=frozenset(config.stop_ids),
        poolings=frozenset({Pooling.LAST} if config.vectors else ()),
        executor=runner, sampler=runner, memories=memory.memories, sleeper=memory,
        report=report, resources=resources.pop_all(), tier=memory.tier, images=memory.images,
        compute_context=inference_mode,
    )  # fmt: skip


def model_artifacts(model: ModelSpec, device: str) -> ArtifactFiles[CpuArtifact] | ArtifactFiles[GpuArtifact] | None:
    """The files that `open_model` takes over where they exist, and leaves where they do not; None where nothing needs
    to be kept.

    Raises as `open_model`, and loads nothing.
    """
    folder = Path(model.folder)
    if is_encoder(folder):
        return None
    config, where = read_decoder_config(folder, vectors=model.vectors), select_device(device)
    if where.type == "cpu":
        measured = model.dtype == "auto" and not config.vectors
        return cpu_artifacts(model, config) if measured else None
    source = WeightSource.open(folder, config, decoder_dtype(model, config, where), where, model.random_weights)
    tokens, device_name = context_tokens(model, config.context_tokens), torch.cuda.get_device_name(where)
    return gpu_artifacts(model, config, tokens, str(source.dtype), source.bf12_parameters, device_name)
