import asyncio
import contextlib
import socket
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from engine.protocol import frames
from engine.protocol.types import FinishReason, RejectReason, Residency, SamplingParams, Scope, ScopeKind
from gateway.cluster.client import ReplicaConnection
from gateway.cluster.connection import MachineConnection
from gateway.cluster.fleet import ReplicaFleet
from gateway.cluster.replica_counters import ReplicaCounters
from gateway.cluster.stream import STEPS_MAX, OutputDelta, ReplicaLeaving, ReplicaLost, ReplicaRejected, pack_token_ids
from tests.support.linked_fleet import PROMPT, SCOPE, collect, connected, link, submit
from tests.support.served_gateway import looped
from tests.support.stub_replica import StubFleet
from tests.support.waiting import turns, until

DISK, MEMORY, DEVICE = Residency


def test_a_request_streams_back_with_start_and_finish(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            stub.behaviour.cached_tokens = 16
            steps = await collect(await submit(fleet, max_tokens=5))
            assert [len(step.tokens) for step in steps] == [1] * 5
            first = sum(range(40)) % len(stub.behaviour.words)
            assert steps[0].tokens == [stub.behaviour.words[first]]
            assert steps[0].started is not None
            assert steps[0].started.cached_tokens == 16
            assert steps[-1].finish is not None
            assert steps[-1].finish.completion_tokens == 5
            assert all(step.finish is None for step in steps[:-1])
            assert stub.submits[0].scope == Scope(ScopeKind.TENANT, SCOPE)

    asyncio.run(scenario())


def test_choices_keep_apart_and_the_stream_ends_after_the_last(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            streams = [await submit(fleet, max_tokens=6, n=3, logprobs=2) for _ in range(4)]
            for stream in streams:
                steps = await collect(stream)
                for choice in range(3):
                    mine = [step for step in steps if step.index_in_n == choice]
                    tokens = [token for step in mine for token in step.tokens]
                    start = sum(range(40)) + choice
                    words = stub.behaviour.words
                    assert tokens == [words[(start + i) % len(words)] for i in range(6)]
                    assert [scored.top_ids[0] for step in mine for scored in step.logprobs] == tokens
                    assert mine[-1].finish is not None

    asyncio.run(scenario())


def test_a_load_said_again_counts_nothing_and_what_the_replica_refused_is_forgotten_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            chosen = await link(fleet)
            stub.replicas[0].load(counters={"hit_tokens": 5})
            await until(lambda: chosen.replica.load is not None)
            stub.behaviour.reject = RejectReason.BUSY
            with pytest.raises(ReplicaRejected):
                await collect(await submit(fleet))
            first, first_s = chosen.replica.load, chosen.replica.load_s
            assert chosen.replica.sequences == 0
            stub.replicas[0].load(counters={"hit_tokens": 5})
            await until(lambda: chosen.replica.load_s > first_s)
            assert chosen.replica.load is first
            assert fleet.counters.sums()[stub.replicas[0].model]["hit_tokens"] == 5

    asyncio.run(scenario())


def test_what_begins_or_ends_in_a_step_is_woken_before_what_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            stub.behaviour.first_s = 1000.0
            streams = [await submit(fleet) for _ in range(3)]
            woken: list[int] = []

            async def follow(index: int) -> OutputDelta:
                step = await anext(streams[index])
                woken.append(index)
                return step

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(follow(index)) for index in range(3)]
                await until(lambda: len(stub.submits) == 3)
                goes_on, ends, begins = (submitted.id for submitted in stub.submits)
                tokens = pack_token_ids([1, 2, 4, 3])
                started, finish = (
                    [frames.SequenceStarted(begins, 0, 1.0)],
                    [frames.SequenceFinished(ends, FinishReason.LENGTH, 2)],
                )
                (connection,) = stub.replicas[0].connections
                connection.send(
                    frames.StepOutputs([goes_on, ends, begins, ends], [1, 1, 1, 1], tokens, started, finish)
                )
            assert woken == [2, 1, 0]
            assert [task.result().tokens for task in tasks] == [[1], [2, 3], [4]]
            assert [task.result().finish for task in tasks] == [None, finish[0], None]

    asyncio.run(scenario())


def test_a_cancelled_stream_tells_the_replica_once_and_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            stub.behaviour.step_s = 0.01
            stream = await submit(fleet, max_tokens=10_000, n=2)
            await anext(stream)
            stream.cancel()
            stream.cancel()
            assert await collect(stream) == []
            await until(lambda: stub.running == 0)
            assert list(stub.replicas[0].cancels) == [1, 2]
            assert len(await collect(await submit(fleet))) == 8  # the connection is as good as before

    asyncio.run(scenario())


def test_cancelling_after_the_end_sends_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            stream = await submit(fleet)
            await collect(stream)
            stream.cancel()
            await collect(await submit(fleet))
            assert not stub.replicas[0].cancels

    asyncio.run(scenario())


def test_a_waiting_reader_is_woken_by_cancel(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            stub.behaviour.first_s = 100
            stream = await submit(fleet)
            reader = asyncio.create_task(collect(stream))
            await turns(3)
            stream.cancel()
            assert await reader == []

    asyncio.run(scenario())


def test_a_lost_replica_fails_its_streams_at_once_after_what_they_received(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            stub.behaviour.die_at = 3
            streams = [await submit(fleet, max_tokens=100) for _ in range(5)]
            for stream in streams:
                assert [len((await anext(stream)).tokens) for _ in range(3)] == [1, 1, 1]
                with pytest.raises(ReplicaLost, match="was lost"):
                    await anext(stream)

    asyncio.run(scenario())


def test_submitting_on_a_link_whose_replica_went_raises(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            chosen = await link(fleet)
            stub.replicas[0].die()
            await until(lambda: not fleet.replicas()[0].ready)
            with pytest.raises(ReplicaLost):
                chosen.submit(frames.Submit(0, PROMPT, Scope(), SamplingParams(), max_tokens=1))

    asyncio.run(scenario())


def test_a_rejection_reaches_the_caller_with_its_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            stub.behaviour.reject = RejectReason.BUSY
            with pytest.raises(ReplicaRejected) as raised:
                await collect(await submit(fleet, n=2))
            assert (raised.value.reason, raised.value.retry_after_ms) == (RejectReason.BUSY, 1500)
            stub.behaviour.reject = None
            assert len(await collect(await submit(fleet))) == 8

    asyncio.run(scenario())


class HelloOfTomorrow(msgspec.Struct, array_like=True, tag="hello"):
    """A Hello of a later protocol, with other fields after its version."""

    protocol: int = 99
    model: tuple[str, ...] = ("m", "n")
    later: tuple[int, ...] = (1, 2)


class FrameOfTomorrow(msgspec.Struct, array_like=True, tag="transfer"):
    """A frame that only a later protocol has."""

    blocks: tuple[int, ...] = (1,)


@pytest.mark.parametrize(
    ("greeting", "problem"),
    [
        (None, "a Hello of protocol 99, and this process speaks protocol 2 to 3: install the same hearth"),
        (HelloOfTomorrow(), "a Hello of protocol 99, and this process speaks protocol 2 to 3: install the same hearth"),
        (FrameOfTomorrow(), "a 'transfer' frame, which protocol 3 does not have: install the same hearth"),
    ],
    ids=["version", "fields", "kind"],
)
def test_a_replica_of_another_protocol_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greeting: object, problem: str
) -> None:
    async def scenario() -> None:
        stub = StubFleet(tmp_path)
        hello = greeting or msgspec.structs.replace(stub.replicas[0].hello(), protocol=99)
        monkeypatch.setattr(stub.replicas[0], "hello", lambda: hello)
        async with stub.serving():
            fleet = ReplicaFleet([stub.address])
            running = asyncio.create_task(fleet.run())
            await until(lambda: any(problem in seen.problem for seen in fleet.replicas()))
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    asyncio.run(scenario())


def test_a_slow_reader_holds_a_bounded_number_of_steps_and_loses_no_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with connected(tmp_path) as (stub, fleet):
            stream = await submit(fleet, max_tokens=3000, n=2, logprobs=0)
            await until(lambda: stub.running == 0 and stream._open == 0)
            assert len(stream._steps) <= STEPS_MAX + 2
            steps = await collect(stream)
            for choice in range(2):
                mine = [step for step in steps if step.index_in_n == choice]
                tokens = [token for step in mine for token in step.tokens]
                words, start = stub.behaviour.words, sum(range(40)) + choice
                assert tokens == [words[(start + i) % len(words)] for i in range(3000)]
                assert len([scored for step in mine for scored in step.logprobs]) == 3000
                assert [step.finish is not None for step in mine] == [False] * (len(mine) - 1) + [True]

    asyncio.run(scenario())


def test_packed_tokens_are_little_endian_words() -> None:
    assert pack_token_ids([1, 70000]) == b"\x01\0\0\0\x70\x11\x01\0"
    assert array("I", pack_token_ids([5, 6])).tolist() == [5, 6]


@looped
async def test_what_a_replica_has_not_begun_with_is_taken_back_when_it_leaves_the_device(tmp_path: Path) -> None:
    async with connected(tmp_path) as (stub, fleet):
        stub.behaviour.step_s = 0.02
        begun = await submit(fleet, max_tokens=50)
        await anext(begun)
        stub.behaviour.first_s = 60.0
        other = await submit(fleet, n=2)
        await until(lambda: len(stub.submits) == 2)
        stub.move(0, DEVICE, toward=MEMORY)
        with pytest.raises(ReplicaLeaving):
            await anext(other)
        await until(lambda: len(stub.replicas[0].cancels) == 2)
        stub.move(0, MEMORY, ready_ms=100)
        stub.move(0, DEVICE)
        assert sum(len(step.tokens) for step in await collect(begun)) == 49


def test_what_a_machine_says_again_is_compared_once_however_often_it_comes() -> None:
    @looped
    async def scenario() -> None:
        reports: list[frames.MachineState] = []
        machine = MachineConnection(lambda _, report: reports.append(report))
        said = frames.encode_frame(frames.MachineState("m", []))
        for chunk in (said, said + said, said):  # two at once are read anew
            machine.data_received(chunk)
        assert len(reports) == 1
        (again,) = machine._frames.feed(said)
        assert machine._last is again, "it is compared by what it is, not by what is in it"
        machine.data_received(frames.encode_frame(frames.MachineState("m", [], draining=True)))
        assert len(reports) == 2

    scenario()


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the kernel asks nobody")
@pytest.mark.parametrize(("polled", "idle_s"), [(False, 1), (True, 15)])
def test_the_kernel_seldom_asks_the_host_of_a_replica_that_may_be_quiet(polled: bool, idle_s: int) -> None:
    @looped
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
            transport = SimpleNamespace(get_extra_info=lambda name: peer, write=lambda data: None)
            replica = ReplicaConnection("tcp:127.0.0.1:1", lambda: None, ReplicaCounters(), lambda seconds: None)
            replica.connection_made(cast(asyncio.BaseTransport, transport))
            replica.receive(frames.Hello(2, "m", "r", "1", 1, 100, 100, 16, 10, 3, polled=polled))
            assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle_s

    scenario()
