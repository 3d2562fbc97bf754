"""Batches in the Redis store: each change is one Lua call on the account's keys.

    hearth:{ID}:batches              sorted set: batch ids by created_at
    hearth:{ID}:batches:open         hash: batch id → items, of those that have not ended
    hearth:{ID}:batch:BATCH          hash: document, status, ended_at, expires_at, succeeded, failed, and the two tokens
    hearth:{ID}:batch:BATCH:bodies   hash: place → body, of items that have not ended
    hearth:{ID}:batch:BATCH:tries    hash: place → how often it was claimed
    hearth:{ID}:batch:BATCH:results  hash: place → 1 or 0 for succeeded, and the result
    hearth:{ID}:line:MODEL           list: BATCH PLACE of what waits, first come, first served
    hearth:{ID}:leases:MODEL         sorted set: the same of what was claimed, by the end of its lease
    hearth:lines:MODEL               sorted set: account ids by their next turns

A batch's keys end by themselves when it expires. What lines and leases still name of it then is passed over.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import structs

from tenants.records import batches
from tenants.records.batches import BatchItemResult, BatchJob, BatchJobItem, BatchStatus, QueueDepth
from tenants.records.usage import MICRO, UsageRecord
from tenants.store.redis.database import RedisDatabase, account_key, grouped
from tenants.store.redis.scripts import COMMON

_COUNTS: Final = ("succeeded", "failed", "prompt_tokens", "completion_tokens")
_FIELDS: Final = ("document", "status", "ended_at", "expires_at", *_COUNTS)
_PARTS: Final = ("", ":bodies", ":tries", ":results")
_TURNS: Final = 4  # accounts with nothing to claim that one call passes over,
_PASSED_MAX: Final = 2_000  # and items of batches that have ended

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(BatchJob).decode

# What the scripts below have in common. Times in these keys are seconds.
_BATCHES: Final = f"""{COMMON}
local now_s = now / 1e6

local function batch_key(id) return account .. ':batch:' .. id end

-- By the caller's clock: the server's may differ.
local function expire(key, at)
    redis.call('PEXPIRE', key, string.format('%.0f', math.max(1, 1e3 * (tonumber(at) - now_s))))
end

local function end_at(key, at)
    redis.call('HSET', key, 'expires_at', string.format('%.0f', at))
    for _, part in ipairs({{'', ':bodies', ':tries', ':results'}}) do expire(key .. part, at) end
end

local function is_open(key)
    local status = redis.call('HGET', key, 'status')
    return status == 'queued' or status == 'running'
end

local function close(id, status)
    local key = batch_key(id)
    local at = math.floor(now_s)
    redis.call('HSET', key, 'status', status, 'ended_at', string.format('%.0f', at))
    redis.call('UNLINK', key .. ':bodies', key .. ':tries')
    redis.call('HDEL', account .. ':batches:open', id)
    end_at(key, at + tonumber(redis.call('HGET', key, 'keep_s')))
end
"""

# ARGV: now, batch, document, items, keep_s, model, created_at, expires_at.
_BEGIN: Final = f"""{_BATCHES}
local id, key, open_ones = ARGV[2], batch_key(ARGV[2]), account .. ':batches:open'
if redis.call('EXISTS', key) == 1 then return 1 end
local count, items, flat = 0, tonumber(ARGV[4]), redis.call('HGETALL', open_ones)
for i = 1, #flat, 2 do
    if redis.call('EXISTS', batch_key(flat[i])) == 1 then
        count, items = count + 1, items + tonumber(flat[i + 1])
    else
        redis.call('HDEL', open_ones, flat[i])
    end
end
if count >= {batches.OPEN_BATCHES_MAX} or items > {batches.OPEN_ITEMS_MAX} then return 0 end
redis.call('HSET', key, 'document', ARGV[3], 'status', 'arriving')
redis.call('HSET', key, 'items', ARGV[4], 'keep_s', ARGV[5], 'model', ARGV[6])
redis.call('HSET', open_ones, id, ARGV[4])
for _, old in ipairs(redis.call('ZRANGE', account .. ':batches', 0, 15)) do
    if redis.call('EXISTS', batch_key(old)) == 0 then redis.call('ZREM', account .. ':batches', old) end
end
redis.call('ZADD', account .. ':batches', ARGV[7], id)
end_at(key, ARGV[8])
return 1
"""

# ARGV: now, batch, first, bodies …
_ADD: Final = f"""{_BATCHES}
local key = batch_key(ARGV[2])
if redis.call('HGET', key, 'status') ~= 'arriving' then return 0 end
for i = 4, #ARGV do redis.call('HSET', key .. ':bodies', tonumber(ARGV[3]) + i - 4, ARGV[i]) end
redis.call('EXPIRE', key .. ':bodies', {batches.ARRIVING_S})
return 1
"""

# ARGV: now, batch, expires_at.
_OPEN: Final = f"""{_BATCHES}
local key = batch_key(ARGV[2])
if redis.call('HGET', key, 'status') ~= 'arriving' then return 0 end
local line = account .. ':line:' .. redis.call('HGET', key, 'model')
for place = 0, tonumber(redis.call('HGET', key, 'items')) - 1 do
    redis.call('RPUSH', line, ARGV[2] .. ' ' .. place)
end
redis.call('HSET', key, 'status', 'queued')
end_at(key, ARGV[3])
return 1
"""

# KEYS: hearth:lines:MODEL. ARGV: now. The account whose turn it is, which goes behind the others.
_TURN: Final = f"""{COMMON}
local next_account = redis.call('ZRANGEBYSCORE', account, '-inf', now / 1e6, 'LIMIT', 0, 1)[1]
if next_account then redis.call('ZADD', account, now / 1e6, next_account) end
return next_account
"""

# ARGV: now, model, lease, limit. Returns the end of the first lease where all that is left is leased, '' where nothing
# is left at all; then batch, place, body, tries, document of each.
_CLAIM: Final = f"""{_BATCHES}
local looks = {_PASSED_MAX}
local line, leases = account .. ':line:' .. ARGV[2], account .. ':leases:' .. ARGV[2]
for _, name in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now_s)) do
    redis.call('LPUSH', line, name)
    redis.call('ZREM', leases, name)
end
local claimed, limit = {{''}}, tonumber(ARGV[4])
while limit > 0 and looks > 0 do
    looks = looks - 1
    local name = redis.call('LPOP', line)
    if not name then break end
    local id, place = string.match(name, '^(%S+) (%d+)$')
    local key = batch_key(id)
    local body = is_open(key) and redis.call('HGET', key .. ':bodies', place)
    if body then
        redis.call('HSET', key, 'status', 'running')
        redis.call('ZADD', leases, now_s + tonumber(ARGV[3]), name)
        local tries = redis.call('HINCRBY', key .. ':tries', place, 1)
        if tries == 1 then expire(key .. ':tries', redis.call('HGET', key, 'expires_at')) end
        for _, part in ipairs({{id, place, body, tries, redis.call('HGET', key, 'document')}}) do
            claimed[#claimed + 1] = part
        end
        limit = limit - 1
    end
end
local first = redis.call('ZRANGE', leases, 0, 0, 'WITHSCORES')[2]
if first then claimed[1] = first end
return claimed
"""

# ARGV: now, model, lease, then batch, place of each. Returns a 1 for each that may run on.
_RENEW: Final = f"""{_BATCHES}
local leases, alive = account .. ':leases:' .. ARGV[2], {{}}
for i = 4, #ARGV, 2 do
    local name, key = ARGV[i] .. ' ' .. ARGV[i + 1], batch_key(ARGV[i])
    local runs = is_open(key) and redis.call('ZSCORE', leases, name)
    if runs then redis.call('ZADD', leases, now_s + tonumber(ARGV[3]), name) end
    alive[#alive + 1] = runs and 1 or 0
end
return alive
"""

# ARGV: now, model, then batch, place of each.
_PUT_BACK: Final = f"""{_BATCHES}
for i = #ARGV - 1, 3, -2 do
    local name = ARGV[i] .. ' ' .. ARGV[i + 1]
    if redis.call('ZREM', account .. ':leases:' .. ARGV[2], name) == 1 and is_open(batch_key(ARGV[i])) then
        redis.call('LPUSH', account .. ':line:' .. ARGV[2], name)
        redis.call('HINCRBY', batch_key(ARGV[i]) .. ':tries', ARGV[i + 1], -1)
    end
end
"""

# ARGV: now, model, batch, place, succeeded, result, then request, day, record and the two tokens of what was used.
_END: Final = f"""{_BATCHES}
local id, place, key = ARGV[3], ARGV[4], batch_key(ARGV[3])
if ARGV[7] then
    local hold = take(ARGV[7])
    write(ARGV[7], hold and hold.day or ARGV[8], hold, ARGV[9])
end
redis.call('ZREM', account .. ':leases:' .. ARGV[2], id .. ' ' .. place)
if not is_open(key) or redis.call('HSETNX', key .. ':results', place, ARGV[5] .. ARGV[6]) == 0 then return 0 end
expire(key .. ':results', redis.call('HGET', key, 'expires_at'))
redis.call('HDEL', key .. ':bodies', place)
local succeeded = redis.call('HINCRBY', key, 'succeeded', ARGV[5])
local failed = redis.call('HINCRBY', key, 'failed', 1 - ARGV[5])
redis.call('HINCRBY', key, 'prompt_tokens', ARGV[10] or 0)
redis.call('HINCRBY', key, 'completion_tokens', ARGV[11] or 0)
if succeeded + failed == tonumber(redis.call('HGET', key, 'items')) then close(id, 'done') end
return 1
"""

# ARGV: now, batch, status.
_CLOSE: Final = f"""{_BATCHES}
if not is_open(batch_key(ARGV[2])) then return 0 end
close(ARGV[2], ARGV[3])
return 1
"""


class RedisBatchStore:
    """See BatchStore."""

    def __init__(self, database: RedisDatabase) -> None:
        self._database = database

    async def begin(self, batch: BatchJob) -> bool:
        fixed = (batch.items, batch.keep_s, batch.model, batch.created_at, batch.expires_at)
        return bool(await self._run(_BEGIN, batch.account_id, batch.id, _pack(batch), *fixed))

    async def add_items(self, account_id: str, batch_id: str, first: int, bodies: Sequence[bytes]) -> None:
        await self._run(_ADD, account_id, batch_id, first, *bodies)

    async def open(self, account_id: str, batch_id: str) -> None:
        document = await self._database.ask("HGET", _batch_key(account_id, batch_id), "document")
        if document is not None:
            batch = _unpack(document)
            await self._run(_OPEN, account_id, batch_id, batch.created_at + batches.WAITING_S)
            await self._database.ask("ZADD", _lines(batch.model), "NX", 0, account_id)

    async def get(self, account_id: str, batch_id: str) -> BatchJob | None:
        return _batch(await self._database.ask("HMGET", _batch_key(account_id, batch_id), *_FIELDS))

    async def of_account(self, account_id: str) -> Sequence[BatchJob]:
        (ids,) = await self._database.read(("ZREVRANGE", account_key(account_id, "batches"), 0, batches.LISTED_MAX - 1))
        return await self._batches([(account_id, id) for id in ids])

    async def results(self, account_id: str, batch_id: str, first: int, limit: int) -> Sequence[BatchItemResult]:
        places = range(first, first + limit)
        (values,) = await self._database.read(("HMGET", f"{_batch_key(account_id, batch_id)}:results", *places))
        pairs = zip(places, values, strict=True)
        return [BatchItemResult(place, value[:1] == b"1", value[1:]) for place, value in pairs if value is not None]

    async def claim(self, model: str, lease_s: float, limit: int) -> Sequence[BatchJobItem]:
        """A claim that Redis did not answer in time is made again, and what the first one got waits for its lease."""
        for _ in range(_TURNS):
            turn = await self._database.run_script_once(_TURN, _lines(model), self._database.now_us())
            if turn is None:
                return []
            account_id = turn.decode()
            first_lease, *parts = await self._run(_CLAIM, account_id, model, lease_s, limit)
            if parts:
                return [_item(account_id, *parts[at : at + 5]) for at in range(0, len(parts), 5)]
            if first_lease:
                await self._database.ask("ZADD", _lines(model), "XX", first_lease.decode(), account_id)
            else:
                await self._dequeue_account(model, account_id)
        return []

    async def _dequeue_account(self, model: str, account_id: str) -> None:
        """Takes an account without items out of the line, and back into it where items came meanwhile."""
        await self._database.ask("ZREM", _lines(model), account_id)
        if await self._database.ask("EXISTS", account_key(account_id, f"line:{model}")):
            await self._database.ask("ZADD", _lines(model), 0, account_id)

    async def renew(self, items: Sequence[BatchJobItem], lease_s: float) -> Sequence[BatchJobItem]:
        now, groups = self._database.now_us(), grouped(items, _line_of)
        calls = [
            (account_key(account_id), (now, model, lease_s, *_batch_places(group)))
            for (account_id, model), group in groups
        ]
        answers = await self._database.run_script(_RENEW, calls) if calls else []
        pairs = zip(groups, answers, strict=True)
        return [item for (_, group), alive in pairs for item, runs in zip(group, alive, strict=True) if not runs]

    async def put_back(self, items: Sequence[BatchJobItem], delay_s: float) -> None:
        for (account_id, model), group in grouped(items, _line_of):
            await self._run(_PUT_BACK, account_id, model, *_batch_places(group))
            now = self._database.now_us() / MICRO or time.time()
            await self._database.ask("ZADD", _lines(model), now + delay_s, account_id)

    async def end(self, item: BatchJobItem, succeeded: bool, result: bytes, record: UsageRecord | None) -> bool:
        used: tuple[Any, ...] = ()
        if record is not None:
            tokens = (record.prompt_tokens, record.completion_tokens)
            used = (record.request_id, record.day, _pack(record), *tokens)
        key = (item.model, item.batch_id, item.place)
        arguments = (self._database.now_us(), *key, int(succeeded), result, *used)
        ended = await self._database.run_lasting(_END, account_key(item.account_id), *arguments)
        if record is not None:
            self._database.recent.settle(item.account_id, record.request_id)
        return bool(ended)

    async def close(self, account_id: str, batch_id: str, status: BatchStatus) -> bool:
        arguments = (self._database.now_us(), batch_id, str(status))
        return bool(await self._database.run_lasting(_CLOSE, account_key(account_id), *arguments))

    async def discard(self, account_id: str) -> None:
        index = account_key(account_id, "batches")
        (ids,) = await self._database.read(("ZRANGE", index, 0, -1))
        models = {batch.model for batch in await self._batches([(account_id, id) for id in ids])}
        keys = [f"{_batch_key(account_id, id.decode())}{part}" for id in ids for part in _PARTS]
        keys += [account_key(account_id, f"{kind}:{model}") for model in models for kind in ("line", "leases")]
        await self._database.read(*(("UNLINK", key) for key in [*keys, f"{index}:open", index]))

    async def sweep(self) -> None:
        """Redis deletes what has expired."""

    async def waiting(self, models: Sequence[str]) -> Mapping[str, QueueDepth]:
        lines = await self._database.read(*(("ZRANGE", _lines(model), 0, -1) for model in models))
        accounts = sorted({account_id.decode() for line in lines for account_id in line})
        if not accounts:
            return {}
        hashes = [account_key(account_id, "batches:open") for account_id in accounts]
        open_ids = await self._database.read(*(("HKEYS", key) for key in hashes))
        depths: dict[str, QueueDepth] = {}
        keys = [(account_id, id) for account_id, ids in zip(accounts, open_ids, strict=True) for id in ids]
        for batch in await self._batches(keys):
            if batch.status.open:
                before = depths.get(batch.model, QueueDepth(0, batch.created_at))
                left = before.items + batch.items - batch.succeeded - batch.failed
                depths[batch.model] = QueueDepth(left, min(before.oldest_at, batch.created_at))
        return {model: depth for model, depth in depths.items() if model in models}

    async def _batches(self, keys: Sequence[tuple[str, bytes]]) -> list[BatchJob]:
        """The batches of these accounts and ids, as far as they exist."""
        commands = [("HMGET", _batch_key(account_id, id.decode()), *_FIELDS) for account_id, id in keys]
        rows = await self._database.read(*commands) if commands else []
        return [batch for columns in rows if (batch := _batch(columns)) is not None]

    async def _run(self, script: str, account_id: str, *arguments: Any) -> Any:
        key, now = account_key(account_id), self._database.now_us()
        return await self._database.run_script_once(script, key, now, *arguments)


def _batch_key(account_id: str, batch_id: str) -> str:
    return account_key(account_id, f"batch:{batch_id}")


def _lines(model: str) -> str:
    return f"hearth:lines:{model}"


def _batch(columns: Sequence[bytes | None]) -> BatchJob | None:
    """None where there is none, or where it has not arrived."""
    document, status, ended_at, expires_at, *counts = columns
    if document is None or status is None or status == b"arriving":
        return None
    return structs.replace(
        _unpack(document),
        status=BatchStatus(status.decode()),
        ended_at=int(ended_at) if ended_at else None,
        expires_at=int(expires_at or 0),
        **{name: int(count or 0) for name, count in zip(_COUNTS, counts, strict=True)},
    )


def _item(account_id: str, batch_id: bytes, place: bytes, body: bytes, tries: int, document: bytes) -> BatchJobItem:
    batch = _unpack(document)
    return BatchJobItem(account_id, batch_id.decode(), int(place), batch.token_id, batch.model, body, tries)


def _line_of(item: BatchJobItem) -> tuple[str, str]:
    return item.account_id, item.model


def _batch_places(items: Sequence[BatchJobItem]) -> list[Any]:
    return [part for item in items for part in (item.batch_id, item.place)]
