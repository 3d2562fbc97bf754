"""Which tensors of a checkpoint a parameter is made of, and in what order its rows then lie. It knows no family."""

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.models.decoder_config import RopeConfig


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """How one tensor has the weights of all experts, [experts, outputs, inputs], or their biases, [experts, outputs].

    transposed   each is stored [inputs, outputs].
    interleaved  gate and up take turns, row by row; they come to lie gate above up.
    """

    transposed: bool = False
    interleaved: bool = False


class NumberPacking(enum.StrEnum):
    """How numbers lie that need a tensor of scales beside them: MXFP4 in pairs of 4 bits, [..., inputs ÷ 32, 16], where
    32 share a power of two, whose exponent is the scale; FP8 in 8 bits, of which a block shares a factor."""

    MXFP4 = "mxfp4"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class TensorScales:
    """The tensor of scales that belongs to another one, of one of some shapes that mean the same."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    packing: NumberPacking


class StoredForm(NamedTuple):
    """What the checkpoint must have: a tensor's shape, one of these, and where not any weight's will do, its dtypes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ()


_NUMBERS: Final = {NumberPacking.MXFP4: ("U8",), NumberPacking.FP8: ("F8_E4M3",)}
_SCALES: Final = {NumberPacking.MXFP4: ("U8",), NumberPacking.FP8: ("F32", "BF16")}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor of the checkpoint and the shape it must have.

    sections  how many of its rows belong together, where it is several weights below each other.
    stack     where it has several experts, which come to lie below each other.
    scales    where its numbers are packed.
    """

    name: str
    shape: tuple[int, ...]
    sections: tuple[int, ...] = ()
    stack: ExpertStack | None = None
    scales: TensorScales | None = None

    @property
    def placed(self) -> tuple[int, ...]:
        """The shape of what it becomes: [outputs, inputs] or [outputs]."""
        if self.stack is None:
            return self.shape
        experts, *rest = self.shape
        if self.is_mxfp4:
            outputs, blocks, half = rest
            return experts * outputs, 2 * blocks * half
        outputs, *inputs = reversed(rest) if self.stack.transposed else rest
        return experts * outputs, *inputs

    @property
    def is_mxfp4(self) -> bool:
        return self.scales is not None and self.scales.packing is NumberPacking.MXFP4

    @property
    def is_fp8(self) -> bool:
        return self.scales is not None and self.scales.packing is NumberPacking.FP8

    @property
    def stored(self) -> tuple[StoredForm, ...]:
        """The checkpoint's tensors that it is read from."""
        scales = self.scales
        if scales is None:
            return (StoredForm(self.name, (self.shape,)),)
        return (
            StoredForm(self.name, (self.shape,), _NUMBERS[scales.packing]),
            StoredForm(scales.name, scales.shapes, _SCALES[scales.packing]),
        )


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """The first `heads` heads' rows are put so that the two of a pair lie half a head apart, as kernels rotate them.

    What does not turn follows what does, in both halves: tables turn it by nothing. Queries and keys are put in the
    same order, so that their products stay.
    """

    heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool

    def rows(self, count: int) -> list[int]:
        """For each of `count` rows which of the checkpoint's it is."""
        half, rest = self.rotary_dim // 2, self.head_dim - self.rotary_dim
        first = [2 * pair for pair in range(half)] if self.interleaved else list(range(half))
        second = [2 * pair + 1 for pair in range(half)] if self.interleaved else list(range(half, 2 * half))
        first += range(2 * half, 2 * half + rest // 2)
        second += range(2 * half + rest // 2, self.head_dim)
        order = first + second
        turned = [head * self.head_dim + row for head in range(self.heads) for row in order]
        return turned + list(range(len(turned), count))


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """One parameter: its sources stacked along their first dimension in this order.

    order   how its rows are put when all are there.
    offset  what is then added to each number: some families store their norms' weights less 1.
    """

    parameter: str
    sources: tuple[TensorSource, ...]
    order: HeadOrder | None = None
    offset: float = 0.0

    @property
    def is_of_experts(self) -> bool:
        """Whether it has all experts' weights or biases below each other."""
        return ".experts." in self.parameter

    @property
    def is_plain(self) -> bool:
        """Whether each source is a weight as the model takes it, of which any rows may be read."""
        return all(source.stack is None and source.scales is None for source in self.sources)


def head_order(rope: RopeConfig | None, heads: int, head_dim: int) -> HeadOrder | None:
    """None where the checkpoint has the rows of so many heads of q and k in the kernels' order."""
    if rope is None or not (rope.interleaved or rope.rotary_dim):
        return None
    return HeadOrder(heads, head_dim, rope.rotary_dim or head_dim, rope.interleaved)


def entry(
    parameter: str, *sources: tuple[str, tuple[int, ...]], order: HeadOrder | None = None, offset: float = 0.0
) -> ParameterEntry:
    return ParameterEntry(parameter, tuple(TensorSource(name, shape) for name, shape in sources), order, offset)


def linear_entries(
    parameter: str, parts: list[tuple[str, int]], inputs: int, bias: bool = True, order: HeadOrder | None = None
) -> list[ParameterEntry]:
    """A weight [outputs, inputs] stacked from (name, outputs) and, where the model has one, its bias."""
    weights = ((f"{name}.weight", (outputs, inputs)) for name, outputs in parts)
    biases = ((f"{name}.bias", (outputs,)) for name, outputs in parts)
    weight = entry(f"{parameter}.weight", *weights, order=order)
    return [weight, entry(f"{parameter}.bias", *biases, order=order)] if bias else [weight]


def fused_entry(
    parameter: str, name: str, sections: tuple[int, ...], inputs: int, order: HeadOrder | None = None
) -> ParameterEntry:
    """A weight that the checkpoint has as one tensor of several sections."""
    return ParameterEntry(parameter, (TensorSource(f"{name}.weight", (sum(sections), inputs), sections),), order)
