"""gateway/batch/concurrency.py: queued requests take a small part of the loop's time, and timing them changes nothing
else."""

import asyncio
import random

import pytest

from gateway.batch.concurrency import CONCURRENCY_MAX, LOOP_SHARE_MAX, ConcurrencyController
from tests.support.waiting import StoppedClock, forever, turns


@pytest.mark.parametrize("cost_s", [0.0001, 0.001, 0.01])
def test_as_many_are_on_their_way_as_take_their_share(cost_s: float) -> None:
    """Each one on its way takes so much in a turn of 0.1 s."""
    clock, pick = StoppedClock(), random.Random(1)
    pace = ConcurrencyController(clock)
    taken_s, rounds = 0.0, 400

    async def work() -> None:
        clock.now_s += cost_s * pick.uniform(0.5, 1.5)

    async def run() -> None:
        nonlocal taken_s
        for _ in range(rounds):
            began = clock.now_s
            for _ in range(pace.limit):
                await pace.timed(work())
            taken_s += clock.now_s - began
            clock.now_s = max(clock.now_s, began + 0.1)
            pace.adjust()

    asyncio.run(run())
    share = taken_s / clock.now_s
    assert share < 1.5 * max(LOOP_SHARE_MAX, cost_s / 0.1)  # one at least is always on its way
    assert pace.limit == CONCURRENCY_MAX or share > 0.7 * LOOP_SHARE_MAX


def test_waiting_is_not_counted_and_results_of_waits_arrive() -> None:
    clock, seen = StoppedClock(), []
    pace = ConcurrencyController(clock)

    async def work() -> None:
        await turns(20)
        seen.append(await asyncio.to_thread(lambda: 7))

    async def pass_time() -> None:
        for _ in range(20):
            clock.now_s += 1.0
            await turns()

    async def run() -> None:
        await asyncio.gather(_awaited(pace, work()), pass_time())

    asyncio.run(run())
    assert seen == [7]
    assert (clock.now_s, pace._taken_s) == (20.0, 0.0)


async def _awaited(pace: ConcurrencyController, work: object) -> None:
    await pace.timed(work)  # type: ignore[arg-type]


def test_an_error_and_a_cancellation_go_through_and_may_be_caught_inside() -> None:
    async def fails() -> None:
        await turns()
        raise LookupError

    async def tidies(done: list[str]) -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            await turns()
            done.append("tidied")
            raise

    async def scenario() -> None:
        pace, done = ConcurrencyController(), list[str]()
        with pytest.raises(LookupError):
            await pace.timed(fails())
        task = asyncio.create_task(_awaited(pace, tidies(done)))
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == ["tidied"]

    asyncio.run(scenario())
