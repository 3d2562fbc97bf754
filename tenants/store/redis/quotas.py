"""Holds, usage records and counters in the Redis store: every decision is one Lua call, timed by Redis' own clock."""

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import structs

from tenants.records.holds import Cap, DenialReason, Denied, Granted, Hold
from tenants.records.usage import DAY_US, MICRO, Balance, Totals, UsageRecord, UsageRow
from tenants.store.redis import scripts
from tenants.store.redis.database import RedisDatabase, account_key, grouped
from tenants.store.redis.pipeline import PIPELINE_COMMANDS

_SUMS: Final = Totals.__struct_fields__

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
        code, *answer = await self._database.run_script_once(scripts.RESERVE, *arguments)
        if not code:
            day, held, *after = answer
            return Granted(day, held, tuple(after))
        if code == scripts.DENIAL_CODES[DenialReason.NO_ACCOUNT]:
            await self._database.require_data()
        *numbers, subject = answer or (b"",)
        return structs.replace(Denied(scripts.DENIAL_REASONS[code - 1], *numbers), subject=subject.decode())

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

    async def sweep(self) -> int:
        now, swept = self._database.now_us(), 0
        calls = [(account_key(account_id), (now,)) for account_id in await self._database.account_ids()]
        while calls:
            counts = await self._database.run_script(scripts.SWEEP, calls[:PIPELINE_COMMANDS])
            unfinished = [call for call, count in zip(calls, counts, strict=False) if count == scripts.SWEEP_MAX]
            calls = unfinished + calls[PIPELINE_COMMANDS:]
            swept += sum(counts)
        return swept

    async def totals(self, account_id: str, day: int) -> Totals:
        return _totals(await self._database.ask("HMGET", account_key(account_id, f"day:{day}"), *_SUMS))

    async def records(self, account_id: str, day: int) -> Sequence[UsageRecord]:
        (packed,) = await self._database.read(("HVALS", account_key(account_id, f"ledger:{day}")))
        # The day in a hold's record was guessed before the decision, and may be off by one.
        records = [structs.replace(_unpack_record(value), day=day) for value in packed]
        return sorted(records, key=lambda record: record.request_id)

    async def usage(self, account_id: str, first_day: int, last_day: int) -> Sequence[UsageRow]:
        days = range(first_day, last_day + 1)
        hashes = await self._database.read(*(("HGETALL", account_key(account_id, f"usage:{day}")) for day in days))
        rows = []
        for day, fields in zip(days, hashes, strict=True):
            for field, value in fields.items():
                token_id, model, *tags = field.decode().split(scripts.FIELD_SEPARATOR)
                columns: Any = (day, token_id, model, *map(int, value.split(b":")), "".join(tags))
                rows.append(UsageRow(*columns))
        return sorted(rows, key=lambda row: (row.day, row.token_id, row.model, row.tags))

    async def reconcile(self, account_id: str, day: int, subject: str = "") -> Balance:
        """See QuotaStore. A day that is over is read in pieces, so that no other command waits; today in one look."""
        subject_part = f":{subject}" if subject else ""
        ledger = account_key(account_id, f"ledger:{day}")
        counters = ("HMGET", account_key(account_id, f"day:{day}{subject_part}"), *_SUMS)
        holds = ("HVALS", account_key(account_id, "holds"))
        if (day + 1) * DAY_US < (self._database.now_us() or int(time.time() * MICRO)):
            packed = [value async for value in self._database.hash_values(ledger)]
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


def _account_key(record: UsageRecord) -> str:
    return account_key(record.account_id)


def _totals(columns: Sequence[bytes | None]) -> Totals:
    return Totals(*(int(column or 0) for column in columns))
