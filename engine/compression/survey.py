"""Which tensors of a folder are coded, from which bases, and why the others are not: by name, shape and numbers.

A parameter of the model may be made of several tensors, which lie below each other on a device. All of them are coded,
or none. Their numbers are counted by exponent, all of them, before the first is coded, so that what is written is
known to be good; what was counted last still lies in the page cache when it is read again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine.bf12.codec import bases_for, codes_of, exponents_of
from engine.bf12.layout import CODES, fits
from engine.kernels.tuning_tables import coded_pays
from engine.models.config import ConfigError, read_config
from engine.models.encoder_config import is_encoder, read_encoder_config
from engine.models.encoder_names import encoder_entries
from engine.models.encoder_names import prefix_of as encoder_prefix_of
from engine.models.weight_names import entries, prefix_of
from engine.weights.safetensors_header import Placed

ESCAPES_MOST: Final = 0.0002  # per number: more of them slow a kernel down
_GATED: Final = "gate_up.weight"


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that become one parameter; `gated` where it is a gate above what it lets through."""

    names: tuple[str, ...]
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Counted:
    """The best bases of a tensor's rows, and how many numbers have each code with them, or none (codec.codes_of)."""

    bases_N: Tensor
    codes_C: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """`bases_N` is None of a tensor that is kept, for that `reason`. `escapes` is None where nobody counted, and else
    `high_bits` is the entropy of what a high byte has of a number."""

    bases_N: Tensor | None = None
    escapes: int | None = None
    high_bits: float = 0.0
    reason: str = ""


class Survey:
    """`counts` goes through a bf16 tensor. With `every` matrices are counted as well whose shape has no
    code."""

    def __init__(
        self,
        tensors: Mapping[str, Placed],
        groups: Iterable[Group],
        counts: Callable[[Placed], Counted],
        every: bool = False,
    ) -> None:
        self._tensors = tensors
        self._group = {name: group for group in groups for name in group.names}
        self._counts = counts
        self._every = every
        self._verdicts: dict[str, Verdict] = {}

    def of(self, name: str) -> Verdict:
        """Reads all tensors that are judged together, the first time."""
        if name not in self._verdicts:
            group = self._group.get(name, Group((name,)))
            self._verdicts |= self._judged([self._tensors[each] for each in group.names], group.gated)
        return self._verdicts[name]

    def _judged(self, group: Sequence[Placed], gated: bool) -> dict[str, Verdict]:
        reasons = {tensor.name: shape_reason(tensor) for tensor in group}
        outputs = sum(tensor.shape[0] for tensor in group if tensor.shape)
        if not any(reasons.values()) and not coded_pays(outputs, group[0].shape[1], gated):
            reasons = {tensor.name: "in 12 bits it is slower, as measured" for tensor in group}
        matrices = [tensor for tensor in group if tensor.dtype == "BF16" and len(tensor.shape) == 2]
        counted = matrices if self._every or not any(reasons.values()) else []
        found = {tensor.name: _verdict(self._counts(tensor)) for tensor in counted}
        for tensor in counted:
            if not reasons[tensor.name] and (found[tensor.name].escapes or 0) > ESCAPES_MOST * tensor.bytes / 2:
                reasons[tensor.name] = "more of its numbers have no code than pays"
        because = next((name for name, reason in reasons.items() if reason), "")
        verdicts = {}
        for name, reason in reasons.items():
            verdict = found.get(name, Verdict())
            kept = reason or (f"{because}, which it lies beside, is kept" if because else "")
            verdicts[name] = replace(verdict, bases_N=None, reason=kept) if kept else verdict
        return verdicts


def shape_reason(tensor: Placed) -> str:
    """Why it has no code, whatever its numbers are; empty where it may have."""
    if tensor.dtype != "BF16":
        return f"its numbers are {tensor.dtype}"
    if len(tensor.shape) != 2:
        return "it is no matrix"
    if not fits(*tensor.shape):
        return "its shape has no code"
    return ""


def groups_of(folder: Path, names: Sequence[str]) -> list[Group]:
    """The tensors that become one parameter, of the architectures that are known; of others each is alone."""
    stored = set(names)
    try:
        if is_encoder(folder):
            table = encoder_entries(read_encoder_config(folder), encoder_prefix_of(stored))
        else:
            table = entries(read_config(folder, vectors=True), prefix_of(stored))
    except (ConfigError, TypeError, ValueError, KeyError, AttributeError):
        return []
    groups = [
        Group(tuple(source.name for source in entry.sources), entry.parameter.endswith(_GATED)) for entry in table
    ]
    return [group for group in groups if stored.issuperset(group.names)]


def count(weight_NK: Tensor) -> Counted:
    """On the host."""
    counts_NX = exponents_of(weight_NK)
    bases_N = bases_for(counts_NX)
    return Counted(bases_N.cpu(), codes_of(counts_NX, bases_N).cpu())


def total(parts: Sequence[Counted]) -> Counted:
    """Of a tensor that was counted in parts."""
    codes_C = torch.stack([part.codes_C for part in parts]).sum(0) if parts else torch.zeros(CODES + 1).long()
    return Counted(torch.cat([part.bases_N for part in parts]) if parts else torch.empty(0, dtype=torch.uint8), codes_C)


def _verdict(counted: Counted) -> Verdict:
    escapes = int(counted.codes_C[-1])
    high_C = counted.codes_C[:-1].view(-1, 2).sum(1).double()
    high_C[0] += escapes
    shares = high_C[high_C > 0] / max(1, int(counted.codes_C.sum()))
    return Verdict(counted.bases_N, escapes, 1.0 - float((shares * shares.log2()).sum()))
