"""Where a model's parameters come from: its folder's files, or made up; and what a decoder's will be on their device,
which is known before any of them is there. It runs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from engine.models.bert import EncoderParameters, assemble_encoder
from engine.models.config import EncoderConfig, ModelConfig
from engine.models.llama import DecoderParameters
from engine.models.weight_names import ParameterEntry, decoder_entries, encoder_entries, required_tensors
from engine.protocol.specs import ModelSpec
from engine.weights.assembly import assemble_decoder
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import (
    TensorShapes,
    WeightFormats,
    bf12_formats_bytes,
    formats_bytes,
    plain_formats,
    select_formats,
    tensor_shapes,
    uncompressed_bytes,
)
from engine.weights.load import load_tensors
from engine.weights.random import random_tensors


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The parameters of a decoder on one device. `checkpoint` is None where they are made up; else what its headers say
    holds for as long as load.ModelFiles finds the folder unchanged."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    checkpoint: Checkpoint | None
    table: list[ParameterEntry]
    formats: WeightFormats

    @classmethod
    def open(cls, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, random: bool) -> Self:
        """Reads headers. Raises CheckpointError where a tensor is missing, has no place or has the wrong shape."""
        if random:
            table = decoder_entries(config)
            return cls(config, dtype, device, None, table, plain_formats(table, dtype))
        checkpoint = Checkpoint(folder)
        table, is_unused = required_tensors(config, checkpoint.tensors)
        checkpoint.require(table, is_unused)
        return cls(config, dtype, device, checkpoint, table, select_formats(table, checkpoint.tensors, dtype, device))

    @property
    def shapes(self) -> TensorShapes:
        """The tensors that `load` fills."""
        return tensor_shapes(self.formats)

    @property
    def bytes(self) -> int:
        return formats_bytes(self.formats)

    @property
    def bf12_bytes(self) -> int:
        """The bytes of parameters in 12 bits a number."""
        return bf12_formats_bytes(self.formats)

    @property
    def bf16_bytes(self) -> int:
        """What the parameters would take in bf16; 0 where none is in 12 bits."""
        return uncompressed_bytes(self.formats) if self.bf12_bytes else 0

    @property
    def bf12_parameters(self) -> list[str]:
        """The parameters in 12 bits a number."""
        return [parameter for parameter, format_ in self.formats.items() if format_.is_bf12]

    def load(self, beat: Callable[[], None], into: dict[str, Tensor] | None = None) -> DecoderParameters:
        """The parameters, in the tensors of `into` or in new ones. Calls `beat` as more is there. On a CPU the largest
        takes its memory once more, for packing. Raises as `load_tensors`."""
        if self.checkpoint is None:
            tensors = random_tensors(self.table, self.dtype, self.device, beat, into=into)
        else:
            tensors = load_tensors(self.checkpoint, self.table, self.formats, self.device, beat, into)
        return assemble_decoder(self.config, tensors, beat)


def load_encoder(
    model: ModelSpec, config: EncoderConfig, dtype: torch.dtype, device: torch.device, beat: Callable[[], None]
) -> EncoderParameters:
    """Reads an encoder's parameters, or makes them up. Calls `beat` after each tensor. Raises CheckpointError."""
    if model.random_weights:
        return assemble_encoder(config, random_tensors(encoder_entries(config, ""), dtype, device, beat), beat)
    checkpoint = Checkpoint(Path(model.folder))
    table, is_unused = required_tensors(config, checkpoint.tensors)
    checkpoint.require(table, is_unused)
    tensors = load_tensors(checkpoint, table, plain_formats(table, dtype), device, beat)
    return assemble_encoder(config, tensors, beat)
