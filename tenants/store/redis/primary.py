"""Connects to the primary of a store, wherever it is now, and tells one that is new what it must hear first.

It does not know what that is, nor what is asked afterwards.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from redis.asyncio import Connection, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as NoAnswer

from tenants.store.redis.address import RedisAddress, new_connection
from tenants.store.redis.sentinel import PrimaryPlace, find_primary, following_class

CONNECT_S: Final = 2.0  # for a connection, and for the answers to a piece of what it must hear
PIECE_COMMANDS: Final = 64
LOOK_S: Final = 0.1  # for a primary to answer, before the Sentinels are asked whether it still is

_Reached = tuple[Connection, str, float]

log = logging.getLogger(__name__)


class Primary:
    """What the address names. `restate` returns commands that a primary hears before anything else, where it is not
    the one that heard all others."""

    def __init__(self, address: RedisAddress, restate: Callable[[], Iterable[Sequence[Any]]] = tuple) -> None:
        self.address = address
        self._restate = restate
        self._telling = asyncio.Lock()
        self._heard = ""  # the history of the primary that knows all that this process was told
        self.guarded = False  # it takes no writes without replicas, as it was set at the last connection

    def pool(self) -> Redis:
        """For long reads: connections that are made when needed, to the primary of that time, and once more where one
        broke while it was idle."""
        address = self.address
        kind = following_class(address) if address.sentinels else address.connection_class
        pool: Any = ConnectionPool(connection_class=kind, retry=Retry(NoBackoff(), 1), **address.options)
        return Redis.from_pool(pool)

    async def connect(self) -> tuple[Connection, float]:
        """A connection to the primary, and how long one round trip took. Raises RedisError and OSError."""
        try:
            async with asyncio.timeout(CONNECT_S):
                connection, history, round_trip_s = await self._reach()
        except TimeoutError as error:
            raise NoAnswer(f"no connection within {CONNECT_S:g} s") from error
        try:
            async with self._telling:  # of several connections to a new primary one tells it
                if history != self._heard or not history:
                    await self._tell(connection)
                    self._heard = history
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection, round_trip_s

    async def _reach(self) -> _Reached:
        if not self.address.sentinels:
            return await self._connect_to({})
        place = await find_primary(self.address)
        while True:
            attempt = asyncio.create_task(self._connect_to({"host": place.host, "port": place.port}))
            try:
                latest = await self._moved(place, attempt)
                if latest is None:
                    return await attempt
                place = latest
            finally:
                attempt.cancel()

    async def _moved(self, place: PrimaryPlace, attempt: asyncio.Task[_Reached]) -> PrimaryPlace | None:
        """Where the primary is meanwhile, as soon as that is elsewhere; None once the attempt has ended."""
        while not (await asyncio.wait({attempt}, timeout=LOOK_S))[0]:
            with suppress(RedisError, OSError):
                latest = await find_primary(self.address)
                if (latest.host, latest.port) != (place.host, place.port):
                    return latest
        return None

    async def _connect_to(self, place: dict[str, Any]) -> _Reached:
        connection = new_connection(self.address.connection_class, {**self.address.options, **place})
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            began_s = asyncio.get_running_loop().time()
            history, self.guarded = await _history(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection, history, asyncio.get_running_loop().time() - began_s

    async def _tell(self, connection: Connection) -> None:
        commands = list(self._restate())
        for first in range(0, len(commands), PIECE_COMMANDS):
            try:
                async with asyncio.timeout(CONNECT_S):
                    answers = await _converse(connection, commands[first : first + PIECE_COMMANDS])
            except TimeoutError as error:
                raise NoAnswer(f"no answer within {CONNECT_S:g} s to what a new primary is told") from error
            for answer in answers:
                if isinstance(answer, RedisError):
                    raise answer
        if commands:
            log.warning("store_told_again", extra={"fields": {"commands": len(commands), "primary": repr(connection)}})


async def _history(connection: Connection) -> tuple[str, bool]:
    """What names this run of the server and the history of its data, "" where the user may not ask for it, and whether
    it takes no writes without replicas. Raises ResponseError where the server is no primary."""
    server, replication = await _converse(connection, [("INFO", "server"), ("INFO", "replication")])
    if isinstance(server, RedisError) or isinstance(replication, RedisError):
        refusal = server if isinstance(server, RedisError) else replication
        if isinstance(refusal, NoPermissionError):
            return "", False
        raise refusal
    fields = info_fields(server) | info_fields(replication)
    if fields["role"] != "master":
        raise ReadOnlyError(f"READONLY {connection!r} follows {fields['master_host']}:{fields['master_port']}")
    return f"{fields['run_id']} {fields['master_replid']}", "min_slaves_good_slaves" in fields


def info_fields(text: bytes) -> dict[str, str]:
    """The lines of an answer to INFO."""
    pairs = (line.partition(":") for line in text.decode().splitlines() if not line.startswith("#"))
    return {name: value for name, _, value in pairs}


async def _converse(connection: Connection, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """The answers of commands that go at once, errors of Redis among them."""
    await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    answers: list[Any] = []
    for _ in commands:
        try:
            answers.append(await connection.read_response())
        except ResponseError as error:
            answers.append(error)
    return answers
