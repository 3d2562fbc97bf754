"""Costs measured on devices whose costs are known."""

import random
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from engine.scheduling.prefix_groups import PrefixGroups
from engine.step.cost_model import CostModel
from engine.step.layout import Int32s, unpack_step
from engine.step.profiling import ProfilingLimits, profile_costs
from tests.engine.scheduling.test_prefix_groups import _behind_one_prefix

ROWS = (1, 16, 64, 128, 256, 512)
LARGE = ProfilingLimits(blocks=40_000, block_tokens=16, context_tokens=131_072, sequences=512)
TRUE = CostModel(
    rows=((1, 3800.0), (16, 3900.0), (64, 4200.0), (128, 5000.0), (256, 7000.0), (512, 12_000.0)),
    key_us=0.031,
    shared_key_us=0.035,
    pair_us=0.0008,
    prompt_pair_us=0.0007,
    segment_us=20.0,
    groups_us=500.0,
)


class Clockwork:
    """A device that takes exactly what its costs say, and noise."""

    def __init__(self, costs: CostModel, room: ProfilingLimits, noise_us: float = 0.0) -> None:
        self.costs = costs
        self.room = room
        self.noise_us = noise_us
        self.random = random.Random(1)
        self.launches = 0

    def launch_ms(self, packed: Int32s, launches: int) -> float:
        self.launches += 1 + launches
        return median(self._us(packed) + self.random.gauss(0, self.noise_us) for _ in range(launches)) / 1e3

    def _us(self, packed: Int32s) -> float:
        batch, costs, room = unpack_step(packed), self.costs, self.room
        assert batch.tables_GSW[0].max() < room.blocks
        assert batch.positions_T.max() < room.context_tokens
        assert len(batch.contexts_S) <= room.sequences
        took = costs.rows_us(len(batch.tokens_T))
        lengths_S = np.diff(batch.query_starts_S1)
        shares = [costs.full_share] * room.full + [share for _, share in costs.windows]
        seen_S = np.array([costs.seen(int(keys)) for keys in batch.contexts_S]) - shares @ batch.own_starts_GS
        took += costs.key_us * seen_S[lengths_S == 1].sum()
        wide_T = np.repeat(lengths_S > 1, lengths_S)
        took += costs.prompt_pair_us * sum(costs.seen(int(position) + 1) for position in batch.positions_T[wide_T])
        took += costs.groups_us * (len(batch.segments_N5) > 0)
        for group, share in enumerate(shares):
            for _, first, last, members_M in batch.segments(group):
                keys_us = (last - first) * (costs.shared_key_us + len(members_M) * costs.pair_us)
                took += share * (costs.segment_us + keys_us)
        return float(took)


@pytest.mark.parametrize("noise_us", [0.0, 3.0])
def test_known_costs_are_found_again(noise_us: float) -> None:
    clockwork = Clockwork(TRUE, LARGE, noise_us)
    found = profile_costs(clockwork.launch_ms, ROWS, LARGE)
    for name in ("key_us", "shared_key_us", "pair_us", "prompt_pair_us", "segment_us", "groups_us"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    for rows in (1, 16, 100, 256, 512, 2000):
        assert found.rows_us(rows) == pytest.approx(TRUE.rows_us(rows), rel=0.05)
    assert clockwork.launches <= 80


WINDOWS = [((1024, 0.75),), ((128, 0.5), (4096, 0.25))]


@pytest.mark.parametrize("windows", WINDOWS)
def test_costs_are_found_where_most_layers_see_a_window(windows: tuple[tuple[int, float], ...]) -> None:
    room = replace(LARGE, groups=1 + len(windows), windows=windows)
    found = profile_costs(Clockwork(replace(TRUE, windows=windows), room).launch_ms, ROWS, room)
    assert found.windows == windows
    for name in ("key_us", "shared_key_us", "pair_us", "prompt_pair_us", "segment_us", "groups_us"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name


@pytest.mark.parametrize("windows", [((256, 1.0),), ((128, 0.25), (4096, 0.75))])
def test_costs_are_found_where_no_layer_sees_everything(windows: tuple[tuple[int, float], ...]) -> None:
    room = replace(LARGE, groups=len(windows), windows=windows)
    found = profile_costs(Clockwork(replace(TRUE, windows=windows), room).launch_ms, ROWS, room)
    for name in ("key_us", "shared_key_us", "pair_us", "prompt_pair_us", "segment_us", "groups_us"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name


def test_groups_never_pay_where_no_row_sees_a_segment_and_more() -> None:
    windows = ((40, 1.0),)
    room = replace(LARGE, groups=1, windows=windows)
    found = profile_costs(Clockwork(replace(TRUE, windows=windows), room).launch_ms, ROWS, room)
    assert found.pair_us == float("inf")


@pytest.mark.parametrize("windows", [(), *WINDOWS, ((256, 1.0),)])
def test_rows_see_together_what_each_of_them_sees(windows: tuple[tuple[int, float], ...]) -> None:
    costs = replace(TRUE, windows=windows)
    for start, rows in ((0, 1), (0, 300), (100, 50), (200, 100), (5000, 1), (5000, 700)):
        each = sum(costs.seen(position + 1) for position in range(start, start + rows))
        assert costs.pairs(start, rows) == pytest.approx(each)
    shares = 1.0 - sum(share for _, share in windows)
    assert costs.seen(10_000) == pytest.approx(10_000 * shares + sum(most * share for most, share in windows))


def test_what_is_found_groups_alike() -> None:
    sequences = [*_behind_one_prefix(64, 256), *_behind_one_prefix(2, 4, 1)]
    found = profile_costs(Clockwork(TRUE, LARGE, 3.0).launch_ms, ROWS, LARGE)
    (segment,) = PrefixGroups(found, 16).segments([*sequences])
    assert (len(segment.members), segment.first, segment.last) == (64, 0, 4096)


@pytest.mark.parametrize("blocks", [1, 16, 64, 5000])
@pytest.mark.parametrize("sequences", [1, 2, 64])
def test_small_pools_and_few_sequences_give_costs_too(blocks: int, sequences: int) -> None:
    room = ProfilingLimits(blocks, block_tokens=16, context_tokens=min(256, blocks * 16), sequences=sequences)
    found = profile_costs(Clockwork(TRUE, room).launch_ms, (1, 16, 64), room)
    assert found.rows_us(16) == pytest.approx(3900.0, rel=0.05)
    assert min(found.key_us, found.shared_key_us, found.pair_us, found.prompt_pair_us) > 0
    assert (found.pair_us < float("inf")) == (sequences == 64 and blocks == 5000)  # else there is no room for groups


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("context_tokens", [1, 8, 16, 40, 128, 191])
def test_short_contexts_are_not_left_and_give_costs_too(context_tokens: int, block_tokens: int) -> None:
    room = replace(LARGE, context_tokens=context_tokens, block_tokens=block_tokens)
    found = profile_costs(Clockwork(TRUE, room).launch_ms, ROWS, room)
    assert found.rows_us(16) == pytest.approx(3900.0, rel=0.05)
    assert min(found.key_us, found.shared_key_us, found.pair_us, found.prompt_pair_us) > 0
    assert (found.pair_us < float("inf")) == (context_tokens >= 3 * block_tokens)  # else a segment has nothing behind


def test_a_device_without_any_order_still_gives_positive_ascending_costs() -> None:
    found = profile_costs(Clockwork(TRUE, LARGE, 3000.0).launch_ms, ROWS, LARGE)
    took = [us for _, us in found.rows]
    assert took == sorted(took)
    assert took[0] > 0
    assert min(found.key_us, found.shared_key_us, found.pair_us, found.prompt_pair_us, found.segment_us) > 0


@pytest.mark.parametrize(("sequences", "block_tokens"), [(512, 16), (512, 64), (8, 8), (64, 16)])
def test_blocks_that_are_not_used_change_no_measurement(sequences: int, block_tokens: int) -> None:
    large = replace(LARGE, sequences=sequences, block_tokens=block_tokens)

    def steps(room: ProfilingLimits) -> list[bytes]:
        seen: list[bytes] = []

        def launch_ms(packed: Int32s, launches: int) -> float:
            seen.append(packed.tobytes())
            return 1.0

        profile_costs(launch_ms, ROWS, room)
        return seen

    assert large.used_blocks < large.blocks
    assert steps(replace(large, blocks=large.used_blocks)) == steps(large)
    assert steps(replace(large, blocks=large.used_blocks // 4)) != steps(large)
