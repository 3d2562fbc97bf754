"""Opens an encoder, on a CPU or a GPU."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Final

import torch

from engine.execution.device_select import device_facts
from engine.execution.dtype_select import dtype_note, encoder_dtype
from engine.execution.encoder_runner import EncoderMemory, EncoderRunner
from engine.execution.memory_plan import context_tokens
from engine.memory.streams import DeviceStream
from engine.models.bert import BertEncoder, EncoderParameters
from engine.models.config import read_encoder_config
from engine.process.allocator import large_blocks_in_heap
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Pooling
from engine.step.executor import LoadedModel
from engine.step.limits import ExecutorLimits
from engine.weights.load import ModelFiles
from engine.weights.source import load_encoder

log = logging.getLogger(__name__)

_STEP_TOKENS: Final = {"cpu": 512, "cuda": 16384}
_SEQUENCES: Final = {"cpu": 64, "cuda": 1024}


def open_encoder(model: ModelSpec, device: torch.device, beat: Callable[[], None]) -> LoadedModel:
    """Loads `model.folder`, now and at each wake. Calls `beat` after each tensor; afterwards each launch calls it after
    each layer. On a CPU, large blocks that this process allocates later are mapped (engine/process/allocator.py).
    Raises ModelConfigError, CheckpointError or DoesNotFit, each saying what to change."""
    config = read_encoder_config(Path(model.folder))
    dtype, tokens = encoder_dtype(model, config, device), context_tokens(model, config.context_tokens)
    files = ModelFiles(Path(model.folder), model.random_weights)

    def load() -> EncoderParameters:
        with large_blocks_in_heap() if device.type == "cpu" else nullcontext():
            return load_encoder(model, config, dtype, device, beat)

    parameters = load()
    memory = EncoderMemory(
        BertEncoder(config, parameters), lambda: BertEncoder(config, files.reread(load)), parameters.bytes,
        DeviceStream(device),
    )  # fmt: skip
    name, free_bytes, total_bytes = device_facts(device)
    report = MemoryReport(
        model=model.name, pid=os.getpid(), device=name, device_bytes=total_bytes, weights_bytes=parameters.bytes,
        kv_blocks=0, kv_block_tokens=1, kv_bytes=0, free_bytes=free_bytes,
        note=dtype_note(model, dtype),
    )  # fmt: skip
    log.info("%s: %.1f MB as %s", model.name, report.weights_bytes / 1e6, dtype)
    step_tokens = model.step_tokens or _STEP_TOKENS[device.type]
    limits = ExecutorLimits(
        tokens, config.vocabulary, blocks=(), step_tokens=step_tokens, prompt_step_tokens=step_tokens,
        sequences=model.sequences or _SEQUENCES[device.type], depth=2 if device.type == "cuda" else 1,
    )  # fmt: skip
    resources = ExitStack()
    resources.callback(memory.close)
    return LoadedModel(
        revision=files.revision, stop_ids=frozenset(),
        poolings=frozenset({Pooling.SCORE} if config.scores else {Pooling.MEAN, Pooling.CLS}),
        executor=EncoderRunner(memory, limits, beat), sampler=None, memories=(), sleeper=memory,
        report=report, resources=resources,
    )  # fmt: skip
