"""One step as it is planned: which sequences compute how many of their tokens, packed for an executor. It does not know
why these, nor what their outcome means.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.sequences.sequence import GrammarMatcher, PromptImage, Sequence, SequenceState
from engine.step.layout import Count, EmbeddingSpan, Int32s, PrefixSegment, SequenceSlice, awaited_token, pack_step

INFLIGHT_STEPS_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows first … first+count−1 of an image, which lie in an executor's buffer from `row` on."""

    image: PromptImage
    first: int
    count: int
    row: int

    @property
    def rows_NH(self) -> NDArray[np.float32]:
        assert self.image.rows_NH is not None, "an image that is not encoded"
        return self.image.rows_NH[self.first : self.first + self.count]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: sequences[i] computes its next chunks[i] tokens, slice i of `packed`; row rows[i] of what is sampled is
    its next token, −1: none is. planned_us: how long the step is to take, 0 where that is not needed; planned_s: when
    it was planned; work: as StepTime counts it. masked_sequences: the rows that are sampled by masks, in this order;
    unwanted: those whose next token was known before this step samples it; embeddings: what the executor's buffer has
    to have before it is launched."""

    packed: Int32s
    sequences: list[Sequence]
    chunks: list[int]
    rows: list[int]
    planned_us: float
    planned_s: float
    work: float = 0.0
    masked_sequences: list[Sequence] = field(default_factory=list)
    unwanted: set[Sequence] = field(default_factory=set)
    embeddings: list["PlacedRows"] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        """How many tokens it computes."""
        return int(self.packed[Count.TOKENS])

    @property
    def sampled_rows(self) -> int:
        """How many tokens it samples."""
        return int(self.packed[Count.ROWS])

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
    groups: int,
    planned_us: float,
    planned_s: float,
    work: float,
) -> StepPlan:
    """Packs the next tokens of each sequence, which count as launched from now on; `segments` are read once for several
    slices. `groups`: how many block tables the step has, the last of them those of the sequences' `window_tables`."""
    slices = [_slice(sequence, chunk, groups) for sequence, chunk in zip(sequences, chunks, strict=True)]
    embeddings = _place_images(sequences, slices)
    rows, sampled = [-1] * len(slices), 0
    for index, sequence in enumerate(sequences):
        sequence.inflight_steps += 1
        sequence.launched += chunks[index]
        if slices[index].sampling is not None:
            rows[index] = sequence.sampled_row = sampled
            sampled += 1
    masked = [sequence for sequence, part in zip(sequences, slices, strict=True) if part.masked]
    return StepPlan(
        pack_step(slices, block_tokens, segments), sequences, chunks, rows, planned_us, planned_s, work, masked,
        embeddings=embeddings,
    )  # fmt: skip


def _place_images(sequences: list[Sequence], slices: list[SequenceSlice]) -> list[PlacedRows]:
    """Has slices name the rows of their images in a buffer, one behind the other. Returns which those are."""
    placed: list[PlacedRows] = []
    if not any([sequence.images for sequence in sequences]):  # a list: a step of 256 has 0.05 ms for all that is rare
        return placed
    row = 0
    for index, sequence in enumerate(sequences):
        spans = []
        start, end = slices[index].start, slices[index].start + len(slices[index].tokens)
        for image in sequence.images:
            first, last = max(start, image.first), min(end, image.end)
            if first < last:
                spans.append(EmbeddingSpan(first - start, row, last - first))
                placed.append(PlacedRows(image, first - image.first, last - first, row))
                row += last - first
        if spans:
            slices[index] = msgspec.structs.replace(slices[index], embeddings=spans)
    return placed


def _slice(sequence: Sequence, chunk: int, groups: int) -> SequenceSlice:
    """The sequence's next `chunk` tokens as a step computes them."""
    tokens, start = sequence.tokens, sequence.launched
    tables, end = (sequence.table[: sequence.block_count],), start + chunk
    if end < len(tokens):
        item = SequenceSlice(tokens[start:end], start, tables)
    else:
        history = (sequence.token_ids, sequence.prompt_tokens) if sequence.penalized else None
        computed = tokens[start:end] if start < len(tokens) else (awaited_token(sequence.sampled_row),)
        sampling = sequence.sampling if sequence.early_sampling is None else sequence.sampling_behind(end)
        item = SequenceSlice(computed, start, tables, sampling, history, sequence.matcher is not None)
    return _with_windows(item, sequence, groups) if sequence.window_tables else item


def _with_windows(item: SequenceSlice, sequence: Sequence, groups: int) -> SequenceSlice:
    """The slice with the tables of all groups that have layers."""
    windowed = sequence.window_tables
    tables = [*item.tables, *(each.pages.view("<i4")[::2] for each in windowed)]
    starts = [0, *(each.first for each in windowed)]
    return msgspec.structs.replace(item, tables=tables[-groups:], table_starts=starts[-groups:])
