"""One step as it is planned: which sequences compute how many of their tokens, packed for an executor. It does not know
why these, nor what their outcome means.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final

from engine.scheduling.sequence import GrammarMatcher, Sequence, SequenceState
from engine.step.layout import Int32s, PrefixSegment, SequenceSlice, pack_step

INFLIGHT_STEPS_MAX: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: sequences[i] computes its next chunks[i] tokens, slice i of `packed`; row rows[i] of what is sampled is
    its next token, −1: none is. planned_us: how long the step is to take, 0 where that is not needed; planned_s: when
    it was planned; work: as StepTime counts it. masked_sequences: the rows that are sampled by masks, in this order;
    unwanted: those whose next token was known before this step samples it."""

    packed: Int32s
    sequences: list[Sequence]
    chunks: list[int]
    rows: list[int]
    planned_us: float
    planned_s: float
    work: float = 0.0
    masked_sequences: list[Sequence] = field(default_factory=list)
    unwanted: set[Sequence] = field(default_factory=set)

    @property
    def matchers(self) -> list[GrammarMatcher | None]:
        """One for each masked row; None for a row that is not wanted any more."""
        return [
            None if sequence.state == SequenceState.ENDED or sequence in self.unwanted else sequence.matcher
            for sequence in self.masked_sequences
        ]


def plan_step(
    sequences: list[Sequence],
    chunks: list[int],
    segments: Items[PrefixSegment],
    block_tokens: int,
    planned_us: float,
    planned_s: float,
    work: float,
) -> StepPlan:
    """Packs the next tokens of each sequence, which count as launched from now on; `segments` are read once for several
    slices."""
    slices = [_slice(sequence, chunk) for sequence, chunk in zip(sequences, chunks, strict=True)]
    rows, sampled = [-1] * len(slices), 0
    for index, sequence in enumerate(sequences):
        sequence.inflight_steps += 1
        sequence.launched += chunks[index]
        if slices[index].sampling is not None:
            rows[index] = sequence.sampled_row = sampled
            sampled += 1
    masked = [sequence for sequence, part in zip(sequences, slices, strict=True) if part.masked]
    return StepPlan(
        pack_step(slices, block_tokens, segments), sequences, chunks, rows, planned_us, planned_s, work, masked
    )


def _slice(sequence: Sequence, chunk: int) -> SequenceSlice:
    """The sequence's next `chunk` tokens as a step computes them."""
    tokens, start = sequence.tokens, sequence.launched
    table, end = sequence.table[: sequence.block_count], start + chunk
    if end < len(tokens):
        return SequenceSlice(tokens[start:end], start, table)
    history = (tokens, sequence.prompt_tokens) if sequence.penalized else None
    computed = tokens[start:end] if start < len(tokens) else (-1 - sequence.sampled_row,)
    return SequenceSlice(computed, start, table, sequence.sampling, history, sequence.matcher is not None)
