"""Groups against tables read block by block, against the best choice there is, and in time."""

import random
import time
from array import array
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import pytest

from engine.protocol.types import SamplingParams
from engine.scheduling.prefix_groups import PrefixGroups
from engine.sequences.sequence import Sequence
from engine.step.cost_model import CostModel
from engine.step.key_span import FULL, KeySpan
from engine.step.layout import SEGMENTS_MAX, PrefixSegment, SequenceSlice, pack_step, unpack_step
from prefixcache.tree import Namespace

CHEAP = CostModel(
    ((1, 1.0),), key_us=1.0, shared_key_us=1.0, pair_us=0.1, prompt_pair_us=0.1, segment_us=0.5, groups_us=0.0
)
H200 = CostModel(
    ((1, 4200.0),), key_us=0.0356, shared_key_us=0.1, pair_us=0.0011, prompt_pair_us=0.0018, segment_us=1.0,
    groups_us=550.0,
)  # fmt: skip
SIZE = 16


def _namespace(name: int = 0) -> Namespace:
    return Namespace("m", "", "m", "kv", SIZE, 1, bytes([name]) * 16, 0)


def _sequence(shared: Items[int], own: Items[int] = (10**6,), namespace: Namespace | None = None) -> Sequence:
    """One that decodes: `shared` blocks of the tree, then blocks of its own."""
    computed = (len(shared) + len(own)) * SIZE - 1
    sequence = Sequence(
        1, 1, b"", namespace or _namespace(), array("I", bytes(4 * (computed + 1))), 1, 10**6, SamplingParams(),
        frozenset(),
        0.0, computed=computed, launched=computed,
    )  # fmt: skip
    sequence.append_pages([*shared, *own])
    sequence.shared_blocks = len(shared)
    return sequence


def _segments(sequences: Items[Sequence | None], costs: CostModel = CHEAP) -> list[tuple[list[int], int, int]]:
    segments = PrefixGroups(costs, SIZE).segments(list(sequences))
    return sorted((list(each.members), each.first // SIZE, each.last // SIZE) for each in segments)


def _behind_one_prefix(count: int, blocks: int, name: int = 0) -> list[Sequence]:
    first = name * 100_000
    return [_sequence([*range(first, first + blocks), first + 50_000 + own]) for own in range(count)]


def test_two_with_the_same_blocks_read_them_together() -> None:
    assert _segments([_sequence([1, 2, 3, 4]), _sequence([1, 2, 3, 5])]) == [([0, 1], 0, 3)]


def test_sequences_with_nothing_in_common_stay_alone() -> None:
    assert _segments([_sequence([1, 2]), _sequence([3, 4]), _sequence([]), None]) == []
    assert _segments([]) == []
    assert _segments([None]) == []


def test_slices_keep_their_numbers_beside_those_that_take_no_part() -> None:
    sharing = [_sequence([1, 2, 3]), _sequence([1, 2, 4])]
    assert _segments([None, sharing[0], _sequence([9]), None, sharing[1]]) == [([1, 4], 0, 2)]


def test_a_conversation_follows_the_system_prompt_of_all() -> None:
    texts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7], [1, 2, 8]]
    assert _segments([_sequence(each) for each in texts]) == [([0, 1], 2, 4), ([0, 1, 2, 3], 0, 2)]


def test_one_table_may_be_the_beginning_of_another() -> None:
    assert _segments([_sequence([1, 2, 3]), _sequence([1, 2, 3, 4]), _sequence([1, 2])]) == [
        ([0, 1], 2, 3),
        ([0, 1, 2], 0, 2),
    ]


def test_a_short_common_beginning_is_left_to_longer_groups() -> None:
    costs = replace(CHEAP, segment_us=100.0)
    texts = [[1, *range(10, 90), one] for one in (2, 3, 4)] + [[1, *range(110, 190), one] for one in (5, 6, 7)]
    assert _segments([_sequence(each) for each in texts], costs) == [([0, 1, 2], 0, 81), ([3, 4, 5], 0, 81)]


def test_inner_groups_that_do_not_pay_are_left_to_their_sequences() -> None:
    costs = replace(CHEAP, segment_us=100.0)
    texts = [[*range(1, 90), 200, 201], [*range(1, 90), 200, 202], [*range(1, 90), 300]]
    assert _segments([_sequence(each) for each in texts], costs) == [([0, 1, 2], 0, 89)]


@pytest.mark.parametrize(
    ("count", "tokens", "grouped"), [(64, 4096, True), (256, 4096, True), (128, 16384, True), (2, 64, False)]
)
def test_what_pays_on_an_h200(count: int, tokens: int, grouped: bool) -> None:
    members = list(range(count))
    expected = [(members, 0, tokens // SIZE)] if grouped else []
    assert _segments(_behind_one_prefix(count, tokens // SIZE), H200) == expected


def test_many_small_groups_pay_for_what_the_first_costs_where_one_does_not() -> None:
    groups = [_behind_one_prefix(8, 64, name) for name in range(16)]
    assert _segments(groups[0], H200) == []
    assert len(_segments([each for group in groups for each in group], H200)) == 16


def test_nothing_is_grouped_where_pairs_cost_as_much_as_keys() -> None:
    assert _segments(_behind_one_prefix(64, 256), replace(CHEAP, pair_us=float("inf"))) == []
    assert _segments(_behind_one_prefix(64, 256), replace(CHEAP, pair_us=CHEAP.key_us)) == []


def test_a_sequence_is_in_a_few_segments_at_most() -> None:
    texts = [[*range(10 * depth), 10_000 + depth] for depth in range(1, 30)]
    segments = _segments([_sequence(each) for each in texts])
    counts = np.bincount([member for members, _, _ in segments for member in members])
    assert counts.max() == SEGMENTS_MAX


def test_groups_are_computed_again_where_somebody_came_or_was_told_to_have_changed() -> None:
    groups, sequences = PrefixGroups(CHEAP, SIZE), [_sequence(each) for each in ([1, 2], [1, 3], [4])]
    before = groups.segments([*sequences])
    assert groups.segments([*sequences]) is before
    sequences[1].append_pages([9])
    sequences[1].shared_blocks += 1  # a block of its own became full
    assert groups.segments([*sequences]) is before
    sequences[2].table[0] = 1
    groups.invalidate()
    assert [list(each.members) for each in groups.segments([*sequences])] == [[0, 1, 2]]
    assert [list(each.members) for each in groups.segments([*sequences[1:]])] == [[0, 1]]


def test_blocks_that_two_namespaces_claim_are_found_out() -> None:
    with pytest.raises(AssertionError, match="two namespaces"):
        _segments([_sequence([1, 2], namespace=_namespace(1)), _sequence([1, 2], namespace=_namespace(2))])


def _plan(pick: random.Random) -> list[Sequence | None]:
    """Sequences of several namespaces over random trees, in which no block has two places; some take no part."""
    paths: list[tuple[int, list[int]]] = [(name, []) for name in range(pick.randint(1, 4))]
    blocks = iter(range(10**6))
    sequences: list[Sequence | None] = []
    for _ in range(pick.randint(1, 24)):
        name, path = pick.choice(paths)
        path = [*path[: pick.randint(0, len(path))], *(next(blocks) for _ in range(pick.choice([0, 1, 2, 9])))]
        paths.append((name, path))
        sequences.append(None if pick.random() < 0.1 else _sequence(path, [next(blocks)], _namespace(name)))
    return sequences


def _random_costs(pick: random.Random) -> CostModel:
    return replace(
        CHEAP,
        pair_us=pick.choice([0.0, 0.1, 0.5]),
        shared_key_us=pick.choice([0.5, 1.0, 2.0]),
        segment_us=pick.choice([0.0, 10.0, 40.0, 160.0]),
    )


@pytest.mark.parametrize("seed", range(300))
def test_no_group_reads_what_is_not_its_members(seed: int) -> None:
    pick = random.Random(seed)
    sequences = _plan(pick)
    segments = PrefixGroups(_random_costs(pick), SIZE).segments(sequences)
    for segment in segments:
        members = [sequences[index] for index in segment.members]
        first, last = segment.first // SIZE, segment.last // SIZE
        reading = [each for each in members if each is not None and each.shared_blocks >= last]
        assert len(reading) == len(members) > 1
        assert len({each.namespace for each in reading}) == 1
        assert len({each.table[first:last].tobytes() for each in reading}) == 1
    taking_part = [each for each in sequences if each is not None]
    numbers = {index: number for number, index in enumerate(i for i, each in enumerate(sequences) if each is not None)}
    slices = [SequenceSlice([0], each.launched, [each.table[: each.block_count]]) for each in taking_part]
    renamed = [PrefixSegment([numbers[i] for i in each.members], each.first, each.last) for each in segments]
    if slices:
        batch = unpack_step(pack_step(slices, SIZE, renamed))  # asserts that there is no gap, and a key left for each
        assert len(batch.segments_N5) == len(segments)


def _windowed(costs: CostModel, *windows: tuple[int, float]) -> CostModel:
    return replace(costs, windows=windows)


def test_what_a_window_shows_of_a_prefix_is_read_together_there_too() -> None:
    sequences: list[Sequence | None] = [_sequence([*range(100), 200 + own], [1000 + own]) for own in range(8)]
    position, keys = 102 * SIZE - 1, 100 * SIZE
    for span in (KeySpan(window=800), KeySpan(chunk=1024)):
        groups = PrefixGroups(_windowed(CHEAP, (800, 0.75)), SIZE, (FULL, span))
        segments = groups.segments(sequences)
        assert [(each.members, each.first, each.last, each.group) for each in segments] == [
            ([*range(8)], 0, keys, 0),
            ([*range(8)], 0, keys, 1),
        ]
        seen = keys - span.first(position)
        assert groups.spared_keys == round(7 * (0.25 * keys + 0.75 * max(0, seen)))
        rate = 8 * (CHEAP.key_us - CHEAP.pair_us) - CHEAP.shared_key_us
        assert groups.saved_us == pytest.approx(rate * (0.25 * keys + 0.75 * seen) - CHEAP.segment_us)


def test_what_no_window_shows_is_read_together_by_the_other_layers_alone() -> None:
    sequences: list[Sequence | None] = [_sequence(range(100), range(10**6, 10**6 + 50)) for _ in range(8)]
    groups = PrefixGroups(_windowed(CHEAP, (800, 0.75)), SIZE, (FULL, KeySpan(window=800)))
    assert [each.group for each in groups.segments(sequences)] == [0]
    groups = PrefixGroups(_windowed(CHEAP, (800, 1.0)), SIZE, (KeySpan(window=800),))
    assert groups.segments(sequences) == []
    assert groups.saved_us == groups.spared_keys == 0


def test_models_without_a_full_layer_read_together_what_they_see() -> None:
    costs = _windowed(CHEAP, (800, 0.5), (256, 0.5))
    sequences: list[Sequence | None] = [_sequence([*range(60), 100 + own]) for own in range(4)]
    groups = PrefixGroups(costs, SIZE, (KeySpan(window=800), KeySpan(window=256)))
    segments = groups.segments(sequences)
    assert [(each.first, each.last, each.group) for each in segments] == [(0, 960, 0), (0, 960, 1)]


def test_one_who_sees_little_counts_for_little() -> None:
    ahead = _sequence(range(100), range(10**6, 10**6 + 40))
    sequences: list[Sequence | None] = [ahead, *(_sequence([*range(100), 200 + own]) for own in range(7))]
    groups = PrefixGroups(_windowed(CHEAP, (800, 1.0)), SIZE, (KeySpan(window=800),))
    groups.segments(sequences)
    alone = PrefixGroups(_windowed(CHEAP, (800, 1.0)), SIZE, (KeySpan(window=800),))
    alone.segments(sequences[1:])
    assert groups.saved_us == pytest.approx(alone.saved_us), "the seven read on without it"


def test_a_conversation_in_a_window_follows_what_the_window_hides() -> None:
    """The prompt of all is out of sight, and yet the conversation's segment begins behind it, or at key 0."""
    texts = [
        [*range(100), *range(1000 + 50 * name, 1050 + 50 * name), 10**5 + own] for name in (0, 1) for own in (1, 2)
    ]
    sequences: list[Sequence | None] = [_sequence(text) for text in texts]
    groups = PrefixGroups(_windowed(CHEAP, (640, 1.0)), SIZE, (KeySpan(window=640),))
    segments = groups.segments(sequences)
    assert sorted((each.members, each.first, each.last) for each in segments) == [
        ([0, 1], 0, 150 * SIZE),
        ([2, 3], 0, 150 * SIZE),
    ]


def test_windows_that_move_on_have_segments_chosen_anew_after_some_steps() -> None:
    sequences: list[Sequence | None] = [_sequence([*range(100), 200 + own]) for own in range(8)]
    groups = PrefixGroups(_windowed(CHEAP, (800, 1.0)), SIZE, (KeySpan(window=800),))
    steps = 0
    while groups.segments(sequences):
        steps += 1
        for sequence in sequences:
            assert sequence is not None
            sequence.append_pages([10**6])
            sequence.launched += 8
    assert 0 <= 8 * steps - 800 < 8 * 64


@pytest.mark.parametrize("seed", range(100))
def test_random_segments_in_windows_can_be_packed_and_save_what_is_said(seed: int) -> None:
    pick = random.Random(seed)
    sequences = [each for each in _plan(pick) if each is not None]
    costs = _windowed(_random_costs(pick), (pick.choice([16, 60, 200]), 0.5), (pick.choice([32, 128]), 0.25))
    spans = (FULL, KeySpan(window=costs.windows[0][0]), KeySpan(chunk=costs.windows[1][0]))
    groups = PrefixGroups(costs, SIZE, spans)
    segments = groups.segments([*sequences])
    slices = [SequenceSlice([0], each.launched, [each.table[: each.block_count]] * 3) for each in sequences]
    if not slices:
        return
    unpack_step(pack_step(slices, SIZE, segments))  # asserts that there is no gap, and a key left for each
    saved, shares = 0.0, (0.25, 0.5, 0.25)
    for each in segments:
        seen = sorted(max(each.first, spans[each.group].first(sequences[index].launched)) for index in each.members)
        rates = [count * (costs.key_us - costs.pair_us) - costs.shared_key_us for count in range(1, len(seen) + 1)]
        most = max(rate * (each.last - first) for rate, first in zip(rates, seen, strict=True))
        saved += shares[each.group] * (max(0.0, most) - costs.segment_us)
    assert groups.saved_us <= saved + 1e-6
    assert groups.saved_us >= 0.9 * saved - 1e-6


def _saved(segments: Items[PrefixSegment], costs: CostModel) -> float:
    return sum(
        (each.last - each.first) * (len(each.members) * (costs.key_us - costs.pair_us) - costs.shared_key_us)
        - costs.segment_us
        for each in segments
    )


def _best(tables: list[list[int]], above: int, costs: CostModel) -> float:
    """The most that any choice of segments saves, by trying every node of the radix tree with every beginning."""
    if len(tables) < 2:
        return 0.0
    columns = enumerate(zip(*tables, strict=False))
    common = next((at for at, column in columns if len(set(column)) > 1), min(map(len, tables)))
    children: dict[int, list[list[int]]] = {}
    for table in tables:
        if len(table) > common:
            children.setdefault(table[common], []).append(table)
    left = sum(_best(child, above, costs) for child in children.values())
    if common <= above:
        return left
    rate = len(tables) * (costs.key_us - costs.pair_us) - costs.shared_key_us
    saved = (common - above) * SIZE * rate - costs.segment_us
    return max(left, saved + sum(_best(child, common, costs) for child in children.values()))


def test_choices_are_the_best_there_are_but_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scheduling.prefix_groups.SEGMENTS_MAX", 99)
    best = saved = 0.0
    for seed in range(300):
        pick = random.Random(seed)
        sequences, costs = _plan(pick), _random_costs(pick)
        tables = [each.table[: each.shared_blocks].tolist() for each in sequences if each is not None]
        best += (most := _best(tables, 0, costs))
        groups = PrefixGroups(costs, SIZE)
        saved += (some := _saved(groups.segments(sequences), costs))
        assert groups.saved_us == pytest.approx(some)
        assert 0 <= some <= most + 1e-6
    assert saved > 0.99 * best


def _took_ms(groups: PrefixGroups, sequences: list[Sequence | None], changed: bool) -> float:
    """The least of some measurements of this thread's own time: other work on the host lengthens the rest."""
    took = []
    for _ in range(9):
        if changed:
            groups.invalidate()
        start = time.thread_time()
        groups.segments(sequences)
        took.append((time.thread_time() - start) * 1e3)
    return min(took)


def test_it_takes_next_to_nothing() -> None:
    one: list[Sequence | None] = [*_behind_one_prefix(256, 256)]
    fifty: list[Sequence | None] = [each for name in range(50) for each in _behind_one_prefix(10, 256, name)]
    groups = PrefixGroups(H200, SIZE)
    groups.segments(one)
    assert _took_ms(groups, [*one], False) < 0.3
    assert _took_ms(groups, fifty, True) < 5  # 1.1 where this was written
