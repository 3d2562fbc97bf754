"""The audit log in the Redis store."""

from collections.abc import Sequence

import msgspec

from tenants.records.audit_entry import AuditEntry
from tenants.store.redis import scripts
from tenants.store.redis.database import RedisDatabase, account_key

_pack = msgspec.msgpack.Encoder().encode
_unpack_entry = msgspec.msgpack.Decoder(AuditEntry).decode


class RedisAuditStore:
    """See AuditStore."""

    def __init__(self, database: RedisDatabase) -> None:
        self._database = database

    async def append(self, entry: AuditEntry) -> bool:
        key = account_key(entry.account_id)
        return bool(await self._database.run_script_once(scripts.APPEND_AUDIT, key, 0, entry.seq, _pack(entry)))

    async def entries(self, account_id: str, first_seq: int, limit: int) -> Sequence[AuditEntry]:
        first = first_seq - 1
        (packed,) = await self._database.read(("LRANGE", account_key(account_id, "audit"), first, first + limit - 1))
        return [_unpack_entry(entry) for entry in packed]

    async def head(self, account_id: str) -> AuditEntry | None:
        packed = await self._database.ask("LINDEX", account_key(account_id, "audit"), -1)
        return None if packed is None else _unpack_entry(packed)
