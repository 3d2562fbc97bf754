"""Holds, usage records and counters in the SQLite store. schema.py says which numbers add up."""

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

from msgspec import structs

from tenants.records.holds import Cap, DenialReason, Denied, Granted, Hold
from tenants.records.leases import LEASE_PREFIX
from tenants.records.limits import lasts_us
from tenants.records.usage import EXPIRED, Balance, Totals, UsageRecord, UsageRow, day_of, first_of_month
from tenants.store.decision import SubjectUsage, decide, first_denial, remaining
from tenants.store.protocol import RETENTION_DAYS, USAGE_COLUMNS
from tenants.store.sqlite.file import SqliteFile
from tenants.store.sqlite.leases import charge_lease, lease_left
from tenants.store.sqlite.schema import NEVER_US

_RECORD_COLUMNS: Final = ", ".join(UsageRecord.__struct_fields__)
_DAY_COLUMNS: Final = "requests, micro_neurons, prompt_tokens, cached_tokens, completion_tokens, held, open"

_HOLD_STATE: Final = f"""
SELECT suspended_at, sweep_us,
    (SELECT revoked_at FROM tokens WHERE id = :token),
    (SELECT day FROM holds WHERE account_id = :account AND request_id = :request),
    (SELECT held FROM holds WHERE account_id = :account AND request_id = :request),
    EXISTS (SELECT 1 FROM ledger WHERE account_id = :account AND day = :day AND request_id = :request
        AND outcome <> '{EXPIRED}')
FROM accounts WHERE id = :account
"""
_SUBJECT_USAGE: Final = """
SELECT coalesce(requests_us, 0), coalesce(input_us, 0), coalesce(output_us, 0), coalesce(output_held, 0),
    coalesce(open, 0), coalesce((
    SELECT micro_neurons + held FROM days WHERE account_id = :account AND subject = :subject AND day = :day), 0)
FROM (SELECT 1) LEFT JOIN gauges ON account_id = :account AND subject = :subject
"""
_MONTH_USAGE: Final = """
SELECT coalesce(sum(micro_neurons + held), 0) FROM days
    WHERE account_id = ? AND subject = ? AND day BETWEEN ? AND ?
"""
_SET_SWEEP: Final = "UPDATE accounts SET sweep_us = ? WHERE id = ?"
_ADD_TO_GAUGE: Final = """
INSERT INTO gauges VALUES (?, ?, ?, ?, 0, ?, 1) ON CONFLICT DO UPDATE SET requests_us = excluded.requests_us,
    input_us = excluded.input_us, output_held = output_held + excluded.output_held, open = open + 1
"""
_COUNT_REQUEST: Final = """
INSERT INTO gauges VALUES (?, ?, ?, 0, 0, 0, 0) ON CONFLICT DO UPDATE SET requests_us = excluded.requests_us
"""
_TAKE_FROM_GAUGE: Final = """
UPDATE gauges SET open = open - 1, output_held = output_held - ?, output_us = max(output_us, ?) + ?
    WHERE account_id = ? AND subject = ?
"""
_ADD_TO_DAY: Final = """
INSERT INTO days VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens,
    micro_neurons = micro_neurons + excluded.micro_neurons, held = held + excluded.held, open = open + excluded.open
"""
_ADD_HOLD: Final = "INSERT INTO holds VALUES (?, ?, ?, ?, ?, 0, 0, 0, 0, ?, ?, ?, 0.0, NULL, ?, ?, ?, ?, ?)"
_CHECKPOINT: Final = """
UPDATE holds SET expires_us = ?, micro_neurons = ?, prompt_tokens = ?, cached_tokens = ?, completion_tokens = ?,
    total_ms = ?, first_token_ms = ? WHERE account_id = ? AND request_id = ?
"""
_REMOVE_HOLD: Final = "DELETE FROM holds WHERE account_id = ? AND request_id = ? RETURNING day, held, output, rates"
_PLACEHOLDERS: Final = ", ".join("?" * len(UsageRecord.__struct_fields__))
_ADD_RECORD: Final = f"INSERT INTO ledger VALUES ({_PLACEHOLDERS}) ON CONFLICT DO NOTHING"
_USAGE: Final = """
SELECT account_id, day, {token_id} AS of_token, {model} AS of_model, sum(requests), sum(micro_neurons),
    sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), {tags} AS of_tags
FROM usage WHERE account_id IN (SELECT value FROM json_each(?)) AND day BETWEEN ? AND ? AND requests > 0
GROUP BY account_id, day, of_token, of_model, of_tags ORDER BY account_id, day, of_token, of_model, of_tags
"""
_REMOVE_RECORDS: Final = """
DELETE FROM ledger WHERE (account_id, day, request_id) IN (
    SELECT account_id, day, request_id FROM ledger WHERE account_id = ? AND day = ? LIMIT ?)
"""
REMOVED_AT_ONCE: Final = 200  # records, while no other write gets in
_REMOVE_EXPIRED: Final = """
DELETE FROM ledger WHERE account_id = ? AND day = ? AND request_id = ? AND outcome = ?
    RETURNING micro_neurons, prompt_tokens, cached_tokens, completion_tokens
"""
_EXPIRED_HOLDS: Final = f"""
SELECT held, output, rates, {_RECORD_COLUMNS.replace("outcome", f"'{EXPIRED}'")} FROM holds
    WHERE account_id = ? AND expires_us <= ?
"""


class _HoldState(NamedTuple):
    """The columns of _HOLD_STATE."""

    suspended_at: int | None
    sweep_us: int
    revoked_at: int | None
    held_day: int | None
    held: int | None
    recorded: int


class _Release(NamedTuple):
    """A hold that is given back: its day, micro-neurons, output tokens, and each subject's limit on output tokens per
    minute, 0 without one."""

    day: int
    held: int
    output: int
    rates: str


class SqliteQuotaStore:
    """See QuotaStore."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._run = file.run
        self._cleaned_day = 0

    async def reserve(self, hold: Hold) -> Granted | Denied:
        record, now_us = hold.record, self._file.now_us()
        day, account_id = day_of(now_us), record.account_id
        key = {"account": account_id, "token": record.token_id, "request": record.request_id, "day": day}
        with self._file.transaction():
            row = self._run(_HOLD_STATE, key).fetchone()
            if row is None:
                return Denied(DenialReason.NO_ACCOUNT)
            state = _HoldState(*row)
            if state.sweep_us <= now_us:
                self._expire(account_id, now_us)
                state = _HoldState(*self._run(_HOLD_STATE, key).fetchone())
            if (reason := _denial(state)) is not None:
                return Denied(reason)
            used = self._usage(account_id, record.subjects_counted, hold.caps, now_us)
            if state.held_day is not None:
                after = tuple(remaining(cap, used[cap.subject], now_us) for cap in hold.caps)
                return Granted(state.held_day, state.held or 0, after)
            decision = decide(hold, used, now_us)
            if isinstance(decision, Granted):
                expires_us = now_us + hold.lifetime_us
                if expires_us < state.sweep_us:
                    self._run(_SET_SWEEP, (expires_us, account_id))
                self._hold(hold, decision, used, now_us)
        return decision

    async def count(self, account_id: str, caps: Sequence[Cap]) -> Denied | None:
        now_us = self._file.now_us()
        with self._file.transaction():
            used = self._usage(account_id, {cap.subject for cap in caps}, caps, now_us)
            if (denied := first_denial(caps, used, now_us)) is not None:
                return denied
            for cap in caps:
                requests_us = max(used[cap.subject].requests_us, now_us) + cap.cost_us
                self._run(_COUNT_REQUEST, (account_id, cap.subject, requests_us))
        return None

    async def remaining(self, account_id: str, caps: Sequence[Cap]) -> Sequence[int]:
        now_us = self._file.now_us()
        with self._file.transaction():
            used = self._usage(account_id, {cap.subject for cap in caps}, caps, now_us)
        return [remaining(cap, used[cap.subject], now_us) for cap in caps]

    def _usage(
        self, account_id: str, subjects: Iterable[str], caps: Sequence[Cap], now_us: int
    ) -> dict[str, SubjectUsage]:
        day, used = day_of(now_us), {}
        monthly = {cap.subject for cap in caps if cap.measure is DenialReason.NEURONS_PER_MONTH}
        for subject in subjects:
            key = {"account": account_id, "subject": subject, "day": day}
            used[subject] = SubjectUsage(*self._run(_SUBJECT_USAGE, key).fetchone())
            if subject in monthly:
                (month,) = self._run(_MONTH_USAGE, (account_id, subject, first_of_month(day), day)).fetchone()
                used[subject] = used[subject]._replace(month=month)
            if subject.startswith(LEASE_PREFIX):
                left = lease_left(self._file, account_id, subject, now_us)
                used[subject] = used[subject]._replace(lease=left)
        return used

    def _hold(self, hold: Hold, granted: Granted, used: dict[str, SubjectUsage], now_us: int) -> None:
        record, account_id = hold.record, hold.record.account_id
        rates = []
        for subject in record.subjects_counted:
            costs = {cap.measure: cap for cap in hold.caps if cap.subject == subject}
            requests = costs.get(DenialReason.REQUESTS_PER_MINUTE)
            input_tokens = costs.get(DenialReason.INPUT_TOKENS_PER_MINUTE)
            output = costs.get(DenialReason.OUTPUT_TOKENS_PER_MINUTE)
            before = used[subject]
            requests_us = max(before.requests_us, now_us) + requests.cost_us if requests else before.requests_us
            input_us = max(before.input_us, now_us) + input_tokens.cost_us if input_tokens else before.input_us
            rates.append(str(output.allowed if output else 0))
            if subject.startswith(LEASE_PREFIX):
                charge_lease(self._file, account_id, subject, (granted.held, 1, 0, 0, 0))
                continue
            self._run(_ADD_TO_GAUGE, (account_id, subject, requests_us, input_us, hold.output))
            self._run(_ADD_TO_DAY, (account_id, subject, granted.day, 0, 0, 0, 0, 0, granted.held, 1))
        identity = (record.token_id, record.model, record.started_us, record.subjects)
        expires_us = now_us + hold.lifetime_us
        hold_row = (account_id, record.request_id, granted.day, granted.held, expires_us)
        self._run(_ADD_HOLD, (*hold_row, *identity, hold.output, ",".join(rates), record.tags, record.metadata))

    async def checkpoint(self, records: Sequence[UsageRecord], lifetime_us: int) -> None:
        expires_us = self._file.now_us() + lifetime_us
        with self._file.transaction():
            for record in records:
                tokens = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
                times = (record.total_ms, record.first_token_ms)
                key = (record.account_id, record.request_id)
                self._run(_CHECKPOINT, (expires_us, record.micro_neurons, *tokens, *times, *key))

    async def settle(self, records: Sequence[UsageRecord]) -> None:
        with self._file.transaction():
            for record in records:
                self.settle_one(record)

    async def sweep(self) -> int:
        now_us, swept = self._file.now_us(), 0
        for (account_id,) in self._file.rows("SELECT id FROM accounts WHERE sweep_us <= ?", now_us):
            with self._file.transaction():
                swept += self._expire(account_id, now_us)
        if self._cleaned_day != day_of(now_us):
            await self._remove_before(day_of(now_us) - RETENTION_DAYS)
            self._cleaned_day = day_of(now_us)
        await asyncio.to_thread(self._file.shorten_log)
        return swept

    async def _remove_before(self, day: int) -> None:
        """Removes ledgers and counters of older days, and notices and claims that are over; a ledger some records at a
        time, and its day's counters last, so that an end in the middle is no end."""
        old_days = ("SELECT account_id, day FROM days WHERE day < ? AND subject = ''", (day,))
        await self._remove_days((await asyncio.to_thread(self._file.snapshot, old_days))[0])
        with self._file.transaction():
            self._run("DELETE FROM notices WHERE due_at < ?", (day * 86_400,))
            self._run("DELETE FROM claims WHERE until_s < ?", (int(self._file.clock()),))

    async def _remove_days(self, days: Iterable[tuple[str, int]]) -> None:
        """Removes these days of accounts, each by its id."""
        for day in days:
            for sums in ("usage", "usage_rows"):
                self._file.write(f"DELETE FROM {sums} WHERE account_id = ? AND day = ?", *day)
            removed = 1
            while removed:
                removed = self._file.write(_REMOVE_RECORDS, *day, REMOVED_AT_ONCE)
                await asyncio.sleep(0)
            self._file.write("DELETE FROM days WHERE account_id = ? AND day = ?", *day)

    async def remove(self, account_id: str, *, keep_usage: bool) -> None:
        with self._file.transaction():
            self._expire(account_id, NEVER_US)
            for table in ("gauges", "claims", "leases"):
                self._run(f"DELETE FROM {table} WHERE account_id = ?", (account_id,))
        if not keep_usage:
            days = self._file.rows("SELECT DISTINCT account_id, day FROM days WHERE account_id = ?", account_id)
            await self._remove_days(days)

    async def totals(self, account_id: str, day: int) -> Totals:
        select = f"SELECT {_DAY_COLUMNS} FROM days WHERE account_id = ? AND subject = '' AND day = ?"
        rows = self._file.rows(select, account_id, day)
        return Totals(*rows[0]) if rows else Totals()

    async def records(
        self, account_id: str, day: int, request_ids: Sequence[str] | None = None
    ) -> Sequence[UsageRecord]:
        select = f"SELECT {_RECORD_COLUMNS} FROM ledger WHERE account_id = ? AND day = ?"
        if request_ids is None:
            rows = self._file.rows(f"{select} ORDER BY request_id", account_id, day)
        else:
            these = f"{select} AND request_id IN (SELECT value FROM json_each(?)) ORDER BY request_id"
            rows = self._file.rows(these, account_id, day, json.dumps(request_ids))
        return [UsageRecord(*row) for row in rows]

    async def usage(
        self, account_ids: Sequence[str], first_day: int, last_day: int, by: Collection[str] = USAGE_COLUMNS
    ) -> Mapping[str, Sequence[UsageRow]]:
        select = _USAGE.format_map({name: name if name in by else "''" for name in USAGE_COLUMNS})

        def summed() -> dict[str, list[UsageRow]]:
            (rows,) = self._file.snapshot((select, (json.dumps(account_ids), first_day, last_day)))
            return {
                account_id: [UsageRow(*row) for _, *row in of_account]
                for account_id, of_account in groupby(rows, itemgetter(0))
            }

        return await asyncio.to_thread(summed)

    async def reconcile(self, account_id: str, day: int, subject: str = "") -> Balance:
        counted_for = "account_id = ? AND day = ? AND (? = '' OR instr(char(10) || subjects || char(10), ?) > 0)"
        parameters = (account_id, day, subject, f"\n{subject}\n")
        ledger = f"""SELECT count(*), coalesce(sum(micro_neurons), 0), coalesce(sum(prompt_tokens), 0),
            coalesce(sum(cached_tokens), 0), coalesce(sum(completion_tokens), 0) FROM ledger WHERE {counted_for}"""
        holds = f"SELECT coalesce(sum(held), 0), count(*) FROM holds WHERE {counted_for}"
        days = f"SELECT {_DAY_COLUMNS} FROM days WHERE account_id = ? AND subject = ? AND day = ?"
        queries = ((days, (account_id, subject, day)), (ledger, parameters), (holds, parameters))
        counted, (used,), (held,) = await asyncio.to_thread(self._file.snapshot, *queries)
        return Balance(Totals(*counted[0]) if counted else Totals(), Totals(*used, *held))

    def settle_one(self, record: UsageRecord) -> None:
        """Settles a request inside the caller's transaction."""
        released = self._run(_REMOVE_HOLD, (record.account_id, record.request_id)).fetchone()
        self._record(record, _Release(*released) if released else None, self._file.now_us())

    def _expire(self, account_id: str, now_us: int) -> int:
        """Charges the account's expired holds at their checkpoints; sets when to look again."""
        expired = self._run(_EXPIRED_HOLDS, (account_id, now_us)).fetchall()
        self._run("DELETE FROM holds WHERE account_id = ? AND expires_us <= ?", (account_id, now_us))
        for held, output, rates, *columns in expired:
            record = UsageRecord(*columns)
            self._record(record, _Release(record.day, held, output, rates), now_us)
        first = "SELECT coalesce(min(expires_us), ?) FROM holds WHERE account_id = ?"
        self._run(f"UPDATE accounts SET sweep_us = ({first}) WHERE id = ?", (NEVER_US, account_id, account_id))
        return len(expired)

    def _record(self, record: UsageRecord, release: _Release | None, now_us: int) -> None:
        """Writes the one record of a request, gives its hold back and counts the cost, all in the hold's day."""
        day = record.day if release is None else release.day
        row = structs.astuple(record if record.day == day else structs.replace(record, day=day))
        if self._run(_ADD_RECORD, row).rowcount:
            requests, change = 1, row[3:7]
        else:
            requests, change = 0, self._replace_expired(row)
        held, holds = (release.held, 1) if release else (0, 0)
        for subject in record.subjects_counted:
            if subject.startswith(LEASE_PREFIX):
                micro_neurons, *tokens = change
                charge_lease(self._file, record.account_id, subject, (micro_neurons - held, -holds, *tokens))
            else:
                self._run(_ADD_TO_DAY, (record.account_id, subject, day, requests, *change, -held, -holds))
        if release is not None:
            self._release_gauges(record, release, now_us)

    def _release_gauges(self, record: UsageRecord, release: _Release, now_us: int) -> None:
        for subject, rate in zip(record.subjects_counted, release.rates.split(","), strict=False):
            lasts = lasts_us(record.completion_tokens, int(rate)) if rate not in ("", "0") else 0
            start_us = now_us if lasts else 0
            self._run(_TAKE_FROM_GAUGE, (release.output, start_us, lasts, record.account_id, subject))

    def _replace_expired(self, row: tuple[Any, ...]) -> tuple[int, ...]:
        """Replaces an expired record by the final one and returns what that changes; nothing where one was final."""
        account_id, request_id, day = row[:3]
        expired = self._run(_REMOVE_EXPIRED, (account_id, day, request_id, EXPIRED)).fetchall()
        if not expired:
            return (0, 0, 0, 0)
        self._run(_ADD_RECORD, row)
        return tuple(after - before for after, before in zip(row[3:7], expired[0], strict=True))


def _denial(state: _HoldState) -> DenialReason | None:
    """The reason that forbids a request of any size."""
    if state.revoked_at is not None:
        return DenialReason.REVOKED
    if state.suspended_at is not None:
        return DenialReason.SUSPENDED
    return DenialReason.RECORDED if state.recorded and state.held_day is None else None
