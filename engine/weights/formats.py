"""How each parameter lies on its device: as it is, or in 12, 8 or 4 bits a number. Decided from the name table,
headers, dtype and device, before any weight is read. A format says which tensors there will be; it knows no maths,
which is the business of the linear layer that takes its tensors (assembly.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from engine.bf12 import shard
from engine.bf12.codec import EscapeIndex, Escapes, index_escapes
from engine.bf12.layout import GROUP_OUTPUTS, words_of
from engine.layers.rank_shard import RankShard
from engine.models.decoder_config import ModelConfig
from engine.models.quantization import SCALE_BLOCK
from engine.models.sharding import ParameterShard, shard_config, shard_parameters
from engine.models.weight_names import ParameterEntry, decoder_entries
from engine.protocol.expert_cut import ExpertCut, expert_cut
from engine.weights import fp8, mxfp4
from engine.weights.tensor_index import StoredTensor, bf12_escapes

TensorShapes = Mapping[str, tuple[torch.Size, torch.dtype]]

WORDS, SCALES, FIRSTS, PLACES, VALUES = ".words", ".scales", ".firsts", ".places", ".values"  # of a bf12 parameter
_BF16_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """One tensor of the parameter's name, a number as it is."""

    shape: torch.Size
    dtype: torch.dtype
    is_bf12 = False

    @property
    def numbers(self) -> int:
        return self.shape.numel()

    def tensors(self, parameter: str) -> TensorShapes:
        """The tensors in memory, by name."""
        return {parameter: (self.shape, self.dtype)}

    def main_tensor(self, parameter: str) -> str:
        """The one of these that sources are read into, below each other."""
        return parameter

    def write_index(self, parameter: str, tensors: dict[str, Tensor], escapes: Sequence[Escapes]) -> None:
        """Fills the tensors beside the main one, of which there are none: escapes are numbers among the others."""

    def cut(self, part: ParameterShard) -> "PlainFormat":
        """The format of one rank's part."""
        rest = self.shape[1:] if part.columns is None else (len(part.columns),)
        return PlainFormat(torch.Size((sum(map(len, part.rows)), *rest)), self.dtype)

    def write_part(
        self, parameter: str, whole: Mapping[str, Tensor], part: ParameterShard, own: Mapping[str, Tensor]
    ) -> None:
        """Fills a part's tensors from those of the whole, which has this format."""
        _copy_part(whole[parameter], part, own[parameter])


@dataclass(frozen=True, slots=True)
class Bf12Format:
    """A codec.Bf12Weight: words, and an index of what they leave out, with room for so many escapes. Its methods are
    PlainFormat's."""

    outputs: int
    inputs: int
    escapes: int
    is_bf12 = True

    @property
    def numbers(self) -> int:
        return self.outputs * self.inputs

    def tensors(self, parameter: str) -> TensorShapes:
        groups = -(-self.outputs // GROUP_OUTPUTS)
        return {
            parameter + WORDS: (torch.Size((self.outputs, words_of(self.inputs))), torch.int32),
            parameter + SCALES: (torch.Size((self.outputs,)), torch.float32),
            parameter + FIRSTS: (torch.Size((groups + 1,)), torch.int32),
            parameter + PLACES: (torch.Size((self.escapes,)), torch.int32),
            parameter + VALUES: (torch.Size((self.escapes,)), torch.bfloat16),
        }

    def main_tensor(self, parameter: str) -> str:
        return parameter + WORDS

    def write_index(self, parameter: str, tensors: dict[str, Tensor], escapes: Sequence[Escapes]) -> None:
        """Fills the tensors beside the words. `escapes` are those of the sources, which are stored as bf12."""
        self._write(parameter, tensors, index_escapes(escapes))

    def cut(self, part: ParameterShard) -> "Bf12Format | None":
        """As PlainFormat.cut; None where the code of a part is not a part of the code. How many of the escapes are the
        part's is not known from headers: it has room for all of them, which are few."""
        if not shard.can_cut(self.inputs, part.rows, part.columns):
            return None
        inputs = self.inputs if part.columns is None else len(part.columns)
        return Bf12Format(sum(map(len, part.rows)), inputs, self.escapes)

    def write_part(
        self, parameter: str, whole: Mapping[str, Tensor], part: ParameterShard, own: Mapping[str, Tensor]
    ) -> None:
        words = ParameterShard(part.rows, shard.word_columns(part.columns))
        _copy_part(whole[parameter + WORDS], words, own[parameter + WORDS])
        index = EscapeIndex(*(whole[parameter + name] for name in (SCALES, FIRSTS, PLACES, VALUES)))
        self._write(parameter, own, shard.cut_index(index, part.rows, part.columns))

    def _write(self, parameter: str, tensors: Mapping[str, Tensor], index: EscapeIndex) -> None:
        tensors[parameter + SCALES].copy_(index.scales_N)
        tensors[parameter + FIRSTS].copy_(index.firsts_G)
        for name, values in ((PLACES, index.places_E), (VALUES, index.values_E)):
            target = tensors[parameter + name]
            target[: len(values)].copy_(values)
            target[len(values) :].zero_()


@dataclass(frozen=True, slots=True)
class _ScaledFormat:
    """A tensor of numbers, and one of what several of them share. Its methods are PlainFormat's."""

    outputs: int
    inputs: int
    is_bf12: ClassVar = False

    @property
    def numbers(self) -> int:
        return self.outputs * self.inputs

    def main_tensor(self, parameter: str) -> str:
        return parameter

    def write_index(self, parameter: str, tensors: dict[str, Tensor], escapes: Sequence[Escapes]) -> None:
        """Does nothing: load.py writes what is shared, which it has read."""


@dataclass(frozen=True, slots=True)
class Fp8Format(_ScaledFormat):
    """Numbers in 8 bits (fp8.py): one tensor of them, and one of float32 factors, [outputs, blocks of 128 inputs or
    1]."""

    blocks: int

    def tensors(self, parameter: str) -> TensorShapes:
        return {
            parameter: (torch.Size((self.outputs, self.inputs)), fp8.DTYPE),
            parameter + SCALES: (torch.Size((self.outputs, self.blocks)), torch.float32),
        }

    def cut(self, part: ParameterShard) -> "Fp8Format | None":
        """As PlainFormat.cut; None where a part's inputs are not whole blocks, of which each has a factor."""
        outputs, columns = sum(map(len, part.rows)), part.columns
        if columns is None or self.blocks == 1:
            return Fp8Format(outputs, self.inputs if columns is None else len(columns), self.blocks)
        if columns.start % SCALE_BLOCK or len(columns) % SCALE_BLOCK:
            return None
        return Fp8Format(outputs, len(columns), len(columns) // SCALE_BLOCK)

    def write_part(
        self, parameter: str, whole: Mapping[str, Tensor], part: ParameterShard, own: Mapping[str, Tensor]
    ) -> None:
        columns = part.columns
        if columns is not None:
            blocks = range(columns.start // SCALE_BLOCK, columns.stop // SCALE_BLOCK)
            columns = blocks if self.blocks > 1 else None
        _copy_part(whole[parameter], part, own[parameter])
        _copy_part(whole[parameter + SCALES], ParameterShard(part.rows, columns), own[parameter + SCALES])


@dataclass(frozen=True, slots=True)
class Mxfp4Format(_ScaledFormat):
    """An Mxfp4Weight: one tensor of pairs, and one of exponents."""

    def tensors(self, parameter: str) -> TensorShapes:
        return {
            parameter: (torch.Size((self.outputs, self.inputs // 2)), torch.uint8),
            parameter + SCALES: (torch.Size((self.outputs, self.inputs // mxfp4.BLOCK)), torch.uint8),
        }

    def cut(self, part: ParameterShard) -> "Mxfp4Format | None":
        """As PlainFormat.cut; None where a part's inputs are not whole pairs of blocks."""
        outputs, columns = sum(map(len, part.rows)), part.columns
        if columns is None:
            return Mxfp4Format(outputs, self.inputs)
        if columns.start % mxfp4.PAIR or len(columns) % mxfp4.PAIR:
            return None
        return Mxfp4Format(outputs, len(columns))

    def write_part(
        self, parameter: str, whole: Mapping[str, Tensor], part: ParameterShard, own: Mapping[str, Tensor]
    ) -> None:
        for name, numbers in ((parameter, 2), (parameter + SCALES, mxfp4.BLOCK)):
            columns = part.columns
            if columns is not None:
                columns = range(columns.start // numbers, columns.stop // numbers)
            _copy_part(whole[name], ParameterShard(part.rows, columns), own[name])


WeightFormat = PlainFormat | Bf12Format | Fp8Format | Mxfp4Format
WeightFormats = Mapping[str, WeightFormat]  # by parameter


def plain_formats(table: Iterable[ParameterEntry], dtype: torch.dtype) -> dict[str, WeightFormat]:
    """Every parameter as it is: norms and sinks in float32, the rest in `dtype`."""
    return {entry.parameter: _plain(entry, dtype) for entry in table}


def formats_to_cut(
    formats: WeightFormats, parts: Mapping[str, ParameterShard], dtype: torch.dtype
) -> dict[str, WeightFormat]:
    """How whole parameters are read that are then cut: as they are to be, or in `dtype` where a part cannot."""
    return {
        parameter: formats[parameter]
        if formats[parameter].cut(part) is not None
        else _expanded(formats[parameter], dtype)
        for parameter, part in parts.items()
    }


def choose_expert_cut(
    config: ModelConfig, table: Sequence[ParameterEntry], formats: WeightFormats, ranks: int
) -> ExpertCut | None:
    """How experts are cut for so many ranks: the same on each of them. None where there are none, or they divide in
    neither way."""
    if config.mixture is None:
        return None
    experts, inner = config.mixture.rule.experts, config.mixture.intermediate
    packed = [entry for entry in table if entry.is_of_experts and not isinstance(formats[entry.parameter], PlainFormat)]
    keeps_format = True
    if packed and inner % ranks == 0:
        names = {entry.parameter for entry in packed}
        inside = decoder_entries(shard_config(config, ranks, ExpertCut.INSIDE))
        own = [entry for entry in inside if entry.parameter in names]
        parts = shard_parameters(packed, own, RankShard(ranks - 1, ranks))
        keeps_format = all(formats[parameter].cut(part) is not None for parameter, part in parts)
    return expert_cut(ranks, experts, inner, keeps_format)


def shard_formats(formats: WeightFormats, parts: Mapping[str, ParameterShard]) -> dict[str, WeightFormat]:
    """The formats of what is one rank's, where those of the whole are `formats_to_cut`."""
    shards: dict[str, WeightFormat] = {}
    for parameter, part in parts.items():
        own = formats[parameter].cut(part)
        assert own is not None
        shards[parameter] = own
    return shards


def select_formats(
    table: Iterable[ParameterEntry], stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device
) -> dict[str, WeightFormat]:
    """`stored` has all sources of the table. Only GPUs multiply by words or by 4 bits a number, and only in bfloat16,
    or by 8 bits, from Ada on: elsewhere all are expanded while they are loaded."""
    multiplies = _multiplies_packed(dtype, device)
    keeps_fp8 = multiplies and fp8.are_kept(device)
    formats: dict[str, WeightFormat] = {}
    for entry in table:
        packed = _bf12(entry, stored) or _mxfp4(entry) if multiplies else None
        formats[entry.parameter] = packed or (_fp8(entry) if keeps_fp8 else None) or _plain(entry, dtype)
    return formats


def random_formats(
    table: Iterable[ParameterEntry], dtype: torch.dtype, device: torch.device
) -> dict[str, WeightFormat]:
    """The same where numbers are made up: what a checkpoint would have in 4 bits is so, and the rest as it is."""
    table = list(table)
    packed = {entry.parameter: _mxfp4(entry) for entry in table} if _multiplies_packed(dtype, device) else {}
    return {entry.parameter: packed.get(entry.parameter) or _plain(entry, dtype) for entry in table}


def _multiplies_packed(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cuda" and dtype is torch.bfloat16


def tensor_shapes(formats: WeightFormats) -> TensorShapes:
    """The tensors of all parameters."""
    return {name: shape for parameter, format_ in formats.items() for name, shape in format_.tensors(parameter).items()}


def formats_bytes(formats: WeightFormats) -> int:
    return sum(shape.numel() * dtype.itemsize for shape, dtype in tensor_shapes(formats).values())


def bf12_formats_bytes(formats: WeightFormats) -> int:
    """The bytes of what is in 12 bits a number."""
    return formats_bytes({parameter: format_ for parameter, format_ in formats.items() if format_.is_bf12})


def uncompressed_bytes(formats: WeightFormats) -> int:
    """What the parameters would take if none were in 12 bits."""
    bf12_numbers = sum(format_.numbers for format_ in formats.values() if format_.is_bf12)
    return formats_bytes(formats) - bf12_formats_bytes(formats) + _BF16_BYTES * bf12_numbers


def allocate(formats: WeightFormats, device: torch.device) -> dict[str, Tensor]:
    """The parameters' tensors, not yet written."""
    return {
        name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in tensor_shapes(formats).items()
    }


def is_norm(entry: ParameterEntry) -> bool:
    return entry.parameter.endswith("norm")


def _copy_part(whole: Tensor, part: ParameterShard, own: Tensor) -> None:
    first = 0
    for rows in part.rows:
        taken = whole[rows.start : rows.stop]
        taken = taken if part.columns is None else taken[:, part.columns.start : part.columns.stop]
        own[first : first + len(rows)].copy_(taken)
        first += len(rows)


def _expanded(format_: WeightFormat, dtype: torch.dtype) -> PlainFormat:
    assert not isinstance(format_, PlainFormat)
    return PlainFormat(torch.Size((format_.outputs, format_.inputs)), dtype)


def _plain(entry: ParameterEntry, dtype: torch.dtype) -> PlainFormat:
    outputs = sum(source.placed[0] for source in entry.sources)
    shape = torch.Size((outputs, *entry.sources[0].placed[1:]))
    exact = is_norm(entry) or entry.parameter.endswith(("sinks", "choice_bias"))
    return PlainFormat(shape, torch.float32 if exact else dtype)


def _fp8(entry: ParameterEntry) -> Fp8Format | None:
    if not all(source.is_fp8 for source in entry.sources):
        return None
    outputs, inputs = sum(source.shape[0] for source in entry.sources), entry.sources[0].shape[1]
    scales = entry.sources[0].scales
    assert scales is not None
    return Fp8Format(outputs, inputs, fp8.blocks_of(scales.shapes[0]))


def _mxfp4(entry: ParameterEntry) -> Mxfp4Format | None:
    outputs, inputs = sum(source.placed[0] for source in entry.sources), entry.sources[0].placed[-1]
    if not all(source.is_mxfp4 for source in entry.sources) or inputs % mxfp4.PAIR:
        return None
    return Mxfp4Format(outputs, inputs)


def _bf12(entry: ParameterEntry, stored: Mapping[str, StoredTensor]) -> Bf12Format | None:
    escapes = bf12_escapes(entry, stored)
    if escapes is None:
        return None
    outputs = sum(source.shape[0] for source in entry.sources)
    return Bf12Format(outputs, entry.sources[0].shape[1], escapes)
