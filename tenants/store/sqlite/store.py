"""The store as one SQLite file in WAL mode, called inline. It shares the file with the processes of the command line.

A commit survives a killed process. It is not forced to the disk (`synchronous=NORMAL`), so a power cut may take the
last moments with it; the file itself stays whole.
"""

import asyncio
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import structs

from tenants.records.accounts import Account
from tenants.records.audit_entry import AuditEntry
from tenants.records.batches import BatchStore
from tenants.records.grants import Grant
from tenants.records.holds import Cap, DenialReason, Denied, Granted, Hold
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.notices import Notice
from tenants.records.plans import DEFAULT_PLAN, Plan
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import (
    EXPIRED,
    MICRO,
    Balance,
    Totals,
    UsageRecord,
    UsageRow,
    day_of,
    first_of_month,
    first_of_next_month,
)
from tenants.store.codec import account_document, plan_document, read_account, read_plan
from tenants.store.decision import SubjectUsage, decide, lasts_us, remaining
from tenants.store.protocol import OTHER_TAGS, RETENTION_DAYS, TAGGED_MAX, Clock, StoreUnavailable
from tenants.store.sqlite.batches import SqliteBatchStore, SqliteCalls
from tenants.store.sqlite.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION

BUSY_MS: Final = 1_000  # how long to wait for another process's write
PAGE_BYTES: Final = 2_048  # a commit writes whole pages; a pair of calls costs 4 µs less than with the default
# A write-ahead log of this many pages is copied into the file by whoever commits, unless sweep() did it before. Every
# version of the few pages that all decisions touch is in it, so a long one makes each look-up slower.
LOG_PAGES_MAX: Final = 1_000
NEVER_US: Final = 1 << 62

_ACCOUNT: Final = """
    accounts.id, created_at, accounts.revision, suspended_at, accounts.document, plans.document, plans.revision
    FROM accounts LEFT JOIN plans ON plans.name = accounts.plan
"""
_TOKEN: Final = "id, account_id, name, created_at, expires_at, revoked_at, permitted, limits, digest, pepper, rolled"
_ADD_TOKEN: Final = f"INSERT INTO tokens ({_TOKEN}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_RECORD: Final = ", ".join(UsageRecord.__struct_fields__)
_DAY: Final = "requests, micro_neurons, prompt_tokens, cached_tokens, completion_tokens, held, open"

_ASK: Final = f"""
SELECT suspended_at, sweep_us,
    (SELECT revoked_at FROM tokens WHERE id = :token),
    (SELECT day FROM holds WHERE account_id = :account AND request_id = :request),
    (SELECT held FROM holds WHERE account_id = :account AND request_id = :request),
    EXISTS (SELECT 1 FROM ledger WHERE account_id = :account AND day = :day AND request_id = :request
        AND outcome <> '{EXPIRED}')
FROM accounts WHERE id = :account
"""
_USED: Final = """
SELECT coalesce(requests_us, 0), coalesce(input_us, 0), coalesce(output_us, 0), coalesce(output_held, 0),
    coalesce(open, 0), coalesce((
    SELECT micro_neurons + held FROM days WHERE account_id = :account AND subject = :subject AND day = :day), 0)
FROM (SELECT 1) LEFT JOIN gauges ON account_id = :account AND subject = :subject
"""
_MONTH: Final = """
SELECT coalesce(sum(micro_neurons + held), 0) FROM days
    WHERE account_id = ? AND subject = ? AND day BETWEEN ? AND ?
"""
_LOOK_AGAIN: Final = "UPDATE accounts SET sweep_us = ? WHERE id = ?"
_TAKE: Final = """
INSERT INTO gauges VALUES (?, ?, ?, ?, 0, ?, 1) ON CONFLICT DO UPDATE SET requests_us = excluded.requests_us,
    input_us = excluded.input_us, output_held = output_held + excluded.output_held, open = open + 1
"""
_GIVE_BACK: Final = """
UPDATE gauges SET open = open - 1, output_held = output_held - ?, output_us = max(output_us, ?) + ?
    WHERE account_id = ? AND subject = ?
"""
_COUNT: Final = """
INSERT INTO days VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens,
    micro_neurons = micro_neurons + excluded.micro_neurons, held = held + excluded.held, open = open + excluded.open
"""
_HOLD: Final = "INSERT INTO holds VALUES (?, ?, ?, ?, ?, 0, 0, 0, 0, ?, ?, ?, 0.0, NULL, ?, ?, ?, ?, ?)"
_CHECKPOINT: Final = """
UPDATE holds SET expires_us = ?, micro_neurons = ?, prompt_tokens = ?, cached_tokens = ?, completion_tokens = ?,
    total_ms = ?, first_token_ms = ? WHERE account_id = ? AND request_id = ?
"""
_RELEASE: Final = "DELETE FROM holds WHERE account_id = ? AND request_id = ? RETURNING day, held, output, rates"
_PLACES: Final = ", ".join("?" * len(UsageRecord.__struct_fields__))
_RECORD_ONCE: Final = f"INSERT INTO ledger VALUES ({_PLACES}) ON CONFLICT DO NOTHING"
_SUM_UP: Final = """
WITH kinds AS (
    SELECT day, token_id, model, tags, count(*) AS requests, sum(micro_neurons) AS micro_neurons,
        sum(prompt_tokens) AS prompt_tokens, sum(cached_tokens) AS cached_tokens,
        sum(completion_tokens) AS completion_tokens,
        row_number() OVER (PARTITION BY day ORDER BY min(started_us), token_id, model, tags) AS place
    FROM ledger WHERE account_id = :account AND day BETWEEN :first AND :last GROUP BY day, token_id, model, tags
)
SELECT day, token_id, model, sum(requests), sum(micro_neurons), sum(prompt_tokens), sum(cached_tokens),
    sum(completion_tokens), CASE WHEN tags = '' OR place <= :most THEN tags ELSE :other END AS told
FROM kinds GROUP BY day, token_id, model, told ORDER BY day, token_id, model, told
"""
_FORGET: Final = """
DELETE FROM ledger WHERE account_id = ? AND day = ? AND request_id = ? AND outcome = ?
    RETURNING micro_neurons, prompt_tokens, cached_tokens, completion_tokens
"""
_EXPIRED: Final = f"""
SELECT held, output, rates, {_RECORD.replace("outcome", f"'{EXPIRED}'")} FROM holds
    WHERE account_id = ? AND expires_us <= ?
"""


_pack = msgspec.msgpack.Encoder().encode
_unpack_grant = msgspec.msgpack.Decoder(Grant).decode
_unpack_limits = msgspec.msgpack.Decoder(Limits).decode
_unpack_seals = msgspec.msgpack.Decoder(list[TokenDigest]).decode


class _Found(NamedTuple):
    """The columns of _ASK."""

    suspended_at: int | None
    sweep_us: int
    revoked_at: int | None
    held_day: int | None
    held: int | None
    recorded: int


class _Release(NamedTuple):
    """What a hold gives back: its day, micro-neurons, output tokens, and by how much each subject's rate of these is
    limited, 0 where it is not."""

    day: int
    held: int
    output: int
    rates: str


class SqliteStore:
    """See Store. One connection, used by one thread at a time; other processes may write beside it."""

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        self._path = Path(path)
        self._clock = clock or time.time
        self._tidied_day = 0
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._run = self._connection.execute
            self._run(f"PRAGMA busy_timeout = {BUSY_MS}")
            self._run(f"PRAGMA page_size = {PAGE_BYTES}")
            self._run("PRAGMA journal_mode = WAL")
            self._run("PRAGMA synchronous = NORMAL")
            self._run(f"PRAGMA wal_autocheckpoint = {LOG_PAGES_MAX}")
        except (sqlite3.Error, OSError) as error:
            raise self._unavailable(error) from error
        self._prepare()
        self.batches: BatchStore = SqliteBatchStore(
            SqliteCalls(self._run, self._rows, self._transaction, self._settle, self._clock)
        )

    def _prepare(self) -> None:
        with self._transaction():
            (version,) = self._run("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise StoreUnavailable(f"{self._path} was written by a newer Hearth; run that one, or use another file")
            for script in (SCHEMA, *MIGRATIONS)[version:]:
                for statement in script.strip().rstrip(";").split(";"):
                    self._run(statement)
            if version < SCHEMA_VERSION:
                self._run(f"PRAGMA user_version = {SCHEMA_VERSION}")

    async def ping(self) -> None:
        with self._transaction():
            self._run(f"PRAGMA user_version = {SCHEMA_VERSION}")  # writes a page, for which a full disk has no room

    async def advice(self) -> Sequence[str]:
        return []

    async def close(self) -> None:
        self._connection.close()

    async def add_account(self, account: Account) -> None:
        row = (account.id, account.created_at, account.revision, account.suspended_at, account.plan.name)
        with self._transaction():
            insert = "INSERT INTO accounts VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            self._run(insert, (*row, account_document(account), NEVER_US))

    async def account(self, account_id: str) -> Account | None:
        rows = self._rows(f"SELECT {_ACCOUNT} WHERE id = ?", account_id)
        return _account(rows[0]) if rows else None

    async def accounts(self) -> Sequence[Account]:
        return [_account(row) for row in self._rows(f"SELECT {_ACCOUNT} ORDER BY created_at, id")]

    async def change_account(self, account: Account) -> bool:
        columns = "revision = ?, suspended_at = ?, plan = ?, document = ?"
        values = (account.revision, account.suspended_at, account.plan.name, account_document(account))
        with self._transaction():
            update = f"UPDATE accounts SET {columns} WHERE id = ? AND revision = ?"
            return self._run(update, (*values, account.id, account.revision - 1)).rowcount == 1

    async def plans(self) -> Sequence[Plan]:
        return [_plan(*row) for row in self._rows("SELECT document, revision FROM plans ORDER BY name")]

    async def keep_plan(self, plan: Plan) -> bool:
        with self._transaction():
            row = self._run("SELECT revision FROM plans WHERE name = ?", (plan.name,)).fetchone()
            if plan.revision != (row[0] if row else 0) + 1:
                return False
            self._run("REPLACE INTO plans VALUES (?, ?, ?)", (plan.name, plan.revision, plan_document(plan)))
        return True

    async def remove_plan(self, name: str) -> bool:
        with self._transaction():
            return self._run("DELETE FROM plans WHERE name = ?", (name,)).rowcount == 1

    async def add_token(self, token: ApiToken, seal: TokenDigest) -> bool:
        times = (token.created_at, token.expires_at, token.revoked_at)
        given = (_pack(token.grant), _pack(token.limits))
        row = (token.id, token.account_id, token.name, *times, *given, seal.digest, seal.pepper, None)
        with self._transaction():
            if not self._run("SELECT 1 FROM accounts WHERE id = ?", (token.account_id,)).fetchone():
                return False
            self._run(_ADD_TOKEN, row)
        return True

    async def token(self, token_id: str) -> tuple[ApiToken, Sequence[TokenDigest], Account] | None:
        rows = self._rows(f"SELECT {_TOKEN} FROM tokens WHERE id = ?", token_id)
        if not rows:
            return None
        *_, digest, pepper, rolled = rows[0]
        token = _token(rows[0])
        account = await self.account(token.account_id)
        seals = [TokenDigest(digest, pepper), *(_unpack_seals(rolled) if rolled else ())]
        return (token, seals, account) if account else None

    async def change_token(self, token: ApiToken, seals: Sequence[TokenDigest]) -> bool:
        columns = "name = ?, expires_at = ?, permitted = ?, limits = ?, digest = ?, pepper = ?, rolled = ?"
        newest, *rolled = seals
        given = (token.name, token.expires_at, _pack(token.grant), _pack(token.limits))
        values = (*given, newest.digest, newest.pepper, _pack(rolled))
        with self._transaction():
            return self._run(f"UPDATE tokens SET {columns} WHERE id = ?", (*values, token.id)).rowcount == 1

    async def tokens(self, account_id: str) -> Sequence[ApiToken]:
        rows = self._rows(f"SELECT {_TOKEN} FROM tokens WHERE account_id = ? ORDER BY created_at, id", account_id)
        return [_token(row) for row in rows]

    async def revoke(self, token_id: str, revoked_at: int) -> bool:
        with self._transaction():
            update = "UPDATE tokens SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?"
            return self._run(update, (revoked_at, token_id)).rowcount == 1

    async def reserve(self, hold: Hold) -> Granted | Denied:
        record, now_us = hold.record, self._now_us()
        day, account_id = day_of(now_us), record.account_id
        asked = {"account": account_id, "token": record.token_id, "request": record.request_id, "day": day}
        with self._transaction():
            row = self._run(_ASK, asked).fetchone()
            if row is None:
                return Denied(DenialReason.NO_ACCOUNT)
            found = _Found(*row)
            if found.sweep_us <= now_us:
                self._expire(account_id, now_us)
                found = _Found(*self._run(_ASK, asked).fetchone())
            if (refusal := _forbidden(found)) is not None:
                return Denied(refusal)
            used = {subject: self._used(account_id, subject, now_us, hold.caps) for subject in record.counted}
            if found.held_day is not None:
                after = tuple(remaining(cap, used[cap.subject], now_us) for cap in hold.caps)
                return Granted(found.held_day, found.held or 0, after)
            decision = decide(hold, used, now_us)
            if isinstance(decision, Granted):
                expires_us = now_us + hold.lifetime_us
                if expires_us < found.sweep_us:
                    self._run(_LOOK_AGAIN, (expires_us, account_id))
                self._take(hold, decision, used, now_us)
        return decision

    async def left(self, account_id: str, caps: Sequence[Cap]) -> Sequence[int]:
        now_us = self._now_us()
        with self._transaction():
            used = {cap.subject: self._used(account_id, cap.subject, now_us, caps) for cap in caps}
        return [remaining(cap, used[cap.subject], now_us) for cap in caps]

    def _used(self, account_id: str, subject: str, now_us: int, caps: Sequence[Cap]) -> SubjectUsage:
        day = day_of(now_us)
        used = SubjectUsage(*self._run(_USED, {"account": account_id, "subject": subject, "day": day}).fetchone())
        if not any(cap.subject == subject and cap.measure is DenialReason.NEURONS_PER_MONTH for cap in caps):
            return used
        days = (first_of_month(day), first_of_next_month(day) - 1)
        return used._replace(month=self._run(_MONTH, (account_id, subject, *days)).fetchone()[0])

    def _take(self, hold: Hold, granted: Granted, used: dict[str, SubjectUsage], now_us: int) -> None:
        record, account_id = hold.record, hold.record.account_id
        rates = []
        for subject in record.counted:
            costs = {cap.measure: cap for cap in hold.caps if cap.subject == subject}
            requests, input_tokens = (
                costs.get(DenialReason.REQUESTS_PER_MINUTE),
                costs.get(DenialReason.INPUT_TOKENS_PER_MINUTE),
            )
            output = costs.get(DenialReason.OUTPUT_TOKENS_PER_MINUTE)
            before = used[subject]
            requests_us = max(before.requests_us, now_us) + requests.cost_us if requests else before.requests_us
            input_us = max(before.input_us, now_us) + input_tokens.cost_us if input_tokens else before.input_us
            rates.append(str(output.allowed if output else 0))
            self._run(_TAKE, (account_id, subject, requests_us, input_us, hold.output))
            self._run(_COUNT, (account_id, subject, granted.day, 0, 0, 0, 0, 0, granted.held, 1))
        identity = (record.token_id, record.model, record.started_us, record.subjects)
        expires_us = now_us + hold.lifetime_us
        kept = (account_id, record.request_id, granted.day, granted.held, expires_us)
        self._run(_HOLD, (*kept, *identity, hold.output, ",".join(rates), record.tags, record.metadata))

    async def checkpoint(self, records: Sequence[UsageRecord], lifetime_us: int) -> None:
        expires_us = self._now_us() + lifetime_us
        with self._transaction():
            for record in records:
                tokens = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
                times = (record.total_ms, record.first_token_ms)
                key = (record.account_id, record.request_id)
                self._run(_CHECKPOINT, (expires_us, record.micro_neurons, *tokens, *times, *key))

    async def settle(self, records: Sequence[UsageRecord]) -> None:
        with self._transaction():
            for record in records:
                self._settle(record)

    async def sweep(self) -> int:
        now_us, swept = self._now_us(), 0
        for (account_id,) in self._rows("SELECT id FROM accounts WHERE sweep_us <= ?", now_us):
            with self._transaction():
                swept += self._expire(account_id, now_us)
        if self._tidied_day != day_of(now_us):
            self._forget_before(day_of(now_us) - RETENTION_DAYS)
            self._tidied_day = day_of(now_us)
        await asyncio.to_thread(self._shorten_log)
        return swept

    def _forget_before(self, day: int) -> None:
        with self._transaction():
            for old in self._run("SELECT account_id, day FROM days WHERE day < ? AND subject = ''", (day,)).fetchall():
                self._run("DELETE FROM ledger WHERE account_id = ? AND day = ?", old)
            self._run("DELETE FROM days WHERE day < ?", (day,))
            self._run("DELETE FROM notices WHERE due_at < ?", (day * 86_400,))
            self._run("DELETE FROM claims WHERE until_s < ?", (int(self._clock()),))

    def _shorten_log(self) -> None:
        """Copies the write-ahead log into the file, which waits for the disk and so has its own thread."""
        try:
            with closing(sqlite3.connect(self._path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    async def totals(self, account_id: str, day: int) -> Totals:
        select = f"SELECT {_DAY} FROM days WHERE account_id = ? AND subject = '' AND day = ?"
        rows = self._rows(select, account_id, day)
        return Totals(*rows[0]) if rows else Totals()

    async def records(self, account_id: str, day: int) -> Sequence[UsageRecord]:
        select = f"SELECT {_RECORD} FROM ledger WHERE account_id = ? AND day = ? ORDER BY request_id"
        return [UsageRecord(*row) for row in self._rows(select, account_id, day)]

    async def usage(self, account_id: str, first_day: int, last_day: int) -> Sequence[UsageRow]:
        rows = await asyncio.to_thread(self._sum_up, account_id, first_day, last_day)
        return [UsageRow(*row) for row in rows]

    def _sum_up(self, account_id: str, first_day: int, last_day: int) -> list[Any]:
        """In a thread of its own, with a connection of its own: it may be long."""
        which = {"account": account_id, "first": first_day, "last": last_day, "most": TAGGED_MAX, "other": OTHER_TAGS}
        try:
            with closing(sqlite3.connect(self._path)) as connection:
                return connection.execute(_SUM_UP, which).fetchall()
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    async def reconcile(self, account_id: str, day: int, subject: str = "") -> Balance:
        return await asyncio.to_thread(self._reconcile, account_id, day, subject)

    def _reconcile(self, account_id: str, day: int, subject: str) -> Balance:
        """In a thread of its own, with one look at the file of its own."""
        mine = "account_id = ? AND day = ? AND (? = '' OR instr(char(10) || subjects || char(10), ?) > 0)"
        which = (account_id, day, subject, f"\n{subject}\n")
        ledger = f"""SELECT count(*), coalesce(sum(micro_neurons), 0), coalesce(sum(prompt_tokens), 0),
            coalesce(sum(cached_tokens), 0), coalesce(sum(completion_tokens), 0) FROM ledger WHERE {mine}"""
        holds = f"SELECT coalesce(sum(held), 0), count(*) FROM holds WHERE {mine}"
        days = f"SELECT {_DAY} FROM days WHERE account_id = ? AND subject = ? AND day = ?"
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
                connection.execute("BEGIN")
                counted = connection.execute(days, (account_id, subject, day)).fetchone()
                used, held = (connection.execute(select, which).fetchone() for select in (ledger, holds))
        except sqlite3.Error as error:
            raise self._unavailable(error) from error
        return Balance(Totals(*counted) if counted else Totals(), Totals(*used, *held))

    async def append_audit(self, entry: AuditEntry) -> bool:
        with self._transaction():
            last = "SELECT coalesce(max(seq), 0) FROM audit WHERE account_id = ?"
            if self._run(last, (entry.account_id,)).fetchone()[0] != entry.seq - 1:
                return False
            self._run("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?)", structs.astuple(entry))
        return True

    async def audit(self, account_id: str, first_seq: int, most: int) -> Sequence[AuditEntry]:
        select = "SELECT * FROM audit WHERE account_id = ? AND seq >= ? ORDER BY seq LIMIT ?"
        return [AuditEntry(*row) for row in self._rows(select, account_id, first_seq, most)]

    async def audit_head(self, account_id: str) -> AuditEntry | None:
        rows = self._rows("SELECT * FROM audit WHERE account_id = ? ORDER BY seq DESC LIMIT 1", account_id)
        return AuditEntry(*rows[0]) if rows else None

    async def claim(self, account_id: str, key: str, value: bytes, lifetime_s: int) -> bytes | None:
        now_s = int(self._clock())
        with self._transaction():
            there = "SELECT value FROM claims WHERE account_id = ? AND key = ? AND until_s > ?"
            row = self._run(there, (account_id, key, now_s)).fetchone()
            if row is None:
                self._run("REPLACE INTO claims VALUES (?, ?, ?, ?)", (account_id, key, value, now_s + lifetime_s))
        return bytes(row[0]) if row else None

    async def reclaim(self, account_id: str, key: str, value: bytes | None, lifetime_s: int) -> None:
        with self._transaction():
            self._run("DELETE FROM claims WHERE account_id = ? AND key = ?", (account_id, key))
            if value is not None:
                until_s = int(self._clock()) + lifetime_s
                self._run("INSERT INTO claims VALUES (?, ?, ?, ?)", (account_id, key, value, until_s))

    async def add_notice(self, notice: Notice) -> None:
        with self._transaction():
            insert = "INSERT INTO notices VALUES (?, ?, ?, ?, ?, ?, NULL) ON CONFLICT DO NOTHING"
            self._run(insert, structs.astuple(notice))

    async def take_notices(self, now: float, lease_s: float, most: int) -> Sequence[Notice]:
        due = "SELECT id, account_id, url, body, due_at, tries FROM notices WHERE closed_at IS NULL AND due_at <= ?"
        with self._transaction():
            rows = self._run(f"{due} ORDER BY due_at LIMIT ?", (now, most)).fetchall()
            for row in rows:
                self._run("UPDATE notices SET due_at = ?, tries = tries + 1 WHERE id = ?", (now + lease_s, row[0]))
        return [Notice(*row) for row in rows]

    async def postpone_notice(self, notice_id: str, due_at: float) -> None:
        with self._transaction():
            self._run("UPDATE notices SET due_at = ? WHERE id = ?", (due_at, notice_id))

    async def close_notice(self, notice_id: str) -> None:
        with self._transaction():
            self._run("UPDATE notices SET closed_at = ? WHERE id = ?", (int(self._clock()), notice_id))

    def _settle(self, record: UsageRecord) -> None:
        account_id, request_id = record.account_id, record.request_id
        released = self._run(_RELEASE, (account_id, request_id)).fetchone()
        self._record(record, _Release(*released) if released else None, self._now_us())

    def _expire(self, account_id: str, now_us: int) -> int:
        """Charges the account's expired holds at their checkpoints; sets when to look again."""
        expired = self._run(_EXPIRED, (account_id, now_us)).fetchall()
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
        if self._run(_RECORD_ONCE, row).rowcount:
            requests, change = 1, row[3:7]
        else:
            requests, change = 0, self._amend(row)
        held, holds = (release.held, 1) if release else (0, 0)
        for subject in record.counted:
            self._run(_COUNT, (record.account_id, subject, day, requests, *change, -held, -holds))
        if release is not None:
            self._give_back(record, release, now_us)

    def _give_back(self, record: UsageRecord, release: _Release, now_us: int) -> None:
        for subject, rate in zip(record.counted, release.rates.split(","), strict=False):
            lasts = lasts_us(record.completion_tokens, int(rate)) if rate not in ("", "0") else 0
            start_us = now_us if lasts else 0
            self._run(_GIVE_BACK, (release.output, start_us, lasts, record.account_id, subject))

    def _amend(self, row: tuple[Any, ...]) -> tuple[int, ...]:
        """Replaces an expired record by the final one and returns what that changes; nothing where one was final."""
        account_id, request_id, day = row[:3]
        expired = self._run(_FORGET, (account_id, day, request_id, EXPIRED)).fetchall()
        if not expired:
            return (0, 0, 0, 0)
        self._run(_RECORD_ONCE, row)
        return tuple(after - before for after, before in zip(row[3:7], expired[0], strict=True))

    def _now_us(self) -> int:
        return int(self._clock() * MICRO)

    def _rows(self, statement: str, *values: Any) -> list[Any]:
        try:
            return self._run(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._run("BEGIN IMMEDIATE")
            yield
            self._run("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                self._run("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._unavailable(error) from error
            raise

    def _unavailable(self, error: sqlite3.Error | OSError) -> StoreUnavailable:
        return StoreUnavailable(f"{self._path}: {error}: {_advice(error)}")


def _forbidden(found: _Found) -> DenialReason | None:
    """What forbids a request whatever its size is."""
    if found.revoked_at is not None:
        return DenialReason.REVOKED
    if found.suspended_at is not None:
        return DenialReason.SUSPENDED
    return DenialReason.RECORDED if found.recorded and found.held_day is None else None


def _token(row: Any) -> ApiToken:
    *columns, permitted, limits = row[:8]
    grant = _unpack_grant(permitted) if permitted else Grant()
    return structs.replace(ApiToken(*columns), grant=grant, limits=_unpack_limits(limits) if limits else NO_LIMITS)


def _account(row: Any) -> Account:
    account_id, created_at, revision, suspended_at, document, plan, plan_revision = row
    found = DEFAULT_PLAN if plan is None else _plan(plan, plan_revision)
    return read_account(account_id, created_at, revision, suspended_at, document, found)


def _plan(document: str, revision: int) -> Plan:
    return structs.replace(read_plan(document), revision=revision)


def _advice(error: sqlite3.Error | OSError) -> str:
    """What an operator can do about it."""
    if isinstance(error, OSError):
        return "check that its folder exists and that this user may write there"
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return _ADVICE.get(primary, "see the message of SQLite before it")


_ADVICE: Final = {
    sqlite3.SQLITE_FULL: "its disk is full; free some space, and what could not be written follows from the outbox",
    sqlite3.SQLITE_READONLY: "make the file, its folder and its disk writable for this user",
    sqlite3.SQLITE_PERM: "make the file, its folder and its disk writable for this user",
    sqlite3.SQLITE_CANTOPEN: "check that its folder exists and that this user may write there",
    sqlite3.SQLITE_BUSY: f"another process has been writing for over {BUSY_MS} ms; find who has the file open",
    sqlite3.SQLITE_LOCKED: f"another process has been writing for over {BUSY_MS} ms; find who has the file open",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; stop Hearth, then save what is left with `sqlite3 FILE .recover`",
    sqlite3.SQLITE_NOTADB: "the file is no SQLite database; name another one in [store] url, or move it away",
    sqlite3.SQLITE_IOERR: "its disk fails; look into the system's log",
}
