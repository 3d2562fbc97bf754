"""Which keys of a step are read once for many: prefix groups, chosen by what they save. It knows block ids, not texts.

Sequences that begin with the same blocks of the prefix tree may read them together, as segments
(engine/step/layout.py). A block of the tree has one place in it, so where two sequences have the same block they have
the same ones before it:

    a  1 2 3 4 5      0 … 2 blocks may be a segment of a, b and c,
    b  1 2 3 4 6      2 … 4 another one of a and b, behind it, or, if c is not worth it, 0 … 4 one of a and b alone
    c  1 2 7

A block of the tree belongs to one namespace, and so does a group, unless its blocks are public.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.sequence import Sequence
from engine.step.cost_model import CostModel
from engine.step.layout import SEGMENTS_MAX, PrefixSegment


class PrefixGroups:
    """The segments of one step after another, computed anew only where the running sequences, or what they share,
    changed.

    A running sequence lengthens what it has in the tree by blocks that are its alone, which changes no group. Where it
    gets blocks of others, or resumes with other blocks, `invalidate` has to be called.
    """

    def __init__(self, costs: CostModel, block_tokens: int) -> None:
        self._costs = costs
        self._block_tokens = block_tokens
        self._slices: list[Sequence | None] = []
        self._segments: list[PrefixSegment] = []
        self.saved_us = 0.0  # by the segments returned last

    def invalidate(self) -> None:
        """Has the segments computed anew: some sequence shares other blocks than before."""
        self._slices = []

    def segments(self, slices: list[Sequence | None]) -> list[PrefixSegment]:
        """The segments that pay in a step of these slices: a slice is its sequence, or None where it has several rows.

        Costs a comparison of lists, or about 2 µs per sequence where something changed. Neither list may be changed.
        """
        if slices != self._slices:
            self._slices = slices
            self._segments = self._computed(slices)
            self.saved_us = sum(self._saved_us(segment) for segment in self._segments) - self._costs.groups_us
            if self.saved_us <= 0:
                self._segments, self.saved_us = [], 0.0
        return self._segments

    def _computed(self, slices: list[Sequence | None]) -> list[PrefixSegment]:
        sharing = [index for index, sequence in enumerate(slices) if sequence is not None and sequence.shared_blocks]
        leading = {index: _shared_table(slices[index]) for index in sharing}
        sharing.sort(key=leading.__getitem__)
        if len(sharing) < 2 or self._costs.key_us <= self._costs.pair_us:
            return []
        blocks_N = _common_blocks([leading[index] for index in sharing])
        chosen = _Choice(self._costs).nodes_of(_tree((blocks_N * self._block_tokens).tolist()))
        segments = [PrefixSegment(sorted(sharing[node.start : node.end]), first, node.keys) for node, first in chosen]
        for segment in segments:
            _assert_one_namespace([slices[index] for index in segment.members], segment.last // self._block_tokens)
        return segments

    def _saved_us(self, segment: PrefixSegment) -> float:
        keys = segment.last - segment.first
        return keys * _key_saves_us(self._costs, len(segment.members)) - self._costs.segment_us


def _key_saves_us(costs: CostModel, members: int) -> float:
    """What is saved where so many sequences read a key together."""
    return members * (costs.key_us - costs.pair_us) - costs.shared_key_us


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

    What a choice saves here, in µs, is a line over the keys that are in segments above: `value` − `rate` · keys above.
    One line is for taking this node's keys as a segment, one for leaving them to its children or to their sequences.
    """

    keys: int
    start: int
    end: int = 0
    children: "list[_Node]" = field(default_factory=list)
    take_rate: float = 0.0
    take_value: float = 0.0
    leave_rate: float = 0.0
    leave_value: float = 0.0

    def saving_if_taken(self, above: int) -> float:
        return self.take_value - self.take_rate * above

    def saving_if_left(self, above: int) -> float:
        return self.leave_value - self.leave_rate * above


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

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

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
        node.take_rate = _key_saves_us(self._costs, node.end - node.start)
        node.take_value = node.take_rate * node.keys - self._costs.segment_us
        for child in node.children:
            node.take_value += max(child.saving_if_taken(node.keys), child.saving_if_left(node.keys))
            if child.saving_if_taken(above) > child.saving_if_left(above):
                node.leave_rate += child.take_rate
                node.leave_value += child.take_value
            else:
                node.leave_rate += child.leave_rate
                node.leave_value += child.leave_value
