import asyncio
import random

import pytest

from engine.protocol.frames import ModelDemand
from gateway.cluster import wake_queue
from gateway.cluster.wake_queue import COALESCE_S, QUEUED_PATIENCE_MS, AwaitedModel, WakeQueue
from tests.support.waiting import holds, in_fake_time, turns, until

M = AwaitedModel("m")


async def waiting(room: WakeQueue, told: list[str], name: str, weight: float = 1.0, wait_s: float = 10.0) -> None:
    try:
        await room.wait(M, weight, asyncio.get_running_loop().time() + wait_s)
        told.append(name)
    except TimeoutError:
        told.append(f"{name} late")


@in_fake_time
async def test_the_heavier_go_on_first_and_equals_as_they_came() -> None:
    room, order = WakeQueue(lambda wake: None), list[str]()
    rng = random.Random(5)
    weights = [rng.choice((0.5, 1.0, 4.0)) for _ in range(60)]
    async with asyncio.TaskGroup() as group:
        for number, weight in enumerate(weights):
            group.create_task(waiting(room, order, f"{number:02}", weight))
        await until(lambda: room.count("m") == 60)
        room.release(M)
    assert order == sorted(order, key=lambda name: (-weights[int(name)], int(name)))
    assert len(order) == 60


@in_fake_time
async def test_the_first_is_told_at_once_and_a_thousand_more_by_one_frame() -> None:
    told = list[ModelDemand]()
    room = WakeQueue(lambda wanted: told.append(room.demand(wanted)))
    async with asyncio.TaskGroup() as group:
        first = group.create_task(waiting(room, [], "first", 1.0, 5.0))
        await turns()
        assert [(wake.requests, wake.weight) for wake in told] == [(1, 1.0)]
        assert 4900 < told[0].patience_ms <= 5000
        more = [group.create_task(waiting(room, [], str(n), 1.0 + n % 3, 20.0)) for n in range(1000)]
        await asyncio.sleep(2 * COALESCE_S)
        assert (told[-1].requests, told[-1].weight) == (1001, 3.0)
        assert len(told) <= 3
        assert told[-1].patience_ms < 5000
        for task in more[:400]:
            task.cancel()
        await until(lambda: told[-1].requests == 601)
        assert told[-1].requests == 601, "whoever leaves counts no longer"
        assert len(told) <= 5
        told.clear()
        room.release(M)
        await until(lambda: told == [ModelDemand("m", 0)])
    assert first.done()


@in_fake_time
async def test_what_waits_is_told_again_until_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake_queue, "REPEAT_S", 0.03)
    told, ended = list[ModelDemand](), list[str]()
    room = WakeQueue(lambda wanted: told.append(room.demand(wanted)))
    again = asyncio.create_task(room.run())
    await asyncio.gather(*(waiting(room, ended, str(n), wait_s=0.2) for n in range(3)))
    assert sorted(ended) == ["0 late", "1 late", "2 late"]
    assert 5 <= len([wake for wake in told if wake.requests == 3]) <= 8
    await until(lambda: told[-1] == ModelDemand("m", 0))
    count = len(told)
    await holds(lambda: len(told) == count, 0.1)
    again.cancel()


@in_fake_time
async def test_batches_count_while_nobody_waits() -> None:
    told = list[ModelDemand]()
    room = WakeQueue(lambda wanted: told.append(room.demand(wanted)))
    room.set_batches(M, 1, 0.25)
    room.set_batches(M, 1, 0.25)
    assert told == [ModelDemand("m", 1, 0.25, QUEUED_PATIENCE_MS)]
    task = asyncio.create_task(waiting(room, [], "live", 2.0))
    await until(lambda: told[-1].weight == 2.0)
    task.cancel()
    await until(lambda: told[-1] == ModelDemand("m", 1, 0.25, QUEUED_PATIENCE_MS))
    assert room.wanted == [M]
    room.release(M)
    await until(lambda: told[-1] == ModelDemand("m", 0))
    assert room.wanted == []


@in_fake_time
async def test_calls_for_some_regions_wait_apart_and_count_together() -> None:
    sent = list[AwaitedModel]()
    room, ended = WakeQueue(sent.append), list[str]()
    there = AwaitedModel("m", ("eu",))
    task = asyncio.create_task(waiting(room, ended, "anywhere"))

    async def bound() -> None:
        await room.wait(there, 1.0, asyncio.get_running_loop().time() + 10)
        ended.append("eu")

    other = asyncio.create_task(bound())
    await until(lambda: sent == [M, there])
    assert room.count("m") == 2
    room.release(there)
    await until(lambda: ended == ["eu"])
    assert room.wanted == [M]
    room.release(M)
    await asyncio.gather(task, other)


@in_fake_time
async def test_it_does_not_remember_for_ever_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake_queue, "SENT_MAX", 8)
    room = WakeQueue(lambda wanted: None)
    for number in range(40):
        room.set_batches(AwaitedModel("m", (f"region-{number}",)), 1, 1.0)
    assert len(room._sent_at) <= 8
