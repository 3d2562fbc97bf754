"""Measures a CostModel: what steps of made-up work take, and what follows. It knows no device, no clock and no kernels.

Everything but the rows' own cost comes from the difference of two steps that differ in one thing. Where a pool or a
context is small so are these steps, and the less exact is what they say.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine.protocol.types import SamplingParams
from engine.step.cost_model import CostModel
from engine.step.layout import Int32s, PrefixSegment, SequenceSlice, pack_step

_LAUNCHES: Final = 2
_DECODES: Final = 32
_DECODE_KEYS: Final = 4096
_PROMPT_ROWS: Final = 512
_PROMPT_KEYS: Final = 8192
_MEMBERS: Final = 128
_MEMBERS_MIN: Final = 16
_SEGMENT_KEYS: Final = 8192
_SEGMENTS: Final = 8  # of a block each, which tell what one costs beside its keys
_US_MIN: Final = 1e-6
_OWN_BLOCKS: Final = 2  # of a member, behind its segment
_GREEDY: Final = SamplingParams()

StepTimer = Callable[[Int32s, int], float]
"""The median ms of a packed step over so many launches one behind the other, after one that does not count. Its tables
name blocks of the pool, whatever lies in them."""


@dataclass(frozen=True, slots=True)
class ProfilingLimits:
    """What steps may use: the pool's blocks, positions, how many sequences, and how many tables for each. `windows` as
    CostModel has them."""

    blocks: int
    block_tokens: int
    context_tokens: int
    sequences: int
    groups: int = 1
    windows: tuple[tuple[int, float], ...] = ()

    @property
    def full(self) -> bool:
        """Whether some layer sees everything."""
        return len(self.windows) < self.groups

    @property
    def shared_group(self) -> tuple[int, int, float]:
        """The group of layers that segments are measured in, which sees most: which one, how many keys at most, and its
        share of the layers."""
        if self.full:
            return 0, self.context_tokens, 1.0 - sum(share for _, share in self.windows)
        most, share = max(self.windows)
        return self.windows.index((most, share)), min(most, self.context_tokens), share

    @property
    def members(self) -> int:
        """The size of the largest group that is worth measuring, or fits; 0 where nobody sees a segment and more."""
        if self.shared_group[1] < (1 + _OWN_BLOCKS) * self.block_tokens:
            return 0
        return min(_MEMBERS, self.sequences, self.blocks // 8)

    @property
    def used_blocks(self) -> int:
        """How many blocks make a difference: with more of them the same steps are measured."""
        size = self.block_tokens
        decodes = min(_DECODES, self.sequences) * -(-_DECODE_KEYS // size)
        groups = max(8 * _MEMBERS, _SEGMENT_KEYS // size + (_MEMBERS + 1) * _OWN_BLOCKS)
        return min(self.blocks, max(decodes, groups, _PROMPT_KEYS // size, 2 * self.sequences))

    def keys(self, max_keys: int, sequences: int) -> int:
        """Up to max_keys keys, as fit for each of so many sequences: whole blocks, or a context that is shorter."""
        size = self.block_tokens
        whole = max(1, min(max_keys, self.context_tokens, self.blocks // sequences * size) // size) * size
        return min(whole, self.context_tokens)


def profile_costs(launch_ms: StepTimer, rows: Items[int], limits: ProfilingLimits) -> CostModel:
    """The costs of steps, at these numbers of rows (ascending) and between. Takes 4 steps for each, and 44 more.

    Where there is no room to tell what groups cost, they never pay.
    """
    bench = _Profiler(launch_ms, limits)
    rows_us, key_us, prompt_pair_us = bench.rows_us(rows), bench.key_us(), bench.prompt_pair_us(rows[-1])
    if limits.members < _MEMBERS_MIN:
        return CostModel(rows_us, key_us, key_us, math.inf, prompt_pair_us, 0.0, 0.0, limits.windows)
    shared_key_us, pair_us = bench.segment_key_us(key_us)
    segment_us, groups_us = bench.segment_us(key_us, shared_key_us, pair_us)
    return CostModel(rows_us, key_us, shared_key_us, pair_us, prompt_pair_us, segment_us, groups_us, limits.windows)


class _Profiler:
    def __init__(self, launch_ms: StepTimer, limits: ProfilingLimits) -> None:
        self._launch_ms = launch_ms
        self._limits = limits
        self._keys = CostModel((), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, limits.windows)  # which counts them

    def rows_us(self, rows: Items[int]) -> tuple[tuple[int, float], ...]:
        costs, max_us = [], 0.0
        for count in rows[: bisect_right(rows, self._limits.sequences * self._limits.context_tokens)]:
            max_us = max(max_us + _US_MIN, self._us(self._short(count)))
            costs.append((count, max_us))
        return tuple(costs)

    def key_us(self) -> float:
        """Measures sequences that decode, with many keys that they see and with a quarter of them."""
        count = min(_DECODES, self._limits.sequences, self._limits.blocks)
        keys = self._limits.keys(min(_DECODE_KEYS, self._limits.shared_group[1]), count)
        few = max(1, keys // 4)
        more = self._keys.seen(keys) - self._keys.seen(few)
        return _slope(self._us(self._decodes(count, keys)), self._us(self._decodes(count, few)), count * more)

    def prompt_pair_us(self, max_rows: int) -> float:
        """Measures a piece of a prompt with much and with little before it."""
        context = self._limits.keys(_PROMPT_KEYS, 1)
        rows = max(1, min(_PROMPT_ROWS, max_rows, context // 2))
        start = context - rows
        near, tables = start // 4 if self._limits.full else 0, self._tables(0, context)
        far_us, near_us = (self._us([SequenceSlice([0] * rows, first, tables, _GREEDY)]) for first in (start, near))
        return _slope(far_us, near_us, self._keys.pairs(start, rows) - self._keys.pairs(near, rows))

    def segment_key_us(self, key_us: float) -> tuple[float, float]:
        """Measures the keys of a segment, and each member at each key: few and many members, at many and few keys."""
        many, (_, _, share) = self._limits.members, self._limits.shared_group
        few = many // 8
        keys = self._segment_keys(many, _SEGMENT_KEYS)
        less = self._segment_keys(many, keys // 4)
        apart = self._apart_keys(keys) - self._apart_keys(less)  # which each member reads for itself
        few_us, many_us = (
            _slope(
                self._segment_us(members, keys) - members * apart * key_us,
                self._segment_us(members, less),
                (keys - less) * share,
            )
            for members in (few, many)
        )
        pair_us = _slope(many_us, few_us, many - few)
        return max(_US_MIN, few_us - few * pair_us), pair_us

    def segment_us(self, key_us: float, shared_key_us: float, pair_us: float) -> tuple[float, float]:
        """Measures what one more segment costs beside its keys, and the first: the same keys in one, many and none."""
        members, size, (_, _, share) = self._limits.members // 4, self._limits.block_tokens, self._limits.shared_group
        keys = self._segment_keys(members, _SEGMENTS * size)
        alone_us, one_us = self._us(self._members(members, keys)), self._segment_us(members, keys)
        segment_us = _slope(self._segment_us(members, keys, size), one_us, (keys // size - 1) * share)
        saved_us = share * (keys * (members * (key_us - pair_us) - shared_key_us) - segment_us)
        return segment_us, max(_US_MIN, one_us - alone_us + saved_us)

    def _segment_us(self, members: int, keys: int, size: int | None = None) -> float:
        """Measures a step in which so many members read so many keys together in the shared group's layers, in segments
        of `size`, or in one."""
        size, (group, _, _) = size or keys, self._limits.shared_group
        segments = [PrefixSegment(range(members), first, first + size, group) for first in range(0, keys, size)]
        return self._us(self._members(members, keys), segments)

    def _apart_keys(self, keys: int) -> float:
        """What a member behind so many keys sees of all its keys in the layers that read no segment."""
        context, (_, _, share) = keys + _OWN_BLOCKS * self._limits.block_tokens, self._limits.shared_group
        return self._keys.seen(context) - share * context

    def _us(self, slices: list[SequenceSlice], segments: Items[PrefixSegment] = ()) -> float:
        return self._launch_ms(pack_step(slices, self._limits.block_tokens, segments), _LAUNCHES) * 1e3

    def _short(self, rows: int) -> list[SequenceSlice]:
        """So many rows of as many sequences as may be, with no keys before them."""
        count = min(rows, self._limits.sequences)
        max_length = -(-rows // count)
        lengths = [rows // count + (index < rows % count) for index in range(count)]
        return [
            SequenceSlice([0] * length, 0, self._tables(index, max_length), _GREEDY)
            for index, length in enumerate(lengths)
        ]

    def _decodes(self, count: int, keys: int) -> list[SequenceSlice]:
        return [SequenceSlice([0], keys - 1, self._tables(index, keys), _GREEDY) for index in range(count)]

    def _segment_keys(self, members: int, max_keys: int) -> int:
        """Up to max_keys keys, as fit beside what the members have alone; in whole blocks."""
        size = self._limits.block_tokens
        room = min(self._limits.shared_group[1] // size, self._limits.blocks - members * _OWN_BLOCKS) - _OWN_BLOCKS
        return max(1, min(max_keys // size, room)) * size

    def _members(self, count: int, keys: int) -> list[SequenceSlice]:
        """Sequences with `keys` keys in the same blocks and some of their own behind them."""
        size = self._limits.block_tokens
        shared, context = self._table(0, keys), keys + _OWN_BLOCKS * size
        owns = (keys // size + np.arange(count * _OWN_BLOCKS).reshape(count, -1)) % self._limits.blocks
        tables = [np.append(shared, own).astype(np.int32) for own in owns]
        return [SequenceSlice([0], context - 1, [table] * self._limits.groups, _GREEDY) for table in tables]

    def _tables(self, index: int, keys: int) -> list[Int32s]:
        """The same table for each group."""
        return [self._table(index, keys)] * self._limits.groups

    def _table(self, index: int, keys: int) -> Int32s:
        """The index-th of tables of so many keys, each with blocks of its own as far as they go round."""
        width = -(-keys // self._limits.block_tokens)
        return ((index * width + np.arange(width)) % self._limits.blocks).astype(np.int32)


def _slope(more: float, less: float, by: float) -> float:
    return max(_US_MIN, (more - less) / by) if by > 0 else _US_MIN
