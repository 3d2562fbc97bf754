"""Which keys of a step are read once for many: prefix groups, chosen by what they save. It knows block ids, not texts.

Sequences that begin with the same blocks of the prefix tree may read them together, as segments
(engine/step/layout.py). A block of the tree has one place in it, so where two sequences have the same block they have
the same ones before it:

    a  1 2 3 4 5      0 … 2 blocks may be a segment of a, b and c,
    b  1 2 3 4 6      2 … 4 another one of a and b, behind it, or, if c is not worth it, 0 … 4 one of a and b alone
    c  1 2 7

Layers that see only a window or a chunk have segments of their own: beside a block of the tree lies one of theirs at
most, so what several sequences still see of it is the same block for all. Which of a segment's members those are
changes from step to step; the attention plan (engine/step/attention_plan.py) leaves out who sees nothing of it.

A block of the tree belongs to one namespace, and so does a group, unless its blocks are public.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.sequences.sequence import Sequence
from engine.step.cost_model import CostModel
from engine.step.key_span import FULL, KeySpan
from engine.step.layout import SEGMENTS_MAX, PrefixSegment

_WINDOWED_STEPS: Final = 64  # after which segments are chosen anew where windows and chunks have moved on meanwhile


class PrefixGroups:
    """The segments of one step after another, computed anew only where the running sequences, or what they share,
    changed, and from time to time where some layers do not see everything.

    A running sequence lengthens what it has in the tree by blocks that are its alone, which changes no group. Where it
    gets blocks of others, or resumes with other blocks, `invalidate` has to be called.

    saved_us     by the segments returned last,
    spared_keys  and how many keys are not read in a step because of them, counted as CostModel counts keys.
    """

    def __init__(self, costs: CostModel, block_tokens: int, spans: Items[KeySpan] = (FULL,)) -> None:
        """`spans`: of each KV group that has layers, in the order of a step's tables."""
        shares = [costs.full_share] * (FULL in spans) + [share for _, share in costs.windows]
        self._costs = costs
        self._groups = list(zip(spans, shares, strict=True))
        self._block_tokens = block_tokens
        self._max_age = 0 if spans == (FULL,) else _WINDOWED_STEPS
        self._age = 0
        self._slices: list[Sequence | None] = []
        self._segments: list[PrefixSegment] = []
        self.saved_us = 0.0
        self.spared_keys = 0

    def invalidate(self) -> None:
        """Has the segments computed anew: some sequence shares other blocks than before."""
        self._slices = []

    def segments(self, slices: list[Sequence | None]) -> list[PrefixSegment]:
        """The segments that pay in a step of these slices: a slice is its sequence, or None where it has several rows.

        Costs a comparison of lists, or about 2 µs per sequence and KV group where something changed. Neither list may
        be changed.
        """
        self._age += 1
        if slices != self._slices or self._age == self._max_age:
            self._slices, self._age = slices, 0
            chosen = self._computed(slices)
            self.saved_us = sum(each.saved_us for each in chosen) - self._costs.groups_us
            if self.saved_us <= 0:
                chosen, self.saved_us = [], 0.0
            self._segments = [each.segment for each in chosen]
            self.spared_keys = round(sum(each.spared_keys for each in chosen))
        return self._segments

    def _computed(self, slices: list[Sequence | None]) -> list["_Chosen"]:
        sharing = [index for index, sequence in enumerate(slices) if sequence is not None and sequence.shared_blocks]
        leading = {index: _shared_table(slices[index]) for index in sharing}
        sharing.sort(key=leading.__getitem__)
        if len(sharing) < 2 or self._costs.key_us <= self._costs.pair_us:
            return []
        blocks_N = _common_blocks([leading[index] for index in sharing])
        if not blocks_N.any():
            return []
        common_N = (blocks_N * self._block_tokens).tolist()
        positions_N = np.array([each.launched for index in sharing if (each := slices[index]) is not None])
        chosen = []
        for group, (span, share) in enumerate(self._groups):
            choice = _Choice(self._costs, share, None if span == FULL else span.firsts(positions_N))
            for node, first in choice.nodes_of(_tree(common_N)):
                members = sorted(sharing[node.start : node.end])
                _assert_one_namespace([slices[index] for index in members], node.keys // self._block_tokens)
                segment = PrefixSegment(members, first, node.keys, group)
                chosen.append(_Chosen(segment, node.own_saving(first), share * node.spared_keys(first)))
        return chosen


@dataclass(frozen=True, slots=True)
class _Chosen:
    segment: PrefixSegment
    saved_us: float
    spared_keys: float


def _shared_table(sequence: Sequence | None) -> bytes:
    assert sequence is not None
    return sequence.table[: sequence.shared_blocks].tobytes()


def _assert_one_namespace(members: Items[Sequence | None], blocks: int) -> None:
    """Asserts that the blocks which all members read belong to one namespace, unless they are public."""
    namespaces = [member.namespace for member in members if member is not None and member.public_blocks < blocks]
    if not namespaces:
        return
    assert None not in namespaces
    assert namespaces.count(namespaces[0]) == len(members), "a group of two namespaces"


def _common_blocks(leading: list[bytes]) -> NDArray[np.int64]:
    """How many blocks each of these tables has in common with the next one: N − 1 of them for N tables.

    Where the last of so many blocks is the same, the ones before are: a search by halves for all at once.
    """
    blocks = np.frombuffer(b"".join(leading), np.int32)
    lengths_N = np.array([len(table) // 4 for table in leading])
    starts_N = lengths_N.cumsum() - lengths_N
    max_N = np.minimum(lengths_N[:-1], lengths_N[1:])
    ends_N, next_ends_N = starts_N[:-1] - 1, starts_N[1:] - 1
    common_N: NDArray[np.int64] = np.zeros_like(max_N)
    step = 1 << int(max_N.max()).bit_length()
    while step := step >> 1:
        longer_N = common_N + step
        tried_N = np.minimum(longer_N, max_N)
        same_N = blocks[ends_N + tried_N] == blocks[next_ends_N + tried_N]
        common_N += step * (same_N & (longer_N <= max_N))
    return common_N


@dataclass(slots=True)
class _Node:
    """Tables start … end−1 of those in order have their first `keys` keys in common, and each child's more than that.
    Only `readers` of them are worth reading these together, from key `begin` on: where all see all, everybody from 0.

    What a choice saves here, in µs, is a line over the keys that are in segments above: `value` − `rate` · keys above.
    One line is for taking this node's keys as a segment, one for leaving them to its children or to their sequences.
    """

    keys: int
    start: int
    end: int = 0
    children: "list[_Node]" = field(default_factory=list)
    readers: int = 0
    begin: int = 0
    own_value: float = 0.0
    take_rate: float = 0.0
    take_value: float = 0.0
    leave_rate: float = 0.0
    leave_value: float = 0.0

    def saving_if_taken(self, above: int) -> float:
        return self.take_value - self.take_rate * max(above, self.begin)

    def saving_if_left(self, above: int) -> float:
        return self.leave_value - self.leave_rate * above

    def own_saving(self, above: int) -> float:
        """What its segment alone saves."""
        return self.own_value - self.take_rate * max(above, self.begin)

    def spared_keys(self, above: int) -> int:
        """How many keys are not read because of its segment."""
        return (self.readers - 1) * (self.keys - max(above, self.begin))


def _tree(common_N: list[int]) -> _Node:
    """The radix tree of tables in order, of which each has common_N[i] keys in common with the next one."""
    open_nodes = [_Node(0, 0)]
    for index, keys in enumerate([*common_N, 0]):
        start, closed = index, None
        while open_nodes[-1].keys > keys:
            closed = open_nodes.pop()
            closed.end, start = index + 1, closed.start
            if open_nodes[-1].keys >= keys:
                open_nodes[-1].children.append(closed)
                closed = None
        if open_nodes[-1].keys < keys:
            open_nodes.append(_Node(keys, start, children=[] if closed is None else [closed]))
    root = open_nodes[0]
    root.end = len(common_N) + 1
    return root


class _Choice:
    """Which nodes of a tree become segments. Up from the leaves it weighs, down from the root it chooses.

    A node that is left gives its keys to the taken nodes below it, whose segments then begin earlier. Leaving is
    weighed as if the node above were taken, so that each node is looked at twice and no more: what that misses is a
    fraction of a percent.
    """

    def __init__(self, costs: CostModel, share: float, seen_N: NDArray[np.int64] | None) -> None:
        """`share`: of the layers, which read the segments; seen_N: the first key that each table's sequence sees there,
        None where all see everything."""
        self._apart_us = share * (costs.key_us - costs.pair_us)  # saved by each member for each key,
        self._together_us = share * costs.shared_key_us  # but for this once
        self._segment_us = share * costs.segment_us
        self._seen_N = seen_N

    def nodes_of(self, root: _Node) -> list[tuple[_Node, int]]:
        """The nodes taken, each with the key at which its segment begins, upper nodes first."""
        order = [(root, 0)]
        for node, _ in order:
            order += [(child, node.keys) for child in node.children]
        for node, above in reversed(order):
            self._weigh(node, above)
        chosen = []
        nodes = [(root, 0, 0)]
        for node, above, segments in nodes:
            if node.saving_if_taken(above) > node.saving_if_left(above):
                chosen.append((node, above))
                above, segments = node.keys, segments + 1
            if segments < SEGMENTS_MAX:
                nodes += [(child, above, segments) for child in node.children]
        return chosen

    def _weigh(self, node: _Node, above: int) -> None:
        self._count_readers(node, above)
        node.take_rate = node.readers * self._apart_us - self._together_us if node.readers else 0.0
        node.own_value = node.take_value = node.take_rate * node.keys - self._segment_us
        for child in node.children:
            node.take_value += max(child.saving_if_taken(node.keys), child.saving_if_left(node.keys))
            if child.saving_if_taken(above) <= child.saving_if_left(above):
                node.leave_rate += child.leave_rate
                node.leave_value += child.leave_value
            elif child.begin > above:
                node.leave_value += child.saving_if_taken(above)
            else:
                node.leave_rate += child.take_rate
                node.leave_value += child.take_value

    def _count_readers(self, node: _Node, above: int) -> None:
        """Finds those who read most together: each one more reads along, and all begin where the last of them sees."""
        node.readers = node.end - node.start
        if self._seen_N is None:
            return
        seen_M = np.sort(self._seen_N[node.start : node.end])
        each_us_M = np.arange(1, node.readers + 1) * self._apart_us - self._together_us
        saved_M = np.maximum(0, node.keys - np.maximum(seen_M, above)) * each_us_M
        best = int(saved_M.argmax())
        node.readers, node.begin = (best + 1, int(seen_M[best])) if saved_M[best] > 0 else (0, node.keys)
