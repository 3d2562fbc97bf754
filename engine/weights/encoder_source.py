"""An encoder from its folder's files, or made up."""

from collections.abc import Callable
from pathlib import Path

import torch

from engine.models.bert import EncoderParameters, assemble_encoder
from engine.models.config import EncoderConfig
from engine.models.weight_names import encoder_entries, encoder_prefix, is_unused_encoder_tensor
from engine.protocol.specs import ModelSpec
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import plain_formats
from engine.weights.load import load_tensors
from engine.weights.random import random_tensors


def load_encoder(
    model: ModelSpec, config: EncoderConfig, dtype: torch.dtype, device: torch.device, beat: Callable[[], None]
) -> EncoderParameters:
    """Reads the parameters. Calls `beat` after each tensor. Raises CheckpointError."""
    if model.random_weights:
        return assemble_encoder(config, random_tensors(encoder_entries(config, ""), dtype, device, beat), beat)
    checkpoint = Checkpoint(Path(model.folder))
    prefix = encoder_prefix(checkpoint.tensors)
    table = encoder_entries(config, prefix)
    sources = (source for entry in table for source in entry.sources)
    checkpoint.require(sources, lambda name: is_unused_encoder_tensor(config, prefix, name))
    tensors = load_tensors(checkpoint, table, plain_formats(table, dtype), device, beat)
    return assemble_encoder(config, tensors, beat)
