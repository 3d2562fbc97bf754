"""How each parameter lies on its device: as it is, or in 12 bits a number. Decided from the name table, headers, dtype
and device, before any weight is read. A format says which tensors there will be; it knows no maths, which is the
business of the linear layer that takes its tensors (assembly.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.bf12.codec import Escapes, index_escapes
from engine.bf12.layout import GROUP_OUTPUTS, words_of
from engine.models.weight_names import ParameterEntry
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


@dataclass(frozen=True, slots=True)
class Bf12Format:
    """A codec.Bf12Weight: words, and an index of what they leave out. Its methods are PlainFormat's."""

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
        index = index_escapes(escapes)
        tensors[parameter + SCALES].copy_(index.scales_N)
        tensors[parameter + FIRSTS].copy_(index.firsts_G)
        tensors[parameter + PLACES].copy_(index.places_E)
        tensors[parameter + VALUES].copy_(index.values_E)


WeightFormat = PlainFormat | Bf12Format
WeightFormats = Mapping[str, WeightFormat]  # by parameter


def plain_formats(table: Iterable[ParameterEntry], dtype: torch.dtype) -> dict[str, WeightFormat]:
    """Every parameter as it is: norms in float32, the rest in `dtype`."""
    return {entry.parameter: _plain(entry, dtype) for entry in table}


def select_formats(
    table: Iterable[ParameterEntry], stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device
) -> dict[str, WeightFormat]:
    """`stored` has all sources of the table. Only GPUs multiply by words, and only in bfloat16: elsewhere bf12 is
    expanded while it is loaded."""
    multiplies = device.type == "cuda" and dtype is torch.bfloat16
    return {entry.parameter: (_bf12(entry, stored) if multiplies else None) or _plain(entry, dtype) for entry in table}


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


def _plain(entry: ParameterEntry, dtype: torch.dtype) -> PlainFormat:
    outputs = sum(source.shape[0] for source in entry.sources)
    shape = torch.Size((outputs, *entry.sources[0].shape[1:]))
    return PlainFormat(shape, torch.float32 if is_norm(entry) else dtype)


def _bf12(entry: ParameterEntry, stored: Mapping[str, StoredTensor]) -> Bf12Format | None:
    escapes = bf12_escapes(entry, stored)
    if escapes is None:
        return None
    outputs = sum(source.shape[0] for source in entry.sources)
    return Bf12Format(outputs, entry.sources[0].shape[1], escapes)
