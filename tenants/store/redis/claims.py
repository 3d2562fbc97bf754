"""Claimed keys in the Redis store."""

from tenants.store.redis.database import RedisDatabase, account_key


class RedisClaimStore:
    """See ClaimStore."""

    def __init__(self, database: RedisDatabase) -> None:
        self._database = database

    async def claim(self, account_id: str, key: str, value: bytes, lifetime_s: int) -> bytes | None:
        name = account_key(account_id, f"claim:{key}")
        while not await self._database.ask("SET", name, value, "NX", "EX", lifetime_s):
            existing: bytes | None = await self._database.ask("GET", name)
            if existing is not None:
                return existing
        return None

    async def replace(self, account_id: str, key: str, value: bytes | None, lifetime_s: int) -> None:
        name = account_key(account_id, f"claim:{key}")
        await self._database.ask(*(("DEL", name) if value is None else ("SET", name, value, "EX", lifetime_s)))
