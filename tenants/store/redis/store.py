"""The store in Redis, for many gateways. database.py says which keys it has, and how that Redis must be set up."""

from collections.abc import Sequence
from typing import Final

from tenants.store.protocol import Clock, StoreUnavailable
from tenants.store.redis.accounts import RedisAccountStore
from tenants.store.redis.audit import RedisAuditStore
from tenants.store.redis.batches import RedisBatchStore
from tenants.store.redis.claims import RedisClaimStore
from tenants.store.redis.database import RedisDatabase
from tenants.store.redis.notices import RedisNoticeStore
from tenants.store.redis.quotas import RedisQuotaStore

# What an earlier version wrote is read as it is: 1, which had no version, kept accounts in columns.
VERSION: Final = 2
_VERSION_KEY: Final = "hearth:version"


class RedisStore:
    """See Store. Connections are made when needed, so opening one never fails."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self._database = RedisDatabase(url, clock)
        self.accounts = RedisAccountStore(self._database)
        self.quotas = RedisQuotaStore(self._database)
        self.batches = RedisBatchStore(self._database)
        self.audit = RedisAuditStore(self._database)
        self.claims = RedisClaimStore(self._database)
        self.notices = RedisNoticeStore(self._database)

    async def ping(self) -> None:
        """Writes, because a full Redis and a replica answer a PING. Also raises where a newer Hearth has written."""
        version = int(await self._database.ask("GET", _VERSION_KEY) or 0)
        if version > VERSION:
            raise StoreUnavailable(
                f"a newer Hearth keeps version {version} there: run that one, or name another database"
            )
        await self._database.ask("SET", _VERSION_KEY, VERSION)

    async def advice(self) -> Sequence[str]:
        persistence, memory = await self._database.read(("INFO", "persistence"), ("INFO", "memory"))
        lines = []
        if memory["maxmemory"] and memory["maxmemory_policy"] != "noeviction":
            lines.append("Redis may evict accounts and usage: set `maxmemory-policy noeviction`")
        if not persistence["aof_enabled"]:
            lines.append("Redis forgets everything since its last snapshot when it stops: set `appendonly yes`")
        return lines

    async def close(self) -> None:
        await self._database.pipeline.close()
        await self._database.reads.aclose()
