"""How each parameter lies on its device: as it is, or in 12 bits a number. Decided from the name table, headers, dtype
and device, before any weight is read. A form says which tensors there will be, and where ranks may cut; it knows no
maths: that is the business of the linear layer which takes its tensors (assembly.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from engine.bf12.codec import GROUP_OUTPUTS, Escapes, index
from engine.bf12.layout import block_of, words_of
from engine.models.weight_names import Cut, Entry, Source
from engine.weights.tensor_index import Stored, codes_of

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]

WORDS, SCALES, FIRSTS, PLACES, VALUES = ".words", ".scales", ".firsts", ".places", ".values"  # of a coded parameter
_BF16_BYTES: Final = 2


class CannotBeCut(ValueError):
    """So many ranks do not divide a parameter; the message names it."""


class Form(Protocol):
    """Of one parameter."""

    @property
    def coded(self) -> bool:
        """Whether it takes fewer bytes than its numbers do."""
        ...

    @property
    def numbers(self) -> int: ...

    def tensors(self, parameter: str) -> Shapes:
        """What lies in memory, by name."""
        ...

    def body(self, parameter: str) -> str:
        """Of these the one that sources are read into, below each other."""
        ...

    def write_beside(self, parameter: str, tensors: dict[str, Tensor], escapes: Sequence[Escapes]) -> None:
        """What lies beside the body. `escapes` are those of the sources that are coded."""
        ...

    def cut_unit(self, inputs: int) -> int:
        """How many inputs of a matrix cannot be parted."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """One tensor of the parameter's name."""

    shape: torch.Size
    dtype: torch.dtype
    coded = False

    @property
    def numbers(self) -> int:
        return self.shape.numel()

    def tensors(self, parameter: str) -> Shapes:
        return {parameter: (self.shape, self.dtype)}

    def body(self, parameter: str) -> str:
        return parameter

    def write_beside(self, parameter: str, tensors: dict[str, Tensor], escapes: Sequence[Escapes]) -> None:
        """There is nothing: escapes are numbers among the others."""

    def cut_unit(self, inputs: int) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Twelve:
    """A codec.Bf12: words, and an index of what they leave out."""

    outputs: int
    inputs: int
    escapes: int
    coded = True

    @property
    def numbers(self) -> int:
        return self.outputs * self.inputs

    def tensors(self, parameter: str) -> Shapes:
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

    def cut_unit(self, inputs: int) -> int:
        return block_of(inputs)


Forms = Mapping[str, Form]  # by parameter


def plain(table: Iterable[Entry], dtype: torch.dtype) -> dict[str, Form]:
    """All as they are: norms in float32, the rest in `dtype`."""
    return {entry.parameter: _plain(entry, dtype) for entry in table}


def forms_of(
    table: Iterable[Entry], stored: Mapping[str, Stored], dtype: torch.dtype, device: torch.device
) -> dict[str, Form]:
    """`stored` has all sources of the table. Only GPUs multiply by words, and only in bfloat16: elsewhere what is coded
    is expanded while it is loaded."""
    multiplies = device.type == "cuda" and dtype is torch.bfloat16
    forms: dict[str, Form] = {}
    for entry in table:
        coded = _coded(entry, stored) if multiplies else None
        forms[entry.parameter] = coded or _plain(entry, dtype)
    return forms


def shapes_of(forms: Forms) -> Shapes:
    """The tensors of all parameters."""
    return {name: shape for parameter, form in forms.items() for name, shape in form.tensors(parameter).items()}


def bytes_of(forms: Forms) -> int:
    return sum(shape.numel() * dtype.itemsize for shape, dtype in shapes_of(forms).values())


def coded_bytes_of(forms: Forms) -> int:
    """Of the bytes, those of what is coded."""
    return bytes_of({parameter: form for parameter, form in forms.items() if form.coded})


def bf16_bytes_of(forms: Forms) -> int:
    """What they would take if nothing were coded."""
    coded = sum(form.numbers for form in forms.values() if form.coded)
    return bytes_of(forms) - coded_bytes_of(forms) + _BF16_BYTES * coded


def allocate(forms: Forms, device: torch.device) -> dict[str, Tensor]:
    """Their tensors, not yet written."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes_of(forms).items()}


def is_norm(entry: Entry) -> bool:
    return entry.parameter.endswith("norm")


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of one source: these rows, and these columns where it is a matrix."""

    outputs: range
    inputs: range

    def of(self, tensor: Tensor) -> Tensor:
        rows = tensor[self.outputs.start : self.outputs.stop]
        return rows if tensor.ndim == 1 else rows[:, self.inputs.start : self.inputs.stop]


def parts_of(entry: Entry, form: Form, rank: int, ranks: int) -> list[Part]:
    """Of each source, which are cut alike, so that a rank has the same share of q, k and v. Raises CannotBeCut."""
    return [_part(entry, source, form, rank, ranks) for source in entry.sources]


def _part(entry: Entry, source: Source, form: Form, rank: int, ranks: int) -> Part:
    outputs, inputs = source.shape[0], source.shape[1] if len(source.shape) == 2 else 1
    if entry.cut is Cut.OUTPUTS:
        return Part(_share(source, "outputs", outputs, 1, rank, ranks), range(inputs))
    if entry.cut is Cut.INPUTS:
        return Part(range(outputs), _share(source, "inputs", inputs, form.cut_unit(inputs), rank, ranks))
    return Part(range(outputs), range(inputs))


def _share(source: Source, what: str, count: int, unit: int, rank: int, ranks: int) -> range:
    if count % (unit * ranks):
        runs = f" in runs of {unit}" if unit > 1 else ""
        raise CannotBeCut(f"{source.name} has {count} {what}{runs}, which {ranks} ranks do not divide")
    each = count // ranks
    return range(rank * each, (rank + 1) * each)


def _plain(entry: Entry, dtype: torch.dtype) -> Plain:
    outputs = sum(source.shape[0] for source in entry.sources)
    shape = torch.Size((outputs, *entry.sources[0].shape[1:]))
    return Plain(shape, torch.float32 if is_norm(entry) else dtype)


def _coded(entry: Entry, stored: Mapping[str, Stored]) -> Twelve | None:
    codes = codes_of(entry, stored)
    if not codes:
        return None
    outputs = sum(source.shape[0] for source in entry.sources)
    return Twelve(outputs, entry.sources[0].shape[1], sum(code.values.numbers for code in codes))
