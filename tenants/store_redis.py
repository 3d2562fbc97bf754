"""The store in Redis, for many gateways: every decision is one Lua call, timed by Redis' own clock.

All that a decision touches shares one hash tag, `{account id}`:

    hearth:{ID}             hash: name, created_at, the limits, arrival_us (when the next request is due by the rate)
    hearth:{ID}:tokens      hash: token id → ApiToken and Seals
    hearth:{ID}:revoked     hash: token id → when
    hearth:{ID}:holds       hash: request id → day:held:checkpoint, where the checkpoint is a record
    hearth:{ID}:expiries    sorted set: request ids by expires_us
    hearth:{ID}:day:DAY     hash: the counters of that day
    hearth:{ID}:ledger:DAY  hash: request id → record
    hearth:accounts         set of ids
    hearth:token:TOKEN      account id

Redis must run with `maxmemory-policy noeviction`, or it forgets accounts under pressure, and with `appendonly yes` and
`appendfsync everysec`; advice() says so. How long a Redis that hangs can hold a request up is in store_line.py.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import structs
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from tenants.store import (
    KEPT_DAYS,
    Account,
    ApiToken,
    Clock,
    Granted,
    Hold,
    Limits,
    Refusal,
    Refused,
    Seal,
)
from tenants.store_line import FLIGHT, Line, connect, explained, unavailable
from tenants.usage import EXPIRED, MICRO, Balance, Totals, UsageRecord

READ_S: Final = 5.0  # for an answer that may be long
SWEEP_MAX: Final = 500  # holds that one call expires

# A record is a msgpack array made by UsageRecord: 4 micro_neurons, 5 prompt_tokens, 6 cached_tokens,
# 7 completion_tokens, 8 outcome (Lua counts from 1). Scripts move its bytes and read these.
_COMMON: Final = f"""
local account, now = KEYS[1], tonumber(ARGV[1])
if now == 0 then
    local time = redis.call('TIME')
    now = time[1] * {MICRO} + time[2]
end
local holds, expiries = account .. ':holds', account .. ':expiries'
local sums = {{'requests', 'micro_neurons', 'prompt_tokens', 'cached_tokens', 'completion_tokens', 'held', 'open'}}

local function count(day, changes)
    local key = account .. ':day:' .. day
    for i, name in ipairs(sums) do
        if changes[i] ~= 0 then redis.call('HINCRBY', key, name, changes[i]) end
    end
    redis.call('EXPIREAT', key, (day + {KEPT_DAYS}) * 86400)
end

local function take(request)
    local hold = redis.call('HGET', holds, request)
    if not hold then return nil end
    redis.call('HDEL', holds, request)
    redis.call('ZREM', expiries, request)
    local day, held, record = string.match(hold, '^(%d+):(%d+):(.*)$')
    return {{day = day, held = tonumber(held), record = record}}
end

local function write(request, day, held, open, bytes)
    local ledger = account .. ':ledger:' .. day
    local record, before = cmsgpack.unpack(bytes), redis.call('HGET', ledger, request)
    local changes = {{0, 0, 0, 0, 0, -held, -open}}
    local old = before and cmsgpack.unpack(before) or {{0, 0, 0, 0, 0, 0, 0, '{EXPIRED}'}}
    if old[8] == '{EXPIRED}' then
        if not before then changes[1] = 1 end
        for i = 4, 7 do changes[i - 2] = record[i] - old[i] end
        redis.call('HSET', ledger, request, bytes)
        redis.call('EXPIREAT', ledger, (day + {KEPT_DAYS}) * 86400)
    end
    count(day, changes)
end

local function expire()
    local due = redis.call('ZRANGEBYSCORE', expiries, '-inf', now, 'LIMIT', 0, {SWEEP_MAX})
    for _, request in ipairs(due) do
        local hold = take(request)
        write(request, hold.day, hold.held, 1, hold.record)
    end
    return #due
end
"""

_REFUSALS: Final = list(Refusal)
_CODE: Final = {refusal: number for number, refusal in enumerate(_REFUSALS, 1)}

# ARGV: now, request, token, held, lifetime, record. The steps are those of _decide in store_sqlite.py.
_RESERVE: Final = f"""
local request, token, held, lifetime, record = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local day = math.floor(now / (86400 * {MICRO}))
local limits = redis.call('HMGET', account, 'requests_per_minute', 'burst', 'micro_neurons_per_day',
    'concurrent_requests', 'arrival_us')
expire()
if not limits[1] then return {{{_CODE[Refusal.NO_ACCOUNT]}}} end
if redis.call('HEXISTS', account .. ':revoked', token) == 1 then return {{{_CODE[Refusal.REVOKED]}}} end
local hold = redis.call('HGET', holds, request)
if hold then return {{0, tonumber(string.match(hold, '^%d+'))}} end
if redis.call('HEXISTS', account .. ':ledger:' .. day, request) == 1 then return {{{_CODE[Refusal.RECORDED]}}} end

local allowed, counted = tonumber(limits[3]), redis.call('HMGET', account .. ':day:' .. day, 'micro_neurons', 'held')
local used = tonumber(counted[1] or 0) + tonumber(counted[2] or 0)
if used + held > allowed then
    return {{{_CODE[Refusal.NEURONS_PER_DAY]}, (day + 1) * 86400 * {MICRO} - now, allowed, used}}
end
local per_minute = tonumber(limits[1])
local at_once, interval = tonumber(limits[2]) or per_minute, math.ceil(60 * {MICRO} / per_minute)
local arrival = math.max(tonumber(limits[5] or 0), now) + interval
local wait = arrival - at_once * interval - now
if wait > 0 then return {{{_CODE[Refusal.REQUESTS_PER_MINUTE]}, wait, per_minute, 0}} end
local running, concurrent = redis.call('HLEN', holds), tonumber(limits[4])
if running >= concurrent then
    return {{{_CODE[Refusal.CONCURRENT_REQUESTS]}, {MICRO}, concurrent, running}}
end

redis.call('HSET', account, 'arrival_us', arrival)
redis.call('HSET', holds, request, day .. ':' .. ARGV[4] .. ':' .. record)
redis.call('ZADD', expiries, now + lifetime, request)
count(day, {{0, 0, 0, 0, 0, held, 1}})
return {{0, day}}
"""

# ARGV: now, lifetime, then request, record of each.
_CHECKPOINT: Final = """
for i = 3, #ARGV, 2 do
    local hold = redis.call('HGET', holds, ARGV[i])
    if hold then
        redis.call('HSET', holds, ARGV[i], string.match(hold, '^%d+:%d+:') .. ARGV[i + 1])
        redis.call('ZADD', expiries, now + tonumber(ARGV[2]), ARGV[i])
    end
end
"""

# ARGV: now, then request, day, record of each.
_SETTLE: Final = """
for i = 2, #ARGV, 3 do
    local hold = take(ARGV[i])
    if hold then
        write(ARGV[i], hold.day, hold.held, 1, ARGV[i + 2])
    else
        write(ARGV[i], ARGV[i + 1], 0, 0, ARGV[i + 2])
    end
end
"""

_SWEEP: Final = "return expire()"


_LIMITS: Final = ("requests_per_minute", "micro_neurons_per_day", "concurrent_requests", "burst")
_ACCOUNT: Final = ("name", "created_at", *_LIMITS)
_SUMS: Final = Totals.__struct_fields__

_pack = msgspec.msgpack.Encoder().encode
_unpack_record = msgspec.msgpack.Decoder(UsageRecord).decode
_unpack_token = msgspec.msgpack.Decoder(tuple[ApiToken, Seal | list[Seal]]).decode  # one, before they were rolled


class _Script:
    def __init__(self, body: str) -> None:
        self.text = _COMMON + body
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class RedisStore:
    """See Store. Connections are made when needed, so opening one never fails."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self._line = Line(url)
        self._reads: Any = Redis.from_pool(connect(url))
        self._clock = clock
        self._reserve, self._checkpoint = _Script(_RESERVE), _Script(_CHECKPOINT)
        self._settle, self._sweep = _Script(_SETTLE), _Script(_SWEEP)

    async def ping(self) -> None:
        await self._ask("PING")

    async def advice(self) -> Sequence[str]:
        persistence, memory = await self._read(("INFO", "persistence"), ("INFO", "memory"))
        lines = []
        if memory["maxmemory"] and memory["maxmemory_policy"] != "noeviction":
            lines.append("Redis may evict accounts and usage: set `maxmemory-policy noeviction`")
        if not persistence["aof_enabled"]:
            lines.append("Redis forgets everything since its last snapshot when it stops: set `appendonly yes`")
        return lines

    async def close(self) -> None:
        await self._line.close()
        await self._reads.aclose()

    async def add_account(self, account: Account) -> None:
        await self._ask("SADD", "hearth:accounts", account.id)
        columns = ("name", account.name, "created_at", account.created_at, *_limit_pairs(account.limits))
        await self._ask("HSET", _key(account.id), *columns)

    async def account(self, account_id: str) -> Account | None:
        return _account(account_id, await self._ask("HMGET", _key(account_id), *_ACCOUNT))

    async def accounts(self) -> Sequence[Account]:
        ids = await self._ids()
        rows = await self._read(*(("HMGET", _key(account_id), *_ACCOUNT) for account_id in ids))
        accounts = [_account(account_id, row) for account_id, row in zip(ids, rows, strict=True)]
        return sorted(
            (account for account in accounts if account), key=lambda account: (account.created_at, account.id)
        )

    async def set_limits(self, account_id: str, limits: Limits) -> bool:
        if not await self._ask("EXISTS", _key(account_id)):
            return False
        await self._ask("HSET", _key(account_id), *_limit_pairs(limits))
        return True

    async def add_token(self, token: ApiToken, seal: Seal) -> bool:
        if not await self._ask("EXISTS", _key(token.account_id)):
            return False
        await self._ask("SETNX", f"hearth:token:{token.id}", token.account_id)
        await self._ask("HSETNX", _key(token.account_id, "tokens"), token.id, _pack((token, [seal])))
        return True

    async def token(self, token_id: str) -> tuple[ApiToken, Sequence[Seal], Account] | None:
        owner = await self._ask("GET", f"hearth:token:{token_id}")
        if owner is None:
            return None
        account_id = owner.decode()
        answers = await self._line.ask(
            ("HGET", _key(account_id, "tokens"), token_id),
            ("HGET", _key(account_id, "revoked"), token_id),
            ("HMGET", _key(account_id), *_ACCOUNT),
        )
        packed, revoked_at, columns = _checked(answers)
        account = _account(account_id, columns)
        if packed is None or account is None:
            return None
        token, seals = _unpack_token(packed)
        return _with_revocation(token, revoked_at), [seals] if isinstance(seals, Seal) else seals, account

    async def change_token(self, token: ApiToken, seals: Sequence[Seal]) -> bool:
        tokens = _key(token.account_id, "tokens")
        if not await self._ask("HEXISTS", tokens, token.id):
            return False
        await self._ask("HSET", tokens, token.id, _pack((token, seals)))
        return True

    async def tokens(self, account_id: str) -> Sequence[ApiToken]:
        packed, revoked = await self._read(
            ("HVALS", _key(account_id, "tokens")), ("HGETALL", _key(account_id, "revoked"))
        )
        tokens = [_unpack_token(one)[0] for one in packed]
        tokens = [_with_revocation(token, revoked.get(token.id.encode())) for token in tokens]
        return sorted(tokens, key=lambda token: (token.created_at, token.id))

    async def revoke(self, token_id: str, revoked_at: int) -> bool:
        owner = await self._ask("GET", f"hearth:token:{token_id}")
        if owner is None:
            return False
        await self._ask("HSETNX", _key(owner.decode(), "revoked"), token_id, revoked_at)
        return True

    async def reserve(self, hold: Hold) -> Granted | Refused:
        record = hold.record
        key, now = _key(record.account_id), self._now_us()
        ask = (record.request_id, record.token_id, hold.held, hold.lifetime_us, _pack(record))
        ((code, *numbers),) = await self._call(self._reserve, [(key, (now, *ask))])
        return Refused(_REFUSALS[code - 1], *numbers) if code else Granted(*numbers)

    async def checkpoint(self, records: Sequence[UsageRecord], lifetime_us: int) -> None:
        now = self._now_us()
        calls = [
            (key, (now, lifetime_us, *(part for one in group for part in (one.request_id, _pack(one)))))
            for key, group in _by_account(records)
        ]
        await self._call(self._checkpoint, calls)

    async def settle(self, records: Sequence[UsageRecord]) -> None:
        now = self._now_us()
        calls = [
            (key, (now, *(part for one in group for part in (one.request_id, one.day, _pack(one)))))
            for key, group in _by_account(records)
        ]
        await self._call(self._settle, calls)

    async def sweep(self) -> int:
        now, swept = self._now_us(), 0
        calls = [(_key(account_id), (now,)) for account_id in await self._ids()]
        while calls:
            counts = await self._call(self._sweep, calls[:FLIGHT])
            again = [call for call, count in zip(calls, counts, strict=False) if count == SWEEP_MAX]
            calls = again + calls[FLIGHT:]
            swept += sum(counts)
        return swept

    async def totals(self, account_id: str, day: int) -> Totals:
        return _totals(await self._ask("HMGET", _key(account_id, f"day:{day}"), *_SUMS))

    async def records(self, account_id: str, day: int) -> Sequence[UsageRecord]:
        (packed,) = await self._read(("HVALS", _key(account_id, f"ledger:{day}")))
        records = [structs.replace(_unpack_record(one), day=day) for one in packed]  # a hold's guess may be off by one
        return sorted(records, key=lambda record: record.request_id)

    async def reconcile(self, account_id: str, day: int) -> Balance:
        asked = [
            ("HMGET", _key(account_id, f"day:{day}"), *_SUMS),
            ("HVALS", _key(account_id, f"ledger:{day}")),
            ("HVALS", _key(account_id, "holds")),
        ]
        counted, packed, holds = await self._read(*asked)
        records = [_unpack_record(one) for one in packed]
        held = [int(amount) for of_day, amount, _ in (hold.split(b":", 2) for hold in holds) if int(of_day) == day]
        sums = {name: sum(getattr(record, name) for record in records) for name in _SUMS[1:5]}
        recorded = Totals(requests=len(records), held=sum(held), open=len(held), **sums)
        return Balance(_totals(counted), recorded)

    async def _ids(self) -> list[str]:
        (ids,) = await self._read(("SMEMBERS", "hearth:accounts"))
        return [one.decode() for one in ids]

    async def _call(self, script: _Script, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """One script per account. Scripts are idempotent, so all run again where Redis had forgotten the text."""
        commands = [("EVALSHA", script.sha, 1, key, *arguments) for key, arguments in calls]
        answers = await self._line.ask(*commands)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            await self._ask("SCRIPT LOAD", script.text)
            answers = await self._line.ask(*commands)
        return _checked(answers)

    async def _ask(self, *command: Any) -> Any:
        return _checked(await self._line.ask(command))[0]

    async def _read(self, *commands: Sequence[Any]) -> list[Any]:
        """One consistent look at what may be much; not on the request path."""
        with explained():
            async with asyncio.timeout(READ_S), self._reads.pipeline(transaction=True) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = await pipeline.execute()
                return answers

    def _now_us(self) -> int:
        """0 lets Redis read its own clock."""
        return 0 if self._clock is None else int(self._clock() * MICRO)


def _checked(answers: list[Any]) -> list[Any]:
    """The answers, or StoreUnavailable where one of them is an error."""
    for answer in answers:
        if isinstance(answer, RedisError):
            raise unavailable(answer) from answer
    return answers


def _key(account_id: str, part: str = "") -> str:
    return f"hearth:{{{account_id}}}:{part}" if part else f"hearth:{{{account_id}}}"


def _by_account(records: Sequence[UsageRecord]) -> list[tuple[str, list[UsageRecord]]]:
    groups: dict[str, list[UsageRecord]] = {}
    for record in records:
        groups.setdefault(_key(record.account_id), []).append(record)
    return list(groups.items())


def _limit_pairs(limits: Limits) -> list[str | int]:
    burst = "" if limits.burst is None else limits.burst
    values = (limits.requests_per_minute, limits.micro_neurons_per_day, limits.concurrent_requests, burst)
    return [part for pair in zip(_LIMITS, values, strict=True) for part in pair]


def _account(account_id: str, columns: Sequence[bytes | None]) -> Account | None:
    name, created_at, per_minute, micro_neurons, concurrent, burst = columns
    if name is None or created_at is None or per_minute is None or micro_neurons is None or concurrent is None:
        return None
    limits = Limits(int(per_minute), int(micro_neurons) / MICRO, int(concurrent), int(burst) if burst else None)
    return Account(account_id, name.decode(), limits, int(created_at))


def _with_revocation(token: ApiToken, revoked_at: bytes | None) -> ApiToken:
    return token if revoked_at is None else structs.replace(token, revoked_at=int(revoked_at))


def _totals(columns: Sequence[bytes | None]) -> Totals:
    return Totals(*(int(column or 0) for column in columns))
