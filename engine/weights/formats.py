"""How each parameter lies on its device: as it is, or in 12 bits a number. Decided from the name table, headers, dtype
and device, before any weight is read. A format says which tensors there will be; it knows no
maths: that is the business of the linear layer which takes its tensors (assembly.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from engine.bf12.codec import GROUP_OUTPUTS, Escapes, index
from engine.bf12.layout import words_of
from engine.models.weight_names import ParameterEntry
from engine.weights.tensor_index import StoredTensor, coded_sources

TensorShapes = Mapping[str, tuple[torch.Size, torch.dtype]]

WORDS, SCALES, FIRSTS, PLACES, VALUES = ".words", ".scales", ".firsts", ".places", ".values"  # of a coded parameter
_BF16_BYTES: Final = 2


class WeightFormat(Protocol):
    """Of one parameter."""

    @property
    def coded(self) -> bool:
        """Whether it takes fewer bytes than its numbers do."""
        ...

    @property
    def numbers(self) -> int: ...

    def tensors(self, parameter: str) -> TensorShapes:
        """What lies in memory, by name."""
        ...

    def body(self, parameter: str) -> str:
        """Of these the one that sources are read into, below each other."""
        ...

    def write_beside(self, parameter: str, tensors: dict[str, Tensor], escapes: Sequence[Escapes]) -> None:
        """What lies beside the body. `escapes` are those of the sources that are coded."""
        ...


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """One tensor of the parameter's name."""

    shape: torch.Size
    dtype: torch.dtype
    coded = False

    @property
    def numbers(self) -> int:
        return self.shape.numel()

    def tensors(self, parameter: str) -> TensorShapes:
        return {parameter: (self.shape, self.dtype)}

    def body(self, parameter: str) -> str:
        return parameter

    def write_beside(self, parameter: str, tensors: dict[str, Tensor], escapes: Sequence[Escapes]) -> None:
        """There is nothing: escapes are numbers among the others."""


@dataclass(frozen=True, slots=True)
class Bf12Format:
    """A codec.Bf12: words, and an index of what they leave out."""

    outputs: int
    inputs: int
    escapes: int
    coded = True

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

    def body(self, parameter: str) -> str:
        return parameter + WORDS

    def write_beside(self, parameter: str, tensors: dict[str, Tensor], escapes: Sequence[Escapes]) -> None:
        found = index(escapes)
        tensors[parameter + SCALES].copy_(found.scales_N)
        tensors[parameter + FIRSTS].copy_(found.firsts_G)
        tensors[parameter + PLACES].copy_(found.places_E)
        tensors[parameter + VALUES].copy_(found.values_E)


WeightFormats = Mapping[str, WeightFormat]  # by parameter


def plain_formats(table: Iterable[ParameterEntry], dtype: torch.dtype) -> dict[str, WeightFormat]:
    """All as they are: norms in float32, the rest in `dtype`."""
    return {entry.parameter: _plain(entry, dtype) for entry in table}


def select_formats(
    table: Iterable[ParameterEntry], stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device
) -> dict[str, WeightFormat]:
    """`stored` has all sources of the table. Only GPUs multiply by words, and only in bfloat16: elsewhere what is coded
    is expanded while it is loaded."""
    multiplies = device.type == "cuda" and dtype is torch.bfloat16
    forms: dict[str, WeightFormat] = {}
    for entry in table:
        coded = _coded(entry, stored) if multiplies else None
        forms[entry.parameter] = coded or _plain(entry, dtype)
    return forms


def tensor_shapes(forms: WeightFormats) -> TensorShapes:
    """The tensors of all parameters."""
    return {name: shape for parameter, form in forms.items() for name, shape in form.tensors(parameter).items()}


def formats_bytes(forms: WeightFormats) -> int:
    return sum(shape.numel() * dtype.itemsize for shape, dtype in tensor_shapes(forms).values())


def bf12_formats_bytes(forms: WeightFormats) -> int:
    """Of the bytes, those of what is coded."""
    return formats_bytes({parameter: form for parameter, form in forms.items() if form.coded})


def uncompressed_bytes(forms: WeightFormats) -> int:
    """What they would take if nothing were coded."""
    coded = sum(form.numbers for form in forms.values() if form.coded)
    return formats_bytes(forms) - bf12_formats_bytes(forms) + _BF16_BYTES * coded


def allocate(forms: WeightFormats, device: torch.device) -> dict[str, Tensor]:
    """Their tensors, not yet written."""
    return {
        name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in tensor_shapes(forms).items()
    }


def is_norm(entry: ParameterEntry) -> bool:
    return entry.parameter.endswith("norm")


def _plain(entry: ParameterEntry, dtype: torch.dtype) -> PlainFormat:
    outputs = sum(source.shape[0] for source in entry.sources)
    shape = torch.Size((outputs, *entry.sources[0].shape[1:]))
    return PlainFormat(shape, torch.float32 if is_norm(entry) else dtype)


def _coded(entry: ParameterEntry, stored: Mapping[str, StoredTensor]) -> Bf12Format | None:
    codes = coded_sources(entry, stored)
    if not codes:
        return None
    outputs = sum(source.shape[0] for source in entry.sources)
    return Bf12Format(outputs, entry.sources[0].shape[1], sum(code.values.numbers for code in codes))
