"""Requests that a replica hands over to another one, as their connection sees it: frames in, frames and steps out."""

import asyncio
from array import array
from typing import Any, cast

import msgspec
import pytest

from engine.protocol import frames
from engine.protocol.cache_frames import HandOver, HandOverFailed
from engine.protocol.types import FinishReason, RejectReason, SamplingParams, Scope
from gateway.cluster.client import ReplicaConnection
from gateway.cluster.replica_counters import ReplicaCounters
from gateway.cluster.stream import (
    OutputDelta,
    ReplicaLeaving,
    ReplicaMoved,
    ReplicaRejected,
    ReplicaStream,
    SuccessorWanted,
)
from tests.support.served_gateway import looped


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self._reader = frames.FrameReader()
        self.sent: list[frames.Frame] = []

    def write(self, data: bytes) -> None:
        self.sent += self._reader.feed(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return None


def connection(address: str = "unix:/one", handover: str = "unix:/one-kv", **fields: Any) -> tuple[Any, Wire]:
    replica = ReplicaConnection(address, lambda: None, ReplicaCounters(), lambda seconds: None)
    wire = Wire()
    replica.connection_made(cast(asyncio.BaseTransport, wire))
    hello = frames.Hello(2, "m", "r", "1", 1, 100, 100, 16, 10, 3, "d", handover)
    for name, value in fields.items():
        hello = msgspec.structs.replace(hello, **{name: value})
    replica.receive(hello)
    return replica, wire


def begun(replica: ReplicaConnection, n: int = 1) -> ReplicaStream:
    stream = replica.open_stream(frames.Submit(0, b"\1\0\0\0", Scope(), SamplingParams(), 9, n=n), 0, None)
    for id in stream.ids:
        replica.receive(progress(id, [7], started=[frames.SequenceStarted(id, 0, 0.0)]))
    return stream


def progress(id: int, tokens: list[int], reason: FinishReason | None = None, **columns: Any) -> frames.StepOutputs:
    finished = [] if reason is None else [frames.SequenceFinished(id, reason, len(tokens))]
    return frames.StepOutputs([id], [len(tokens)], array("I", tokens).tobytes(), finished=finished, **columns)


async def steps_until(stream: ReplicaStream, kind: type[Exception]) -> tuple[list[OutputDelta], Any]:
    steps = []
    try:
        async with asyncio.timeout(5):
            while True:
                steps.append(await anext(stream))
    except kind as error:
        return steps, error
    raise AssertionError(f"it ended without {kind.__name__}")


@looped
async def test_a_request_that_moves_gives_all_its_tokens_first_and_no_finish() -> None:
    (one, wire), (other, _) = connection(), connection("unix:/other", "unix:/other-kv", boot="4")
    stream = begun(one)
    one.hand_over([other])
    one.hand_over([other])
    (order,) = [frame for frame in wire.sent if isinstance(frame, HandOver)]
    assert (order.address, order.boot, len(order.key)) == ("unix:/other-kv", "4", 32)
    one.release(started=True)
    one.receive(progress(order.id, [8, 9], FinishReason.MOVED))
    steps, moved = await steps_until(stream, ReplicaMoved)
    assert [token for step in steps for token in step.tokens] == [7, 8, 9]
    assert not any(step.finish for step in steps)
    assert (moved.target, moved.keys) == (other, {0: order.key})
    assert not one.regions


@looped
async def test_of_several_choices_some_may_end_and_the_rest_move() -> None:
    (one, wire), (other, _) = connection(), connection("unix:/other")
    stream = begun(one, n=3)
    one.hand_over([other])
    orders = [frame for frame in wire.sent if isinstance(frame, HandOver)]
    assert len({order.key for order in orders}) == 3
    one.receive(progress(orders[0].id, [1], FinishReason.MOVED))
    one.receive(progress(orders[1].id, [2], FinishReason.STOP))
    stream.stop(2)
    steps, moved = await steps_until(stream, ReplicaMoved)
    assert [step.finish.reason for step in steps if step.finish] == [FinishReason.STOP]
    assert moved.keys[0] == orders[0].key


@looped
async def test_what_cannot_be_moved_goes_on_elsewhere_by_its_tokens() -> None:
    (one, _), (other, _) = connection(), connection("unix:/other")
    stream = begun(one, n=2)
    one.hand_over([other])
    one.receive(HandOverFailed(stream.first_id, "refused (full)"))
    await steps_until(stream, ReplicaLeaving)
    assert not one.regions


@looped
async def test_choices_that_moved_keep_their_kv_where_another_one_does_not() -> None:
    (one, wire), (other, _) = connection(), connection("unix:/other")
    stream = begun(one, n=2)
    one.hand_over([other])
    one.receive(progress(stream.first_id, [], FinishReason.MOVED))
    one.receive(HandOverFailed(stream.first_id + 1, "silent"))
    _, moved = await steps_until(stream, ReplicaMoved)
    assert moved.keys.keys() == {0}
    assert frames.Cancel([stream.first_id + 1]) in wire.sent


@looped
async def test_a_request_that_ends_before_it_moves_just_ends() -> None:
    (one, _), (other, _) = connection(), connection("unix:/other")
    stream = begun(one)
    one.hand_over([other])
    one.receive(progress(stream.first_id, [3], FinishReason.LENGTH))
    steps = [step async for step in stream]
    assert steps[-1].finish is not None
    assert steps[-1].finish.reason is FinishReason.LENGTH


def computing(replica: Any, other: Any, n: int = 1) -> ReplicaStream:
    """A request whose prompt the replica computes for the other one."""
    return replica.open_stream(frames.Submit(0, b"\1\0\0\0", Scope(), SamplingParams(), 9, n=n), 0, None, other, 5.0)


@looped
async def test_a_prompt_computed_for_another_one_is_handed_over_with_its_first_token() -> None:
    (one, wire), (other, _) = connection(), connection("unix:/other", "unix:/other-kv", boot="4")
    stream = computing(one, other)
    assert [type(frame).__name__ for frame in wire.sent] == ["Submit", "HandOver"]
    assert other.coming_s(4.0) == (1.0,)
    one.receive(progress(1, [7], started=[frames.SequenceStarted(1, 0, 0.0)]))
    one.receive(progress(1, [8], FinishReason.MOVED))
    _, moved = await steps_until(stream, ReplicaMoved)
    assert moved.target is other
    assert other.coming_s(4.0) == ()


@looped
async def test_what_is_computed_elsewhere_is_load_of_the_replica_that_answers_it() -> None:
    """Else calls whose prompts others compute would all be given to the same one."""
    (one, _), (other, _) = connection(), connection("unix:/other", "unix:/other-kv")
    stream = computing(one, other, n=3)
    assert (one.expected, other.expected) == (3, 3)
    other.receive(frames.ReplicaLoad(2, 1, 0, 9, 0, 0))
    assert other.expected == 6, "it knows nothing of those that come"
    stream.stop(2)
    assert other.expected == 5
    one.receive(progress(1, [7], FinishReason.MOVED))
    assert other.expected == 4
    stream.cancel()
    assert other.expected == 3


@looped
async def test_a_request_of_one_choice_that_was_not_moved_goes_on_where_it_is() -> None:
    (one, _), (other, _) = connection(), connection("unix:/other")
    stream = computing(one, other)
    one.receive(progress(1, [7], started=[frames.SequenceStarted(1, 0, 0.0)]))
    one.receive(HandOverFailed(1, "full"))
    one.receive(progress(1, [8], FinishReason.LENGTH))
    assert [token async for step in stream for token in step.tokens] == [7, 8]
    assert one.failed_handovers.keys() == {"unix:/one-kv"}, "nothing more goes there for a while"


@looped
async def test_a_request_of_one_choice_that_was_not_moved_is_answered_until_another_replica_goes_on_with_it() -> None:
    (one, _), (other, _) = connection(), connection("unix:/other")
    stream = begun(one)
    one.hand_over([other])
    one.receive(HandOverFailed(stream.first_id, "full"))
    await steps_until(stream, SuccessorWanted)
    one.hand_over([other])
    assert stream.departure is None, "it is not handed over a second time"
    one.receive(progress(stream.first_id, [8], FinishReason.LENGTH))
    assert [token async for step in stream for token in step.tokens] == [8]


@looped
async def test_where_prompts_are_computed_for_others_a_full_queue_refuses_nobody() -> None:
    (one, _), (other, _) = connection(), connection("unix:/other")
    stream = computing(one, other)
    one.receive(frames.Reject(1, RejectReason.BUSY, "the waiting queue is full", 900))
    await steps_until(stream, ReplicaLeaving)
    assert one.failed_handovers
    other_fault = computing(one, other)
    one.receive(frames.Reject(2, RejectReason.TOO_LONG, "too long"))
    await steps_until(other_fault, ReplicaRejected)


@looped
async def test_a_prompt_that_was_not_begun_with_leaves_a_replica_that_drains() -> None:
    (one, _), (other, _) = connection(), connection("unix:/other")
    stream = computing(one, other)
    one.release(started=False)
    await steps_until(stream, ReplicaLeaving)


@looped
async def test_prompts_that_were_sent_since_the_last_load_are_counted() -> None:
    (one, _), (other, _) = connection(), connection("unix:/other")
    computing(one, other)
    assert (one.queued_prompts, one.queued_tokens, one.pending_tokens) == (1, 1, 1)
    one.receive(frames.ReplicaLoad(1, 0, 0, 0, 0, 0))
    assert (one.queued_prompts, one.queued_tokens, one.queued_keys) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("target", "source", "fields", "place"),
    [
        ("unix:/other", "unix:/one", {}, "unix:/kv/r-kv.sock"),
        ("unix:/other", "unix:/one", {"handover": ""}, ""),
        ("unix:/other", "unix:/one", {"digest": "e"}, ""),
        ("unix:/other", "unix:/one", {"digest": "e/2"}, ""),
        ("unix:/other", "unix:/one", {"digest": "d/2"}, "unix:/kv/r-kv.sock"),
        ("unix:/other", "unix:/one", {"revision": "s"}, ""),
        ("tls:m1@10.0.0.1:8790/r", "unix:/one", {}, "tls:m1@10.0.0.1:8790/r-kv"),
        ("tls:m1@10.0.0.1:8790/r", "tls:m1@10.0.0.1:8790/q", {}, "unix:/kv/r-kv.sock"),
        ("tls:m1@10.0.0.1:8790/r", "tls:m2@10.0.0.2:8790/q", {}, "tls:m1@10.0.0.1:8790/r-kv"),
        ("unix:/other", "tls:m2@10.0.0.2:8790/q", {}, ""),
    ],
)
def test_kv_goes_to_replicas_where_it_means_the_same_and_that_can_be_named(
    target: str, source: str, fields: dict[str, Any], place: str
) -> None:
    @looped
    async def ask() -> None:
        (one, _), (other, _) = connection(source), connection(target, **{"handover": "unix:/kv/r-kv.sock"} | fields)
        assert other.handover_from(one) == place

    ask()
