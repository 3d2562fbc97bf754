"""Which rows of a packed step read which keys together: the attention kernels' work, as int32 words behind the step.

A single row (a decode) is a narrow entry; the rows of a prompt and the members of a segment are stacked to wide ones.
Where there are too few entries to keep the device at work, their keys are divided. Every division of a row's keys but
an only one is a partial result with a slot of its own; a row's slots are consecutive and merged in that order.

    header word SPARE_WORD + w     first word of the tiles for window w of Layout.windows
    narrow count | wide count | merge count | narrow start | wide start | merge start | 0 | 0
    narrow Nx8   row, slice, first key, last key, slot or −1, first slot, slots, slots that narrow entries fill or 0
    wide Wx8     start of its members, members, slice, first key, last key, whether keys are hidden by position, 0, 0
    members Mx2  row, slot or −1
    merge Rx4    row, first slot, slots, 0

It knows no torch and nothing of why there are segments.

S slices, E entries.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.step.layout import SPARE_WORD, Int32s, StepBatch

Int64s = NDArray[np.int64]
WINDOWS_MAX: Final = 8  # header words that are left for them
ENTRY_WORDS: Final = 8
HEAD_WORDS: Final = 8
_NARROW_KEYS_MIN: Final = 64  # fewer are not worth a division
_WIDE_KEYS_MIN: Final = 256
_KEYS_UNIT: Final = 16  # entries begin at its multiples, since keys are fetched by so many
_WAVES: Final = (1, 2, 3, 5)  # narrow entries per program that are tried; wide ones cost too much to merge
_EVEN: Final = 1.1
_ENTRY_KEYS: Final = 96  # keys that could be read in the time that an entry takes beside its own
_WORTH: Final = 0.97  # finer divisions have to be merged: they must do so much better


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """What the work is cut for.

    windows         the distinct windows of the model's layers, None for none; segments serve None alone.
    kv_heads        each entry is computed for each of them.
    wide_rows       rows of a step that a wide entry stacks at most.
    *_programs      that the kernels run with; few_programs the narrow one where a step has few_rows or fewer.
    slots           partial results that there is memory for.
    """

    windows: tuple[int | None, ...]
    kv_heads: int
    wide_rows: int
    narrow_programs: int
    wide_programs: int
    slots: int
    few_rows: int = 0
    few_programs: int = 1

    def programs_of(self, rows: int) -> int:
        """The narrow kernel's, for a step of so many rows."""
        return self.few_programs if rows <= self.few_rows else self.narrow_programs


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`words` go behind the packed array, whose spare header words are set already. `wide`: whether any entry is."""

    words: Int32s
    wide: bool


def plan_attention(packed: Int32s, batch: StepBatch, layout: AttentionLayout) -> AttentionPlan:
    """Plans the attention of a packed step, and writes its spare header words. Costs about 0.1 ms, and 1 µs per
    entry."""
    assert len(layout.windows) <= WINDOWS_MAX
    parts: list[Int32s] = []
    at, wide = len(packed), False
    for index, window in enumerate(layout.windows):
        work = _Work(batch, window, layout)
        packed[SPARE_WORD + index] = at
        parts.append(work.words(at))
        at += len(parts[-1])
        wide = wide or work.wide
    return AttentionPlan(np.concatenate(parts), wide)


@dataclass(frozen=True, slots=True)
class _Wide:
    """Wide entries before they are divided: entry e stacks rows_M[starts_E[e] :] of the step, counts_E[e] of them.
    Rows of prompts come first, and none of them is in two entries."""

    rows_M: Int64s
    counts_E: Int64s
    slice_E: Int64s
    first_E: Int64s
    last_E: Int64s
    hidden_E: Int64s

    @property
    def starts_E(self) -> Int64s:
        return np.cumsum(self.counts_E) - self.counts_E


class _Work:
    """The entries for one window."""

    def __init__(self, batch: StepBatch, window: int | None, layout: AttentionLayout) -> None:
        self._batch = batch
        self._window = window
        self._layout = layout
        self._narrow_programs = layout.programs_of(len(batch.tokens_T))
        single_S = np.diff(batch.query_starts_S1) == 1
        self._singles = np.flatnonzero(single_S)
        self._prompts = np.flatnonzero(~single_S)
        self._segments = batch.segments_G4 if window is None else batch.segments_G4[:0]
        self.wide = bool(len(self._prompts) or len(self._segments))
        self._cut()

    def _cut(self) -> None:
        """Divides keys, the more the fewer entries there are; less where the slots would not do."""
        layout, batch = self._layout, self._batch
        contexts = batch.contexts_S[self._singles].astype(np.int64)
        firsts = np.zeros_like(contexts)
        if self._window is not None:
            firsts = np.maximum(0, contexts - self._window)
            firsts -= firsts % _KEYS_UNIT
        elif len(self._segments):
            firsts = batch.own_starts_S[self._singles].astype(np.int64)
        wide = self._wide_entries()
        keys, wide_keys = contexts - firsts, wide.last_E - wide.first_E
        narrow_span = _span(keys, self._narrow_programs // layout.kv_heads, _NARROW_KEYS_MIN, _WAVES)
        wide_span = _span(wide_keys, layout.wide_programs // layout.kv_heads, _WIDE_KEYS_MIN, _WAVES[:1])
        while True:
            divisions, wide_divisions = _divisions(keys, narrow_span), _divisions(wide_keys, wide_span)
            slots_T = self._slots_of(divisions, wide, wide_divisions)
            if slots_T.sum() <= layout.slots:
                break
            narrow_span, wide_span = 2 * narrow_span, 2 * wide_span
            assert narrow_span < 1 << 40, f"{layout.slots} slots do not hold one for each member of each segment"
        self._lay(contexts, firsts, divisions, wide, wide_divisions, slots_T)

    def _wide_entries(self) -> _Wide:
        batch, wide_rows = self._batch, self._layout.wide_rows
        starts, ends = batch.query_starts_S1[self._prompts], batch.query_starts_S1[self._prompts + 1]
        owner_E = np.repeat(np.arange(len(starts)), -(-(ends - starts) // wide_rows))
        nth_E = np.arange(len(owner_E)) - np.searchsorted(owner_E, owner_E)
        low_E = starts[owner_E].astype(np.int64) + nth_E * wide_rows
        count_E = np.minimum(wide_rows, ends[owner_E] - low_E)
        first_E = np.zeros_like(low_E)
        if self._window is not None:
            first_E = np.maximum(0, batch.positions_T[low_E].astype(np.int64) + 1 - self._window)
            first_E -= first_E % _KEYS_UNIT
        last_E = batch.positions_T[low_E + count_E - 1].astype(np.int64) + 1
        rows = [_ranges(low_E, count_E)]
        table = [np.stack((count_E, self._prompts[owner_E], first_E, last_E, np.ones_like(low_E)), 1)]
        begin = 0
        for index, first, last, end in self._segments.tolist():
            rows.append(batch.query_starts_S1[batch.members_M[begin:end]].astype(np.int64))
            counts = [min(wide_rows, end - low) for low in range(begin, end, wide_rows)]
            table.append(np.array([(count, index, first, last, 0) for count in counts], np.int64))
            begin = end
        return _Wide(np.concatenate(rows), *np.concatenate(table).T)

    def _slots_of(self, divisions: Int64s, wide: _Wide, wide_divisions: Int64s) -> Int64s:
        """How many partial results each row has; 0 for an only one, which is the result."""
        count_T = np.zeros(len(self._batch.tokens_T), np.int64)
        count_T[self._batch.query_starts_S1[self._singles]] = divisions
        np.add.at(count_T, wide.rows_M, np.repeat(wide_divisions, wide.counts_E))
        count_T[count_T == 1] = 0
        return count_T

    def _lay(
        self, contexts: Int64s, firsts: Int64s, divisions: Int64s, wide: _Wide, wide_divisions: Int64s, slots_T: Int64s
    ) -> None:
        base_T = np.cumsum(slots_T) - slots_T
        before_M, used_T = self._slots_before(wide, wide_divisions)
        entry_X = np.repeat(np.arange(len(wide.counts_E)), wide_divisions)
        part_X = np.arange(len(entry_X)) - np.repeat(np.cumsum(wide_divisions) - wide_divisions, wide_divisions)
        count_X, parts_X = wide.counts_E[entry_X], wide_divisions[entry_X]
        member_Y = _ranges(wide.starts_E[entry_X], count_X)
        row_Y = wide.rows_M[member_Y]
        slot_Y = base_T[row_Y] + before_M[member_Y] + np.repeat(part_X, count_X)
        self._members = _table(row_Y, np.where(slots_T[row_Y] == 0, -1, slot_Y))
        first_X, keys_X = wide.first_E[entry_X], (wide.last_E - wide.first_E)[entry_X]
        begin_X, end_X = _part(first_X, keys_X, part_X, parts_X)
        starts_X, slice_X, hidden_X = np.cumsum(count_X) - count_X, wide.slice_E[entry_X], wide.hidden_E[entry_X]
        entries = _table(starts_X, count_X, slice_X, begin_X, end_X, hidden_X, 0, 0)
        self._wide = entries[_order(end_X - begin_X, self._layout.wide_programs, self._layout)]
        merged = np.flatnonzero((used_T > 0) & (slots_T > 0))
        self._merge = _table(merged, base_T[merged], slots_T[merged], 0)
        self._narrow = self._narrow_entries(contexts, firsts, divisions, slots_T, base_T, used_T)

    def _slots_before(self, wide: _Wide, wide_divisions: Int64s) -> tuple[Int64s, Int64s]:
        """For each member how many slots of its row belong to entries before its own; for each row, to all of them. A
        single row's own keys come after its segments."""
        used_T = np.zeros(len(self._batch.tokens_T), np.int64)
        before_M = np.zeros(len(wide.rows_M), np.int64)
        prompts = int(wide.hidden_E.sum())
        of_prompts = int(wide.counts_E[:prompts].sum())
        used_T[wide.rows_M[:of_prompts]] = np.repeat(wide_divisions[:prompts], wide.counts_E[:prompts])
        table = (wide.starts_E[prompts:], wide.counts_E[prompts:], wide_divisions[prompts:])
        for start, count, divisions in np.stack(table, 1).tolist():
            rows = wide.rows_M[start : start + count]
            before_M[start : start + count] = used_T[rows]
            used_T[rows] += divisions
        return before_M, used_T

    def _narrow_entries(
        self, contexts: Int64s, firsts: Int64s, divisions: Int64s, slots_T: Int64s, base_T: Int64s, used_T: Int64s
    ) -> Int32s:
        owner_E = np.repeat(np.arange(len(self._singles)), divisions)
        part_E = np.arange(len(owner_E)) - np.repeat(np.cumsum(divisions) - divisions, divisions)
        row_E = self._batch.query_starts_S1[self._singles][owner_E]
        keys_E, parts_E = (contexts - firsts)[owner_E], divisions[owner_E]
        begin_E, end_E = _part(firsts[owner_E], keys_E, part_E, parts_E)
        base_E, slots_E, used_E = base_T[row_E], slots_T[row_E], used_T[row_E]
        slot_E = np.where(slots_E == 0, -1, base_E + used_E + part_E)
        alone_E = np.where(used_E == 0, slots_E, 0)
        entries = _table(row_E, self._singles[owner_E], begin_E, end_E, slot_E, base_E, slots_E, alone_E)
        return entries[_order(end_E - begin_E, self._narrow_programs, self._layout)]

    def words(self, at: int) -> Int32s:
        """All entries as int32 words that begin at word `at`."""
        wide_at = at + HEAD_WORDS + self._narrow.size
        members_at = wide_at + self._wide.size
        merge_at = members_at + self._members.size
        self._wide[:, 0] *= 2
        self._wide[:, 0] += members_at
        head = (len(self._narrow), len(self._wide), len(self._merge), at + HEAD_WORDS, wide_at, merge_at, 0, 0)
        tables = (self._narrow, self._wide, self._members, self._merge)
        return np.concatenate([np.array(head, np.int32), *(table.ravel() for table in tables)])


def _table(first: NDArray[np.integer], *others: NDArray[np.integer] | int) -> Int32s:
    """Entries by their columns."""
    table = np.empty((len(first), 1 + len(others)), np.int32)
    for index, column in enumerate((first, *others)):
        table[:, index] = column
    return table


def _part(first_E: Int64s, keys_E: Int64s, part_E: Int64s, parts_E: Int64s) -> tuple[Int64s, Int64s]:
    """First and last key of one of the parts that each entry's keys are divided into."""
    begin_E, end_E = keys_E * part_E // parts_E, keys_E * (part_E + 1) // parts_E
    end_E = np.where(part_E + 1 == parts_E, keys_E, end_E - end_E % _KEYS_UNIT)
    return first_E + begin_E - begin_E % _KEYS_UNIT, first_E + end_E


def _divisions(keys_E: Int64s, span: int) -> Int64s:
    return np.maximum(1, (keys_E + span // 2) // span)


def _span(keys_E: Int64s, programs: int, min_span: int, waves_tried: Items[int]) -> int:
    """About how many keys an entry is to have, so that the busiest program has as little work as it can; `programs`
    for each KV head. Even lengths are best not divided more than they must be, uneven ones more finely."""
    if not len(keys_E):
        return min_span
    programs = max(1, programs)
    if keys_E.max() <= _EVEN * keys_E.min():
        waves_tried = waves_tried[:1]
    best, best_load = 0, float("inf")
    for waves in waves_tried:
        span = max(min_span, -(-int(keys_E.sum()) // (programs * waves)))
        parts_E = _divisions(keys_E, span)
        loads = np.repeat(keys_E / parts_E + _ENTRY_KEYS, parts_E)
        load = _heaviest(-np.sort(-loads), programs)
        if load < best_load * _WORTH:
            best, best_load = span, load
    return best


def _heaviest(loads_E: NDArray[np.float64], programs: int) -> float:
    """The work of the busiest program, for entries in descending order as `_order` deals them out."""
    load_P = np.zeros(programs)
    for wave, first in enumerate(range(0, len(loads_E), programs)):
        dealt = loads_E[first : first + programs]
        load_P[: len(dealt)] += dealt if wave % 2 else dealt[::-1]
    return float(load_P.max())


def _order(keys_E: Int64s, programs: int, layout: AttentionLayout) -> Int64s:
    """Programs take entries in turn: the longest first, then those that are left so that the sums are even."""
    wave = max(1, programs // layout.kv_heads)
    descending = np.argsort(-keys_E, kind="stable")
    for first in range(0, len(descending), 2 * wave):
        descending[first : first + wave] = descending[first : first + wave][::-1]
    return descending


def _ranges(starts: Int64s, counts: Int64s) -> Int64s:
    """start … start + count − 1 of each, one after the other."""
    flat: Int64s = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    return flat
