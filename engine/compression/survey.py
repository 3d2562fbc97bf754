"""Which tensors of a folder become bf12, with which bases, and why the others stay: by name, shape and numbers.

A parameter of the model may be made of several tensors, which lie below each other on a device. All of them are coded,
or none. The exponents of all their numbers are counted before the first is coded, so that what is written is known to
be good; what was counted last still lies in the page cache when it is read again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine.bf12.codec import bases_for, count_code_use, exponents_of
from engine.bf12.layout import CODES, is_encodable
from engine.kernels.tuning_tables import bf12_pays_off
from engine.models.config import ModelConfigError, is_encoder, read_decoder_config, read_encoder_config
from engine.models.weight_names import required_tensors
from engine.weights.safetensors_header import TensorSpan

ESCAPE_RATE_MAX: Final = 0.0002  # per number: more escapes slow a kernel down
_GATED: Final = "gate_up.weight"


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that become one parameter; `gated` where it is a gate above what it lets through."""

    names: tuple[str, ...]
    gated: bool = False


@dataclass(frozen=True, slots=True)
class CodeCounts:
    """The best bases of a tensor's rows, and how many numbers have each code with them, or none
    (codec.count_code_use)."""

    bases_N: Tensor
    codes_C: Tensor


@dataclass(frozen=True, slots=True)
class CodingDecision:
    """Whether a tensor becomes bf12. `bases_N` is None where it stays, for the `reason`. `escapes` is None where they
    were not counted; else `high_bits` is the entropy of a number's part of a high byte."""

    bases_N: Tensor | None = None
    escapes: int | None = None
    high_bits: float = 0.0
    reason: str = ""


class CodingSurvey:
    """Decisions on a folder's tensors. `counts` reads a bf16 tensor. With `every`, matrices whose shape has no code are
    counted as well."""

    def __init__(
        self,
        tensors: Mapping[str, TensorSpan],
        groups: Iterable[TensorGroup],
        counts: Callable[[TensorSpan], CodeCounts],
        every: bool = False,
    ) -> None:
        self._tensors = tensors
        self._group = {name: group for group in groups for name in group.names}
        self._counts = counts
        self._every = every
        self._decisions: dict[str, CodingDecision] = {}

    def decide(self, name: str) -> CodingDecision:
        """The decision on a tensor. Reads all tensors of its group the first time."""
        if name not in self._decisions:
            group = self._group.get(name, TensorGroup((name,)))
            self._decisions |= self._decide_group([self._tensors[member] for member in group.names], group.gated)
        return self._decisions[name]

    def _decide_group(self, group: Sequence[TensorSpan], gated: bool) -> dict[str, CodingDecision]:
        reasons = {tensor.name: shape_reason(tensor) for tensor in group}
        outputs = sum(tensor.shape[0] for tensor in group if tensor.shape)
        if not any(reasons.values()) and not bf12_pays_off(outputs, group[0].shape[1], gated):
            reasons = {tensor.name: "in 12 bits it is slower, as measured" for tensor in group}
        matrices = [tensor for tensor in group if tensor.dtype == "BF16" and len(tensor.shape) == 2]
        counted = matrices if self._every or not any(reasons.values()) else []
        decisions = {tensor.name: _decision(self._counts(tensor)) for tensor in counted}
        for tensor in counted:
            if not reasons[tensor.name] and (decisions[tensor.name].escapes or 0) > ESCAPE_RATE_MAX * tensor.bytes / 2:
                reasons[tensor.name] = "more of its numbers have no code than pays"
        excluded = next((name for name, reason in reasons.items() if reason), "")
        for name, reason in reasons.items():
            decision = decisions.get(name, CodingDecision())
            why = reason or (f"{excluded}, which it lies beside, is kept" if excluded else "")
            decisions[name] = replace(decision, bases_N=None, reason=why) if why else decision
        return decisions


def shape_reason(tensor: TensorSpan) -> str:
    """Why a tensor of this shape and dtype has no code; empty where it may have one."""
    if tensor.dtype != "BF16":
        return f"its numbers are {tensor.dtype}"
    if len(tensor.shape) != 2:
        return "it is no matrix"
    if not is_encodable(*tensor.shape):
        return "its shape has no code"
    return ""


def tensor_groups(folder: Path, names: Sequence[str]) -> list[TensorGroup]:
    """The tensors that become one parameter, for known architectures; tensors of others are in no group."""
    stored = set(names)
    try:
        config = read_encoder_config(folder) if is_encoder(folder) else read_decoder_config(folder, vectors=True)
        table, _ = required_tensors(config, stored)
    except (ModelConfigError, TypeError, ValueError, KeyError, AttributeError):
        return []
    groups = [
        TensorGroup(tuple(source.name for source in entry.sources), entry.parameter.endswith(_GATED)) for entry in table
    ]
    return [group for group in groups if stored.issuperset(group.names)]


def count_codes(weight_NK: Tensor) -> CodeCounts:
    """The counts of a matrix, on the host."""
    counts_NX = exponents_of(weight_NK)
    bases_N = bases_for(counts_NX)
    return CodeCounts(bases_N.cpu(), count_code_use(counts_NX, bases_N).cpu())


def merge_counts(parts: Sequence[CodeCounts]) -> CodeCounts:
    """The counts of a tensor that was counted in parts."""
    codes_C = torch.stack([part.codes_C for part in parts]).sum(0) if parts else torch.zeros(CODES + 1).long()
    return CodeCounts(
        torch.cat([part.bases_N for part in parts]) if parts else torch.empty(0, dtype=torch.uint8), codes_C
    )


def _decision(counted: CodeCounts) -> CodingDecision:
    escapes = int(counted.codes_C[-1])
    high_C = counted.codes_C[:-1].view(-1, 2).sum(1).double()
    high_C[0] += escapes
    shares = high_C[high_C > 0] / max(1, int(counted.codes_C.sum()))
    return CodingDecision(counted.bases_N, escapes, 1.0 - float((shares * shares.log2()).sum()))
