"""Asks Sentinels where a primary is now. It opens no connection to the primary, and caches nothing.

A Sentinel that was cut off, or has yet to hear of a failover, says what was true before. So the answers of a majority
are waited for, and a moment longer for the others', and that of the newest configuration counts; where no majority
answers in time, the newest of those that do.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Connection
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import RedisError, ResponseError

from tenants.store.redis.address import RedisAddress, new_connection

SENTINEL_S: Final = 1.0  # for a majority of Sentinels: a connection of its own each time, also from far away
OTHERS_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class PrimaryPlace:
    """`epoch` numbers configurations; `replicas` are all that the Sentinel knows, also those that are away."""

    host: str
    port: int
    epoch: int
    replicas: int
    sentinels: int
    quorum: int
    down_after_ms: int


async def find_primary(address: RedisAddress) -> PrimaryPlace:
    """Raises NoConnection where no Sentinel answers in time, or none knows the name."""
    asking = [asyncio.create_task(_ask(host, port, address)) for host, port in address.sentinels]
    answers: list[PrimaryPlace | None] = []
    problems: list[str] = []
    try:
        async with asyncio.timeout(SENTINEL_S) as limit:
            for answer in asyncio.as_completed(asking):
                try:
                    answers.append(await answer)
                except (RedisError, OSError) as problem:
                    problems.append(str(problem))
                if len(answers) == len(asking) // 2 + 1:
                    limit.reschedule(asyncio.get_running_loop().time() + OTHERS_S)
    except TimeoutError:
        problems.append(f"no answer within {SENTINEL_S:g} s")
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    places = [place for place in answers if place is not None]
    if places:
        return max(places, key=lambda place: place.epoch)
    if answers:
        raise NoConnection(f"UNKNOWNNAME the Sentinels {address.places} know no primary {address.service!r}")
    raise NoConnection(f"NOSENTINEL none of {address.places} answers: {'; '.join(sorted(set(problems)))}")


async def _ask(host: str, port: int, address: RedisAddress) -> PrimaryPlace | None:
    """None: it knows no primary of this name."""
    assert address.sentinel_options is not None
    connection = new_connection(address.connection_class, {**address.sentinel_options, "host": host, "port": port})
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
        asked = [("SENTINEL", name, address.service) for name in ("GET-MASTER-ADDR-BY-NAME", "MASTER")]
        await connection.send_packed_command(connection.pack_commands(asked), check_health=False)
        place: Any = await connection.read_response()
        columns: Any = await connection.read_response()
    except ResponseError as error:
        if "No such master" in str(error):
            return None
        raise
    finally:
        await connection.disconnect(nowait=True)
    fields = dict(zip(map(bytes.decode, columns[::2]), map(bytes.decode, columns[1::2]), strict=True))
    numbers = ("port", "config-epoch", "num-slaves", "num-other-sentinels", "quorum")
    now_port, epoch, replicas, others, quorum = (int(fields[name]) for name in numbers)
    down_after_ms = int(fields["down-after-milliseconds"])
    # In a failover the first answer names the promoted server as soon as it has taken the role, the second one at the
    # end of it all, when the configuration gets its number.
    host, promoted_port = place[0].decode(), int(place[1])
    moved = (host, promoted_port) != (fields["ip"], now_port)
    return PrimaryPlace(host, promoted_port, epoch + moved, replicas, others + 1, quorum, down_after_ms)


def following_class(address: RedisAddress) -> type[Connection]:
    """A class of connections that each go to where the primary is at that time."""

    class FollowingConnection(address.connection_class):  # type: ignore[misc, name-defined]
        async def _connect(self) -> None:  # what each way of redis-py's to connect comes to
            place = await find_primary(address)
            self.host, self.port = place.host, place.port
            await super()._connect()

    return FollowingConnection
