"""Heirs of streams: who of the two goes on, at which replica they begin, and what asks for them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine.protocol import frames
from engine.protocol.types import FinishReason, Pooling, RejectReason, SamplingParams, Scope
from gateway.cluster.fleet import NoReplicaAvailable
from gateway.cluster.stream import (
    LAG_S,
    Outlook,
    ReplicaLost,
    ReplicaStream,
    ReplicaSucceeded,
    SuccessorWanted,
)
from tests.gateway.cluster.test_moves import Wire, begun, connection, progress, steps_until
from tests.support.linked_fleet import PROMPT, SCOPE, connected
from tests.support.stub_replica import MODEL
from tests.support.waiting import in_fake_time, turns, until

GIVEN = [frames.GivenTokens(0, b"\7\0\0\0")]


def heir_at(other: Any, **order: Any) -> ReplicaStream:
    stream: ReplicaStream = other.open_stream(
        frames.Submit(0, b"\1\0\0\0", Scope(), SamplingParams(), 9, given=GIVEN, **order), 0, None
    )
    return stream


async def with_heir(outlook: Outlook) -> tuple[Any, Wire, Any, Wire, ReplicaStream, ReplicaStream]:
    """A stream that has given one token, and its heir at another replica."""
    (one, wire), (other, other_wire) = connection(), connection("unix:/other")
    stream = begun(one)
    stream.want_successor(outlook)
    await steps_until(stream, SuccessorWanted)
    heir = heir_at(other)
    stream.prepare(heir)
    return one, wire, other, other_wire, stream, heir


def cancelled(wire: Wire) -> bool:
    return any(isinstance(frame, frames.Cancel) for frame in wire.sent)


@pytest.mark.parametrize("outlook", [Outlook.DOUBTED, Outlook.LEAVES])
def test_the_heir_goes_on_with_its_first_token(outlook: Outlook) -> None:
    @in_fake_time
    async def run() -> None:
        one, wire, other, other_wire, stream, heir = await with_heir(outlook)
        other.receive(frames.StepOutputs([], [], b"", [frames.SequenceStarted(heir.first_id, 0, 0.0)]))
        assert stream.heir is heir, "it has no token yet"
        other.receive(progress(heir.first_id, [8]))
        one.receive(progress(stream.first_id, [8]))
        steps, _ = await steps_until(stream, ReplicaSucceeded)
        assert steps == [], "what the first replica gives then is none of the call's"
        assert cancelled(wire)
        assert stream.take_heir() is heir
        other.receive(progress(heir.first_id, [9], FinishReason.LENGTH))
        assert [token async for step in heir for token in step.tokens] == [8, 9]
        assert not cancelled(other_wire)

    run()


@in_fake_time
async def test_a_replica_in_doubt_that_speaks_first_goes_on_and_its_heir_is_cancelled() -> None:
    one, wire, _, other_wire, stream, _ = await with_heir(Outlook.DOUBTED)
    one.receive(progress(stream.first_id, [8]))
    assert stream.heir is None
    assert cancelled(other_wire)
    one.receive(progress(stream.first_id, [9], FinishReason.LENGTH))
    assert [token async for step in stream for token in step.tokens] == [8, 9]
    assert not cancelled(wire)


@in_fake_time
async def test_a_replica_that_speaks_before_an_heir_was_begun_gets_none() -> None:
    (one, _), (other, other_wire) = connection(), connection("unix:/other")
    stream = begun(one)
    one.doubt()
    one.receive(progress(stream.first_id, [8]))
    stream.prepare(heir_at(other))
    assert cancelled(other_wire)
    one.receive(progress(stream.first_id, [9], FinishReason.LENGTH))
    assert [token async for step in stream for token in step.tokens] == [7, 8, 9]


@in_fake_time
async def test_a_replica_that_leaves_answers_until_then_and_to_the_end_if_that_is_sooner() -> None:
    one, _, _, other_wire, stream, heir = await with_heir(Outlook.LEAVES)
    one.receive(progress(stream.first_id, [8]))
    assert stream.heir is heir
    one.receive(progress(stream.first_id, [9], FinishReason.LENGTH))
    assert cancelled(other_wire)
    assert [token async for step in stream for token in step.tokens] == [8, 9]


@in_fake_time
async def test_an_heir_that_is_far_behind_is_begun_again_where_most_is_computed() -> None:
    one, wire, other, other_wire, stream, heir = await with_heir(Outlook.LEAVES)
    one.receive(progress(stream.first_id, [8, 9]))
    other.received_s = heir._submitted_s + 2 * LAG_S
    other.receive(progress(heir.first_id, [8]))
    assert cancelled(other_wire)
    steps, _ = await steps_until(stream, SuccessorWanted)
    assert [token for step in steps for token in step.tokens] == [8, 9]
    assert stream.warmed is other
    again = heir_at(other)
    stream.prepare(again)
    other.received_s = again._submitted_s + 2 * LAG_S
    other.receive(progress(again.first_id, [10]))
    await steps_until(stream, ReplicaSucceeded)
    assert cancelled(wire)


@in_fake_time
async def test_where_an_heir_is_refused_or_lost_the_stream_goes_on_and_asks_for_another_later() -> None:
    one, _, other, _, stream, heir = await with_heir(Outlook.LEAVES)
    other.receive(frames.Reject(heir.first_id, RejectReason.BUSY, "full", 900))
    assert stream.heir is None
    one.receive(progress(stream.first_id, [8]))
    assert (await anext(stream)).tokens == [8]
    _, wanted = await steps_until(stream, SuccessorWanted)
    assert wanted.lost is None
    heir = heir_at(other)
    stream.prepare(heir)
    other.receive(progress(heir.first_id, [], FinishReason.ERROR))
    _, wanted = await steps_until(stream, SuccessorWanted)
    stream.prepare(heir_at(other))
    other.connection_lost(None)
    _, wanted = await steps_until(stream, SuccessorWanted)
    assert wanted.lost is not None, "its prompt may be what crashed it"
    stream.prepare(None)
    await steps_until(stream, SuccessorWanted)
    one.receive(progress(stream.first_id, [9], FinishReason.LENGTH))
    assert [token async for step in stream for token in step.tokens] == [9]


@in_fake_time
async def test_what_is_lost_or_refused_leaves_its_heir_to_the_call() -> None:
    one, _, _, _, stream, heir = await with_heir(Outlook.DOUBTED)
    one.connection_lost(None)
    await steps_until(stream, ReplicaLost)
    assert stream.take_heir() is heir
    one, _, _, _, stream, heir = await with_heir(Outlook.DOUBTED)
    one.receive(frames.Reject(stream.first_id, RejectReason.BUSY, "full", 900))
    await steps_until(stream, ReplicaSucceeded)
    assert stream.take_heir() is heir


@in_fake_time
async def test_who_asks_again_while_an_heir_is_begun_gets_that_one() -> None:
    (one, _), (other, _) = connection(), connection("unix:/other")
    stream = begun(one)
    one.doubt()
    await steps_until(stream, SuccessorWanted)
    one.doubt()
    heir = heir_at(other)
    stream.prepare(heir)
    other.receive(progress(heir.first_id, [8]))
    await steps_until(stream, ReplicaSucceeded)


@in_fake_time
async def test_both_end_with_the_call() -> None:
    _, wire, _, other_wire, stream, _ = await with_heir(Outlook.LEAVES)
    stream.cancel()
    assert cancelled(wire)
    assert cancelled(other_wire)
    assert [step async for step in stream] == []


@in_fake_time
async def test_what_is_handed_over_gets_no_heir() -> None:
    (one, _), (other, other_wire) = connection(), connection("unix:/other")
    stream = begun(one)
    one.hand_over([other])
    one.doubt()
    one.want_successors()
    stream.prepare(heir_at(other))
    assert cancelled(other_wire)
    assert not stream._wanted


@in_fake_time
async def test_vectors_have_no_heirs() -> None:
    one, _ = connection()
    order = frames.Submit(0, b"\1\0\0\0", Scope(), SamplingParams(), 1, pooling=Pooling.MEAN)
    stream = one.open_stream(order, 0, None)
    one.doubt()
    assert not stream._wanted


@in_fake_time
async def test_an_heir_begins_at_another_replica_also_where_its_own_has_spoken_again(tmp_path: Path) -> None:
    async with connected(tmp_path, replicas=2) as (stub, fleet):
        entries = [*fleet._pools[MODEL].entries]
        connections = [entry.connection for entry in entries]
        for own, other in (connections, reversed(connections)):
            assert own is not None
            chosen = await fleet.acquire(MODEL, SCOPE, PROMPT, 0.0, began_as=own.model, besides=own)
            assert chosen.replica is other
            with pytest.raises(NoReplicaAvailable):
                await fleet.acquire(MODEL, SCOPE, PROMPT, 0.0, began_as="other weights", besides=own)
        stub.hidden.add(0)
        stub.tell()
        await until(lambda: len(fleet.replicas()) == 1)
        (last,) = [entry.connection for entry in fleet._pools[MODEL].entries]
        assert last is not None
        with pytest.raises(NoReplicaAvailable):
            await fleet.acquire(MODEL, SCOPE, PROMPT, 0.0, began_as=last.model, besides=last)
        await turns()
        assert not fleet.waiting(MODEL), "a stream that has a replica wakes none"


@pytest.mark.parametrize("machine_drains", [False, True])
@in_fake_time
async def test_an_heir_begins_on_another_number_of_gpus_where_no_replica_has_as_many(
    tmp_path: Path, machine_drains: bool
) -> None:
    async with connected(tmp_path, replicas=2) as (stub, fleet):
        for replica, digest in zip(stub.replicas, ("d/2", "d"), strict=True):
            replica.digest = digest
            replica.die()
        entries = {entry.state.address: entry for entry in fleet._pools[MODEL].entries}
        of_two, of_one = (entries[replica.state.address] for replica in stub.replicas)
        await until(lambda: (of_two.model, of_one.model) == ("stub:d/2", "stub:d"))
        assert (of_two.differs, of_one.differs) == (False, True), "calls are not mixed"
        own = of_two.connection
        if machine_drains:
            of_two.machine = replace(of_two.machine, report=structs.replace(of_two.machine.report, draining=True))
            fleet._on_change(of_two)
        else:
            stub.replicas[0].load(draining=True)
        await until(lambda: not of_one.differs)
        chosen = await fleet.acquire(MODEL, SCOPE, PROMPT, 0.0, began_as="stub:d/2", besides=own)
        assert chosen.replica is of_one.connection
        with pytest.raises(NoReplicaAvailable):
            await fleet.acquire(MODEL, SCOPE, PROMPT, 0.0, began_as="stub:e/2", besides=own)
