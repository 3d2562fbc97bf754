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

from engine.batch import SPARE_WORD, Batch, Int32s

WINDOWS_MOST: Final = 8  # header words that are left for them
ENTRY_WORDS: Final = 8
HEAD_WORDS: Final = 8
_NARROW_KEYS_LEAST: Final = 64  # fewer are not worth a division
_WIDE_KEYS_LEAST: Final = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """What the work is cut for.

    windows         the distinct windows of the model's layers, None for none; segments serve None alone.
    kv_heads        each entry is computed for each of them.
    wide_rows       rows of a step that a wide entry stacks at most.
    *_programs      that the kernels run with.
    slots           partial results that there is memory for.
    """

    windows: tuple[int | None, ...]
    kv_heads: int
    wide_rows: int
    narrow_programs: int
    wide_programs: int
    slots: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """`words` go behind the packed array, whose spare header words are set already. `wide`: whether any entry is."""

    words: Int32s
    wide: bool


def build(packed: Int32s, batch: Batch, layout: Layout) -> Tiles:
    """The tiles of a packed step; writes its spare header words. Costs about 0.1 ms, and 1 µs per entry."""
    assert len(layout.windows) <= WINDOWS_MOST
    parts: list[Int32s] = []
    at, wide = len(packed), False
    for index, window in enumerate(layout.windows):
        work = _Work(batch, window, layout)
        words = work.words(at)
        packed[SPARE_WORD + index] = at
        at += len(words)
        wide = wide or work.wide
        parts.append(words)
    return Tiles(np.concatenate(parts), wide)


class _Work:
    """The entries for one window."""

    def __init__(self, batch: Batch, window: int | None, layout: Layout) -> None:
        self._batch = batch
        self._window = window
        self._layout = layout
        lengths_S = np.diff(batch.query_starts_S1)
        single_S = lengths_S == 1
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
        elif len(self._segments):
            firsts = batch.own_starts_S[self._singles].astype(np.int64)
        wide = self._wide_entries()
        wide_keys = sum(int((last - first) * len(rows)) for rows, _, first, last, _ in wide)
        wide_keys //= max(1, layout.wide_rows)
        narrow_span = _span((contexts - firsts).sum(), layout.kv_heads, layout.narrow_programs, _NARROW_KEYS_LEAST)
        wide_span = _span(wide_keys, layout.kv_heads, layout.wide_programs, _WIDE_KEYS_LEAST)
        while True:
            divisions = np.maximum(1, (contexts - firsts + narrow_span // 2) // narrow_span)
            wide_divisions = [max(1, (last - first + wide_span // 2) // wide_span) for _, _, first, last, _ in wide]
            slots_T = self._slots_of(divisions, wide, wide_divisions)
            if slots_T.sum() <= layout.slots:
                break
            narrow_span, wide_span = 2 * narrow_span, 2 * wide_span
            assert narrow_span < 1 << 40, f"{layout.slots} slots do not hold one for each member of each segment"
        self._lay(contexts, firsts, divisions, wide, wide_divisions, slots_T)

    def _wide_entries(self) -> list[tuple[Int32s, int, int, int, bool]]:
        """(rows, slice, first key, last key, whether positions hide keys), not divided yet."""
        batch, most, found = self._batch, self._layout.wide_rows, []
        for index in self._prompts.tolist():
            start, end = batch.query_starts_S1[index : index + 2].tolist()
            for low in range(start, end, most):
                high = min(low + most, end)
                position = int(batch.positions_T[low])
                first = 0 if self._window is None else max(0, position + 1 - self._window)
                rows = np.arange(low, high, dtype=np.int32)
                found.append((rows, index, first, int(batch.positions_T[high - 1]) + 1, True))
        begin = 0
        for index, first, last, end in self._segments.tolist():
            rows = batch.query_starts_S1[batch.members_M[begin:end]]
            found += [(rows[low : low + most], index, first, last, False) for low in range(0, len(rows), most)]
            begin = end
        return found

    def _slots_of(
        self, divisions: NDArray[np.int64], wide: list[tuple[Int32s, int, int, int, bool]], wide_divisions: list[int]
    ) -> NDArray[np.int64]:
        """How many partial results each row has; 0 for an only one, which is the result."""
        count_T = np.zeros(len(self._batch.tokens_T), np.int64)
        count_T[self._batch.query_starts_S1[self._singles]] = divisions
        for (rows, *_), parts in zip(wide, wide_divisions, strict=True):
            count_T[rows] += parts
        count_T[count_T == 1] = 0
        return count_T

    def _lay(
        self, contexts: NDArray[np.int64], firsts: NDArray[np.int64], divisions: NDArray[np.int64],
        wide: list[tuple[Int32s, int, int, int, bool]], wide_divisions: list[int], slots_T: NDArray[np.int64],
    ) -> None:  # fmt: skip
        base_T = np.cumsum(slots_T) - slots_T
        used_T = np.zeros_like(slots_T)  # by wide entries; a single row's own keys come after its segments
        members, entries, at = [], [], 0
        for (rows, index, first, last, hidden), parts in zip(wide, wide_divisions, strict=True):
            direct = slots_T[rows] == 0
            for low, high in _divide(first, last, parts):
                slots = np.where(direct, -1, base_T[rows] + used_T[rows])
                used_T[rows] += 1
                members.append(np.stack((rows, slots), 1))
                entries.append((at, len(rows), index, low, high, int(hidden), 0, 0))
                at += len(rows)
        # The longest first: what is left for the end should be short.
        entries.sort(key=lambda entry: entry[3] - entry[4])
        self._wide = np.array(entries, np.int32).reshape(-1, ENTRY_WORDS)
        self._members = np.concatenate(members).astype(np.int32) if members else np.empty((0, 2), np.int32)
        merged = np.flatnonzero(used_T * (slots_T > 0))
        self._merge = np.zeros((len(merged), 4), np.int32)
        self._merge[:, 0], self._merge[:, 1], self._merge[:, 2] = merged, base_T[merged], slots_T[merged]
        self._narrow = self._narrow_entries(contexts, firsts, divisions, slots_T, base_T, used_T)

    def _narrow_entries(
        self, contexts: NDArray[np.int64], firsts: NDArray[np.int64], divisions: NDArray[np.int64],
        slots_T: NDArray[np.int64], base_T: NDArray[np.int64], used_T: NDArray[np.int64],
    ) -> Int32s:  # fmt: skip
        owner_E = np.repeat(np.arange(len(self._singles)), divisions)
        part_E = np.arange(len(owner_E)) - np.repeat(np.cumsum(divisions) - divisions, divisions)
        row_E = self._batch.query_starts_S1[self._singles][owner_E]
        keys_E, parts_E = (contexts - firsts)[owner_E], divisions[owner_E]
        entries = np.zeros((len(owner_E), ENTRY_WORDS), np.int32)
        entries[:, 0] = row_E
        entries[:, 1] = self._singles[owner_E]
        entries[:, 2] = firsts[owner_E] + keys_E * part_E // parts_E
        entries[:, 3] = firsts[owner_E] + keys_E * (part_E + 1) // parts_E
        entries[:, 4] = np.where(slots_T[row_E] == 0, -1, base_T[row_E] + used_T[row_E] + part_E)
        entries[:, 5] = base_T[row_E]
        entries[:, 6] = slots_T[row_E]
        entries[:, 7] = np.where(used_T[row_E] == 0, slots_T[row_E], 0)
        return entries[np.argsort(entries[:, 2] - entries[:, 3], kind="stable")]

    def words(self, at: int) -> Int32s:
        """Everything, to lie from word `at` on."""
        wide_at = at + HEAD_WORDS + self._narrow.size
        members_at = wide_at + self._wide.size
        merge_at = members_at + self._members.size
        self._wide[:, 0] *= 2
        self._wide[:, 0] += members_at
        head = (len(self._narrow), len(self._wide), len(self._merge), at + HEAD_WORDS, wide_at, merge_at, 0, 0)
        parts: Items[Int32s] = (
            np.array(head, np.int32), self._narrow.ravel(), self._wide.ravel(), self._members.ravel(),
            self._merge.ravel(),
        )  # fmt: skip
        return np.concatenate(parts)


def _span(keys: int, kv_heads: int, programs: int, least: int) -> int:
    """About how many keys an entry has, so that each program has one of them or not much more work than another."""
    return max(least, -(-int(keys) * kv_heads // programs))


def _divide(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    return [
        (first + (last - first) * part // parts, first + (last - first) * (part + 1) // parts) for part in range(parts)
    ]
