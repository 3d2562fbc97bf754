"""Who is taken for silent and for lost: the gateway looks at times that the tests tell."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.cluster.fleet import ReplicaFleet
from gateway.cluster.machine_links import LOSSES
from gateway.cluster.replica_entry import MachineEntry, ReplicaEntry, Standing
from gateway.cluster.replica_links import FLAP_S, FROZEN_S, LATE_S, LOST_S, QUIET_S, WATCH_S, ReplicaLinks
from gateway.cluster.stream import ReplicaLost, SuccessorWanted
from tests.support.linked_fleet import collect, connected, submit
from tests.support.stub_replica import StubFleet
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def beating(
    folder: Path, polled: bool = False
) -> AsyncIterator[tuple[StubFleet, ReplicaFleet, MachineEntry, ReplicaEntry]]:
    """A machine that is to speak twice a second, and says nothing but what a test has it say."""
    async with connected(folder, polled=polled) as (stub, fleet):
        stub.protocol = 3
        stub.tell()
        (machine,) = fleet._machines.values()
        await until(lambda: machine.beats)
        (entry,) = machine.replicas.values()
        yield stub, fleet, machine, entry


def look_for(links: ReplicaLinks, seconds: float) -> None:
    """So much time passes, in which the gateway looks as often as it does."""
    start = links._looked_s
    for step in range(round(seconds / WATCH_S)):
        links.look(start + (step + 1) * WATCH_S)


@pytest.mark.parametrize("polled", [False, True])
def test_a_silent_host_gets_no_new_call_and_is_lost_a_moment_later(tmp_path: Path, polled: bool) -> None:
    async def scenario() -> None:
        async with beating(tmp_path, polled) as (stub, fleet, machine, entry):
            stub.behaviour.first_s = 1000.0
            stream, links = await submit(fleet), fleet._replica_links
            assert entry.standing is Standing.SERVING
            look_for(links, QUIET_S + 2 * WATCH_S)
            assert entry.standing is Standing.CLOSED
            assert entry.connection is not None
            with pytest.raises(SuccessorWanted):
                await collect(stream)
            look_for(links, LOST_S)
            with pytest.raises(ReplicaLost) as lost:
                await collect(stream)
            assert lost.value.crashed is not None
            assert await lost.value.crashed is False, "its prompts are not to blame"
            links._looked_s = links._forgiven_s = 0.0
            await until(lambda: machine.connection is not None and entry.standing is Standing.SERVING)

    asyncio.run(scenario())


def test_a_replica_that_speaks_is_not_given_up_with_its_silent_machine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with beating(tmp_path) as (_, fleet, machine, entry):
            links = fleet._replica_links
            assert entry.connection is not None
            kept = entry.connection
            for _ in range(16):
                kept.received_s = links._looked_s
                look_for(links, WATCH_S)
            assert machine.silent
            assert entry.connection is kept
            assert entry.standing is Standing.SERVING

    asyncio.run(scenario())


def test_a_quiet_replica_is_asked_once_its_machine_is_late_and_stays_as_long_as_it_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with beating(tmp_path, polled=True) as (stub, fleet, machine, entry):
            links, replica = fleet._replica_links, stub.replicas[0]
            look, links.look = links.look, lambda now: None  # no time passes but the test's
            assert machine.connection is not None
            assert entry.connection is not None
            kept = entry.connection
            await until(lambda: kept.load is not None)
            assert replica.polls == 1, "it is told that it may be quiet"
            machine.connection.received_s = began_s = links._looked_s
            kept.received_s, asked = began_s - 100.0, []
            for step in range(1, 13):
                look(began_s + step * WATCH_S)
                if began_s + step * WATCH_S - max(kept.received_s, began_s) > LATE_S:
                    asked.append(step)
                    kept.received_s = 0.0
                    await until(lambda: kept.received_s > 0.0)
                    kept.received_s = began_s + step * WATCH_S
            assert asked == [4, 8, 12]
            assert replica.polls == 1 + len(asked), "no more often than it would speak"
            assert machine.silent
            assert entry.connection is kept
            assert entry.standing is Standing.SERVING

    asyncio.run(scenario())


def test_a_gateway_that_stood_still_judges_nobody_by_that_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with beating(tmp_path) as (_, fleet, machine, entry):
            links = fleet._replica_links
            links.look(links._looked_s + FROZEN_S + 100.0)
            assert entry.standing is Standing.SERVING
            look_for(links, QUIET_S - WATCH_S)
            assert entry.standing is Standing.SERVING
            assert not machine.silent

    asyncio.run(scenario())


def test_a_machine_of_the_protocol_before_is_not_expected_to_speak(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (_, fleet):
            (machine,) = fleet._machines.values()
            (entry,) = machine.replicas.values()
            look_for(fleet._replica_links, 10 * LOST_S)
            assert entry.standing is Standing.SERVING

    asyncio.run(scenario())


@pytest.mark.parametrize("host_too", [False, True])
def test_a_replica_that_dies_alone_is_told_from_a_host_that_is_gone(tmp_path: Path, host_too: bool) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            stub.behaviour.first_s = 1000.0
            stream = await submit(fleet)
            await until(lambda: stub.running)
            stub.replicas[0].die()
            if host_too:
                for machine in list(stub.machines):
                    machine.close()
            with pytest.raises(ReplicaLost) as lost:
                await collect(stream)
            assert lost.value.crashed is not None
            async with asyncio.timeout(30):
                assert await lost.value.crashed is not host_too

    asyncio.run(scenario())


def test_a_replica_that_its_machine_reports_no_more_has_not_crashed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with beating(tmp_path) as (stub, fleet, _, entry):
            stub.behaviour.first_s = 1000.0
            stream = await submit(fleet)
            fleet._forget(entry)
            with pytest.raises(ReplicaLost) as lost:
                await collect(stream)
            assert lost.value.crashed is not None
            async with asyncio.timeout(5):
                assert await lost.value.crashed is False

    asyncio.run(scenario())


def test_replicas_that_compute_with_something_else_get_no_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, replicas=3) as (stub, fleet):
            (machine,) = fleet._machines.values()
            odd = machine.replicas[stub.replicas[1].state.address]
            stub.replicas[1].revision = "other weights"
            stub.replicas[1].die()
            await until(lambda: odd.connection is not None and odd.connection.model == "other weights")
            views = {view.state.address: view for view in fleet.replicas()}
            assert [view.ready for view in views.values()] == [True, False, True]
            assert "weights" in views[odd.state.address].problem
            assert views[odd.state.address].differs

    asyncio.run(scenario())


def test_a_machine_that_was_lost_again_and_again_is_spare_for_a_while(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            (machine,) = fleet._machines.values()
            (entry,) = machine.replicas.values()
            links = fleet._replica_links
            for count in range(1, LOSSES + 1):
                assert entry.standing is Standing.SERVING
                for each in list(stub.machines):
                    each.close()
                await until(lambda count=count: len(machine.lost_s) == count and machine.connection is not None)
                links.look(links._looked_s + WATCH_S)
            assert entry.standing is Standing.LEAVING
            assert len(await collect(await submit(fleet))) == 8, "it is the only one, and serves"
            links.look(machine.lost_s[0] + FLAP_S - WATCH_S)
            assert entry.standing is Standing.LEAVING
            links.look(machine.lost_s[0] + FLAP_S)
            assert entry.standing is Standing.SERVING

    asyncio.run(scenario())
