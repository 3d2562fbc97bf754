"""Holds, usage records and counters in the Redis store: every decision is one Lua call, timed by Redis' own clock."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import structs

from tenants.records.holds import Cap, DenialReason, Denied, Granted, Hold
from tenants.records.usage import DAY_US, MICRO, Balance, Totals, UsageRecord, UsageRow
from tenants.store.protocol import USAGE_COLUMNS
from tenants.store.redis import scripts
from tenants.store.redis.database import SCAN_FIELDS, RedisDatabase, account_key, grouped, run_command
from tenants.store.redis.pipeline import PIPELINE_COMMANDS

_SUMS: Final = Totals.__struct_fields__
_NEVER_US: Final = 1 << 52  # no hold expires later; Lua counts exactly so far
_USAGE_PARTS: Final = ("day", "month", "usage", "ledger")  # keys of an account's usage
_KEPT_PARTS: Final = ("audit", "tokens", "revoked")  # keys of an account that are others' to remove, or stay

_pack = msgspec.msgpack.Encoder().encode
_unpack_record = msgspec.msgpack.Decoder(UsageRecord).decode


class RedisQuotaStore:
    """See QuotaStore."""

    def __init__(self, database: RedisDatabase) -> None:
        self._database = database

    async def reserve(self, hold: Hold) -> Granted | Denied:
        record, now = hold.record, self._database.now_us()
        request = (record.request_id, record.token_id, hold.held, hold.lifetime_us, _pack(record), hold.output)
        arguments = (account_key(record.account_id), now, *request, record.subjects, _pack(hold.caps))
        await self._database.guard.require_followed()
        run = self._database.run_everywhere if hold.strict else self._database.run_script_once
        code, *answer = await run(scripts.RESERVE, *arguments)
        if not code:
            day, held, *after = answer
            granted = Granted(day, held, tuple(after))
            self._database.recent.grant(hold, granted)
            return granted
        if code == scripts.DENIAL_CODES[DenialReason.NO_ACCOUNT]:
            await self._database.require_data()
        return _denied(code, answer)

    async def count(self, account_id: str, caps: Sequence[Cap]) -> Denied | None:
        arguments = (account_key(account_id), self._database.now_us(), _pack(caps))
        code, *answer = await self._database.run_script_once(scripts.COUNT, *arguments)
        return _denied(code, answer) if code else None

    async def remaining(self, account_id: str, caps: Sequence[Cap]) -> Sequence[int]:
        arguments = (account_key(account_id), self._database.now_us(), _pack(caps))
        amounts: list[int] = await self._database.run_script_once(scripts.REMAINING, *arguments)
        return amounts

    async def checkpoint(self, records: Sequence[UsageRecord], lifetime_us: int) -> None:
        now = self._database.now_us()
        calls = [
            (key, (now, lifetime_us, *(part for record in group for part in (record.request_id, _pack(record)))))
            for key, group in grouped(records, _account_key)
        ]
        await self._database.run_script(scripts.CHECKPOINT, calls)
        for record in records:
            self._database.recent.renew(record)

    async def settle(self, records: Sequence[UsageRecord]) -> None:
        now = self._database.now_us()
        groups = [
            (key, [part for record in group for part in (record.request_id, record.day, _pack(record))])
            for key, group in grouped(records, _account_key)
        ]
        written = await self._database.run_script(scripts.SETTLE, [(key, (now, 0, *parts)) for key, parts in groups])
        if not all(written):
            await self._database.require_data()
            await self._database.run_script(scripts.SETTLE, [(key, (now, 1, *parts)) for key, parts in groups])
        for key, parts in groups:
            command = run_command(scripts.SETTLE, key, (now, 0, *parts))
            self._database.recent.write(key, command, scripts.SETTLE)
        for record in records:
            self._database.recent.settle(record.account_id, record.request_id)

    async def sweep(self) -> int:
        now, swept = self._database.now_us(), 0
        calls = [(account_key(account_id), (now,)) for account_id in await self._database.account_ids()]
        while calls:
            counts = await self._database.run_script(scripts.SWEEP, calls[:PIPELINE_COMMANDS])
            unfinished = [call for call, count in zip(calls, counts, strict=False) if count == scripts.SWEEP_MAX]
            calls = unfinished + calls[PIPELINE_COMMANDS:]
            swept += sum(counts)
        return swept

    async def remove(self, account_id: str, *, keep_usage: bool) -> None:
        key = account_key(account_id)
        while await self._database.run_script_once(scripts.SWEEP, key, _NEVER_US) == scripts.SWEEP_MAX:
            pass
        kept = (*_USAGE_PARTS, *_KEPT_PARTS) if keep_usage else _KEPT_PARTS
        self._database.recent.forget(key)
        gone = [name async for name, part in self._database.account_keys(account_id) if part.split(":")[0] not in kept]
        await self._database.read_apart([("UNLINK", name) for name in gone])

    async def totals(self, account_id: str, day: int) -> Totals:
        return _totals(await self._database.ask("HMGET", account_key(account_id, f"day:{day}"), *_SUMS))

    async def records(
        self, account_id: str, day: int, request_ids: Sequence[str] | None = None
    ) -> Sequence[UsageRecord]:
        ledger = account_key(account_id, f"ledger:{day}")
        if request_ids is not None:
            (values,) = await self._database.read(("HMGET", ledger, *request_ids)) if request_ids else ([],)
            packed = [value for value in values if value is not None]
        else:
            packed = list((await self._fields(ledger)).values())
        # The day in a hold's record was guessed before the decision, and may be off by one.
        records = [structs.replace(_unpack_record(value), day=day) for value in packed]
        return sorted(records, key=lambda record: record.request_id)

    async def usage(
        self, account_ids: Sequence[str], first_day: int, last_day: int, by: Collection[str] = USAGE_COLUMNS
    ) -> Mapping[str, Sequence[UsageRow]]:
        span = (self._database.now_us(), first_day, last_day)
        looks = [("EVAL", scripts.USAGE_DAYS, 1, account_key(account_id), *span) for account_id in account_ids]
        found = [
            (account_id, day, fields)
            for account_id, days in zip(account_ids, await self._database.read_apart(looks), strict=True)
            for day, fields in days
        ]
        keys = {(account_id, day): account_key(account_id, f"usage:{day}") for account_id, day, _ in found}
        few = [(account_id, day) for account_id, day, fields in found if fields <= SCAN_FIELDS]
        hashes = await self._database.read_apart([("HGETALL", keys[name]) for name in few])
        sums = dict(zip(few, hashes, strict=True))
        for name in keys.keys() - sums.keys():
            sums[name] = await self._fields(keys[name])
        return await asyncio.to_thread(_rows, sums, by)

    async def _fields(self, key: str) -> dict[bytes, bytes]:
        """A hash of any size."""
        fields: dict[bytes, bytes] = {}
        async for piece in self._database.hash_pieces(key):
            fields |= piece
        return fields

    async def reconcile(self, account_id: str, day: int, subject: str = "") -> Balance:
        """See QuotaStore. A day that is over is read in pieces, so that no other command waits; today in one look."""
        subject_part = f":{subject}" if subject else ""
        ledger = account_key(account_id, f"ledger:{day}")
        counters = ("HMGET", account_key(account_id, f"day:{day}{subject_part}"), *_SUMS)
        holds = ("HVALS", account_key(account_id, "holds"))
        if (day + 1) * DAY_US < (self._database.now_us() or int(time.time() * MICRO)):
            packed = list((await self._fields(ledger)).values())
            counted, hold_values = await self._database.read(counters, holds)
        else:
            counted, packed, hold_values = await self._database.read(counters, ("HVALS", ledger), holds)
        return Balance(_totals(counted), _recorded(packed, hold_values, day, subject))


def _recorded(packed: Sequence[bytes], holds: Sequence[bytes], day: int, subject: str) -> Totals:
    """The sums over the day's records and holds that are counted for the subject."""
    records = [record for record in map(_unpack_record, packed) if subject in record.subjects_counted]
    held = [
        int(amount)
        for hold_day, amount, _, _, record in (hold.split(b":", 4) for hold in holds)
        if int(hold_day) == day and subject in _unpack_record(record).subjects_counted
    ]
    sums = {name: sum(getattr(record, name) for record in records) for name in _SUMS[1:5]}
    return Totals(requests=len(records), held=sum(held), open=len(held), **sums)


def _rows(sums: Mapping[tuple[str, int], Mapping[bytes, bytes]], by: Collection[str]) -> dict[str, list[UsageRow]]:
    """The rows of each account, in their order, from the fields of its days."""
    rows: dict[str, list[UsageRow]] = {}
    for (account_id, day), fields in sorted(sums.items()):
        counts: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0] * 5)
        for field, value in fields.items():
            token_id, model, *tags = field.decode().split(scripts.FIELD_SEPARATOR)
            parts = {"token_id": token_id, "model": model, "tags": "".join(tags)}
            key: Any = tuple(parts[name] if name in by else "" for name in USAGE_COLUMNS)
            counts[key] = [sum(pair) for pair in zip(counts[key], map(int, value.split(b":")), strict=True)]
        of_day: list[Any] = [(day, *key[:2], *counts[key], key[2]) for key in sorted(counts)]
        rows.setdefault(account_id, []).extend(UsageRow(*columns) for columns in of_day)
    return rows


def _denied(code: int, answer: Sequence[Any]) -> Denied:
    """The denial that a script answered."""
    *numbers, subject = answer or (b"",)
    return structs.replace(Denied(scripts.DENIAL_REASONS[code - 1], *numbers), subject=subject.decode())


def _account_key(record: UsageRecord) -> str:
    return account_key(record.account_id)


def _totals(columns: Sequence[bytes | None]) -> Totals:
    return Totals(*(int(column or 0) for column in columns))
