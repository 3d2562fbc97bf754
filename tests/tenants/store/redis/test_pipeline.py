import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from redis.asyncio import Connection

from tenants.store.protocol import StoreUnavailable
from tenants.store.redis import pipeline as module
from tenants.store.redis.address import read_address
from tenants.store.redis.pipeline import LOOK_S, PIPELINE_COMMANDS, CommandPipeline, lag_tolerant_timeout
from tenants.store.redis.primary import Primary
from tests.support.waiting import turns

pytestmark = pytest.mark.anyio
ANSWER_S = module.ANSWER_S  # in service, before the fixture patient_line raises it


@pytest.fixture
async def line(empty_redis_url: str) -> AsyncIterator[CommandPipeline]:
    line = CommandPipeline(Primary(read_address(empty_redis_url)).connect)
    yield line
    await line.close()


@pytest.fixture
def deadline_of_service(patient_line: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", ANSWER_S)


async def test_each_question_gets_its_own_answer(line: CommandPipeline) -> None:
    async def ask(n: int) -> None:
        assert await line.ask(("ECHO", f"{n}"), ("ECHO", f"again {n}")) == [b"%d" % n, b"again %d" % n]

    await asyncio.gather(*(ask(n) for n in range(3 * PIPELINE_COMMANDS)))
    assert await line.ask() == []
    assert not line._waiting


async def test_an_error_of_one_command_leaves_the_others_alone(line: CommandPipeline) -> None:
    fine, wrong, also_fine = await line.ask(("ECHO", "a"), ("INCR",), ("ECHO", "b"))
    assert (fine, also_fine) == (b"a", b"b")
    assert isinstance(wrong, redis.ResponseError)


async def test_the_commands_of_a_caller_who_left_are_not_sent(line: CommandPipeline, empty_redis_url: str) -> None:
    first = asyncio.create_task(line.ask(("RPUSH", "list", "first")))
    await turns()
    left = asyncio.create_task(line.ask(("RPUSH", "list", "left")))
    stayed = asyncio.create_task(line.ask(("RPUSH", "list", "stayed")))
    await turns()
    left.cancel()
    await asyncio.gather(first, left, stayed, return_exceptions=True)
    with redis.Redis.from_url(empty_redis_url) as client:
        assert client.lrange("list", 0, -1) == [b"first", b"stayed"]


async def test_a_caller_who_leaves_in_flight_takes_nobody_along(line: CommandPipeline) -> None:
    await line.ask(("PING",))
    for _ in range(50):
        tasks = [asyncio.create_task(line.ask(("ECHO", f"{n}"))) for n in range(5)]
        await turns()
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [[b"%d" % n] for n in range(1, 5)]


async def test_a_frozen_redis_is_noticed_within_a_fifth_of_a_second(
    line: CommandPipeline, frozen_redis: Any, deadline_of_service: None
) -> None:
    assert await line.ask(("PING",)) == [b"PONG"]
    times = []
    with frozen_redis():
        for _ in range(5):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="does not answer in time"):
                await line.ask(("PING",))
            times.append(time.monotonic() - began)
    assert min(times) < 2 * ANSWER_S + 0.05, times


async def test_the_bound_fails_where_redis_is_waited_for_longer(line: CommandPipeline, frozen_redis: Any) -> None:
    assert module.ANSWER_S > 4 * ANSWER_S, "patient_line has raised it"
    with pytest.raises(AssertionError, match=r"^\[0\."):
        await test_a_frozen_redis_is_noticed_within_a_fifth_of_a_second(line, frozen_redis, None)


async def test_200_callers_of_a_frozen_redis_wait_no_longer_than_one(
    line: CommandPipeline, frozen_redis: Any, deadline_of_service: None
) -> None:
    await line.ask(("PING",))
    with frozen_redis():
        began = time.monotonic()
        outcomes = await asyncio.gather(*(line.ask(("PING",)) for _ in range(200)), return_exceptions=True)
        assert time.monotonic() - began < 20 * ANSWER_S, "they waited for one another"
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)


async def test_a_redis_that_thawed_answers_the_next_caller(line: CommandPipeline, frozen_redis: Any) -> None:
    with frozen_redis(), pytest.raises(StoreUnavailable):
        await line.ask(("ECHO", "frozen"))
    assert await line.ask(("ECHO", "thawed")) == [b"thawed"]


async def test_nothing_that_was_asked_of_a_frozen_redis_is_done_when_it_thaws_but_what_was_on_its_way(
    line: CommandPipeline, frozen_redis: Any, empty_redis_url: str
) -> None:
    assert await line.ask(("INCR", "asked")) == [1]
    unsure = []
    with frozen_redis():
        for _ in range(5):
            with pytest.raises(StoreUnavailable) as raised:
                await line.ask(("INCR", "asked"))
            unsure.append(raised.value.unsure)
    assert unsure == [True, False, False, False, False]
    assert await line.ask(("INCR", "asked")) == [3]


async def test_a_caller_of_a_redis_that_is_known_to_be_silent_waits_for_one_deadline(
    line: CommandPipeline, frozen_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    await line.ask(("PING",))
    times = []
    with frozen_redis():
        for _ in range(4):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await line.ask(("PING",))
            times.append(time.monotonic() - began)
    assert times[0] >= 0.4, "the first caller's command is sent twice"
    assert min(times[1:]) < 0.3, times


def hold_loop(seconds: float) -> None:
    """Lets the loop do nothing else."""
    time.sleep(seconds)


async def test_an_answer_that_came_while_this_process_was_late_is_taken(
    line: CommandPipeline, empty_redis_url: str
) -> None:
    """Else every pause of the process would be taken for one of Redis."""
    await line.ask(("PING",))
    asking = asyncio.ensure_future(line.ask(("INCR", "asked")))
    await turns(3)
    hold_loop(module.ANSWER_S + 0.1)
    assert await asking == [1], "it was sent once more"


async def test_turns_of_this_loop_that_take_long_are_no_silence_of_redis() -> None:
    """Not even where each is so short that none is late by itself, and together they take longer than the deadline."""
    loop, turn_s = asyncio.get_running_loop(), 1.6 * LOOK_S
    answer = loop.create_future()
    turns_left = int(ANSWER_S / LOOK_S) - 1

    def hold() -> None:
        nonlocal turns_left
        hold_loop(turn_s)
        turns_left -= 1
        if turns_left:
            loop.call_soon(hold)
        else:
            answer.set_result("it came")

    began = time.monotonic()
    loop.call_soon(hold)
    async with lag_tolerant_timeout(ANSWER_S):
        assert await answer == "it came"
    assert time.monotonic() - began > ANSWER_S


async def test_a_loop_that_is_always_late_waits_for_nobody_for_ever() -> None:
    ended = False

    def hold() -> None:
        hold_loop(4 * LOOK_S)
        if not ended:
            asyncio.get_running_loop().call_soon(hold)

    hold()
    with pytest.raises(TimeoutError):
        async with lag_tolerant_timeout(ANSWER_S):
            await asyncio.get_running_loop().create_future()
    ended = True


async def test_a_bug_leaves_no_caller_waiting(empty_redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    primary, bugs = Primary(read_address(empty_redis_url)), [KeyError("role")]

    async def connect() -> tuple[Connection, float]:
        if bugs:
            raise bugs.pop()
        return await primary.connect()

    line = CommandPipeline(connect)
    with pytest.raises(StoreUnavailable, match="KeyError"):
        await line.ask(("PING",))
    assert "store_connection_failed" in caplog.text
    assert await line.ask(("PING",)) == [b"PONG"]
    assert line._connection is not None
    line._connection.read_response = broken_once(line._connection.read_response)  # type: ignore[method-assign]
    assert await line.ask(("ECHO", "again")) == [b"again"], "what was away goes once more"
    await line.close()


def broken_once(read: Any) -> Any:
    bugs = [ValueError("a bug")]

    async def reading(*arguments: Any, **named: Any) -> Any:
        if bugs:
            raise bugs.pop()
        return await read(*arguments, **named)

    return reading
