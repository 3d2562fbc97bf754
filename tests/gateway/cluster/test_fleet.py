import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec import structs

from engine.protocol import frames
from engine.protocol.address import AddressError
from engine.protocol.types import Residency, SamplingParams, SchedulingTerms, Scope
from gateway.cluster import wake_queue
from gateway.cluster.client import ReplicaClient
from gateway.cluster.connection import FrameProtocol, connect
from gateway.cluster.fleet import NoReplicaAvailable, ReplicaFleet
from gateway.cluster.replica_entry import MachineEntry, ReplicaEntry
from gateway.cluster.stream import SuccessorWanted, pack_token_ids
from gateway.members.protocol import Membership
from gateway.members.static import StaticMembers
from tests.support.linked_fleet import PROMPT, SCOPE, collect, connected, link, submit
from tests.support.served_gateway import looped
from tests.support.stub_replica import MODEL, StubFleet
from tests.support.waiting import holds, in_fake_time, turns, until

DISK, MEMORY, DEVICE = Residency


def test_a_lost_replica_is_connected_to_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            stub.replicas[0].die()
            await until(lambda: not fleet.replicas()[0].ready)
            assert "was lost" in fleet.replicas()[0].problem
            assert len(await collect(await submit(fleet))) == 8
            assert fleet.replicas()[0].problem == ""

    asyncio.run(scenario())


def test_link_waits_for_a_replica_that_comes(tmp_path: Path) -> None:
    async def scenario() -> None:
        stub = StubFleet(tmp_path)
        fleet = ReplicaFleet([stub.address])
        running = asyncio.create_task(fleet.run())
        waiting = asyncio.create_task(link(fleet))
        await holds(lambda: not waiting.done(), 0.1)
        async with stub.serving():
            assert (await waiting).replica.ready
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(scenario())


@looped
async def test_who_waits_goes_on_also_where_a_replicas_hello_comes_with_its_connection(tmp_path: Path) -> None:
    async def behind_the_hello(address: str, make: Callable[[], FrameProtocol]) -> FrameProtocol:
        connection = await connect(address, make)
        await asyncio.sleep(0.05)
        return connection

    stub = StubFleet(tmp_path)
    fleet = ReplicaFleet([stub.address], connector=behind_the_hello)
    async with stub.serving():
        running = asyncio.create_task(fleet.run())
        await link(fleet)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def test_link_gives_up_at_its_deadline_and_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        stub = StubFleet(tmp_path)
        fleet = ReplicaFleet([stub.address])
        running = asyncio.create_task(fleet.run())
        with pytest.raises(NoReplicaAvailable, match="cannot be reached") as raised:
            await link(fleet, wait_s=0.1)
        assert not raised.value.loading
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(scenario())


def test_a_model_that_no_machine_has_is_unavailable(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (_, fleet):
            with pytest.raises(NoReplicaAvailable, match="@cf/other/model"):
                await link(fleet, wait_s=0.05, model="@cf/other/model")

    asyncio.run(scenario())


def loads(fleet: ReplicaFleet) -> list[int]:
    """Background sequences of each replica that serves."""
    return [entry.connection.background for entry in fleet._pools[MODEL].serving if entry.connection is not None]


@pytest.mark.parametrize("newest_protocol", [2, 3])
def test_a_draining_replica_gets_no_new_work_and_keeps_its_old_where_no_other_can_go_on_with_it(
    newest_protocol: int, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, replicas=2, newest_protocol=newest_protocol) as (stub, fleet):
            stub.behaviour.step_s = 0.01
            stream = await submit(fleet, max_tokens=20)
            await anext(stream)
            busy = next(replica for replica in stub.replicas if replica.submits)
            other = next(replica for replica in stub.replicas if replica is not busy)
            busy.load(draining=True)
            await until(lambda: sum(seen.ready for seen in fleet.replicas()) == 1)
            if newest_protocol == 2:
                assert len(await collect(stream)) == 19
            else:
                with pytest.raises(SuccessorWanted):
                    await collect(stream)
                stream.cancel()
            rest = await collect(await submit(fleet))
            assert len(rest) == 8
            assert len(other.submits) == 1

    asyncio.run(scenario())


def test_a_replica_that_the_machine_no_longer_tells_of_is_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, replicas=2) as (stub, fleet):
            stub.hidden.add(0)
            stub.tell()
            await until(lambda: len(fleet.replicas()) == 1)
            await until(lambda: not stub.replicas[0].connections)

    asyncio.run(scenario())


def test_load_counts_what_was_submitted_since_it_came(tmp_path: Path) -> None:
    """Requests that arrive at once are spread although no replica has told of any of them yet."""

    async def scenario() -> None:
        async with connected(tmp_path, replicas=4) as (stub, fleet):
            stub.behaviour.first_s = 100
            streams = [await submit(fleet) for _ in range(80)]
            await until(lambda: stub.running == 80)
            running = [replica.running for replica in stub.replicas]
            assert max(running) <= 25, running
            for stream in streams:
                stream.cancel()

    asyncio.run(scenario())


def test_a_wrong_address_is_an_error_at_the_start() -> None:
    with pytest.raises(AddressError, match="outside loopback"):
        StaticMembers(["tcp:10.0.0.1:7000"])


WRONG_ADDRESSES = ("tls:m@somewhere:700000", "tcp:127.0.0.1:99999", "nonsense")


def test_a_machine_at_no_address_stops_no_other_one(tmp_path: Path) -> None:
    """One host that told the store of such an address would else end every gateway of its cluster."""

    async def scenario() -> None:
        async with connected(tmp_path) as (_, fleet):
            fleet.links.follow("store", Membership(frozenset(WRONG_ADDRESSES)))
            await until(lambda: {*fleet.problems()} == {*WRONG_ADDRESSES})
            assert all("cannot be reached" in problem for problem in fleet.problems().values())
            stream = await submit(fleet)
            stream.cancel()
            fleet.links.follow("store", Membership(frozenset(), frozenset(WRONG_ADDRESSES)))
            assert not fleet.problems()

    asyncio.run(scenario())


@pytest.mark.parametrize("address", WRONG_ADDRESSES)
@in_fake_time
async def test_a_replica_at_no_address_is_one_that_cannot_be_reached(address: str) -> None:
    state = frames.ReplicaState("m", address, Residency.DEVICE, 1)
    known = ReplicaEntry(MachineEntry("unix:/m", {}, frames.MachineState("m", [state])), state)
    watch = asyncio.create_task(ReplicaFleet([])._replica_links._keep_replica(known))
    await until(lambda: "cannot be reached" in known.problem)
    assert not watch.done()
    watch.cancel()
    await asyncio.wait([watch])


def test_a_report_that_comes_as_its_machine_is_dropped_brings_it_back_nowhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (_, fleet):
            ((address, machine),) = fleet.links.connections.items()
            assert machine._last is not None
            fleet.links.cut(frozenset([address]))
            machine._on_report(machine, machine._last)
            assert not fleet.machines()
            assert not fleet.replicas()

    asyncio.run(scenario())


@pytest.mark.parametrize("count", range(5))
def test_a_cancellation_beside_a_machines_word_ends_the_watch_of_a_replica(count: int, tmp_path: Path) -> None:
    @in_fake_time
    async def run() -> None:
        state = frames.ReplicaState("m", f"unix:{tmp_path}/nobody", Residency.DEVICE, 1)
        known = ReplicaEntry(MachineEntry("unix:/m", {}, frames.MachineState("m", [state])), state)
        watch = asyncio.create_task(ReplicaFleet([])._replica_links._keep_replica(known))
        await asyncio.sleep(0.05)  # it could not connect, and waits
        known.changed.set()
        await turns(count)
        watch.cancel()
        done, _ = await asyncio.wait([watch], timeout=1)
        assert watch in done
        assert watch.cancelled()

    run()


def test_what_runs_in_the_background_is_no_load_for_live_calls_and_none_for_it_where_these_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, replicas=2) as (stub, fleet):
            assert fleet.spare(MODEL, 10) == 20
            stub.behaviour.first_s = 60.0
            live = await fleet.acquire(MODEL, SCOPE, PROMPT, asyncio.get_running_loop().time())
            for _ in range(8):
                behind = await fleet.acquire(MODEL, SCOPE, PROMPT, asyncio.get_running_loop().time(), background=True)
                terms = SchedulingTerms(background=True)
                behind.submit(frames.Submit(0, PROMPT, Scope(), SamplingParams(), max_tokens=8, terms=terms))
            assert fleet.spare(MODEL, 10) == 12
            again = await fleet.acquire(MODEL, SCOPE, PROMPT, asyncio.get_running_loop().time())
            assert again.replica is live.replica, "live calls go where they went"
            assert sorted(loads(fleet)) != [0, 8], "the background is spread"
            stub.replicas[0].load(waiting=1)
            await until(lambda: fleet.spare(MODEL, 10) <= 10)

    asyncio.run(scenario())


async def held(fleet: ReplicaFleet, count: int = 1, wait_s: float = 5.0) -> list[asyncio.Task[ReplicaClient]]:
    """So many requests that wait for the model."""
    tasks = [asyncio.create_task(link(fleet, wait_s)) for _ in range(count)]
    await until(lambda: fleet.waiting(MODEL) == count)
    return tasks


@contextlib.asynccontextmanager
async def asleep(folder: Path, replicas: int = 1, ready_ms: int = 300) -> AsyncIterator[tuple[StubFleet, ReplicaFleet]]:
    async with connected(folder, replicas) as (stub, fleet):
        for index in range(replicas):
            stub.move(index, MEMORY, ready_ms=ready_ms)
        await until(lambda: not fleet.serves(MODEL))
        yield stub, fleet


@in_fake_time
async def test_one_wake_serves_all_who_wait_and_what_they_send_waits_in_the_replica(tmp_path: Path) -> None:
    async with asleep(tmp_path) as (stub, fleet):
        tasks = await held(fleet, 50)
        await until(lambda: stub.wakes[-1].requests == 50)
        assert len(stub.wakes) <= 2
        stub.move(0, MEMORY, toward=DEVICE)
        streams = [
            (await task).submit(frames.Submit(0, PROMPT, Scope(), SamplingParams(), max_tokens=2)) for task in tasks
        ]
        await until(lambda: len(stub.submits) == 50)
        await until(lambda: stub.wakes[-1] == frames.ModelDemand(MODEL, 0))
        assert not any(stream.ready for stream in streams)
        stub.move(0, DEVICE)
        assert [sum(len(step.tokens) for step in await collect(stream)) for stream in streams] == [2] * 50


@in_fake_time
async def test_a_replica_on_the_device_is_preferred_and_one_that_leaves_it_is_not_chosen(tmp_path: Path) -> None:
    async with connected(tmp_path, replicas=3) as (stub, fleet):
        stub.move(0, MEMORY, toward=DEVICE)
        stub.move(1, DEVICE, toward=MEMORY)
        await until(lambda: [view.ready for view in fleet.replicas()] == [False, False, True])
        for n in range(20):
            chosen = await fleet.acquire(MODEL, SCOPE, pack_token_ids([n] * 40), asyncio.get_running_loop().time())
            assert chosen.replica.address == f"unix:{stub.replicas[2].path}"


@in_fake_time
async def test_a_sleeping_replica_tells_of_no_problem_that_a_new_connection_has_ended(tmp_path: Path) -> None:
    async with connected(tmp_path) as (stub, fleet):
        stub.replicas[0].die()
        await until(lambda: "was lost" in fleet.replicas()[0].problem)
        await until(lambda: fleet.serves(MODEL))
        stub.move(0, MEMORY)
        await until(lambda: not fleet.serves(MODEL))
        assert fleet.replicas()[0].problem == ""


@in_fake_time
async def test_the_wait_ends_when_no_machine_can_ever_serve_the_model(tmp_path: Path) -> None:
    async with asleep(tmp_path, replicas=2) as (stub, fleet):
        (task,) = await held(fleet)
        stub.move(0, DISK, ready_ms=-1, problem="it never fits", quarantined=True)
        await until(lambda: fleet.replicas()[0].state.quarantined)
        await turns(10)
        assert not task.done(), "the other replica may come"
        stub.move(1, DISK, ready_ms=-1, problem="it never fits")
        with pytest.raises(NoReplicaAvailable, match="it never fits") as raised:
            await task
        assert not raised.value.loading
        with pytest.raises(NoReplicaAvailable):
            await link(fleet)


@in_fake_time
async def test_the_end_of_the_wait_says_when_the_model_may_be_there(tmp_path: Path) -> None:
    async with asleep(tmp_path, replicas=2) as (stub, fleet):
        stub.move(0, DISK, ready_ms=7_400)
        await until(lambda: fleet.replicas()[0].expected_s == 7.4)
        stub.move(1, DISK, ready_ms=12_000)
        await until(lambda: fleet.expected_s(MODEL) == 8)
        with pytest.raises(NoReplicaAvailable, match="asleep") as raised:
            await link(fleet, wait_s=0.05)
        assert (raised.value.loading, raised.value.retry_after_s) == (True, 8)
        assert fleet.busy(MODEL) == 8
        await until(lambda: stub.wakes[-1].requests == 0)
        asked = len(stub.wakes)
        with pytest.raises(NoReplicaAvailable):
            await link(fleet, wait_s=0.0)
        await holds(lambda: len(stub.wakes) == asked, 0.05)  # who does not wait wakes nothing


@in_fake_time
async def test_a_machine_that_comes_back_is_told_again_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake_queue, "REPEAT_S", 60.0)
    async with asleep(tmp_path) as (stub, fleet):
        tasks = await held(fleet, 3)
        await until(lambda: stub.wakes[-1].requests == 3)
        stub.wakes.clear()
        for machine in list(stub.machines):
            machine.close()
        await until(lambda: bool(stub.wakes))
        assert stub.wakes[0].requests == 3
        stub.move(0, DEVICE)
        await asyncio.gather(*tasks)


@in_fake_time
async def test_what_a_machine_said_that_is_lost_refuses_nobody_until_it_says_it_again(tmp_path: Path) -> None:
    stub = StubFleet(tmp_path)
    fleet = ReplicaFleet([stub.address])
    running = asyncio.create_task(fleet.run())
    never = {"residency": DISK, "toward": DISK, "ready_ms": -1, "problem": "it never fits"}
    stub.replicas[0].state = structs.replace(stub.replicas[0].state, **never)
    async with stub.serving():
        with pytest.raises(NoReplicaAvailable, match="it never fits"):
            await link(fleet)
    for machine in list(stub.machines):
        machine.close()
    await until(lambda: bool(fleet.problems()))
    (task,) = await held(fleet)
    with pytest.raises(
        NoReplicaAvailable, match=r"is not ready: the machine at .* (was lost|cannot be reached)"
    ) as raised:
        await link(fleet, wait_s=0.1)
    assert raised.value.loading
    assert not task.done()
    async with stub.serving():
        with pytest.raises(NoReplicaAvailable, match="it never fits"):
            await task
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@in_fake_time
async def test_one_machine_refuses_nobody_while_another_that_may_serve_was_never_heard(tmp_path: Path) -> None:
    first, second = (StubFleet(tmp_path / name) for name in "ab")
    for stub in (first, second):
        Path(stub.address.removeprefix("unix:")).parent.mkdir()
    fleet = ReplicaFleet([first.address, second.address])
    running = asyncio.create_task(fleet.run())
    first.replicas[0].state = structs.replace(first.replicas[0].state, residency=DISK, toward=DISK, ready_ms=-1)
    async with first.serving():
        await until(lambda: bool(fleet.replicas()))
        (task,) = await held(fleet)
        async with second.serving():
            assert (await task).replica.ready
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@in_fake_time
async def test_what_a_connection_asks_for_ends_with_those_who_leave(tmp_path: Path) -> None:
    async with asleep(tmp_path) as (stub, fleet):
        tasks = await held(fleet, 2)
        for task in tasks:
            task.cancel()
        await until(lambda: stub.wakes[-1] == frames.ModelDemand(MODEL, 0))
        assert fleet.waiting(MODEL) == 0


@in_fake_time
async def test_the_background_waits_for_no_model_and_wakes_none(tmp_path: Path) -> None:
    async with asleep(tmp_path) as (stub, fleet):
        with pytest.raises(NoReplicaAvailable) as raised:
            await fleet.acquire(MODEL, SCOPE, PROMPT, asyncio.get_running_loop().time() + 5, background=True)
        assert raised.value.loading
        assert not stub.wakes
        assert fleet.spare(MODEL, 10) == 0


@looped
async def test_how_long_requests_waited_for_a_model_is_told_once_for_each_that_did(tmp_path: Path) -> None:
    waited = list[tuple[str, float]]()
    stub = StubFleet(tmp_path)
    fleet = ReplicaFleet([stub.address], on_waited=lambda model, seconds: waited.append((model, seconds)))
    async with stub.serving():
        running = asyncio.create_task(fleet.run())
        await until(lambda: fleet.serves(MODEL))
        await collect(await submit(fleet))
        assert waited == []
        stub.move(0, MEMORY, ready_ms=100)
        await until(lambda: not fleet.serves(MODEL))
        (task,) = await held(fleet)
        stub.move(0, MEMORY, toward=DEVICE)
        stream = (await task).submit(frames.Submit(0, PROMPT, Scope(), SamplingParams(), max_tokens=5))
        await asyncio.sleep(0.2)
        stub.move(0, DEVICE)
        await collect(stream)
        ((model, seconds),) = waited
        assert (model, seconds > 0.2) == (MODEL, True)
        stub.move(0, MEMORY, ready_ms=100)
        await until(lambda: not fleet.serves(MODEL))
        with pytest.raises(NoReplicaAvailable):
            await link(fleet, wait_s=0.1)
        assert len(waited) == 2
        assert waited[1][1] >= 0.09  # clocks differ by a little
        running.cancel()


@in_fake_time
async def test_a_sleeping_replicas_connection_stays_and_one_on_disk_is_not_asked_for(tmp_path: Path) -> None:
    async with asleep(tmp_path) as (stub, fleet):
        hello = fleet.hello(MODEL)
        assert hello is not None
        assert hello.context_tokens == stub.behaviour.context_tokens
        assert not fleet.replicas()[0].ready
        assert fleet.replicas()[0].problem == ""
        stub.move(0, DISK, ready_ms=900)
        stub.replicas[0].die()
        await until(lambda: fleet.hello(MODEL) is None)
        await holds(lambda: not stub.replicas[0].connections, 0.3)
        assert (fleet.replicas()[0].problem, fleet.replicas()[0].expected_s) == ("", 0.9)
        stub.move(0, DISK, toward=DEVICE, ready_ms=900)
        await until(lambda: bool(stub.replicas[0].connections))


def test_calls_go_to_a_replica_that_stays_and_to_one_that_leaves_where_there_is_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path, replicas=2) as (stub, fleet):
            stub.move(0, DEVICE, leaving=True)
            await until(lambda: any(view.state.leaving for view in fleet.replicas()))
            for _ in range(4):
                assert len(await collect(await submit(fleet))) == 8
            assert (len(stub.replicas[0].submits), len(stub.replicas[1].submits)) == (0, 4)
            stub.move(1, DISK)
            await until(lambda: fleet.replicas()[1].state.residency is DISK)
            assert len(await collect(await submit(fleet))) == 8
            assert len(stub.replicas[0].submits) == 1

    asyncio.run(scenario())


def test_calls_are_refused_at_once_while_the_only_machine_is_drained(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            stub.draining = True
            stub.tell()
            await until(lambda: not fleet.serves(MODEL))
            with pytest.raises(NoReplicaAvailable, match="drained"):
                await link(fleet)
            stub.draining = False
            stub.tell()
            await until(lambda: fleet.serves(MODEL))
            await link(fleet)

    asyncio.run(scenario())
