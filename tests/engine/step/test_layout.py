"""engine/step/layout.py: what pack writes, unpack reads back, for every mixture of slices, groups and segments."""

from array import array
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from engine.protocol.types import SamplingParams
from engine.step.layout import (
    EMBEDDING_TOKEN,
    GROUPS_MAX,
    HEADER_WORDS,
    OFFSET_WORD,
    VERSION,
    Count,
    EmbeddingSpan,
    GroupWord,
    PrefixSegment,
    Section,
    SequenceSlice,
    StepBatch,
    awaited_token,
    group_word,
    pack_step,
    unpack_step,
)
from engine.step.limits import ExecutorLimits, check_step

BLOCK_TOKENS = 4
PLAIN = SamplingParams()
BLOCKS = some.integers(0, 10**6)


def samplings() -> some.SearchStrategy[SamplingParams]:
    single = some.floats(0, 4, width=32)
    return some.builds(
        SamplingParams,
        temperature=single,
        top_k=some.integers(0, 2**31 - 1),
        top_p=single,
        min_p=single,
        repetition_penalty=single,
        frequency_penalty=some.floats(-2, 2, width=32),
        presence_penalty=some.floats(-2, 2, width=32),
        seed=some.integers(0, 2**63 - 1),
        logit_bias=some.dictionaries(some.integers(0, 2**31 - 1), some.floats(-100, 100, width=32), max_size=4),
        logprobs=some.none() | some.integers(0, 20),
    )


@some.composite
def slices(draw: some.DrawFn, groups: int = 1) -> SequenceSlice:
    tokens = draw(some.lists(some.integers(0, 2**30 - 1), min_size=1, max_size=9))
    start = draw(some.integers(0, 20))
    needed = -(-(start + len(tokens)) // BLOCK_TOKENS)
    firsts = [draw(some.integers(0, start // BLOCK_TOKENS)) for _ in range(groups)] if draw(some.booleans()) else []
    tables = [
        draw(some.lists(BLOCKS, min_size=needed - first, max_size=needed - first + 3))
        for first in firsts or [0] * groups
    ]
    sampling = draw(some.none() | samplings())
    wanted = draw(some.integers(1, len(tokens)))
    history = None
    if sampling is not None and draw(some.booleans()):
        ids = draw(some.lists(some.integers(0, 2**31 - 1), min_size=wanted, max_size=wanted + 6))
        history = (ids, draw(some.integers(0, len(ids))))
    embeddings = []
    if draw(some.booleans()):
        first = draw(some.integers(0, len(tokens) - 1))
        count = draw(some.integers(1, len(tokens) - first))
        embeddings.append(EmbeddingSpan(first, draw(some.integers(0, 1000)), count))
    elif draw(some.booleans()):
        tokens[-1] = awaited_token(draw(some.integers(0, 500)), draw(some.integers(1, 2000)))
    as_array = draw(some.booleans())
    return SequenceSlice(
        array("i", tokens) if as_array else tokens,
        start,
        [np.array(table, np.int32) if as_array else table for table in tables],
        sampling,
        history,
        draw(some.booleans()),
        wanted,
        draw(some.integers(0, 3)),
        embeddings,
        firsts,
    )


@some.composite
def steps(draw: some.DrawFn) -> tuple[list[SequenceSlice], list[PrefixSegment]]:
    """Slices of equally many groups; the segments of a group are nested, the inner ones behind the outer ones."""
    groups = draw(some.integers(1, GROUPS_MAX))
    items = draw(some.lists(slices(groups), min_size=1, max_size=6))
    segments, contexts = [], [item.start + len(item.tokens) for item in items]
    for group in range(groups):
        members, first = list(range(len(items))), 0
        while draw(some.booleans()):
            last = first + BLOCK_TOKENS * draw(some.integers(1, 2))
            members = [index for index in members if contexts[index] > last and draw(some.booleans())]
            if len(members) < 2:
                break
            segments.append(PrefixSegment(members, first, last, group))
            first = last
    return items, draw(some.permutations(segments))


@settings(max_examples=200, deadline=None)
@given(steps())
def test_unpack_gives_back_what_was_packed(step: tuple[list[SequenceSlice], list[PrefixSegment]]) -> None:
    items, segments = step
    batch = unpack_step(pack_step(items, BLOCK_TOKENS, segments))
    row = masks = 0
    for index, item in enumerate(items):
        start, end = batch.query_starts_S1[index : index + 2].tolist()
        check_tokens(batch.tokens_T[start:end].tolist(), item)
        assert batch.positions_T[start:end].tolist() == list(range(item.start, item.start + len(item.tokens)))
        assert batch.contexts_S[index] == item.start + len(item.tokens)
        assert batch.adapters_S[index] == item.adapter
        check_tables(batch, index, item)
        for nth in range(item.wanted if item.sampling is not None else 0):
            assert batch.rows_R[row] == end - item.wanted + nth
            check_row(batch, row, item, nth)
            assert batch.sampling_R[row]["mask"] == (masks if item.masked else -1)
            masks += item.masked
            row += 1
    assert row == len(batch.rows_R)
    assert batch.masked == (masks > 0)
    check_segments(batch, segments)


def check_tokens(tokens: list[int], item: SequenceSlice) -> None:
    wanted = list(item.tokens)
    for span in item.embeddings:
        for nth in range(span.count):
            wanted[span.first + nth] = EMBEDDING_TOKEN + span.row + nth
    assert tokens == wanted


def check_tables(batch: StepBatch, index: int, item: SequenceSlice) -> None:
    start, end = batch.query_starts_S1[index : index + 2].tolist()
    assert len(batch.tables_GSW) == len(item.tables)
    for group, blocks in enumerate(item.tables):
        table_SW, first = batch.tables_GSW[group], item.table_starts[group] if item.table_starts else 0
        assert batch.table_starts_GS[group, index] == first
        assert table_SW[index].tolist() == [*blocks, *[0] * (table_SW.shape[1] - len(blocks))]
        for position, slot in zip(
            batch.positions_T[start:end].tolist(), batch.slots_GT[group, start:end].tolist(), strict=True
        ):
            block = int(blocks[position // BLOCK_TOKENS - first])
            assert slot == block * BLOCK_TOKENS + position % BLOCK_TOKENS


def check_row(batch: StepBatch, row: int, item: SequenceSlice, nth: int) -> None:
    """The nth of the slice's rows; what it samples comes behind the tokens up to its own."""
    assert item.sampling is not None
    wanted, settings, later = item.sampling, batch.sampling_R[row], item.wanted - 1 - nth
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    for column in ("temperature", "top_k", "top_p", "min_p", *penalties, "seed"):
        assert settings[column] == getattr(wanted, column), column
    assert settings["position"] == item.start + len(item.tokens) - later
    assert settings["logprobs"] == (-1 if wanted.logprobs is None else wanted.logprobs)
    first, last, prompt_tokens = batch.histories_R3[row].tolist()
    if item.history is None:
        assert first == last
    else:
        ids = [*item.history[0], *([item.tokens[-1]] if item.tokens[-1] < 0 else [])]
        assert batch.history_H[first:last].tolist() == ids[: len(ids) - later]
        assert prompt_tokens == item.history[1]
    start, end = batch.bias_starts_R1[row : row + 2].tolist()
    ids, values = batch.bias_ids_B[start:end].tolist(), batch.bias_values_B[start:end].tolist()
    assert dict(zip(ids, values, strict=True)) == wanted.logit_bias


def check_segments(batch: StepBatch, segments: Items[PrefixSegment]) -> None:
    own_starts = np.zeros_like(batch.own_starts_GS)
    for group in range(len(batch.tables_GSW)):
        wanted = [segment for segment in segments if segment.group == group]
        for segment, found in zip(wanted, batch.segments(group), strict=True):
            index, first, last, members_M = found
            assert (index, first, last) == (segment.members[0], segment.first, segment.last)
            assert members_M.tolist() == list(segment.members)
            own_starts[group, members_M] = np.maximum(own_starts[group, members_M], last)
    assert (batch.own_starts_GS == own_starts).all()


def test_step_without_rows_to_sample_has_empty_row_sections() -> None:
    batch = unpack_step(pack_step([SequenceSlice([1, 2, 3], 0, [[5]])], BLOCK_TOKENS))
    assert batch.rows_R.tolist() == []
    assert batch.sampling_R.shape == (0,)
    assert batch.histories_R3.shape == (0, 3)
    assert batch.bias_starts_R1.tolist() == [0]


def test_packed_array_shares_no_memory_with_the_slices() -> None:
    table = np.array([7, 8], np.int32)
    packed = pack_step([SequenceSlice([1], 4, [table], PLAIN)], BLOCK_TOKENS)
    table[:] = 0
    assert unpack_step(packed).tables_GSW[0].tolist() == [[7, 8]]


def test_packed_array_is_flat_int32_with_its_lengths_in_front() -> None:
    slices = [SequenceSlice([1, 2], 0, [[0], [1]], PLAIN, wanted=2), SequenceSlice([3], 6, [[4, 9], [5, 6, 7]])]
    packed = pack_step(slices, BLOCK_TOKENS)
    assert packed.dtype == np.int32
    assert packed.flags.c_contiguous
    assert packed[: 1 + Count.MEMBERS].tolist() == [VERSION, 3, 2, 2, 2, 0, 0, 0, 0]
    assert packed[OFFSET_WORD] == HEADER_WORDS
    at = packed[OFFSET_WORD + Section.TABLES]
    assert [packed[group_word(group, GroupWord.TABLES)] for group in (0, 1)] == [at, at + 2 * 2]
    assert [packed[group_word(group, GroupWord.TABLE_WIDTH)] for group in (0, 1)] == [2, 3]
    for group, starts in enumerate((unpack_step(packed).slots_GT, unpack_step(packed).table_starts_GS)):
        word = (GroupWord.SLOTS, GroupWord.TABLE_STARTS)[group]
        for row, values in enumerate(starts.tolist()):
            first = packed[group_word(row, word)]
            assert packed[first : first + len(values)].tolist() == values


def test_truncated_array_is_refused() -> None:
    packed = pack_step([SequenceSlice([1], 0, [[0]], PLAIN)], BLOCK_TOKENS)
    with pytest.raises(AssertionError):
        unpack_step(packed[:-1].copy())


def test_array_of_another_version_is_refused() -> None:
    packed = pack_step([SequenceSlice([1], 0, [[0]], PLAIN)], BLOCK_TOKENS)
    packed[0] = VERSION + 1
    with pytest.raises(AssertionError, match="version 3"):
        unpack_step(packed)


@pytest.mark.parametrize(
    "bad",
    [
        SequenceSlice([], 0, [[1]]),
        SequenceSlice([1], 4, [[1]]),
        SequenceSlice([1], -1, [[1]]),
        SequenceSlice([1], 7, [[1]], table_starts=[2]),
        SequenceSlice([1], 9, [[1]], table_starts=[1]),
        SequenceSlice([1, 2], 0, [[1]], PLAIN, wanted=3),
        SequenceSlice([1, 2], 0, [[1]], PLAIN, wanted=0),
        SequenceSlice([1, 2], 0, [[1]], PLAIN, ([5], 0), wanted=2),
        SequenceSlice([1, 2], 0, [[1]], embeddings=[EmbeddingSpan(1, 0, 2)]),
        SequenceSlice([1, 2], 0, [[1]], embeddings=[EmbeddingSpan(0, -1, 2)]),
    ],
)
def test_slice_that_cannot_be_what_it_says_is_refused(bad: SequenceSlice) -> None:
    with pytest.raises(AssertionError):
        pack_step([SequenceSlice([1], 0, [[0]], PLAIN), bad], BLOCK_TOKENS)


def test_slices_of_unequally_many_groups_are_refused() -> None:
    for tables in ([[0]], [[0], [1], [2]]):
        with pytest.raises(AssertionError, match="unequally many"):
            pack_step([SequenceSlice([1], 0, [[0], [1]], PLAIN), SequenceSlice([1], 0, tables)], BLOCK_TOKENS)


LIMITS = ExecutorLimits(
    context_tokens=64, vocabulary=100, blocks=(8,), step_tokens=32, prompt_step_tokens=32, sequences=4, depth=1,
    adapters=1, embedding_rows=3,
)  # fmt: skip


def test_a_step_within_its_executors_limits_passes() -> None:
    item = SequenceSlice([99, 0, 5, -1], 60, [[7, 1, 2, 0]], PLAIN, wanted=4, adapter=1)
    check_step(unpack_step(pack_step([item], 16)), LIMITS)
    embedded = [EmbeddingSpan(0, 1, 2)]
    check_step(unpack_step(pack_step([SequenceSlice([10**6, 10**6], 0, [[0]], embeddings=embedded)], 16)), LIMITS)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (SequenceSlice([1], 64, [[0, 1, 2, 3, 4]]), "past the context"),
        (SequenceSlice([100], 0, [[0]]), "past the vocabulary"),
        (SequenceSlice([100, 1], 0, [[0]], embeddings=[EmbeddingSpan(1, 0, 1)]), "past the vocabulary"),
        (SequenceSlice([1, 1], 0, [[0]], embeddings=[EmbeddingSpan(0, 2, 2)]), "past the buffer"),
        (SequenceSlice([1], 0, [[8]]), "past its group's pool"),
        (SequenceSlice([1], 0, [[-1]]), "past its group's pool"),
        (SequenceSlice([1], 0, [[1], [1]]), "another number of groups"),
        (SequenceSlice([1], 0, [[1]], adapter=2), "not loaded"),
        (SequenceSlice([1], 0, [[1]], adapter=-1), "not loaded"),
        (SequenceSlice([1] * 5, 0, [[1]], PLAIN, wanted=5), "more rows"),
    ],
)
def test_a_step_past_its_executors_limits_is_refused(item: SequenceSlice, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_step(unpack_step(pack_step([item], 16)), LIMITS)


def test_each_groups_tables_name_blocks_of_its_own_pool() -> None:
    limits = replace(LIMITS, blocks=(8, 4))
    for tables, fits in (([[7], [3]], True), ([[3], [7]], False), ([[8], [3]], False)):
        step = unpack_step(pack_step([SequenceSlice([1], 0, tables)], 16))
        if fits:
            check_step(step, limits)
        else:
            with pytest.raises(AssertionError, match="past its group's pool"):
                check_step(step, limits)


def test_a_buffer_without_rows_refuses_every_token_that_names_one() -> None:
    item = SequenceSlice([1], 0, [[0]], embeddings=[EmbeddingSpan(0, 0, 1)])
    with pytest.raises(AssertionError, match="past the buffer"):
        check_step(unpack_step(pack_step([item], 16)), replace(LIMITS, embedding_rows=0))


def test_an_awaited_token_names_its_row_and_how_many_steps_ago_it_was_sampled() -> None:
    assert [awaited_token(0), awaited_token(6)] == [-1, -7]
    assert awaited_token(6, steps_before=3) == -7 - (2 << 20)
    assert awaited_token((1 << 20) - 1, steps_before=2048) == -(1 << 31)
