"""The store in Redis, for many gateways, with its small parts: audit log, claimed keys, notices.

database.py says which keys it has, and how that Redis must be set up.
"""

import secrets
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import structs

from tenants.records.accounts import AuditEntry, Notice
from tenants.store.protocol import (
    RETENTION_DAYS,
    AccountStore,
    AuditStore,
    BatchStore,
    ClaimStore,
    Clock,
    ClusterStore,
    LeaseStore,
    NoticeStore,
    QuotaStore,
    StoreUnavailable,
)
from tenants.store.redis import scripts
from tenants.store.redis.accounts import RedisAccountStore
from tenants.store.redis.advice import advice_for
from tenants.store.redis.batches import RedisBatchStore
from tenants.store.redis.cluster import RedisClusterStore
from tenants.store.redis.database import RedisDatabase, account_key
from tenants.store.redis.leases import RedisLeaseStore
from tenants.store.redis.quotas import RedisQuotaStore

# What an earlier version wrote is read as it is: 1, which had no version, kept accounts in columns.
VERSION: Final = 2
_VERSION_KEY: Final = "hearth:version"
_NOTICES: Final = "hearth:notices"

# KEYS: a claim's key. ARGV: value, lifetime, and a name of the one who asks, for a moment: what got no answer is asked
# once more, and the key is then its own.
_CLAIM: Final = """
local value, asker = redis.call('GET', KEYS[1]), KEYS[1] .. ':by'
if value then return redis.call('GET', asker) ~= ARGV[3] and value end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('SET', asker, ARGV[3], 'EX', 10)
return false
"""

_pack = msgspec.msgpack.Encoder().encode
_unpack_entry = msgspec.msgpack.Decoder(AuditEntry).decode
_unpack_notice = msgspec.msgpack.Decoder(Notice).decode


class RedisStore:
    """See Store. Connections are made when needed, so opening one never fails."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self._database = RedisDatabase(url, clock)
        self.accounts: AccountStore = RedisAccountStore(self._database)
        self.quotas: QuotaStore = RedisQuotaStore(self._database)
        self.leases: LeaseStore = RedisLeaseStore(self._database)
        self.batches: BatchStore = RedisBatchStore(self._database)
        self.audit: AuditStore = RedisAuditStore(self._database)
        self.claims: ClaimStore = RedisClaimStore(self._database)
        self.notices: NoticeStore = RedisNoticeStore(self._database)
        self.cluster: ClusterStore = RedisClusterStore(self._database)

    async def ping(self) -> None:
        """Writes, because a full Redis and a replica answer a PING. Also raises where a newer Hearth has written."""
        version = int(await self._database.ask("GET", _VERSION_KEY) or 0)
        if version > VERSION:
            raise StoreUnavailable(
                f"a newer Hearth keeps version {version} there: run that one, or name another database"
            )
        await self._database.ask("SET", _VERSION_KEY, VERSION)

    async def advice(self) -> Sequence[str]:
        return await advice_for(self._database)

    async def close(self) -> None:
        for pipeline in self._database.pipelines:
            await pipeline.close()
        await self._database.reads.aclose()


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


class RedisClaimStore:
    """See ClaimStore."""

    def __init__(self, database: RedisDatabase) -> None:
        self._database = database

    async def claim(self, account_id: str, key: str, value: bytes, lifetime_s: int) -> bytes | None:
        arguments = (account_key(account_id, f"claim:{key}"), value, lifetime_s, secrets.token_bytes(8))
        existing: bytes | None = await self._database.run_script_once(_CLAIM, *arguments)
        return existing

    async def replace(self, account_id: str, key: str, value: bytes | None, lifetime_s: int) -> None:
        name = account_key(account_id, f"claim:{key}")
        await self._database.ask(*(("DEL", name) if value is None else ("SET", name, value, "EX", lifetime_s)))


class RedisNoticeStore:
    """See NoticeStore."""

    def __init__(self, database: RedisDatabase) -> None:
        self._database = database

    async def add(self, notice: Notice) -> None:
        await self._database.ask("HSETNX", f"{_NOTICES}:bodies", notice.id, _pack(notice))
        if await self._database.ask("SET", f"hearth:notice:{notice.id}", "", "NX", "EX", RETENTION_DAYS * 86_400):
            await self._database.ask("ZADD", _NOTICES, notice.due_at, notice.id)
        elif not await self._database.ask("ZSCORE", _NOTICES, notice.id):
            await self._database.ask("HDEL", f"{_NOTICES}:bodies", notice.id)  # it was closed

    async def claim(self, now: float, lease_s: float, limit: int) -> Sequence[Notice]:
        window = (now, now + lease_s)
        claimed = await self._database.run_script_once(scripts.CLAIM_NOTICES, _NOTICES, 0, *window, limit)
        pairs = zip(claimed[::2], claimed[1::2], strict=True)
        return [structs.replace(_unpack_notice(body), tries=tries) for body, tries in pairs if body is not None]

    async def postpone(self, notice_id: str, due_at: float) -> None:
        await self._database.ask("ZADD", _NOTICES, "XX", due_at, notice_id)

    async def close(self, notice_id: str) -> None:
        hashes = (f"{_NOTICES}:bodies", f"{_NOTICES}:tries")
        await self._database.ask_all(("ZREM", _NOTICES, notice_id), *(("HDEL", key, notice_id) for key in hashes))
