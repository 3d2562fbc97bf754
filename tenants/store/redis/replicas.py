"""How many replicas a primary should have, and whether all of them follow it now. It promotes and heals nothing."""

import asyncio
import re
import time
from typing import Final

from redis.exceptions import RedisError

from tenants.store.redis.address import RedisAddress
from tenants.store.redis.errors import redis_errors, unavailable
from tenants.store.redis.pipeline import CommandPipeline
from tenants.store.redis.primary import info_fields
from tenants.store.redis.sentinel import find_primary

LAG_S: Final = 2  # a replica acknowledges each second
_REPLICA: Final = re.compile(r"slave[0-9]+")
AWAY_LOOK_S: Final = 0.25  # between two looks while one is away
LOOK_S: Final = 1.0  # Sentinels learn of a replica in some seconds, and promote none that they do not know


class Replicas:
    """`count` is how many there should be: those that the Sentinels know, also where they are away; without Sentinels
    the most that this process has seen."""

    def __init__(self, address: RedisAddress, pipeline: CommandPipeline) -> None:
        self._address = address
        self._pipeline = pipeline
        self._looking = asyncio.Lock()
        self._looked_s = float("-inf")
        self._known = 0
        self._online = 0

    def count(self) -> int:
        return self._known

    async def require_all(self) -> None:
        """Raises StoreUnavailable where one is away, as was seen LOOK_S ago or later."""
        async with self._looking:
            if time.monotonic() - self._looked_s > (LOOK_S if self._online >= self._known else AWAY_LOOK_S):
                await self._look()
        if self._online < self._known:
            raise unavailable(RedisError(f"NOTALL {self._online} of {self._known} replicas follow"))

    async def _look(self) -> None:
        (answer,) = await self._pipeline.ask(("INFO", "replication"))
        if isinstance(answer, RedisError):
            raise unavailable(answer)
        fields = info_fields(answer)
        online = sum(map(_follows, (value for name, value in fields.items() if _REPLICA.fullmatch(name))))
        if self._address.sentinels:
            with redis_errors():
                self._known = (await find_primary(self._address)).replicas
        else:
            self._known = max(self._known, online)
        self._online, self._looked_s = online, time.monotonic()


def _follows(replica: str) -> bool:
    """Whether a line of INFO is that of a replica that has acknowledged lately: a connection may outlive its host."""
    fields = dict(pair.split("=", 1) for pair in replica.split(",") if "=" in pair)
    return fields.get("state") == "online" and int(fields.get("lag", LAG_S + 1)) <= LAG_S
