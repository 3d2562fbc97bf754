"""engine/step/split.py: the micro-batches of a step are the step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from engine.protocol.types import SamplingParams
from engine.step.layout import SequenceSlice, StepBatch, awaited_row, awaited_token, pack_step, unpack_step
from engine.step.split import awaited_rows, split_step

BLOCK_TOKENS = 4


def slices() -> some.SearchStrategy[SequenceSlice]:
    @some.composite
    def draw(pick: some.DrawFn) -> SequenceSlice:
        length, start, groups = pick(some.integers(1, 9)), pick(some.integers(0, 11)), 2
        blocks = -(-(start + length) // BLOCK_TOKENS)
        sampling = pick(some.sampled_from([None, SamplingParams(logit_bias={3: 1.0, 7: -2.0}), SamplingParams(seed=5)]))
        tokens = pick(some.lists(some.integers(0, 99), min_size=length, max_size=length))
        if sampling is not None and pick(some.booleans()):
            tokens[-1] = awaited_token(pick(some.integers(0, 40)))
        history = (list(range(start + length)), 2) if sampling is not None and pick(some.booleans()) else None
        return SequenceSlice(
            tokens, start, [pick(some.permutations(range(blocks))) for _ in range(groups)], sampling, history,
            sampling is not None and pick(some.booleans()),
        )  # fmt: skip

    return draw()


def rows_of(batch: StepBatch) -> list[tuple[object, ...]]:
    """All that a step says of each of its rows, in their order."""
    slice_T = np.repeat(np.arange(len(batch.contexts_S)), np.diff(batch.query_starts_S1))
    sampled = {row: index for index, row in enumerate(batch.rows_R.tolist())}
    rows: list[tuple[object, ...]] = []
    for row, of in enumerate(slice_T.tolist()):
        wanted: tuple[object, ...] = ()
        if (index := sampled.get(row)) is not None:
            first, last, prompt = batch.histories_R3[index].tolist()
            biases = slice(*batch.bias_starts_R1[[index, index + 1]].tolist())
            wanted = (
                batch.sampling_R[index].tolist(), batch.history_H[first:last].tolist(), prompt if first < last else 0,
                batch.bias_ids_B[biases].tolist(), batch.bias_values_B[biases].tolist(),
            )  # fmt: skip
        tables = [table_SW[of].tolist() for table_SW in batch.tables_GSW]
        position = int(batch.positions_T[row])
        rows.append((int(batch.tokens_T[row]), position, batch.slots_GT[:, row].tolist(), tables, wanted))
    return rows


@settings(max_examples=60, deadline=None)
@given(some.lists(slices(), min_size=1, max_size=6), some.data())
def test_micro_batches_have_the_rows_of_the_step_in_their_order(
    step: list[SequenceSlice], data: some.DataObject
) -> None:
    packed = pack_step(step, BLOCK_TOKENS)
    whole = unpack_step(packed)
    parts = data.draw(some.integers(1, len(whole.tokens_T)))
    batches = [unpack_step(part) for part in split_step(packed, parts)]
    assert len(batches) == parts
    assert [row for batch in batches for row in rows_of(batch)] == rows_of(whole)
    sizes = [len(batch.tokens_T) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    for batch in batches:
        ends = batch.query_starts_S1[1:]
        assert (np.diff(batch.query_starts_S1) > 0).all()
        assert (batch.contexts_S == batch.positions_T[ends - 1] + 1).all()  # it sees nothing behind its own rows
        assert not len(batch.segments_N5)
        assert not batch.own_starts_GS.any()


@pytest.mark.parametrize("steps_before", [1, 2, 3])
def test_tokens_that_are_not_known_say_where_they_are_sampled(steps_before: int) -> None:
    assert awaited_row(awaited_token(77, steps_before)) == (steps_before, 77)
    ids = np.array([5, awaited_token(3, steps_before), 0, awaited_token(0, 1)], np.int32)
    assert awaited_rows(ids) == [(1, steps_before, 3), (3, 1, 0)]
