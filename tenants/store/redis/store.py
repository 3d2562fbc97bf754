"""The store in Redis, for many gateways: every decision is one Lua call, timed by Redis' own clock.

All that a decision touches shares one hash tag, `{account id}`:

    hearth:{ID}                   hash: created_at, revision, suspended_at, plan, document
    hearth:{ID}:tokens            hash: token id → ApiToken and Seals
    hearth:{ID}:revoked           hash: token id → when
    hearth:{ID}:holds             hash: request id → day:held:output:rates:checkpoint, where the checkpoint is a record
    hearth:{ID}:expiries          sorted set: request ids by expires_us
    hearth:{ID}:gauge:SUBJECT     hash: requests_us, input_us, output_us, output, open; SUBJECT is "" for the account
    hearth:{ID}:day:DAY[:SUBJECT] hash: the counters of that day
    hearth:{ID}:month:DAY[:SUBJECT] micro-neurons used and held in the month that begins on DAY, once a limit asked
    hearth:{ID}:usage:DAY         hash: token and model → five sums over the ledger
    hearth:{ID}:ledger:DAY        hash: request id → record
    hearth:{ID}:audit             list of entries
    hearth:{ID}:claim:KEY         what was claimed
    hearth:accounts               set of ids
    hearth:token:TOKEN            account id
    hearth:plans, :revisions      hashes: name → document, revision
    hearth:notices, :bodies       sorted set: notices' ids by due_at; hash: id → Notice
    hearth:notice:ID              that there was one
    …:batch…, :line:, :leases:    see batches_redis.py, and hearth:lines:MODEL
    hearth:version                of all this, VERSION, once a gateway or `hearth doctor` has looked

Redis must run with `maxmemory-policy noeviction`, or it forgets accounts under pressure, and with `appendonly yes` and
`appendfsync everysec`; advice() says so. How long a Redis that hangs can hold a request up is in store_line.py. One
that was emptied is away until it has its data back: after a FLUSHALL by starting it without that command in its log.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import structs
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from tenants.records.accounts import Account
from tenants.records.audit_entry import AuditEntry
from tenants.records.batches import BatchStore
from tenants.records.holds import Cap, DenialReason, Denied, Granted, Hold
from tenants.records.limits import Limits
from tenants.records.notices import Notice
from tenants.records.plans import DEFAULT_PLAN, Plan
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import DAY_US, MICRO, Balance, Totals, UsageRecord, UsageRow
from tenants.store.codec import account_document, plan_document, read_account, read_plan
from tenants.store.protocol import RETENTION_DAYS, Clock, StoreUnavailable
from tenants.store.redis import scripts as scripts
from tenants.store.redis.batches import RedisBatchStore, RedisCalls
from tenants.store.redis.pipeline import PIPELINE_COMMANDS, CommandPipeline, connect, redis_errors, unavailable

# What an earlier version kept is read as it is: 1, which had no version, kept accounts in columns.
VERSION: Final = 2
_VERSION: Final = "hearth:version"
_PLANS: Final = "hearth:plans"
_NOTICES: Final = "hearth:notices"
READ_S: Final = 5.0  # for an answer that may be long

# An account of the first version has columns in place of its document.
_OLD: Final = ("name", "requests_per_minute", "micro_neurons_per_day", "concurrent_requests", "burst")
_ACCOUNT: Final = ("created_at", "revision", "suspended_at", "plan", "document", *_OLD)
_SUMS: Final = Totals.__struct_fields__

_pack = msgspec.msgpack.Encoder().encode
_unpack_record = msgspec.msgpack.Decoder(UsageRecord).decode
_unpack_token = msgspec.msgpack.Decoder(
    tuple[ApiToken, TokenDigest | list[TokenDigest]]
).decode  # one, before they were rolled
_unpack_entry = msgspec.msgpack.Decoder(AuditEntry).decode
_unpack_notice = msgspec.msgpack.Decoder(Notice).decode


class RedisStore:
    """See Store. Connections are made when needed, so opening one never fails."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self._line = CommandPipeline(url)
        self._reads: Any = Redis.from_pool(connect(url))
        self._clock = clock
        self.batches: BatchStore = RedisBatchStore(RedisCalls(self._call, self._asked, self._read, self._now_us, _key))

    async def ping(self) -> None:
        """Writes, because a full Redis and a replica answer a PING. Also raises where a newer Hearth has written."""
        kept = int(await self._ask("GET", _VERSION) or 0)
        if kept > VERSION:
            raise StoreUnavailable(f"a newer Hearth keeps version {kept} there: run that one, or name another database")
        await self._ask("SET", _VERSION, VERSION)

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
        columns = ("revision", account.revision, "plan", account.plan.name, "document", account_document(account))
        suspended = () if account.suspended_at is None else ("suspended_at", account.suspended_at)
        await self._ask("HSET", _key(account.id), "created_at", account.created_at, *columns, *suspended)

    async def account(self, account_id: str) -> Account | None:
        columns, plans = await self._asked(("HMGET", _key(account_id), *_ACCOUNT), ("HGETALL", _PLANS))
        account = _account(account_id, columns, _pairs(plans))
        if account is None:
            await self._remembers()
        return account

    async def accounts(self) -> Sequence[Account]:
        ids = await self._ids()
        plans, *rows = await self._read(
            ("HGETALL", _PLANS), *(("HMGET", _key(account_id), *_ACCOUNT) for account_id in ids)
        )
        accounts = [_account(account_id, row, plans) for account_id, row in zip(ids, rows, strict=True)]
        return sorted(
            (account for account in accounts if account), key=lambda account: (account.created_at, account.id)
        )

    async def change_account(self, account: Account) -> bool:
        suspended_at = "" if account.suspended_at is None else account.suspended_at
        change = (0, account.revision, suspended_at, account.plan.name, account_document(account))
        (changed,) = await self._call(scripts.CHANGE_ACCOUNT, [(_key(account.id), change)])
        return bool(changed)

    async def plans(self) -> Sequence[Plan]:
        (plans,) = await self._read(("HGETALL", _PLANS))
        return sorted((read_plan(plan) for plan in plans.values()), key=lambda plan: plan.name)

    async def keep_plan(self, plan: Plan) -> bool:
        (kept,) = await self._call(scripts.KEEP_PLAN, [(_PLANS, (0, plan.name, plan.revision, plan_document(plan)))])
        return bool(kept)

    async def remove_plan(self, name: str) -> bool:
        await self._ask("HDEL", f"{_PLANS}:revisions", name)
        return bool(await self._ask("HDEL", _PLANS, name))

    async def add_token(self, token: ApiToken, seal: TokenDigest) -> bool:
        if not await self._ask("EXISTS", _key(token.account_id)):
            return False
        await self._ask("SETNX", f"hearth:token:{token.id}", token.account_id)
        await self._ask("HSETNX", _key(token.account_id, "tokens"), token.id, _pack((token, [seal])))
        return True

    async def token(self, token_id: str) -> tuple[ApiToken, Sequence[TokenDigest], Account] | None:
        owner = await self._ask("GET", f"hearth:token:{token_id}")
        if owner is None:
            await self._remembers()
            return None
        account_id = owner.decode()
        packed, revoked_at, columns, plans = await self._asked(
            ("HGET", _key(account_id, "tokens"), token_id),
            ("HGET", _key(account_id, "revoked"), token_id),
            ("HMGET", _key(account_id), *_ACCOUNT),
            ("HGETALL", _PLANS),
        )
        account = _account(account_id, columns, _pairs(plans))
        if packed is None or account is None:
            await self._remembers()
            return None
        token, seals = _unpack_token(packed)
        return _with_revocation(token, revoked_at), [seals] if isinstance(seals, TokenDigest) else seals, account

    async def change_token(self, token: ApiToken, seals: Sequence[TokenDigest]) -> bool:
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

    async def reserve(self, hold: Hold) -> Granted | Denied:
        record = hold.record
        key, now = _key(record.account_id), self._now_us()
        ask = (record.request_id, record.token_id, hold.held, hold.lifetime_us, _pack(record), hold.output)
        asked = (now, *ask, record.subjects, _pack(hold.caps))
        ((code, *answer),) = await self._call(scripts.RESERVE, [(key, asked)])
        if not code:
            day, held, *after = answer
            return Granted(day, held, tuple(after))
        if code == scripts.DENIAL_CODES[DenialReason.NO_ACCOUNT]:
            await self._remembers()
        *numbers, subject = answer or (b"",)
        return structs.replace(Denied(scripts.DENIAL_REASONS[code - 1], *numbers), subject=subject.decode())

    async def left(self, account_id: str, caps: Sequence[Cap]) -> Sequence[int]:
        (found,) = await self._call(scripts.LEFT, [(_key(account_id), (self._now_us(), _pack(caps)))])
        numbers: list[int] = found
        return numbers

    async def checkpoint(self, records: Sequence[UsageRecord], lifetime_us: int) -> None:
        now = self._now_us()
        calls = [
            (key, (now, lifetime_us, *(part for one in group for part in (one.request_id, _pack(one)))))
            for key, group in _by_account(records)
        ]
        await self._call(scripts.CHECKPOINT, calls)

    async def settle(self, records: Sequence[UsageRecord]) -> None:
        now = self._now_us()
        groups = [
            (key, [part for one in group for part in (one.request_id, one.day, _pack(one))])
            for key, group in _by_account(records)
        ]
        written = await self._call(scripts.SETTLE, [(key, (now, 0, *parts)) for key, parts in groups])
        if not all(written):
            await self._remembers()
            await self._call(scripts.SETTLE, [(key, (now, 1, *parts)) for key, parts in groups])

    async def sweep(self) -> int:
        now, swept = self._now_us(), 0
        calls = [(_key(account_id), (now,)) for account_id in await self._ids()]
        while calls:
            counts = await self._call(scripts.SWEEP, calls[:PIPELINE_COMMANDS])
            again = [call for call, count in zip(calls, counts, strict=False) if count == scripts.SWEEP_MAX]
            calls = again + calls[PIPELINE_COMMANDS:]
            swept += sum(counts)
        return swept

    async def totals(self, account_id: str, day: int) -> Totals:
        return _totals(await self._ask("HMGET", _key(account_id, f"day:{day}"), *_SUMS))

    async def records(self, account_id: str, day: int) -> Sequence[UsageRecord]:
        (packed,) = await self._read(("HVALS", _key(account_id, f"ledger:{day}")))
        records = [structs.replace(_unpack_record(one), day=day) for one in packed]  # a hold's guess may be off by one
        return sorted(records, key=lambda record: record.request_id)

    async def usage(self, account_id: str, first_day: int, last_day: int) -> Sequence[UsageRow]:
        days = range(first_day, last_day + 1)
        found = await self._read(*(("HGETALL", _key(account_id, f"usage:{day}")) for day in days))
        sums: dict[tuple[int, str, str, str], Any] = {}
        for day, fields in zip(days, found, strict=True):
            for field, value in fields.items():
                token_id, model, *tags = field.decode().split(scripts.FIELD_SEPARATOR)
                sums[day, token_id, model, "".join(tags)] = [int(number) for number in value.split(b":")]
        return [UsageRow(*(*kind[:3], *numbers, kind[3])) for kind, numbers in sorted(sums.items())]

    async def reconcile(self, account_id: str, day: int, subject: str = "") -> Balance:
        """A day that is over is read in pieces, so that nobody waits behind it; today in one piece, as it moves."""
        of_subject = f":{subject}" if subject else ""
        ledger = _key(account_id, f"ledger:{day}")
        counters = ("HMGET", _key(account_id, f"day:{day}{of_subject}"), *_SUMS)
        holds = ("HVALS", _key(account_id, "holds"))
        if (day + 1) * DAY_US < (self._now_us() or int(time.time() * MICRO)):
            packed = [value async for value in self._values(ledger)]
            counted, held = await self._read(counters, holds)
        else:
            counted, packed, held = await self._read(counters, ("HVALS", ledger), holds)
        return Balance(_totals(counted), _recorded(packed, held, day, subject))

    async def _values(self, key: str) -> AsyncIterator[bytes]:
        with redis_errors():
            async with asyncio.timeout(READ_S * 12):
                async for _, value in self._reads.hscan_iter(key, count=scripts.SWEEP_MAX):
                    yield value

    async def append_audit(self, entry: AuditEntry) -> bool:
        (appended,) = await self._call(scripts.APPEND_AUDIT, [(_key(entry.account_id), (0, entry.seq, _pack(entry)))])
        return bool(appended)

    async def audit(self, account_id: str, first_seq: int, most: int) -> Sequence[AuditEntry]:
        first = first_seq - 1
        (packed,) = await self._read(("LRANGE", _key(account_id, "audit"), first, first + most - 1))
        return [_unpack_entry(one) for one in packed]

    async def audit_head(self, account_id: str) -> AuditEntry | None:
        packed = await self._ask("LINDEX", _key(account_id, "audit"), -1)
        return None if packed is None else _unpack_entry(packed)

    async def claim(self, account_id: str, key: str, value: bytes, lifetime_s: int) -> bytes | None:
        name = _key(account_id, f"claim:{key}")
        while not await self._ask("SET", name, value, "NX", "EX", lifetime_s):
            there: bytes | None = await self._ask("GET", name)
            if there is not None:
                return there
        return None

    async def reclaim(self, account_id: str, key: str, value: bytes | None, lifetime_s: int) -> None:
        name = _key(account_id, f"claim:{key}")
        await (self._ask("DEL", name) if value is None else self._ask("SET", name, value, "EX", lifetime_s))

    async def add_notice(self, notice: Notice) -> None:
        await self._ask("HSETNX", f"{_NOTICES}:bodies", notice.id, _pack(notice))
        if await self._ask("SET", f"hearth:notice:{notice.id}", "", "NX", "EX", RETENTION_DAYS * 86_400):
            await self._ask("ZADD", _NOTICES, notice.due_at, notice.id)
        elif not await self._ask("ZSCORE", _NOTICES, notice.id):
            await self._ask("HDEL", f"{_NOTICES}:bodies", notice.id)  # it was closed

    async def take_notices(self, now: float, lease_s: float, most: int) -> Sequence[Notice]:
        (taken,) = await self._call(scripts.TAKE_NOTICES, [(_NOTICES, (0, now, now + lease_s, most))])
        pairs = zip(taken[::2], taken[1::2], strict=True)
        return [structs.replace(_unpack_notice(body), tries=tries) for body, tries in pairs if body is not None]

    async def postpone_notice(self, notice_id: str, due_at: float) -> None:
        await self._ask("ZADD", _NOTICES, "XX", due_at, notice_id)

    async def close_notice(self, notice_id: str) -> None:
        await self._asked(
            ("ZREM", _NOTICES, notice_id),
            ("HDEL", f"{_NOTICES}:bodies", notice_id),
            ("HDEL", f"{_NOTICES}:tries", notice_id),
        )

    async def _remembers(self) -> None:
        """Raises StoreUnavailable where there is no account at all: an emptied Redis would be taken for one that knows
        nobody, and tokens and usage thrown away that are in force once it is restored."""
        if not await self._ask("EXISTS", "hearth:accounts"):
            raise StoreUnavailable(
                "Redis has no account: it was emptied, and must be restored from its log or a backup; "
                "or [store] url names another one; or `hearth accounts create` has yet to make the first"
            )

    async def _ids(self) -> list[str]:
        (ids,) = await self._read(("SMEMBERS", "hearth:accounts"))
        return [one.decode() for one in ids]

    async def _call(self, script: scripts.LuaScript, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """One script per account. Scripts are idempotent, so all run again where Redis had forgotten the text."""
        commands = [("EVALSHA", script.sha, 1, key, *arguments) for key, arguments in calls]
        answers = await self._line.ask(*commands)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            await self._ask("SCRIPT LOAD", script.text)
            answers = await self._line.ask(*commands)
        return _checked(answers)

    async def _ask(self, *command: Any) -> Any:
        return (await self._asked(command))[0]

    async def _asked(self, *commands: Sequence[Any]) -> list[Any]:
        return _checked(await self._line.ask(*commands))

    async def _read(self, *commands: Sequence[Any]) -> list[Any]:
        """One consistent look at what may be much; not on the request path."""
        with redis_errors():
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


def _recorded(packed: Sequence[bytes], holds: Sequence[bytes], day: int, subject: str) -> Totals:
    """The sums over records and holds of the day that are counted for the subject."""
    records = [record for record in map(_unpack_record, packed) if subject in record.counted]
    parts = [hold.split(b":", 4) for hold in holds]
    held = [
        int(amount)
        for of_day, amount, _, _, record in parts
        if int(of_day) == day and subject in _unpack_record(record).counted
    ]
    sums = {name: sum(getattr(record, name) for record in records) for name in _SUMS[1:5]}
    return Totals(requests=len(records), held=sum(held), open=len(held), **sums)


def _by_account(records: Sequence[UsageRecord]) -> list[tuple[str, list[UsageRecord]]]:
    groups: dict[str, list[UsageRecord]] = {}
    for record in records:
        groups.setdefault(_key(record.account_id), []).append(record)
    return list(groups.items())


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """What HGETALL answers, where redis-py does not make a dictionary of it."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _account(account_id: str, columns: Sequence[bytes | None], plans: dict[bytes, bytes]) -> Account | None:
    created_at, revision, suspended_at, plan, document, *old = columns
    if created_at is None:
        return None
    found = plans.get(plan or b"default")
    return read_account(
        account_id,
        int(created_at),
        int(revision or 1),
        None if suspended_at is None else int(suspended_at),
        document or _old_document(old),
        DEFAULT_PLAN if found is None else read_plan(found),
    )


def _old_document(old: Sequence[bytes | None]) -> bytes:
    name, per_minute, micro_neurons, concurrent, burst = old
    ceiling = Limits(
        requests_per_minute=int(per_minute or 1),
        neurons_per_day=int(micro_neurons or 0) / MICRO,
        concurrent_requests=int(concurrent or 1),
        burst=int(burst) if burst else None,
    )
    return msgspec.json.encode({"name": (name or b"").decode(), "ceiling": ceiling})


def _with_revocation(token: ApiToken, revoked_at: bytes | None) -> ApiToken:
    return token if revoked_at is None else structs.replace(token, revoked_at=int(revoked_at))


def _totals(columns: Sequence[bytes | None]) -> Totals:
    return Totals(*(int(column or 0) for column in columns))
