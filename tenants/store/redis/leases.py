"""Leases in the Redis store: what other cells lent this one, and what calls have used of it.

hearth:{ID}:lease:LEASE   hash: the fields of QuotaLease
hearth:leases             set: ACCOUNT LEASE of all of them
"""

from collections.abc import Sequence
from typing import Any, Final

from msgspec import structs

from tenants.records.leases import LeaseState, QuotaLease
from tenants.store.protocol import LEASE_KEPT_S
from tenants.store.redis.database import RedisDatabase, account_key
from tenants.store.redis.scripts import COMMON

_ALL: Final = "hearth:leases"
_LEASE: Final = f"""{COMMON}
local key = account .. ':lease:' .. ARGV[2]
local state = redis.call('HGET', key, 'state')
"""

# ARGV: now, lease, lifetime, account, then the fields and values of a new one.
_BEGIN: Final = f"""{_LEASE}
if not state then
    redis.call('HSET', key, unpack(ARGV, 5))
    local ends = string.format('%.0f', now + tonumber(ARGV[3]))
    redis.call('HSET', key, 'begun_us', string.format('%.0f', now), 'until_us', ends)
    redis.call('SADD', '{_ALL}', ARGV[4] .. ' ' .. ARGV[2])
end
return redis.call('HMGET', key, 'begun_us', 'until_us')
"""
# ARGV: now, lease, amount, day.
_OPEN: Final = f"""{_LEASE}
if state ~= '{LeaseState.ASKED}' then return 0 end
redis.call('HSET', key, 'state', '{LeaseState.OPEN}', 'amount', ARGV[3], 'day', ARGV[4])
return 1
"""
# ARGV: now, lease.
_CLOSE: Final = f"""{_LEASE}
if state == '{LeaseState.ASKED}' or state == '{LeaseState.OPEN}' then
    redis.call('HSET', key, 'state', '{LeaseState.CLOSED}')
end
"""
# ARGV: now, lease, then the fields to read.
_LOOK: Final = f"""{_LEASE}
if not state then return {{}} end
if tonumber(state) < {LeaseState.CLOSED} and now >= tonumber(redis.call('HGET', key, 'until_us')) then
    redis.call('HSET', key, 'state', '{LeaseState.CLOSED}')
end
return redis.call('HMGET', key, unpack(ARGV, 3))
"""
# ARGV: now, lease, used.
_NOTE_RETURNED: Final = f"""{_LEASE}
if not state or state == '{LeaseState.OPEN}' then return end
if redis.call('HGET', key, 'amount') == '0' then return redis.call('DEL', key) end
local returned = math.max(tonumber(redis.call('HGET', key, 'returned')), tonumber(ARGV[3]))
redis.call('HSET', key, 'state', '{LeaseState.RETURNED}', 'returned', string.format('%.0f', returned))
redis.call('EXPIRE', key, {LEASE_KEPT_S})
"""


class RedisLeaseStore:
    """See LeaseStore."""

    def __init__(self, database: RedisDatabase) -> None:
        self._database = database

    async def begin(self, lease: QuotaLease, lifetime_us: int) -> QuotaLease:
        values = {**structs.asdict(lease), "state": int(lease.state)}
        fields = [part for pair in values.items() for part in pair]
        times = await self._run(_BEGIN, lease.account_id, lease.id, lifetime_us, lease.account_id, *fields)
        begun_us, until_us = map(int, times)
        return structs.replace(lease, begun_us=begun_us, until_us=until_us)

    async def open(self, account_id: str, lease_id: str, amount: int, day: int) -> bool:
        return bool(await self._run(_OPEN, account_id, lease_id, amount, day))

    async def close(self, account_id: str, lease_id: str) -> None:
        await self._run(_CLOSE, account_id, lease_id)

    async def note_returned(self, account_id: str, lease_id: str, used: int) -> None:
        await self._run(_NOTE_RETURNED, account_id, lease_id, used)

    async def list(self, account_id: str = "") -> Sequence[QuotaLease]:
        (every,) = await self._database.read(("SMEMBERS", _ALL))
        names = [name for name in every if name.startswith(account_id.encode())]
        parts = [name.decode().split(" ") for name in names]
        now_us, fields = self._database.now_us(), QuotaLease.__struct_fields__
        looks = [(account_key(account), (now_us, lease_id, *fields)) for account, lease_id in parts]
        rows = await self._database.run_script(_LOOK, looks) if looks else []
        gone = [name for name, row in zip(names, rows, strict=True) if not row]
        if gone:
            await self._database.ask("SREM", _ALL, *gone)
        leases = [_lease(row) for row in rows if row]
        return sorted(leases, key=lambda lease: (lease.begun_us, lease.id))

    async def _run(self, script: str, account_id: str, *arguments: Any) -> Any:
        return await self._database.run_lasting(script, account_key(account_id), self._database.now_us(), *arguments)


def _lease(row: Sequence[bytes]) -> QuotaLease:
    texts = [value.decode() for value in row]
    (account_id, lease_id, home, token_id, subjects), numbers = texts[:5], [int(text) for text in texts[5:]]
    state, amount, day, *others = numbers
    return QuotaLease(account_id, lease_id, home, token_id, subjects, LeaseState(state), amount, day, *others)
