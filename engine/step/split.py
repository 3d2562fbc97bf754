"""Cuts a packed step into micro-batches: runs of its rows, each a packed step of its own. It does not know why.

T rows, S slices, R rows to sample, H history tokens, B biases.
"""

from itertools import pairwise

import numpy as np

from engine.step.layout import Int32s, StepBatch, awaited_row, empty_step, unpack_step


def split_step(packed: Int32s, parts: int) -> list[Int32s]:
    """So many runs of rows, as even as can be, in their order. A slice that lies in several of them is several slices,
    the later of which read what the earlier ones write. Rows keep the numbers of their masks in the whole step; prefix
    groups are left out, for they only spare reading. Costs some 20 µs for each part."""
    batch = unpack_step(packed)
    rows = len(batch.tokens_T)
    assert 1 <= parts <= rows
    return [_part(batch, first, last) for first, last in pairwise([part * rows // parts for part in range(parts + 1)])]


def _part(batch: StepBatch, first: int, last: int) -> Int32s:
    """Rows first … last−1."""
    starts_S, ends_S = batch.query_starts_S1[:-1], batch.query_starts_S1[1:]
    slices = slice(int(np.searchsorted(ends_S, first, "right")), int(np.searchsorted(starts_S, last, "left")))
    rows = slice(*np.searchsorted(batch.rows_R, (first, last)).tolist())
    biases = slice(*batch.bias_starts_R1[[rows.start, rows.stop]].tolist())
    spans_R2 = batch.histories_R3[rows, :2]
    spans_R2 = spans_R2[spans_R2[:, 0] < spans_R2[:, 1]]
    # Rows of one slice share a history, which is written once; the whole range of the part's rows is taken.
    history = slice(int(spans_R2[:, 0].min(initial=len(batch.history_H))), int(spans_R2[:, 1].max(initial=0)))
    counts = [
        last - first, slices.stop - slices.start, len(batch.tables_GSW), rows.stop - rows.start,
        max(0, history.stop - history.start), biases.stop - biases.start, 0, 0,
    ]  # fmt: skip
    packed = empty_step(counts, [table_SW.shape[1] for table_SW in batch.tables_GSW])
    part = unpack_step(packed)
    part.tokens_T[:], part.positions_T[:] = batch.tokens_T[first:last], batch.positions_T[first:last]
    part.slots_GT[:] = batch.slots_GT[:, first:last]
    edges_S1 = batch.query_starts_S1[slices.start : slices.stop + 1]
    part.query_starts_S1[:] = np.clip(edges_S1, first, last) - first
    part.contexts_S[:] = batch.contexts_S[slices] - np.maximum(0, ends_S[slices] - last)
    part.adapters_S[:] = batch.adapters_S[slices]
    part.table_starts_GS[:] = batch.table_starts_GS[:, slices]
    for own_SW, table_SW in zip(part.tables_GSW, batch.tables_GSW, strict=True):
        own_SW[:] = table_SW[slices]
    part.rows_R[:] = batch.rows_R[rows] - first
    part.sampling_R[:] = batch.sampling_R[rows]
    _copy_extras(part, batch, rows, biases, history)
    return packed


def _copy_extras(part: StepBatch, batch: StepBatch, rows: slice, biases: slice, history: slice) -> None:
    """Copies what few rows have, histories and biases."""
    part.bias_starts_R1[:] = batch.bias_starts_R1[rows.start : rows.stop + 1] - biases.start
    part.bias_ids_B[:], part.bias_values_B[:] = batch.bias_ids_B[biases], batch.bias_values_B[biases]
    part.histories_R3[:] = batch.histories_R3[rows]
    has_R = part.histories_R3[:, 0] < part.histories_R3[:, 1]
    part.histories_R3[has_R, :2] -= history.start
    part.history_H[:] = batch.history_H[history]


def awaited_rows(ids: Int32s) -> list[tuple[int, int, int]]:
    """The tokens that were not known as the step was packed: where each is, how many steps before this one it is
    sampled, and in which row."""
    return [(place, *awaited_row(int(ids[place]))) for place in np.flatnonzero(ids < 0).tolist()]
