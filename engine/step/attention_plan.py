"""Which rows of a packed step read which keys together: the attention kernels' work, as int32 words behind the step.

A single row (a decode) is a narrow entry; the rows of a prompt and the members of a segment are stacked to wide ones.
Where there are too few entries to keep the device at work, their keys are divided. Every division of a row's keys but
an only one is a partial result with a slot of its own; a row's slots are consecutive and merged in that order. What a
segment has of keys that not all of its members see, those who do read apart.

    header word PLAN of a group    first word of its tiles
    narrow count | wide count | merge count | narrow start | wide start | merge start | 0 | 0
    narrow Nx8   row, table, first key, last key, slot or −1, first slot, slots, slots that narrow entries fill or 0
    wide Wx8     start of its members, members, table, first key, last key, whether keys are hidden by position, 0, 0
    members Mx2  row, slot or −1
    merge Rx4    row, first slot, slots, 0

A table is the word that names its sequence's first block, or would if the table did not begin later.

It knows no torch and nothing of why there are segments.

S slices, E entries.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.step.key_span import FULL, KeySpan
from engine.step.layout import GroupWord, Int32s, Segment, StepBatch, group_word

Int64s = NDArray[np.int64]
ENTRY_WORDS: Final = 8
HEAD_WORDS: Final = 8
_NARROW_KEYS_MIN: Final = 64  # fewer are not worth a division
_WIDE_KEYS_MIN: Final = 256
KEYS_UNIT: Final = 16  # entries begin at its multiples, since keys are fetched by so many
_WAVES: Final = (1, 2, 3, 5)  # narrow entries per program that are tried; wide ones cost too much to merge
_EVEN: Final = 1.1
_ENTRY_KEYS: Final = 96  # keys that could be read in the time that an entry takes beside its own
_WORTH: Final = 0.97  # finer divisions have to be merged: they must do so much better


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """What the work is cut for.

    spans           of each group's layers. An entry's keys lie in one chunk, which hides no others: of a window
                    kernels hide what is before it from each row.
    kv_heads        each entry is computed for each of them.
    wide_rows       rows of a step that a wide entry stacks at most.
    *_programs      that the kernels run with; few_programs the narrow one where a step has few_rows or fewer.
    slots           partial results that there is memory for.
    """

    spans: tuple[KeySpan, ...]
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
    """`words` go behind the packed array, whose header says where already. `wide`: whether any entry is."""

    words: Int32s
    wide: bool


def plan_attention(packed: Int32s, batch: StepBatch, layout: AttentionLayout) -> AttentionPlan:
    """Plans the attention of a packed step, and writes into its header where each group's plan begins. Costs about
    0.1 ms for a group, and 1 µs for an entry."""
    assert len(layout.spans) == len(batch.tables_GSW), "tables for another number of groups"
    assert all((span.chunk or 0) % KEYS_UNIT == 0 for span in layout.spans), "a chunk that no entry begins with"
    parts: list[Int32s] = []
    at, wide = len(packed), False
    for group in range(len(layout.spans)):
        work = _Work(batch, group, layout, int(packed[group_word(group, GroupWord.TABLES)]))
        packed[group_word(group, GroupWord.PLAN)] = at
        parts.append(work.words(at))
        at += len(parts[-1])
        wide = wide or work.wide
    return AttentionPlan(np.concatenate(parts), wide)


@dataclass(frozen=True, slots=True)
class _Narrow:
    """Narrow entries before they are divided, in the order of the single rows: the owner_N-th reads these keys."""

    owner_N: Int64s
    first_N: Int64s
    last_N: Int64s

    @property
    def keys_N(self) -> Int64s:
        return self.last_N - self.first_N


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
    """The entries of one group, whose tables begin at word `tables_at`."""

    def __init__(self, batch: StepBatch, group: int, layout: AttentionLayout, tables_at: int) -> None:
        self._batch = batch
        self._span = layout.spans[group]
        self._layout = layout
        slices, width = batch.tables_GSW[group].shape
        self._tables_S = tables_at + width * np.arange(slices) - batch.table_starts_GS[group]
        self._narrow_programs = layout.programs_of(len(batch.tokens_T))
        single_S = np.diff(batch.query_starts_S1) == 1
        self._singles = np.flatnonzero(single_S)
        self._prompts = np.flatnonzero(~single_S)
        self._segments, self._narrow_keys = self._shared_and_own(group)
        self.wide = bool(len(self._prompts) or len(self._segments))
        self._cut()

    def _cut(self) -> None:
        """Divides keys, the more the fewer entries there are; less where the slots would not do."""
        layout, narrow, wide = self._layout, self._narrow_keys, self._wide_entries()
        keys, wide_keys = narrow.keys_N, wide.last_E - wide.first_E
        narrow_span = _span(keys, self._narrow_programs // layout.kv_heads, _NARROW_KEYS_MIN, _WAVES)
        wide_span = _span(wide_keys, layout.wide_programs // layout.kv_heads, _WIDE_KEYS_MIN, _WAVES[:1])
        while True:
            divisions, wide_divisions = _divisions(keys, narrow_span), _divisions(wide_keys, wide_span)
            slots_T = self._slots_of(divisions, wide, wide_divisions)
            if slots_T.sum() <= layout.slots:
                break
            narrow_span, wide_span = 2 * narrow_span, 2 * wide_span
            assert narrow_span < 1 << 40, f"{layout.slots} slots do not hold one for each member of each segment"
        self._lay(narrow, divisions, wide, wide_divisions, slots_T)

    def _shared_and_own(self, group: int) -> tuple[list[Segment], _Narrow]:
        """The segments as they serve the group, and what is left to each single row:

        0 … seen          hidden by its span
        seen … shared     its own, since a segment's keys that not all of its members see are read by each of them
        shared … own      in segments
        own … context     its own
        """
        batch, segments = self._batch, self._batch.segments(group)
        contexts_S = batch.contexts_S.astype(np.int64)
        seen_S = self._span.firsts(contexts_S - 1)
        last_I, seen_I, everybody = contexts_S[self._singles], seen_S[self._singles], np.arange(len(self._singles))
        seen_I -= seen_I % KEYS_UNIT
        if not segments:
            return segments, _Narrow(everybody, seen_I, last_I)
        own_S = batch.own_starts_GS[group].astype(np.int64)
        shared_S = np.zeros_like(own_S)
        if self._span != FULL:
            segments, shared_S = _clipped(segments, seen_S, own_S)
        own_I, shared_I = own_S[self._singles], shared_S[self._singles]
        split_I = np.flatnonzero((seen_I < shared_I) & (shared_I < own_I))
        owner_N = np.concatenate((everybody, split_I))
        first_N = np.concatenate((np.where(shared_I < own_I, own_I, seen_I), seen_I[split_I]))
        last_N = np.concatenate((last_I, shared_I[split_I]))
        order = np.argsort(owner_N, kind="stable")
        return segments, _Narrow(owner_N[order], first_N[order], last_N[order])

    def _wide_entries(self) -> _Wide:
        batch, wide_rows = self._batch, self._layout.wide_rows
        starts, ends, slices = self._prompt_runs()
        owner_E = np.repeat(np.arange(len(starts)), -(-(ends - starts) // wide_rows))
        nth_E = np.arange(len(owner_E)) - np.searchsorted(owner_E, owner_E)
        low_E = starts[owner_E] + nth_E * wide_rows
        count_E = np.minimum(wide_rows, ends[owner_E] - low_E)
        first_E = self._span.firsts(batch.positions_T[low_E])
        first_E -= first_E % KEYS_UNIT
        last_E = batch.positions_T[low_E + count_E - 1].astype(np.int64) + 1
        rows = [_ranges(low_E, count_E)]
        table = [np.stack((count_E, slices[owner_E], first_E, last_E, np.ones_like(low_E)), 1)]
        for index, first, last, members_M in self._segments:
            rows.append(batch.query_starts_S1[members_M].astype(np.int64))
            counts = [min(wide_rows, len(members_M) - low) for low in range(0, len(members_M), wide_rows)]
            table.append(np.array([(count, index, first, last, 0) for count in counts], np.int64))
        return _Wide(np.concatenate(rows), *np.concatenate(table).T)

    def _prompt_runs(self) -> tuple[Int64s, Int64s, Int64s]:
        """First and last row, and slice, of each run of a prompt's rows that may share an entry: those of one chunk."""
        batch, chunk = self._batch, self._span.chunk
        starts = batch.query_starts_S1[self._prompts].astype(np.int64)
        ends = batch.query_starts_S1[self._prompts + 1].astype(np.int64)
        if chunk is None:
            return starts, ends, self._prompts
        edges = starts - batch.positions_T[starts] % chunk  # where the chunk of the first row begins
        counts = -(-(ends - edges) // chunk)
        owner_R = np.repeat(np.arange(len(starts)), counts)
        edge_R = edges[owner_R] + chunk * _ranges(np.zeros_like(counts), counts)
        low_R, high_R = np.maximum(edge_R, starts[owner_R]), np.minimum(edge_R + chunk, ends[owner_R])
        return low_R, high_R, self._prompts[owner_R]

    def _slots_of(self, divisions: Int64s, wide: _Wide, wide_divisions: Int64s) -> Int64s:
        """How many partial results each row has; 0 for an only one, which is the result."""
        count_T = np.zeros(len(self._batch.tokens_T), np.int64)
        rows_I = self._batch.query_starts_S1[self._singles]
        count_T[rows_I] = np.bincount(self._narrow_keys.owner_N, divisions, len(rows_I))
        np.add.at(count_T, wide.rows_M, np.repeat(wide_divisions, wide.counts_E))
        count_T[count_T == 1] = 0
        return count_T

    def _lay(self, narrow: _Narrow, divisions: Int64s, wide: _Wide, wide_divisions: Int64s, slots_T: Int64s) -> None:
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
        starts_X, hidden_X = np.cumsum(count_X) - count_X, wide.hidden_E[entry_X]
        table_X = self._tables_S[wide.slice_E[entry_X]]
        entries = _table(starts_X, count_X, table_X, begin_X, end_X, hidden_X, 0, 0)
        self._wide = entries[_order(end_X - begin_X, self._layout.wide_programs, self._layout)]
        merged = np.flatnonzero((used_T > 0) & (slots_T > 0))
        self._merge = _table(merged, base_T[merged], slots_T[merged], 0)
        self._narrow = self._narrow_entries(narrow, divisions, slots_T, base_T, used_T)

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
        self, narrow: _Narrow, divisions: Int64s, slots_T: Int64s, base_T: Int64s, used_T: Int64s
    ) -> Int32s:
        nth_E = np.repeat(np.arange(len(divisions)), divisions)
        part_E = np.arange(len(nth_E)) - np.repeat(np.cumsum(divisions) - divisions, divisions)
        owner_E = narrow.owner_N[nth_E]
        slice_E = self._singles[owner_E]
        row_E = self._batch.query_starts_S1[slice_E]
        begin_E, end_E = _part(narrow.first_N[nth_E], narrow.keys_N[nth_E], part_E, divisions[nth_E])
        base_E, slots_E, used_E = base_T[row_E], slots_T[row_E], used_T[row_E]
        before_E = np.arange(len(owner_E)) - np.searchsorted(owner_E, owner_E)  # of the row's
        slot_E = np.where(slots_E == 0, -1, base_E + used_E + before_E)
        alone_E = np.where(used_E == 0, slots_E, 0)
        entries = _table(row_E, self._tables_S[slice_E], begin_E, end_E, slot_E, base_E, slots_E, alone_E)
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


def _clipped(segments: list[Segment], seen_S: Int64s, own_S: Int64s) -> tuple[list[Segment], Int64s]:
    """The segments cut to what all whom they serve see, for those members for whom most is saved; and the key from
    which on each slice's keys are in segments, its own start where none are."""
    clipped, shared_S = [], own_S.copy()
    for _, first, last, members_M in sorted(segments, key=lambda segment: segment[2], reverse=True):
        members_M = members_M[shared_S[members_M] == last]  # those of whose keys behind it none are left to be read
        if len(members_M) < 2:
            continue
        members_M = members_M[np.argsort(seen_S[members_M], kind="stable")]
        first_M = np.maximum(first, -(-seen_S[members_M] // KEYS_UNIT) * KEYS_UNIT)
        others_M = np.arange(len(members_M))  # who read along with the one who sees most
        saved_M = others_M * (last - first_M) - 2 * (others_M + 1) * _ENTRY_KEYS
        count = 1 + int(saved_M.argmax())
        if saved_M[count - 1] > 0:
            members_M, begin = np.sort(members_M[:count]), int(first_M[count - 1])
            shared_S[members_M] = begin
            clipped.append((int(members_M[0]), begin, last, members_M))
    return clipped[::-1], shared_S


def _table(first: NDArray[np.integer], *others: NDArray[np.integer] | int) -> Int32s:
    """Entries by their columns."""
    table = np.empty((len(first), 1 + len(others)), np.int32)
    for index, column in enumerate((first, *others)):
        table[:, index] = column
    return table


def _part(first_E: Int64s, keys_E: Int64s, part_E: Int64s, parts_E: Int64s) -> tuple[Int64s, Int64s]:
    """First and last key of one of the parts that each entry's keys are divided into."""
    begin_E, end_E = keys_E * part_E // parts_E, keys_E * (part_E + 1) // parts_E
    end_E = np.where(part_E + 1 == parts_E, keys_E, end_E - end_E % KEYS_UNIT)
    return first_E + begin_E - begin_E % KEYS_UNIT, first_E + end_E


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
