import asyncio
from typing import Any

import pytest
from redis.exceptions import ResponseError

from tenants.store.protocol import StoreUnavailable
from tenants.store.redis.guard import FOLLOWED_S, PROBE_S, FollowGuard
from tests.support.waiting import StoppedClock, turns

pytestmark = pytest.mark.anyio


class FakePipeline:
    """Answers as it is told: with OK, an error, or not at all."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: Any = b"OK"
        self.holds = asyncio.Event()
        self.holds.set()

    async def ask(self, *commands: Any) -> list[Any]:
        self.asked += 1
        await self.holds.wait()
        if isinstance(self.answer, StoreUnavailable):
            raise self.answer
        return [self.answer]


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock(100.0)


@pytest.fixture
def pipeline() -> FakePipeline:
    return FakePipeline()


@pytest.fixture
def guard(pipeline: FakePipeline, clock: StoppedClock) -> FollowGuard:
    return FollowGuard(pipeline, lambda: True, clock)  # type: ignore[arg-type]


async def test_a_primary_that_is_followed_is_asked_twice_a_second_and_nobody_waits(
    guard: FollowGuard, pipeline: FakePipeline, clock: StoppedClock
) -> None:
    await guard.require_followed()
    pipeline.holds.clear()
    for _ in range(20):
        clock.now_s += PROBE_S / 10
        await guard.require_followed()
    await turns(2)
    assert pipeline.asked == 2


@pytest.mark.parametrize("answer", [StoreUnavailable("NOTALL"), ResponseError("NOREPLICAS")], ids=["wait", "error"])
async def test_grants_stop_when_no_replica_has_had_a_write_lately(
    guard: FollowGuard, pipeline: FakePipeline, clock: StoppedClock, answer: Any
) -> None:
    await guard.require_followed()
    pipeline.answer = answer
    clock.now_s += FOLLOWED_S
    await guard.require_followed()
    clock.now_s += 0.1
    with pytest.raises(StoreUnavailable, match="none has acknowledged"):
        await guard.require_followed()
    pipeline.answer = b"OK"
    await guard.require_followed()


async def test_a_late_acknowledgement_counts_from_when_it_was_asked_for(
    guard: FollowGuard, pipeline: FakePipeline, clock: StoppedClock
) -> None:
    """Else a replica that was cut off while it was asked would seem to follow still."""
    pipeline.holds.clear()
    waiting = asyncio.create_task(guard.require_followed())
    await turns(3)
    clock.now_s += FOLLOWED_S + 0.1
    pipeline.holds.set()
    with pytest.raises(StoreUnavailable, match="none has acknowledged"):
        await waiting


async def test_a_server_that_is_not_set_to_stop_is_not_asked(pipeline: FakePipeline) -> None:
    await FollowGuard(pipeline, lambda: False).require_followed()  # type: ignore[arg-type]
    assert pipeline.asked == 0
