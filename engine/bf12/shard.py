"""One rank's part of a weight in 12 bits a number: some rows, and whole blocks of their inputs, which keep their words.

It knows no files and no ranks. E escapes, N outputs, W words of a row, G groups of 16 outputs.
"""

from collections.abc import Sequence

import torch

from engine.bf12.codec import EscapeIndex
from engine.bf12.layout import GROUP_OUTPUTS, block_of, lanes_of, words_of


def can_cut(inputs: int, rows: Sequence[range], columns: range | None) -> bool:
    """Whether these rows and columns keep their words. Rows that come to lie below others begin a group of escapes, so
    that kernels find each run of theirs by whole groups."""
    if len(rows) > 1 and any(len(run) % GROUP_OUTPUTS for run in rows):
        return False
    if columns is None:
        return True
    block = block_of(inputs)
    whole_blocks = columns.start % block == 0 and len(columns) % block == 0
    return whole_blocks and lanes_of(len(columns)) == lanes_of(inputs)


def word_columns(columns: range | None) -> range | None:
    """The words of a row that hold these columns, which are whole blocks."""
    return None if columns is None else range(words_of(columns.start), words_of(columns.stop))


def cut_index(index: EscapeIndex, rows: Sequence[range], columns: range | None) -> EscapeIndex:
    """The escapes of these rows, below each other in this order, which ascends, and of these columns."""
    device = index.places_E.device
    outputs = torch.cat([torch.arange(run.start, run.stop, device=device) for run in rows])
    target_N = torch.full((len(index.scales_N),), -1, dtype=torch.int64, device=device)
    target_N[outputs] = torch.arange(len(outputs), device=device)
    groups = torch.arange(len(index.firsts_G) - 1, device=device)
    group_E = groups.repeat_interleave(index.firsts_G.diff())
    count = len(group_E)  # there may be room for more
    places_E = index.places_E[:count]
    n_E = group_E * GROUP_OUTPUTS + ((places_E >> 16) % GROUP_OUTPUTS)
    k_E, target_E = places_E & 0xFFFF, target_N[n_E]
    keep = target_E >= 0
    if columns is not None:
        keep &= (k_E >= columns.start) & (k_E < columns.stop)
        k_E = k_E - columns.start
    target_E = target_E[keep]
    ends = torch.bincount(target_E // GROUP_OUTPUTS, minlength=-(-len(outputs) // GROUP_OUTPUTS)).cumsum(0)
    return EscapeIndex(
        index.scales_N[outputs],
        torch.cat((ends.new_zeros(1), ends)).int(),
        ((target_E & 0x7FFF) << 16 | k_E[keep]).int(),
        index.values_E[:count][keep],
    )
