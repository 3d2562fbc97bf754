"""Tiles read back word by word: every row reads each key that it may see exactly once, and merges what it must.

The kernels' results for the same kinds of steps are tested in kernels/test_attention.py.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest

from engine.protocol.types import SamplingParams
from engine.step import attention_plan
from engine.step.attention_plan import ENTRY_WORDS, HEAD_WORDS, AttentionLayout
from engine.step.layout import SPARE_WORD, Int32s, PrefixSegment, SequenceSlice, StepBatch, pack_step, unpack_step

BLOCK_TOKENS = 16


@dataclass
class Read:
    """What the words behind a step say for one window. Keys are counted, by how often a row reads each."""

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


def read(step: Int32s, batch: StepBatch, layout: AttentionLayout, window: int | None) -> Read:
    at = int(step[SPARE_WORD + layout.windows.index(window)])
    narrow, wide, merge, narrow_at, wide_at, merge_at = step[at : at + 6].tolist()
    assert narrow_at == at + HEAD_WORDS  # the kernel does not look it up
    found = Read()
    for words in step[narrow_at:][: narrow * ENTRY_WORDS].reshape(-1, ENTRY_WORDS).tolist():
        row, index, first, last, slot, *rest = words
        assert row == batch.query_starts_S1[index]
        assert first < last
        assert first % BLOCK_TOKENS == 0
        position = int(batch.positions_T[row])
        found.take(row, slot, range(first if window is None else max(first, position + 1 - window), last))
        found.arrivals[row].add(tuple(rest))
    for words in step[wide_at:][: wide * ENTRY_WORDS].reshape(-1, ENTRY_WORDS).tolist():
        start, count, index, first, last, hidden, *_ = words
        assert 0 < count <= layout.wide_rows
        assert first < last
        assert first % BLOCK_TOKENS == 0
        for row, slot in step[start:][: 2 * count].reshape(-1, 2).tolist():
            position = int(batch.positions_T[row])
            owner = int(np.searchsorted(batch.query_starts_S1, row, "right")) - 1
            blocks = slice(first // BLOCK_TOKENS, -(-last // BLOCK_TOKENS))
            assert (batch.tables_SW[index, blocks] == batch.tables_SW[owner, blocks]).all()
            low = first if window is None else max(first, position + 1 - window)
            found.take(row, slot, range(low, min(last, position + 1) if hidden else last))
    for row, first, count, _ in step[merge_at:][: merge * 4].reshape(-1, 4).tolist():
        assert row not in found.merges
        found.merges[row] = first, count
    return found


def check(
    chunks: list[int], starts: list[int], segments: list[PrefixSegment] | None = None, *,
    windows: tuple[int | None, ...] = (None,), wide_rows: int = 16, programs: int = 12, slots: int = 4096,
) -> list[Read]:  # fmt: skip
    counts = [-(-(start + chunk) // BLOCK_TOKENS) for start, chunk in zip(starts, chunks, strict=True)]
    firsts = np.cumsum(counts) - counts
    tables = [np.arange(first, first + count, dtype=np.int32) for first, count in zip(firsts, counts, strict=True)]
    for segment in segments or []:
        span = slice(segment.first // BLOCK_TOKENS, segment.last // BLOCK_TOKENS)
        for member in segment.members:
            tables[member][span] = tables[segment.members[0]][span]
    slices = [
        SequenceSlice([1] * chunk, start, table, SamplingParams())
        for chunk, start, table in zip(chunks, starts, tables, strict=True)
    ]
    packed = pack_step(slices, BLOCK_TOKENS, segments or [])
    batch = unpack_step(packed)
    layout = AttentionLayout(windows, 2, wide_rows, 2 * programs, 2 * programs, slots)
    before = packed.copy()
    work = attention_plan.plan_attention(packed, batch, layout)
    assert (packed[:SPARE_WORD] == before[:SPARE_WORD]).all()
    assert (packed[SPARE_WORD + len(windows) :] == before[SPARE_WORD + len(windows) :]).all()
    assert work.words.dtype == np.int32
    assert work.wide == any(chunk > 1 for chunk in chunks) or bool(segments)

    step = np.concatenate((packed, work.words))
    reads = [read(step, batch, layout, window) for window in windows]
    for window, found in zip(windows, reads, strict=True):
        check_keys(found, batch, window)
        check_slots(found, batch, slots)
    return reads


def check_keys(found: Read, batch: StepBatch, window: int | None) -> None:
    for row, position in enumerate(batch.positions_T.tolist()):
        first = 0 if window is None else max(0, position + 1 - window)
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
    windowed, whole = check([1] * 6 + [30], [*STARTS, 50], SEGMENTS, windows=(24, None))
    assert set(whole.merges) == set(range(6))
    assert not set(windowed.merges) & set(range(6))


@pytest.mark.parametrize("window", [1, 16, 37, 5000])
def test_a_window_hides_keys_before_it(window: int) -> None:
    check([1, 40, 1], [200, 100, 20], windows=(window,))


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
        chunks, starts, segments, windows=(None, int(rng.integers(1, 300))), wide_rows=int(rng.integers(1, 40)),
        programs=int(rng.integers(1, 80)),
    )  # fmt: skip
