"""Models of several ranks in the policy of residency: they come to all of their devices at once or to none."""

import random
import re
from dataclasses import replace

import pytest

from engine.placement.capacity import TUPLES_MAX, PlacementCapacity, candidate_tuples
from engine.placement.policy import estimate_ready_ms, unplaceable_reason
from engine.placement.snapshot import MoveAllowance, PlacementPreferences
from tests.engine.placement.simulation import DEVICE, DISK, GB, MEMORY, Machine, Model, Request, four_devices
from tests.engine.placement.test_policy import NOW, asleep, awake, moves, on_disk, only, view, waits

PAIR = {"device_count": 2}
BOTH = {**PAIR, "devices": (0, 1)}
TWO = (39 * GB, 39 * GB)
FOUR = (39 * GB,) * 4


def test_a_pair_starts_on_the_two_devices_with_the_most_room_and_takes_as_much_of_each() -> None:
    seen = view(awake("a"), awake("b", devices=(2,)), on_disk("p", **PAIR, **waits()), devices=FOUR)
    move = only(seen)
    assert (move.name, move.residency, move.devices) == ("p", DEVICE, (1, 3))
    assert move.device_bytes == 30 * GB


def test_among_equal_devices_the_lower_indices_are_claimed_first() -> None:
    assert only(view(on_disk("p", **PAIR, **waits()), devices=FOUR)).devices == (0, 1)


def test_a_pair_waits_for_both_devices_and_nothing_comes_to_either_before_it() -> None:
    runs = awake("runs", devices=(1,), running=1, device_bytes=30 * GB, granted_bytes=30 * GB, min_bytes=30 * GB)
    pair, single = asleep("p", **BOTH, **waits(1.0)), asleep("s", min_bytes=30 * GB, **waits(0.5))
    assert not moves(view(runs, pair, single, devices=TWO))
    assert moves(view(runs, asleep("p", **BOTH), single, devices=TWO)) == [("s", DEVICE)]


def test_room_for_a_pair_is_made_on_both_devices_at_once_or_on_none() -> None:
    pair = asleep("p", **BOTH, min_bytes=30 * GB, **waits(1.0))
    idle, other = awake("a"), awake("b", devices=(1,))
    assert moves(view(idle, other, pair, devices=TWO)) == [("a", MEMORY), ("b", MEMORY)]
    assert not moves(view(idle, replace(other, running=1), pair, devices=TWO))
    assert not moves(view(idle, replace(other, placed_at=NOW), pair, devices=TWO))


def test_kv_shrinks_on_each_device_by_what_is_missing_there() -> None:
    grown = {"device_bytes": 30 * GB, "granted_bytes": 30 * GB}
    seen = view(awake("a", **grown), awake("b", devices=(1,)), asleep("p", **BOTH, **waits()), devices=TWO)
    move = only(seen)
    assert (move.name, move.device_bytes) == ("a", 39 * GB - 18 * GB)


def test_a_pair_that_leaves_frees_both_devices_and_is_counted_once() -> None:
    pair = awake("p", **BOTH)
    singles = [asleep(f"s{device}", devices=(device,), min_bytes=30 * GB, **waits()) for device in (0, 1)]
    assert moves(view(pair, *singles, devices=TWO)) == [("p", MEMORY)]


def test_one_pair_that_leaves_is_better_than_two_of_the_same_cost() -> None:
    rate = {"request_rate": 0.1, "requested_at": NOW - 2}
    singles = [awake(f"s{device}", devices=(device,), **rate) for device in (0, 1)]
    pair = awake("p", **PAIR, devices=(2, 3), **rate)
    wanted = on_disk("w", **PAIR, min_bytes=30 * GB, **waits())
    assert moves(view(*singles, pair, wanted, devices=FOUR)) == [("p", MEMORY)]


def test_two_pairs_that_share_a_device_wake_one_after_the_other_in_the_order_of_their_calls() -> None:
    first = asleep("p", device_count=2, devices=(1, 2), **waits(2.0))
    second = asleep("q", device_count=2, devices=(0, 1), **waits(1.0))
    seen = view(first, second, awake("a"), awake("b", devices=(2,)), devices=(38 * GB,) * 3)
    assert moves(seen) == [("p", DEVICE)]
    assert moves(replace(seen, replicas=(replace(first, waited_s=0.5), *seen.replicas[1:]))) == [("q", DEVICE)]


def test_a_pair_waits_for_the_links_of_both_devices_and_no_later_wake_takes_one() -> None:
    wakes = asleep("a", toward=DEVICE, granted_bytes=18 * GB)
    pair, later = asleep("p", **BOTH, **waits(1.0)), asleep("s", devices=(1,), **waits(0.5))
    assert not moves(view(wakes, pair, later, devices=(90 * GB, 90 * GB)))
    assert moves(view(wakes, later, devices=(90 * GB, 90 * GB))) == [("s", DEVICE)]


def test_a_pair_that_is_to_start_keeps_a_device_free_while_another_starts_on_the_second() -> None:
    starts = on_disk("a", toward=DEVICE, devices=(0,), granted_bytes=18 * GB)
    pair, later = on_disk("p", **PAIR, **waits(1.0)), on_disk("s", **waits(0.5))
    devices = (90 * GB, 90 * GB)
    assert not moves(view(starts, pair, later, devices=devices))
    assert moves(view(starts, later, devices=devices)) == [("s", DEVICE)]
    assert estimate_ready_ms(view(starts, pair, devices=devices), pair) == 8000


def test_kv_of_a_pair_grows_by_what_both_devices_have_and_is_taken_from_both() -> None:
    short = awake("p", **BOTH, kv_short=True, running=4)
    grown = only(view(short, awake("a", devices=(1,)), devices=(80 * GB, 40 * GB)))
    assert (grown.name, grown.devices, grown.device_bytes) == ("p", (0, 1), 20 * GB)
    rich = {"device_bytes": 24 * GB, "granted_bytes": 24 * GB}
    donors = (awake("a", **rich), awake("b", devices=(1,), **rich))
    assert moves(view(short, *donors, devices=(42 * GB, 42 * GB))) == [("a", DEVICE), ("b", DEVICE)]
    assert not moves(view(short, donors[0], awake("b", devices=(1,)), devices=(42 * GB, 36 * GB)))


def test_what_no_machine_of_this_kind_can_hold_is_said_in_words() -> None:
    alone = view(on_disk("p", **PAIR, **waits()))
    assert unplaceable_reason(alone, alone.replicas[0]).startswith("p needs 2 GPUs, and there are 1:")
    assert not moves(alone)
    pinned = awake("a", preferences=PlacementPreferences(pinned=True))
    wide = view(pinned, on_disk("p", **PAIR, min_bytes=30 * GB, **waits()), devices=TWO)
    assert re.search("30,000,000,000 bytes of each of 2 devices.*beside what is pinned", unplaceable_reason(
        wide, wide.replicas[1]))  # fmt: skip
    assert not moves(wide)


def test_a_pair_asleep_whose_device_was_pinned_away_starts_elsewhere() -> None:
    pinned = awake("a", preferences=PlacementPreferences(pinned=True))
    pair = asleep("p", **BOTH, min_bytes=30 * GB, **waits())
    assert moves(view(pinned, pair, devices=FOUR)) == [("p", DISK)]


def test_many_devices_are_weighed_in_runs_of_neighbours() -> None:
    seen = view(on_disk("p", device_count=8), devices=(90 * GB,) * 16)
    tuples = candidate_tuples(PlacementCapacity(seen, MoveAllowance()), seen.replicas[0])
    assert tuples == [tuple(range(first, first + 8)) for first in range(9)]
    assert len(tuples) < TUPLES_MAX


def test_pairs_and_singles_that_contend_without_end_are_all_served() -> None:
    """Three pairs of which each two share a device, and singles that would fill whatever comes free."""
    preferences = PlacementPreferences(resident_s=0.1, wake_s=0.5)
    models = [
        *(Model(f"p{i}", 40 * GB, 40 * GB, preferences, gpus=2) for i in range(3)),
        *(Model(f"s{i}", 40 * GB, 40 * GB, preferences) for i in range(4)),
    ]
    machine = Machine(models, (52 * GB,) * 3, 2000 * GB, bound_s=20.0)
    machine.run([Request(at / 5, models[at % len(models)].name, 32) for at in range(300)])
    assert {replica.model.name for _, replica, move in machine.moves if move.residency is DEVICE} == set(
        machine.replicas
    )


@pytest.mark.parametrize("seed", range(6))
def test_four_devices_keep_what_is_promised_and_serve_everybody(seed: int) -> None:
    machine, trace = four_devices(random.Random(seed))
    machine.run(trace)
