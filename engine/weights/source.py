"""Where a model's parameters come from: its folder's files, or made up; and what a decoder's will be on their device,
which is known before any of them is there. It runs nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from engine.layers.rank_shard import RankShard
from engine.memory.streams import trim_memory
from engine.models.bert import EncoderParameters, assemble_encoder
from engine.models.config import EncoderConfig, ModelConfig
from engine.models.llama import DecoderParameters
from engine.models.sharding import ParameterShard, shard_config, shard_parameters, stage_config, stage_name
from engine.models.weight_names import ParameterEntry, decoder_entries, encoder_entries, required_tensors
from engine.protocol.specs import ModelSpec
from engine.vision.encoders import VisionEncoder, make_vision_encoder
from engine.vision.families import read_vision_config, vision_entries
from engine.weights.assembly import AnyExchange, assemble_decoder
from engine.weights.checkpoint import Checkpoint
from engine.weights.formats import (
    TensorShapes,
    WeightFormats,
    allocate,
    bf12_formats_bytes,
    choose_expert_cut,
    formats_bytes,
    formats_to_cut,
    plain_formats,
    random_formats,
    select_formats,
    shard_formats,
    tensor_shapes,
    uncompressed_bytes,
)
from engine.weights.load import load_experts, load_shard, load_tensors
from engine.weights.random import random_tensors

_WHOLE_BYTES: Final = 1 << 30  # of parameters that a rank has whole for a moment, to take its part


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The parameters of a decoder on one device. `checkpoint` is None where they are made up; else what its headers say
    holds for as long as load.ModelFiles finds the folder unchanged. `vision_table` has the parameters of what encodes
    images for it, none where nothing does. `unstaged` is the source of the whole model, where this one is a stage's,
    with what it calls each parameter."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    checkpoint: Checkpoint | None
    table: list[ParameterEntry]
    formats: WeightFormats
    vision_table: tuple[ParameterEntry, ...] = ()
    unstaged: "tuple[WeightSource, Mapping[str, str]] | None" = None

    @classmethod
    def open(cls, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, random: bool) -> Self:
        """Reads headers. Raises CheckpointError where a tensor is missing, has no place or has the wrong shape."""
        if random:
            table = decoder_entries(config)
            return cls(config, dtype, device, None, table, random_formats(table, dtype, device))
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

    @property
    def vision_shapes(self) -> TensorShapes:
        """The tensors that `load_vision` fills; none where nothing encodes images."""
        return tensor_shapes(self._vision_formats)

    @property
    def vision_bytes(self) -> int:
        return formats_bytes(self._vision_formats)

    @property
    def _vision_formats(self) -> WeightFormats:
        return plain_formats(list(self.vision_table), self.dtype)

    def load(self, beat: Callable[[], None], into: dict[str, Tensor] | None = None) -> DecoderParameters:
        """The parameters, in the tensors of `into` or in new ones. Calls `beat` as more is there. On a CPU the largest
        takes its memory once more, for packing. Raises as `load_tensors`."""
        return assemble_decoder(self.config, self.load_all(beat, into), beat)

    def with_vision(self, folder: Path) -> "WeightSource":
        """The source with the encoder of images that the folder's config.json means, where the checkpoint has one.
        Raises ModelConfigError, and CheckpointError where it has only a part, or other shapes."""
        vision = read_vision_config(folder)
        stored = None if self.checkpoint is None else self.checkpoint.tensors
        table = None if vision is None else vision_entries(vision, self.config.hidden, stored)
        if table is None:
            return self
        if self.checkpoint is not None:
            self.checkpoint.require(table, lambda name: True)
        return replace(self, config=self.config.with_vision(vision), vision_table=tuple(table))

    def load_vision(self, beat: Callable[[], None], into: dict[str, Tensor] | None = None) -> VisionEncoder:
        """The encoder of images with its parameters, in the tensors of `into` or in new ones. Raises as
        `load_tensors`."""
        table = list(self.vision_table)
        if self.checkpoint is None:
            tensors = random_tensors(table, self._vision_formats, self.device, beat, into=into)
        else:
            tensors = load_tensors(self.checkpoint.tensors, table, self._vision_formats, self.device, beat, into)
        assert self.config.vision is not None
        return make_vision_encoder(self.config.vision, tensors, beat)

    def stage(self, layers: range) -> "WeightSource":
        """The source of a stage of these layers."""
        names = {entry.parameter: stage_name(entry.parameter, layers) for entry in self.table}
        own = {whole: name for whole, name in names.items() if name is not None}
        return replace(
            self, config=stage_config(self.config, layers),
            table=[replace(entry, parameter=own[entry.parameter]) for entry in self.table if entry.parameter in own],
            formats={name: self.formats[whole] for whole, name in own.items()},
            unstaged=(self, {name: whole for whole, name in own.items()}),
        )  # fmt: skip

    def cut(self, shard: RankShard, cut_embedding: bool = False, parts: int | None = None) -> "ShardSource":
        """What of the parameters is one rank's: in 12, 8 or 4 bits a number where the whole is and the cut lies between
        blocks of these, else as numbers of the model's dtype. Sums over all ranks have so many parts, as many as ranks
        unless it says otherwise. Raises CannotShard."""
        config = shard_config(
            self.config, shard.ranks, choose_expert_cut(self.config, self.table, self.formats, parts or shard.ranks)
        )
        whole = {entry.parameter for entry in self.table}
        own = [entry for entry in decoder_entries(config) if entry.parameter in whole]
        experts, mixture = None, config.mixture
        if mixture is not None and mixture.local is not None:
            experts = shard.of(mixture.rule.experts)
        shards = dict(shard_parameters(self.table, own, shard, cut_embedding, experts is not None))
        whole_formats = formats_to_cut(self.formats, shards, self.dtype)
        return ShardSource(self, config, own, shards, whole_formats, shard_formats(whole_formats, shards), experts)

    def load_all(self, beat: Callable[[], None], into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The parameters' tensors, by name. What is made up is of a whole model on a CPU, and on a GPU made up for each
        stage."""
        if self.checkpoint is None and self.unstaged is not None and self.device.type == "cpu":
            whole, names = self.unstaged
            made = whole.load_all(beat)
            return {name: made[parameter] for name, parameter in names.items()}
        if self.checkpoint is None:
            return random_tensors(self.table, self.formats, self.device, beat, into=into)
        return load_tensors(self.checkpoint.tensors, self.table, self.formats, self.device, beat, into)


@dataclass(frozen=True, slots=True)
class ShardSource:
    """What of a decoder's parameters is one rank's: `config` and `own` entries are those of its shard_config, `parts`
    the rows and columns that it has of each, `whole_formats` how whole ones are read and `formats` how parts lie.
    `experts` are those that it has whole, where ranks have whole ones."""

    whole: WeightSource
    config: ModelConfig
    own: list[ParameterEntry]
    parts: Mapping[str, ParameterShard]
    whole_formats: WeightFormats
    formats: WeightFormats
    experts: range | None = None

    @property
    def shapes(self) -> TensorShapes:
        """The tensors that `load` fills."""
        return tensor_shapes(self.formats)

    @property
    def bytes(self) -> int:
        return formats_bytes(self.formats)

    def load(
        self, exchange: AnyExchange, beat: Callable[[], None], into: dict[str, Tensor] | None = None
    ) -> DecoderParameters:
        """As WeightSource.load. What is made up is cut from the whole on a CPU, and on a GPU made up for each rank."""
        return assemble_decoder(self.config, self._tensors(beat, into), beat, exchange)

    def _tensors(self, beat: Callable[[], None], into: dict[str, Tensor] | None) -> dict[str, Tensor]:
        whole, checkpoint = self.whole, self.whole.checkpoint
        if checkpoint is None and whole.device.type == "cuda":
            made = allocate(self.formats, whole.device) if into is None else into
            return random_tensors(self.own, self.formats, whole.device, beat, into=made)
        if checkpoint is None:
            return self._cut(whole.load_all(beat), into)
        packed = [entry for entry in whole.table if not _is_read_in_parts(entry, checkpoint)]
        apart = {entry.parameter for entry in packed}
        plain, own = ([entry for entry in table if entry.parameter not in apart] for table in (whole.table, self.own))
        tensors = allocate(self.formats, whole.device) if into is None else into
        load_shard(checkpoint.tensors, plain, own, self.parts, self.formats, whole.device, beat, tensors)
        if self.experts is not None:
            stacks = [entry for entry in packed if entry.is_of_experts]
            load_experts(checkpoint.tensors, stacks, self.parts, self.formats, whole.device, beat, tensors)
            packed = [entry for entry in packed if not entry.is_of_experts]
        for entries in self._batches(packed):
            loaded = load_tensors(checkpoint.tensors, entries, self.whole_formats, whole.device, beat)
            for entry in entries:
                name = entry.parameter
                self.whole_formats[name].write_part(name, loaded, self.parts[name], tensors)
            del loaded  # before the next come
        trim_memory(whole.device)
        return tensors

    def _batches(self, entries: list[ParameterEntry]) -> Iterator[list[ParameterEntry]]:
        """Whole parameters to be there at once: one, or several small ones."""
        batch: list[ParameterEntry] = []
        for entry in entries:
            formats = {each.parameter: self.whole_formats[each.parameter] for each in (*batch, entry)}
            if batch and formats_bytes(formats) > _WHOLE_BYTES:
                yield batch
                batch = []
            batch.append(entry)
        if batch:
            yield batch

    def _cut(self, tensors: dict[str, Tensor], into: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Cuts whole parameters, whose memory goes one by one."""
        for parameter, part in self.parts.items():
            whole = tensors[parameter]
            own = whole.new_empty(*self.shapes[parameter][0]) if into is None else into[parameter]
            self.whole_formats[parameter].write_part(parameter, tensors, part, {parameter: own})
            tensors[parameter] = own
        return tensors


def _is_read_in_parts(entry: ParameterEntry, checkpoint: Checkpoint) -> bool:
    """Whether any rows of it may be read alone."""
    return entry.is_plain and all(checkpoint.tensors[source.name].bf12 is None for source in entry.sources)


def load_encoder(
    model: ModelSpec, config: EncoderConfig, dtype: torch.dtype, device: torch.device, beat: Callable[[], None]
) -> EncoderParameters:
    """Reads an encoder's parameters, or makes them up. Calls `beat` after each tensor. Raises CheckpointError."""
    if model.random_weights:
        table = encoder_entries(config, "")
        return assemble_encoder(config, random_tensors(table, plain_formats(table, dtype), device, beat), beat)
    checkpoint = Checkpoint(Path(model.folder))
    table, is_unused = required_tensors(config, checkpoint.tensors)
    checkpoint.require(table, is_unused)
    tensors = load_tensors(checkpoint.tensors, table, plain_formats(table, dtype), device, beat)
    return assemble_encoder(config, tensors, beat)
