"""engine/step/layout.py: what pack writes, unpack reads back, for every mixture of slices."""

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from engine.protocol.types import SamplingParams
from engine.step.layout import (
    HEADER_WORDS,
    OFFSET_WORD,
    ExecutorLimits,
    SequenceSlice,
    StepBatch,
    check_step,
    pack_step,
    unpack_step,
)

BLOCK_TOKENS = 4
PLAIN = SamplingParams()


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
def slices(draw: some.DrawFn) -> SequenceSlice:
    tokens = draw(some.lists(some.integers(0, 2**31 - 1), min_size=1, max_size=9))
    start = draw(some.integers(0, 20))
    needed = -(-(start + len(tokens)) // BLOCK_TOKENS)
    blocks = draw(some.lists(some.integers(0, 10**6), min_size=needed, max_size=needed + 3))
    sampling = draw(some.none() | samplings())
    history = None
    if sampling is not None and draw(some.booleans()):
        ids = draw(some.lists(some.integers(0, 2**31 - 1), min_size=1, max_size=6))
        history = (ids, draw(some.integers(0, len(ids))))
    as_array = draw(some.booleans())
    return SequenceSlice(
        array("I", tokens) if as_array else tokens,
        start,
        np.array(blocks, np.int32) if as_array else blocks,
        sampling,
        history,
    )


@settings(max_examples=150, deadline=None)
@given(some.lists(slices(), min_size=1, max_size=6))
def test_unpack_gives_back_what_was_packed(items: list[SequenceSlice]) -> None:
    batch = unpack_step(pack_step(items, BLOCK_TOKENS))
    assert batch.tokens_T.tolist() == [token for item in items for token in item.tokens]
    row = 0
    for index, item in enumerate(items):
        start, end = batch.query_starts_S1[index : index + 2].tolist()
        assert batch.tokens_T[start:end].tolist() == list(item.tokens)
        assert batch.positions_T[start:end].tolist() == list(range(item.start, item.start + len(item.tokens)))
        assert batch.contexts_S[index] == item.start + len(item.tokens)
        table = batch.tables_SW[index].tolist()
        assert table == [*item.blocks, *[0] * (batch.tables_SW.shape[1] - len(item.blocks))]
        for position, slot in zip(
            batch.positions_T[start:end].tolist(), batch.slots_T[start:end].tolist(), strict=True
        ):
            assert slot == int(item.blocks[position // BLOCK_TOKENS]) * BLOCK_TOKENS + position % BLOCK_TOKENS
        if item.sampling is not None:
            assert batch.rows_R[row] == end - 1
            check_row(batch, row, item)
            row += 1
    assert row == len(batch.rows_R)


def check_row(batch: StepBatch, row: int, item: SequenceSlice) -> None:
    assert item.sampling is not None
    wanted, settings = item.sampling, batch.sampling_R[row]
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    for column in ("temperature", "top_k", "top_p", "min_p", *penalties, "seed"):
        assert settings[column] == getattr(wanted, column), column
    assert settings["position"] == item.start + len(item.tokens)
    assert settings["logprobs"] == (-1 if wanted.logprobs is None else wanted.logprobs)
    start, end = batch.history_starts_R1[row : row + 2].tolist()
    assert batch.history_H[start:end].tolist() == ([] if item.history is None else [item.history[1], *item.history[0]])
    start, end = batch.bias_starts_R1[row : row + 2].tolist()
    ids, values = batch.bias_ids_B[start:end].tolist(), batch.bias_values_B[start:end].tolist()
    assert dict(zip(ids, values, strict=True)) == wanted.logit_bias


def test_step_without_rows_to_sample_has_empty_row_sections() -> None:
    batch = unpack_step(pack_step([SequenceSlice([1, 2, 3], 0, [5])], BLOCK_TOKENS))
    assert batch.rows_R.tolist() == []
    assert batch.sampling_R.shape == (0,)
    assert batch.history_starts_R1.tolist() == [0]
    assert batch.bias_starts_R1.tolist() == [0]


def test_packed_array_shares_no_memory_with_the_slices() -> None:
    table = np.array([7, 8], np.int32)
    packed = pack_step([SequenceSlice([1], 4, table, PLAIN)], BLOCK_TOKENS)
    table[:] = 0
    assert unpack_step(packed).tables_SW.tolist() == [[7, 8]]


def test_packed_array_is_flat_int32_with_its_lengths_in_front() -> None:
    packed = pack_step([SequenceSlice([1, 2], 0, [0], PLAIN), SequenceSlice([3], 6, [4, 9])], BLOCK_TOKENS)
    assert packed.dtype == np.int32
    assert packed.flags.c_contiguous
    assert packed[:OFFSET_WORD].tolist() == [3, 2, 2, 1, 0, 0, 0, 0]
    assert packed[OFFSET_WORD] == HEADER_WORDS


def test_truncated_array_is_refused() -> None:
    packed = pack_step([SequenceSlice([1], 0, [0], PLAIN)], BLOCK_TOKENS)
    with pytest.raises(AssertionError):
        unpack_step(packed[:-1].copy())


@pytest.mark.parametrize("bad", [SequenceSlice([], 0, [1]), SequenceSlice([1], 4, [1]), SequenceSlice([1], -1, [1])])
def test_slice_that_its_table_cannot_hold_is_refused(bad: SequenceSlice) -> None:
    with pytest.raises(AssertionError):
        pack_step([SequenceSlice([1], 0, [0], PLAIN), bad], BLOCK_TOKENS)


LIMITS = ExecutorLimits(
    context_tokens=64, vocabulary=100, blocks=8, step_tokens=32, prompt_step_tokens=32, sequences=4, depth=1
)


def test_a_step_within_its_executors_limits_passes() -> None:
    check_step(unpack_step(pack_step([SequenceSlice([99, 0, -1], 61, [7, 1, 2, 0], PLAIN)], 16)), LIMITS)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (SequenceSlice([1], 64, [0, 1, 2, 3, 4]), "past the context"),
        (SequenceSlice([100], 0, [0]), "past the vocabulary"),
        (SequenceSlice([1], 0, [8]), "past the pool"),
        (SequenceSlice([1], 0, [-1]), "past the pool"),
    ],
)
def test_a_step_past_its_executors_limits_is_refused(item: SequenceSlice, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_step(unpack_step(pack_step([item], 16)), LIMITS)
