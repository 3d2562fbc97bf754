"""One connection to Redis that many callers share, with a deadline. It does not know what the commands mean.

While one flight of commands is away the next one fills, so a thousand callers cost a few round trips and not a thousand
connections. Every command must be idempotent: a flight that got no answer is sent once more, because an answer that is
late may be this process's own lateness, and a connection that broke may only have been idle.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as NoAnswer

from tenants.store.protocol import StoreUnavailable

ANSWER_S: Final = 0.05  # for a flight, a new connection included; after the second one a caller is told
PROBE_COMMANDS: Final = 4  # commands that see whether Redis is back: few, so that one hardly back can answer them
LATE_S: Final = 0.01  # a timer that is so late tells of this process and not of Redis
LOOK_S: Final = 0.005  # for answers that came meanwhile to be read
PIPELINE_COMMANDS: Final = 64  # sent at once; more would save little, and their answers take part of the deadline

Command = Sequence[Any]


def connect(url: str) -> Any:
    """A connection pool of redis-py without its retries, which by default stall a request for half a minute.

    It has no socket_timeout either; whoever uses it sets a deadline around the whole use. With one, redis-py 8 wraps
    every write in asyncio.wait_for, which on Python 3.11 loses a cancellation that comes as the write ends.
    """
    return ConnectionPool.from_url(url, socket_timeout=None, retry=Retry(NoBackoff(), 0), protocol=2)


@dataclass(slots=True, eq=False)
class _PendingCommand:
    command: Command
    answer: Any = None
    answered: bool = False
    sent: bool = False  # Redis may have got it


class CommandPipeline:
    """Every caller is answered or raises within 2 · ANSWER_S of the start of the flight that it is on, and within
    ANSWER_S where Redis did not answer the flight before either."""

    def __init__(self, url: str) -> None:
        self._connection = connect(url).make_connection()
        self._waiting: dict[_PendingCommand, None] = {}  # in the order of asking
        self._lock = asyncio.Lock()
        self._down = False  # since the last flight

    async def ask(self, *commands: Command) -> list[Any]:
        """The answers, an error of Redis itself among them. Raises StoreUnavailable when there are none."""
        questions = [_PendingCommand(command) for command in commands]
        self._waiting.update(dict.fromkeys(questions))
        try:
            async with self._lock:
                while questions and not questions[-1].answered:
                    await self._send_flight()
        finally:
            for question in questions:
                self._waiting.pop(question, None)  # a caller who left takes its commands along
        answers = [question.answer for question in questions]
        for answer in answers:
            if isinstance(answer, (NoConnection, NoAnswer, OSError)):
                raise unavailable(answer, unsure=any(question.sent for question in questions)) from answer
        return answers

    async def close(self) -> None:
        await self._connection.disconnect(nowait=True)

    async def _send_flight(self) -> None:
        """Answers the first FLIGHT questions; all that wait, with the error, where Redis is not there."""
        batch = list(islice(self._waiting, PROBE_COMMANDS if self._down else PIPELINE_COMMANDS))
        try:
            answers = await (self._send(batch) if self._down else self._send_twice(batch))
            self._down = False
        except (RedisError, OSError) as error:
            self._down = True
            batch = list(self._waiting)
            answers = [error] * len(batch)
        for question, answer in zip(batch, answers, strict=True):
            question.answer, question.answered = answer, True
            self._waiting.pop(question, None)

    async def _send_twice(self, batch: list[_PendingCommand]) -> list[Any]:
        try:
            return await self._send(batch)
        except (NoConnection, NoAnswer, OSError):
            return await self._send(batch)

    async def _send(self, batch: list[_PendingCommand]) -> list[Any]:
        """One answer per question, errors of Redis among them. However it fails, the connection is dropped, so that no
        late answer is taken for another question's.

        Nothing is sent before Redis answered the connecting itself, so that one that hangs does not find all that was
        asked meanwhile, in the order of a queue that nobody waits in any more, when it goes on.
        """
        connection = self._connection
        commands = connection.pack_commands([question.command for question in batch])
        try:
            async with lag_tolerant_timeout(ANSWER_S):
                await connection.connect()
                for question in batch:
                    question.sent = True
                await connection.send_packed_command(commands, check_health=False)
                return [await self._receive() for _ in batch]
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise NoAnswer(f"no answer within {ANSWER_S:g} s") from error
            raise

    async def _receive(self) -> Any:
        try:
            return await self._connection.read_response()
        except ResponseError as error:
            return error


@asynccontextmanager
async def lag_tolerant_timeout(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError where the block takes longer. A process that is late itself looks first at what has come."""
    loop = asyncio.get_running_loop()
    due = loop.time() + seconds
    async with asyncio.timeout(None) as timeout:

        def end() -> None:
            now = loop.time()
            timeout.reschedule(now + LOOK_S if now - due > LATE_S else now)

        timer = loop.call_at(due, end)
        try:
            yield
        finally:
            timer.cancel()


@contextmanager
def redis_errors() -> Iterator[None]:
    """What Redis raises inside becomes StoreUnavailable with advice."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise unavailable(error) from error


def unavailable(error: Exception, *, unsure: bool = False) -> StoreUnavailable:
    other = "see that it runs, and that [store] url in the settings names it"
    if isinstance(error, (NoAnswer, TimeoutError)):
        other = "it does not answer in time; see whether it hangs, swaps or is overloaded"
    advice = next((advice for sign, advice in _ADVICE.items() if sign in str(error)), other)
    return StoreUnavailable(f"Redis: {error or type(error).__name__}: {advice}", unsure=unsure)


_ADVICE: Final = {  # for the operator, by what Redis' own message has in it
    "OOM": "its memory is full; raise maxmemory and keep `maxmemory-policy noeviction`",
    "MISCONF": "it cannot save to its disk; free some space there",
    "READONLY": "this is a replica; name the primary in [store] url",
    "LOADING": "it is still loading its data; wait",
    "NOAUTH": "it wants a password; put it into [store] url",
    "Authentication required": "it wants a password; put it into [store] url",
    "WRONGPASS": "the password in [store] url is wrong",
}
