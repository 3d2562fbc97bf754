"""One connection to Redis that many callers share, with deadlines. It does not know what the commands mean.

While as many flights of commands are away as the round trip asks for, the next one fills: near Redis that is one, so a
thousand callers cost a few round trips and not a thousand connections; far from it a flight leaves each half
millisecond, so nobody waits for another's. Every command must be idempotent: what got no answer is sent once more,
because an answer that is late may be this process's own lateness, and a connection that broke may only have been idle.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from redis.asyncio import Connection
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as NoAnswer

from tenants.store.redis.errors import unavailable
from tenants.store.redis.primary import CONNECT_S

ANSWER_S: Final = 0.05  # for an answer, beside ROUND_TRIPS of what one takes; after the second try a caller is told
ROUND_TRIPS: Final = 4
CONNECT_ROUND_TRIPS: Final = 10  # with TLS, a password and what Sentinels are asked; the first ever has CONNECT_S
REPLICATED_S: Final = 0.5  # for replicas to have a flight, where they must
PROBE_COMMANDS: Final = 4  # commands that see whether Redis is back: few, so that one hardly back can answer them
LOOK_S: Final = 0.005  # a deadline is so many looks at what has come, however late each of them is
PIPELINE_COMMANDS: Final = 64  # sent at once; more would save little, and their answers take part of the deadline
PACE_S: Final = 0.0005  # between two flights, where an earlier one is still away
FLIGHTS_MAX: Final = 512
SMOOTHING: Final = 8  # a longer round trip counts for one in so many; a shorter one at once

Command = Sequence[Any]
_GONE: Final = ("READONLY", "read only replica", "MASTERDOWN", "NOREPLICAS")  # said by who may be the primary no more

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _PendingCommand:
    command: Command
    answer: asyncio.Future[Any]  # an error of Redis itself is one
    tries: int = 0  # how often Redis may have got it


@dataclass(slots=True, eq=False)
class _Flight:
    questions: list[_PendingCommand]
    sent_s: float
    alone: bool  # no other one was away, so that its first answer tells the round trip
    replicas: int  # so many must have it before it is answered


class CommandPipeline:
    """Every caller is answered or raises within two deadlines of the start of the flight that it is on, and within one
    where Redis did not answer before either. A deadline is ANSWER_S and ROUND_TRIPS times the measured round trip, in
    which this process itself was not late.

    `open` returns a new connection to the primary that has been told all that it must hear first. `replicas` says how
    many must have a flight before its callers get their answers; where fewer do, they get StoreUnavailable.
    """

    def __init__(
        self, open: Callable[[], Awaitable[tuple[Connection, float]]], replicas: Callable[[], int] = lambda: 0
    ) -> None:
        self._open = open
        self._replicas = replicas
        self._connection: Connection | None = None
        self._waiting: dict[_PendingCommand, None] = {}  # in the order of asking
        self._flights: deque[_Flight] = deque()  # in the order of sending
        self._landed = asyncio.Event()
        self._round_trip_s: float | None = None  # None: it was never connected
        self._down = False  # since the last flight
        # The callers' tasks cannot drive it: one that leaves would take the others' answers along.
        self._connecting: asyncio.Task[tuple[Connection, float] | Exception] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def ask(self, *commands: Command) -> list[Any]:
        """The answers, an error of Redis itself among them. Raises StoreUnavailable when there are none."""
        loop = asyncio.get_running_loop()
        questions = [_PendingCommand(command, loop.create_future()) for command in commands]
        self._waiting.update(dict.fromkeys(questions))
        self._start_sending()
        try:
            answers = [await question.answer for question in questions]
        finally:
            for question in questions:
                self._waiting.pop(question, None)  # a caller who left takes its commands along
                question.answer.cancel()
        for answer in answers:
            if isinstance(answer, (NoConnection, NoAnswer, OSError)):
                raise unavailable(answer, unsure=any(question.tries for question in questions)) from answer
        return answers

    async def close(self) -> None:
        for task in (self._sending, self._reading, self._connecting):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        await self._disconnect()

    def _start_sending(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        """Sends what waits, until nothing does."""
        while self._waiting:
            connection = self._connection
            try:
                if connection is None:
                    connection = await self._connected()
                await self._turn()
                if self._connection is connection:
                    await self._send(connection)
            except Exception as error:
                if self._connection is connection:
                    await self._fail(error)

    async def _connected(self) -> Connection:
        """Waits for a connection within the deadline. One that takes longer is gone on with for the next caller."""
        connecting = self._connecting
        if connecting is None or (connecting.done() and isinstance(connecting.result(), Exception)):
            connecting = self._connecting = asyncio.get_running_loop().create_task(self._connect())
        known_s = self._round_trip_s
        patience_s = CONNECT_S if known_s is None else ANSWER_S + CONNECT_ROUND_TRIPS * known_s
        try:
            async with lag_tolerant_timeout(min(patience_s, CONNECT_S)):
                outcome = await asyncio.shield(connecting)
        except TimeoutError as error:
            raise NoAnswer(f"no connection within {patience_s:.3g} s") from error
        self._connecting = None
        if isinstance(outcome, Exception):
            raise outcome
        connection, self._round_trip_s = outcome
        self._connection = connection
        return connection

    async def _connect(self) -> tuple[Connection, float] | Exception:
        try:
            return await self._open()
        except Exception as error:
            return error

    async def _turn(self) -> None:
        """Returns when a flight may leave."""
        loop = asyncio.get_running_loop()
        while self._flights:
            assert self._round_trip_s is not None
            most = 1 if self._down else min(FLIGHTS_MAX, 1 + int(self._round_trip_s / PACE_S))
            wait_s = self._flights[-1].sent_s + PACE_S - loop.time()
            room = len(self._flights) < most
            if room and wait_s <= 0:
                return
            self._landed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s if room else None):
                    await self._landed.wait()

    async def _send(self, connection: Connection) -> None:
        """Sends the first that wait. Nothing is sent before Redis answered the connecting itself, so that one that
        hangs does not find all that was asked meanwhile, in the order of a queue that nobody waits in any more, when it
        goes on."""
        batch = list(islice(self._waiting, PROBE_COMMANDS if self._down else PIPELINE_COMMANDS))
        commands = [question.command for question in batch]
        if replicas := self._replicas():
            commands.append(("WAIT", replicas, int(REPLICATED_S * 1000)))
        for question in batch:
            del self._waiting[question]
            question.tries += 1
        loop = asyncio.get_running_loop()
        self._flights.append(_Flight(batch, loop.time(), not self._flights, replicas))
        if self._reading is None or self._reading.done():
            self._reading = loop.create_task(self._read_all(connection))
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)

    async def _read_all(self, connection: Connection) -> None:
        """Reads the answers of flights in their order, until none is away."""
        try:
            while self._flights:
                await self._read(connection, self._flights[0])
        except Exception as error:
            if self._connection is connection:
                await self._fail(error)

    async def _read(self, connection: Connection, flight: _Flight) -> None:
        assert self._round_trip_s is not None
        patience_s = ANSWER_S + ROUND_TRIPS * self._round_trip_s + (REPLICATED_S if flight.replicas else 0.0)
        try:
            async with lag_tolerant_timeout(patience_s):
                answers = [await self._receive(connection, flight, question) for question in flight.questions]
                if flight.replicas:
                    count = await _answer(connection)
                    if not isinstance(count, int) or count < flight.replicas:
                        error = NoConnection(f"NOTALL {count} of {flight.replicas} replicas have it")
                        answers = [error] * len(answers)
                    for question, answer in zip(flight.questions, answers, strict=True):
                        _give(question, answer)
        except TimeoutError as error:
            raise NoAnswer(f"no answer within {patience_s:.3g} s") from error
        self._flights.popleft()
        self._landed.set()
        self._down = False

    async def _receive(self, connection: Connection, flight: _Flight, question: _PendingCommand) -> Any:
        """The next answer, given to the question unless replicas must have the flight first."""
        answer = await _answer(connection)
        if flight.alone and question is flight.questions[0]:
            self._measure(asyncio.get_running_loop().time() - flight.sent_s)
        if isinstance(answer, ResponseError) and any(sign in str(answer) for sign in _GONE):
            raise answer
        if not flight.replicas:
            _give(question, answer)
        return answer

    def _measure(self, round_trip_s: float) -> None:
        assert self._round_trip_s is not None
        smoothed_s = self._round_trip_s + (round_trip_s - self._round_trip_s) / SMOOTHING
        self._round_trip_s = min(round_trip_s, smoothed_s)

    async def _fail(self, error: Exception) -> None:
        """Drops the connection, so that no late answer is taken for another question's. What was away goes once more;
        what went twice is told so, and then all that wait are, as they are where Redis was not there before. A bug too
        is told, and leaves nobody waiting."""
        if not isinstance(error, (RedisError, OSError)):
            log.error("store_connection_failed", exc_info=error)
            error = NoConnection(repr(error))
        reading, self._reading = self._reading, None
        if reading is not None and reading is not asyncio.current_task():
            reading.cancel()
        was_connected = self._connection is not None
        away = [one for flight in self._flights for one in flight.questions if not one.answer.done()]
        self._flights.clear()
        self._landed.set()
        if was_connected and not self._down and all(question.tries < 2 for question in away):
            self._waiting = dict.fromkeys([*away, *self._waiting])
        else:
            self._down = True
            for question in [*away, *self._waiting]:
                _give(question, error)
            self._waiting.clear()
        await self._disconnect()
        if self._waiting:
            self._start_sending()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)


def _give(question: _PendingCommand, answer: Any) -> None:
    if not question.answer.done():  # else its caller left
        question.answer.set_result(answer)


async def _answer(connection: Connection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


@asynccontextmanager
async def lag_tolerant_timeout(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError where the block takes longer. Between two looks the loop reads what has come: what it is late
    itself, however long and however often, is no time that it waited."""
    loop, looks = asyncio.get_running_loop(), 1 + math.ceil(seconds / LOOK_S)
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as timeout:

        def look() -> None:
            nonlocal looks, timer
            looks -= 1
            if looks > 0:
                timer = loop.call_later(LOOK_S, look)
            else:
                timeout.reschedule(loop.time())

        timer = loop.call_later(LOOK_S, look)
        try:
            yield
        finally:
            timer.cancel()
