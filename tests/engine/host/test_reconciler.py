"""engine/host/reconciler.py and engine/host/replica_handle.py over real processes: fake replicas that speak the
frames."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import frames
from engine.protocol.frames import ModelDemand
from engine.protocol.types import Residency
from tests.support.fake_replica import BESIDE_BYTES, KEPT_BYTES, MIB
from tests.support.machine import Host, gone, hosting, short_folder
from tests.support.waiting import wait_for

WEIGHTS_BYTES = 400 * MIB
TWO_ROOMS = 1000 * MIB


@pytest.fixture
def short() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@contextlib.contextmanager
def crowd(folder: Path, names: str = "abc", **options: Any) -> Iterator[Host]:
    """Models of which two have room on the one device."""
    sizes = {"device_bytes": TWO_ROOMS, "memory_bytes": 8000 * MIB, "weights_bytes": WEIGHTS_BYTES}
    with hosting(folder, dict.fromkeys(names, "serve"), device="cpu", **{**sizes, **options}) as host:
        yield host


def settled(host: Host, awake: str = "ab") -> str:
    """Waits until all have been started, has these called, and ends that; gives one that sleeps then."""
    started(host)
    call(host, *awake)
    host.until_at(**dict.fromkeys(awake, "DEVICE"))
    host.send(*(ModelDemand(name, 0) for name in awake))
    started(host)
    return next(state.model for state in host.fleet().values() if state.residency is Residency.MEMORY)


def started(host: Host) -> None:
    """Waits until all rest in memory or on the device."""
    wait_for(
        lambda: (
            host.fleet()
            and all(state.residency is state.toward is not Residency.DISK for state in host.fleet().values())
        )
    )


def call(host: Host, *names: str) -> None:
    """Has a gateway that wants these."""
    host.send(*(ModelDemand(name, 1) for name in names))


def within_budget(host: Host) -> bool:
    return all(device.held_bytes <= device.budget_bytes for fleet in host.seen for device in fleet.devices)


def test_more_models_than_have_room_are_all_started_and_a_call_wakes_the_one_that_sleeps(short: Path) -> None:
    with crowd(short) as host:
        sleeper = settled(host)
        assert host.fleet()[sleeper].ready_ms > 0
        assert host.fleet()[sleeper].problem == ""
        call(host, sleeper)
        woken = host.until_serving(sleeper)
        assert (woken.boot, woken.ready_ms, woken.problem) == (1, 0, "")
        assert host.moves()["start"] == 3
        assert host.moves()["wake"] >= 1
        assert host.moves()["sleep"] >= 2
        assert within_budget(host)
        lines = [event for event in host.events("moved") if event["kind"] == "wake" and event["model"] == sleeper]
        line = lines[-1]
        assert line["bytes"] == WEIGHTS_BYTES
        assert {"seconds", "gb_s", "why", "devices"} <= line.keys()


def test_a_model_that_has_its_device_for_itself_gets_all_of_it_and_is_never_moved(short: Path) -> None:
    with crowd(short, "a", device_bytes=None) as host:
        host.until_serving("a")
        wait_for(lambda: host.fleet()["a"].memory)
        host.load("a", free_blocks=0, waiting=5, running=5)
        time.sleep(0.5)
        assert (host.started_spec("a").device_bytes, host.started_spec("a").standby) == (None, False)
        assert host.places("a") == [("DEVICE", None)]


def test_where_all_fit_nobody_sleeps(short: Path) -> None:
    with crowd(short, "ab", device_bytes=3000 * MIB) as host:
        host.until_at(a="DEVICE", b="DEVICE")
        assert not host.started_spec("a").standby
        assert host.moves() == {"start": 2} or set(host.moves()) <= {"start", "grow", "shrink"}


def test_kv_that_is_short_grows_only_when_the_other_has_given_it_up(short: Path) -> None:
    with crowd(short, "ab", device_bytes=1500 * MIB) as host:
        host.until_at(a="DEVICE", b="DEVICE")
        host.load("a", free_blocks=0, running=4, waiting=4)
        before = host.until("a", lambda state: state.memory is not None).memory
        assert before is not None
        grown = host.until("a", lambda state: state.memory is not None and state.memory.device_bytes > 800 * MIB)
        assert grown.residency is Residency.DEVICE
        assert host.moves()["shrink"] >= 1
        assert within_budget(host)


def test_a_replica_that_dies_as_it_wakes_is_started_again_and_the_failure_counted(short: Path) -> None:
    with crowd(short) as host:
        sleeper = settled(host)
        host.move(sleeper, "crash")
        call(host, sleeper)
        host.until(sleeper, lambda state: state.residency is Residency.DISK)
        host.move(sleeper, "ok")
        call(host, sleeper)
        state = host.until_serving(sleeper, boot=2)
        assert state.problem == ""
        assert host.moves()["wake_failed"] == 1
        assert gone(host.pid(sleeper, 1))


def test_a_replica_that_never_answers_an_order_is_killed_at_its_deadline(short: Path) -> None:
    with crowd(short, move_s=0.3) as host:
        sleeper = settled(host)
        host.move(sleeper, "never")
        call(host, sleeper)
        lost = host.until(sleeper, lambda state: state.residency is Residency.DISK)
        assert "no answer for" in lost.problem or lost.boot == 2
        host.move(sleeper, "ok")
        call(host, sleeper)
        host.until_serving(sleeper, boot=2)
        assert host.moves()["wake_failed"] == 1


def test_a_replica_that_serves_and_never_reports_is_killed_and_left_alone_for_a_while_that_doubles(
    short: Path,
) -> None:
    timeouts = {"move_s": 0.4, "deaths": 3, "window_s": 1.0, "quarantine_s": 0.3, "backoff_s": 0.02}
    sizes = {"device_bytes": TWO_ROOMS, "memory_bytes": 8000 * MIB, "weights_bytes": WEIGHTS_BYTES}
    with hosting(short, {"a": "serve", "b": "serve", "c": "deaf"}, device="cpu", **sizes, **timeouts) as host:
        left = host.until("c", lambda state: state.quarantined)
        assert "died 3 times" in left.problem
        assert "to its order to start, so it was killed" in left.problem
        assert left.ready_ms > 0

        def pauses_s() -> list[float]:  # of it alone: on a slow machine the others may take too long as well
            return [event["for_s"] for event in host.events("replica_quarantined") if event["model"] == left.model]

        wait_for(lambda: len(pauses_s()) == 2)
        assert pauses_s() == [0.3, 0.6]
        assert host.moves()["start_failed"] >= 3
        host.behave("c", "serve")
        started(host)
        assert not host.fleet()["c"].quarantined


def test_a_wake_that_finds_no_memory_is_tried_again_with_more_room_and_then_no_more(short: Path) -> None:
    with crowd(short) as host:
        sleeper = settled(host)
        host.move(sleeper, "problem")
        call(host, sleeper)
        said = host.until(sleeper, lambda state: "wake failed" in state.problem)
        assert "there is no memory left" in said.problem
        others = set("abc") - {sleeper}
        wait_for(lambda: {state.residency for state in host.fleet().values()} == {Residency.MEMORY})
        until = time.monotonic() + 20
        while host.fleet()[sleeper].boot == 1 and time.monotonic() < until:
            call(host, sleeper)
        problems = [state.problem for fleet in host.seen for state in fleet.replicas]
        assert any("it could not be woken: there is no memory left" in problem for problem in problems)
        assert host.moves()["wake_failed"] == 4
        assert all(host.fleet()[other].boot == 1 for other in others)
        host.move(sleeper, "ok")
        call(host, sleeper)
        host.until_serving(sleeper, boot=2)


def test_one_that_cannot_sleep_for_want_of_host_memory_ends_on_disk(short: Path) -> None:
    with crowd(short) as host:
        sleeper = settled(host)
        others = set("abc") - {sleeper}
        for other in others:
            host.move(other, "problem")
        call(host, sleeper)
        host.until_serving(sleeper)
        wait_for(lambda: host.moves().get("end"))
        assert host.moves()["sleep_failed"] >= 1
        assert all(state.residency is not Residency.DISK or not state.problem or state.boot > 1
                   for state in host.fleet().values())  # fmt: skip


def test_what_is_kept_asleep_is_within_the_budget_of_host_memory_from_the_first_sleep_on(short: Path) -> None:
    budget_bytes = 2 * WEIGHTS_BYTES + KEPT_BYTES  # of two asleep one would have nothing for what it keeps
    with crowd(short, "ab", device_bytes=600 * MIB, memory_bytes=budget_bytes) as host:
        for name in "abab":
            call(host, name)
            host.until_serving(name)
            host.send(ModelDemand(name, 0))
        assert all(fleet.memory_bytes <= budget_bytes for fleet in host.seen)
        assert host.moves()["end"] >= 1


def test_two_models_are_woken_at_once_and_none_is_forgotten(short: Path) -> None:
    with crowd(short, "abcd") as host:
        settled(host)
        sleepers = [state.model for state in host.fleet().values() if state.residency is Residency.MEMORY]
        call(host, *sleepers)
        host.until_at(**dict.fromkeys(sleepers, "DEVICE"))
        assert within_budget(host)


def test_what_waits_inside_a_sleeping_replica_wakes_it_too(short: Path) -> None:
    with crowd(short) as host:
        sleeper = settled(host)
        host.load(sleeper, waiting=1)
        host.until_serving(sleeper)


def test_a_gateway_that_vanishes_wants_nothing_any_more(short: Path) -> None:
    with crowd(short, demand_s=60.0) as host:
        sleeper = settled(host)
        for other in set("abc") - {sleeper}:
            host.load(other, running=1, waiting=9)
        time.sleep(1.5)  # their Load is here
        before = host.moves()["wake"]
        gateway = host.gateway()
        gateway.sendall(frames.encode_frame(ModelDemand(sleeper, 1)))
        time.sleep(0.1)  # and is heard, while nobody may leave for it
        gateway.close()
        for other in set("abc") - {sleeper}:
            host.load(other)
        time.sleep(1.0)  # they are idle now, and would make room at once
        assert host.fleet()[sleeper].residency is Residency.MEMORY
        assert host.moves()["wake"] == before


def test_a_shutdown_in_the_middle_of_moves_leaves_no_process_and_no_file(short: Path) -> None:
    with crowd(short) as host:
        sleeper = settled(host)
        pids = [host.pid(name, 1) for name in "abc"]
        for name in "abc":
            host.move(name, "slow")
        call(host, sleeper)
        host.until(sleeper, lambda _: any(state.toward is not state.residency for state in host.fleet().values()))
        host.machine.terminate()
        assert host.machine.wait(30) == 0
        assert all(gone(pid) for pid in pids)
        assert not [path for path in (short / "run").iterdir() if path.suffix not in (".pulse", ".lock")]
        assert not (short / "m.sock").exists()


def test_one_that_dies_again_and_again_is_left_alone_for_a_while_that_doubles(short: Path) -> None:
    with hosting(short, {"a": "crash", "b": "serve"}, deaths=3, quarantine_s=0.3, backoff_s=0.02) as host:
        left = host.until("a", lambda state: state.quarantined)
        assert "no such weights: shard 7" in left.problem
        assert "died 3 times" in left.problem
        assert left.ready_ms > 0
        wait_for(lambda: len(host.events("replica_quarantined")) == 2)
        assert [event["for_s"] for event in host.events("replica_quarantined")] == [0.3, 0.6]
        assert host.fleet()["a"].boot <= 4
        host.until_serving("b")
        host.behave("a", "serve")
        assert not host.until_serving("a").quarantined


def test_a_lost_connection_is_opened_again_and_nothing_is_moved_meanwhile(short: Path) -> None:
    with crowd(short) as host:
        sleeper = settled(host)
        host.behave(sleeper, "deaf")
        time.sleep(0.2)
        call(host, sleeper)
        time.sleep(0.5)
        host.behave(sleeper, "serve")
        assert host.until_serving(sleeper).boot == 1


def test_a_crowd_copies_its_weights_ahead_and_is_reported_in_bytes_no_more_often_than_is_of_use(short: Path) -> None:
    with crowd(short) as host:
        settled(host)
        assert all(
            host.started_spec(name).standby and host.started_spec(name).device_bytes is not None for name in "abc"
        )
        fleet = host.state()
        assert fleet is not None
        (device,) = fleet.devices
        assert (device.name, device.budget_bytes) == ("cpu", TWO_ROOMS)
        assert 2 * (WEIGHTS_BYTES + BESIDE_BYTES) <= device.held_bytes <= TWO_ROOMS
        assert 3 * WEIGHTS_BYTES <= fleet.memory_bytes <= 3 * (WEIGHTS_BYTES + KEPT_BYTES)
        assert fleet.memory_budget_bytes == 8000 * MIB
        host.seen.clear()
        began = time.monotonic()
        while (passed_s := time.monotonic() - began) < 0.5:
            host.state()
        assert len(host.seen) <= 1 + passed_s / 0.1


def test_a_crash_of_a_sleeping_replica_is_repaired_and_others_are_not_touched(short: Path) -> None:
    with crowd(short) as host:
        sleeper = settled(host)
        os.kill(host.pid(sleeper, 1), signal.SIGKILL)
        host.until(sleeper, lambda state: state.boot == 2 and state.residency is not Residency.DISK)
        settled(host)
        assert all(host.fleet()[other].boot == 1 for other in set("abc") - {sleeper})
