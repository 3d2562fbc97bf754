"""Tiles read back word by word: every row reads each key that it may see exactly once, and merges what it must.

The kernels' results for the same kinds of steps are tested in kernels/test_attention.py.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec.structs import replace

from engine.protocol.types import SamplingParams
from engine.step import attention_plan
from engine.step.attention_plan import ENTRY_WORDS, HEAD_WORDS, AttentionLayout
from engine.step.key_span import FULL, KeySpan
from engine.step.layout import (
    GroupWord,
    Int32s,
    PrefixSegment,
    SequenceSlice,
    StepBatch,
    group_word,
    pack_step,
    unpack_step,
)

BLOCK_TOKENS = 16


@dataclass
class Read:
    """What the words behind a step say for one span; kernels hide keys of windows alone. Keys are counted, by
    how often a row reads each."""

    keys: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    slots: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    direct: Counter[int] = field(default_factory=Counter)  # entries that write a row's result themselves
    merges: dict[int, tuple[int, int]] = field(default_factory=dict)  # first slot, slots
    arrivals: dict[int, set[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(set))

    def take(self, row: int, slot: int, keys: range) -> None:
        self.keys[row].update(keys)
        if slot < 0:
            self.direct[row] += 1
        else:
            self.slots[row].append(slot)


def read(step: Int32s, batch: StepBatch, layout: AttentionLayout, span: KeySpan) -> Read:
    group = layout.spans.index(span)
    at = int(step[group_word(group, GroupWord.PLAN)])
    narrow, wide, merge, narrow_at, wide_at, merge_at = step[at : at + 6].tolist()
    assert narrow_at == at + HEAD_WORDS  # the kernel does not look it up
    found = Read()
    for words in step[narrow_at:][: narrow * ENTRY_WORDS].reshape(-1, ENTRY_WORDS).tolist():
        row, table, first, last, slot, *rest = words
        check_blocks(step, batch, group, row, table, first, last)
        assert first < last
        assert first % BLOCK_TOKENS == 0
        position = int(batch.positions_T[row])
        found.take(row, slot, range(first if span.window is None else max(first, span.first(position)), last))
        found.arrivals[row].add(tuple(rest))
    for words in step[wide_at:][: wide * ENTRY_WORDS].reshape(-1, ENTRY_WORDS).tolist():
        start, count, table, first, last, hidden, *_ = words
        assert 0 < count <= layout.wide_rows
        assert first < last
        assert first % BLOCK_TOKENS == 0
        for row, slot in step[start:][: 2 * count].reshape(-1, 2).tolist():
            position = int(batch.positions_T[row])
            check_blocks(step, batch, group, row, table, first, last)
            low = max(first, span.first(position)) if hidden and span.window is not None else first
            found.take(row, slot, range(low, min(last, position + 1) if hidden else last))
    for row, first, count, _ in step[merge_at:][: merge * 4].reshape(-1, 4).tolist():
        assert row not in found.merges
        found.merges[row] = first, count
    return found


def check_blocks(step: Int32s, batch: StepBatch, group: int, row: int, table: int, first: int, last: int) -> None:
    """The words from `table` on name the blocks of the row's slice, wherever its own table begins."""
    index = int(np.searchsorted(batch.query_starts_S1, row, "right")) - 1
    begin = int(batch.table_starts_GS[group, index])
    blocks = slice(first // BLOCK_TOKENS, -(-last // BLOCK_TOKENS))
    assert blocks.start >= begin
    own = batch.tables_GSW[group][index, blocks.start - begin : blocks.stop - begin]
    assert step[table + blocks.start : table + blocks.stop].tolist() == own.tolist()


def check(
    chunks: list[int], starts: list[int], segments: list[PrefixSegment] | None = None, *,
    spans: tuple[KeySpan, ...] = (FULL,), wide_rows: int = 16, programs: int = 12, slots: int = 4096,
) -> list[Read]:  # fmt: skip
    counts = [-(-(start + chunk) // BLOCK_TOKENS) for start, chunk in zip(starts, chunks, strict=True)]
    firsts = np.cumsum(counts) - counts
    tables = [np.arange(first, first + count, dtype=np.int32) for first, count in zip(firsts, counts, strict=True)]
    for segment in segments or []:
        span = slice(segment.first // BLOCK_TOKENS, segment.last // BLOCK_TOKENS)
        for member in segment.members:
            tables[member][span] = tables[segment.members[0]][span]
    shown = [[span.first(start) // BLOCK_TOKENS for span in spans] for start in starts]
    slices = [
        SequenceSlice([1] * chunk, start, [table[first:] for first in firsts], SamplingParams(), table_starts=firsts)
        for chunk, start, table, firsts in zip(chunks, starts, tables, shown, strict=True)
    ]
    everywhere = [replace(segment, group=group) for segment in segments or [] for group in range(len(spans))]
    packed = pack_step(slices, BLOCK_TOKENS, everywhere)
    batch = unpack_step(packed)
    layout = AttentionLayout(spans, 2, wide_rows, 2 * programs, 2 * programs, slots)
    before = packed.copy()
    work = attention_plan.plan_attention(packed, batch, layout)
    written = {group_word(group, GroupWord.PLAN) for group in range(len(spans))}
    assert set(np.flatnonzero(packed != before).tolist()) == written
    assert work.words.dtype == np.int32
    assert work.wide or not (any(chunk > 1 for chunk in chunks) or (segments and FULL in spans))

    step = np.concatenate((packed, work.words))
    reads = [read(step, batch, layout, span) for span in spans]
    for span, found in zip(spans, reads, strict=True):
        check_keys(found, batch, span)
        check_slots(found, batch, slots)
    return reads


def check_keys(found: Read, batch: StepBatch, span: KeySpan) -> None:
    for row, position in enumerate(batch.positions_T.tolist()):
        first = span.first(position)
        assert found.keys[row] == Counter(range(first, position + 1)), row


def check_slots(found: Read, batch: StepBatch, slots: int) -> None:
    """A row has one direct entry, or consecutive slots of its own that exactly one merge takes."""
    taken = [slot for own in found.slots.values() for slot in own]
    assert len(taken) == len(set(taken))
    assert not taken or max(taken) < slots
    for row in range(len(batch.tokens_T)):
        own = sorted(found.slots[row])
        assert found.direct[row] == (0 if own else 1)
        assert own == list(range(own[0], own[0] + len(own))) if own else row not in found.merges
        if not own:
            continue
        whole = own[0], len(own)
        by_narrow = {(first, count) for first, count, arrivals in found.arrivals[row] if arrivals}
        by_arrival = {arrivals for _, _, arrivals in found.arrivals[row]}
        if row in found.merges:
            assert found.merges[row] == whole
            assert by_arrival <= {0}
        else:
            assert by_narrow == {whole}
            assert by_arrival == {len(own)}  # each of a row's entries waits for the same number


SEGMENTS = [PrefixSegment([0, 1, 2, 4], 0, 64), PrefixSegment([1, 4], 64, 96), PrefixSegment([3, 5], 0, 32)]
STARTS = [70, 100, 64, 40, 130, 33]


def test_one_key() -> None:
    (found,) = check([1], [0])
    assert found.direct[0] == 1


def test_a_long_row_is_divided_and_merged_by_the_last_to_arrive() -> None:
    (found,) = check([1], [4000])
    assert len(found.slots[0]) > 1
    assert not found.merges


def test_many_equal_rows_are_not_divided() -> None:
    (found,) = check([1] * 48, [575] * 48)
    assert not found.slots or not any(found.slots.values())


def test_prompts_and_single_rows() -> None:
    check([1, 33, 1, 90, 2], [50, 0, 7, 130, 3])


def test_members_of_segments_merge_them_with_their_own_keys() -> None:
    (found,) = check([1] * 6, STARTS, SEGMENTS)
    assert set(found.merges) == set(range(6))


def test_segments_beside_a_prompt_with_and_without_a_window() -> None:
    windowed, whole = check([1] * 6 + [30], [*STARTS, 50], SEGMENTS, spans=(KeySpan(window=24), FULL))
    assert set(whole.merges) == set(range(6))
    assert not set(windowed.merges) & set(range(6))


@pytest.mark.parametrize("window", [1, 16, 37, 5000])
def test_a_window_hides_keys_before_it(window: int) -> None:
    check([1, 40, 1], [200, 100, 20], spans=(KeySpan(window=window),))


@pytest.mark.parametrize("chunk", [16, 48, 64, 8192])
def test_entries_end_where_a_chunk_does(chunk: int) -> None:
    rows = min(3 * chunk, 640)
    starts = [0, chunk - 1, chunk, max(5, 2 * chunk - rows // 2), 2 * chunk - 20]
    check([1, 1, 1, rows, 40], starts, spans=(KeySpan(chunk=chunk),))


def test_a_chunk_that_no_entry_begins_with_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no entry begins"):
        check([1], [30], spans=(KeySpan(chunk=24),))


def test_few_slots_mean_fewer_divisions() -> None:
    members = [1] * 6
    (free,) = check([*members, 60], [*STARTS, 500], SEGMENTS, programs=40)
    (bound,) = check([*members, 60], [*STARTS, 500], SEGMENTS, programs=40, slots=16)
    assert sum(map(len, bound.slots.values())) <= 16
    assert sum(map(len, free.slots.values())) > 16


def test_too_few_slots_for_the_members_of_segments_are_an_error() -> None:
    with pytest.raises(AssertionError, match="slots do not hold"):
        check([1] * 6, STARTS, SEGMENTS, slots=8)


def test_the_default_limits_hold_the_most_segments_of_the_most_sequences() -> None:
    segments = [PrefixSegment(list(range(512)), 16 * depth, 16 * depth + 16) for depth in range(4)]
    check([1] * 512, [70] * 512, segments, wide_rows=32, programs=66)


@pytest.mark.parametrize("seed", range(20))
def test_random_mixtures(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 20))
    chunks = [1 if rng.random() < 0.7 else int(rng.integers(2, 60)) for _ in range(count)]
    starts = rng.integers(0, 900, count).tolist()
    singles = [index for index in range(count) if chunks[index] == 1 and starts[index] >= 64]
    segments = [PrefixSegment(singles, 0, 48), PrefixSegment(singles[1:], 48, 64)] if len(singles) > 2 else []
    check(
        chunks, starts, segments,
        spans=(FULL, KeySpan(window=int(rng.integers(1, 300))), KeySpan(chunk=16 * int(rng.integers(1, 20)))),
        wide_rows=int(rng.integers(1, 40)), programs=int(rng.integers(1, 80)),
    )  # fmt: skip


NESTED = [PrefixSegment(list(range(8)), 0, 1024), PrefixSegment([1, 2, 3, 5], 1024, 1536)]


@pytest.mark.parametrize("span", [KeySpan(window=900), KeySpan(window=901), KeySpan(chunk=1024), KeySpan(chunk=2048)])
def test_members_read_together_what_all_of_them_see_of_a_segment_and_the_rest_alone(span: KeySpan) -> None:
    starts = [1030, 1600, 1610, 1640, 1100, 1580, 1041, 1500]
    (found,) = check([1] * 8, starts, NESTED, spans=(span,), wide_rows=8)
    together = {row for row in range(8) if row in found.merges}
    assert {1, 2, 3, 5} <= together
    assert (together == {1, 2, 3, 5}) == (span.chunk == 1024)  # nobody sees the first segment from the next chunk


def test_who_sees_little_of_a_segment_keeps_nobody_from_reading_it_together() -> None:
    segments = [PrefixSegment(list(range(8)), 0, 2048)]
    (found,) = check([1] * 8, [2100, 2110, 2120, 2130, 2140, 2150, 2160, 3040], segments, spans=(KeySpan(window=1000),))
    assert set(found.merges) == set(range(7))


def test_a_segment_that_saves_less_than_it_costs_is_read_apart() -> None:
    segments = [PrefixSegment([0, 1, 2], 0, 2048)]
    (found,) = check([1] * 3, [2100, 2101, 2102], segments, spans=(KeySpan(window=120),))
    assert not found.merges


@pytest.mark.parametrize("seed", range(30))
def test_random_segments_in_windows_and_chunks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(4, 12))
    starts = rng.integers(1600, 2600, count).tolist()
    segments, members, first = [], list(range(count)), 0
    while first < 1500 and len(members) > 1:
        last = first + 16 * int(rng.integers(10, 60))
        if last <= 1600:
            segments.append(PrefixSegment(members, first, last))
        first, members = last, [member for member in members if rng.random() < 0.8]
    chunks = [*[1] * count, int(rng.integers(2, 60))]
    spans = (FULL, KeySpan(window=int(rng.integers(100, 2500))), KeySpan(chunk=16 * int(rng.integers(20, 120))))
    sizes = {"wide_rows": int(rng.integers(1, 40)), "programs": int(rng.integers(1, 80))}
    check(chunks, [*starts, 700], segments, spans=spans, **sizes)
