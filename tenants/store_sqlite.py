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

from tenants.grants import Grant
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
    StoreUnavailable,
)
from tenants.usage import EXPIRED, MICRO, Balance, Totals, UsageRecord, day_of, us_left

BUSY_MS: Final = 1_000  # how long to wait for another process's write
PAGE_BYTES: Final = 2_048  # a commit writes whole pages; a pair of calls costs 4 µs less than with the default
# A write-ahead log of this many pages is copied into the file by whoever commits, unless sweep() did it before. Every
# version of the few pages that all decisions touch is in it, so a long one makes each look-up slower.
LOG_PAGES_MAX: Final = 1_000
NEVER_US: Final = 1 << 62

# The first version; what came after it is in MIGRATIONS. `days.held` and `days.open` are the sums over `holds`, the
# other columns of `days` the sums over `ledger`. `accounts.sweep_us` is a time before which no hold of it expires.
SCHEMA: Final = """
CREATE TABLE accounts (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, created_at INTEGER NOT NULL,
    requests_per_minute INTEGER NOT NULL, micro_neurons_per_day INTEGER NOT NULL,
    concurrent_requests INTEGER NOT NULL, burst INTEGER,
    arrival_us INTEGER NOT NULL DEFAULT 0, sweep_us INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE TABLE tokens (
    id TEXT PRIMARY KEY, account_id TEXT NOT NULL, name TEXT NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER, revoked_at INTEGER, digest BLOB NOT NULL, pepper INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX tokens_of_account ON tokens (account_id);
CREATE TABLE days (
    account_id TEXT NOT NULL, day INTEGER NOT NULL, requests INTEGER NOT NULL, micro_neurons INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    held INTEGER NOT NULL, open INTEGER NOT NULL,
    PRIMARY KEY (account_id, day)
) STRICT, WITHOUT ROWID;
CREATE TABLE holds (
    account_id TEXT NOT NULL, request_id TEXT NOT NULL, day INTEGER NOT NULL, held INTEGER NOT NULL,
    expires_us INTEGER NOT NULL, micro_neurons INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, token_id TEXT NOT NULL, model TEXT NOT NULL,
    started_us INTEGER NOT NULL, total_ms REAL NOT NULL, first_token_ms REAL,
    PRIMARY KEY (account_id, request_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE ledger (
    account_id TEXT NOT NULL, request_id TEXT NOT NULL, day INTEGER NOT NULL, micro_neurons INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    outcome TEXT NOT NULL, token_id TEXT NOT NULL, model TEXT NOT NULL, started_us INTEGER NOT NULL,
    total_ms REAL NOT NULL, first_token_ms REAL,
    PRIMARY KEY (account_id, day, request_id)
) STRICT, WITHOUT ROWID;
"""

# From version i + 1 to i + 2. A new file goes through all of them as well: there is one way to every version.
MIGRATIONS: Final = (
    # A token's grant, and the seals of its secrets after the newest, as msgpack.
    "ALTER TABLE tokens ADD COLUMN permitted BLOB; ALTER TABLE tokens ADD COLUMN rolled BLOB",
)
SCHEMA_VERSION: Final = 1 + len(MIGRATIONS)

_ACCOUNT: Final = "id, name, created_at, requests_per_minute, micro_neurons_per_day, concurrent_requests, burst"
_TOKEN: Final = "id, account_id, name, created_at, expires_at, revoked_at, permitted, digest, pepper, rolled"
_ADD_TOKEN: Final = f"INSERT INTO tokens ({_TOKEN}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_RECORD: Final = ", ".join(UsageRecord.__struct_fields__)
_DAY: Final = "requests, micro_neurons, prompt_tokens, cached_tokens, completion_tokens, held, open"

_ASK: Final = """
SELECT requests_per_minute, micro_neurons_per_day, concurrent_requests, burst, arrival_us, sweep_us,
    (SELECT revoked_at FROM tokens WHERE id = :token),
    (SELECT day FROM holds WHERE account_id = :account AND request_id = :request),
    EXISTS (SELECT 1 FROM ledger WHERE account_id = :account AND day = :day AND request_id = :request),
    (SELECT micro_neurons + held FROM days WHERE account_id = :account AND day = :day),
    (SELECT total(open) FROM days WHERE account_id = :account AND day >= :day - 1)
FROM accounts WHERE id = :account
"""
_ARRIVE: Final = "UPDATE accounts SET arrival_us = ?, sweep_us = ? WHERE id = ?"
_COUNT: Final = """
INSERT INTO days VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens,
    micro_neurons = micro_neurons + excluded.micro_neurons, held = held + excluded.held, open = open + excluded.open
"""
_HOLD: Final = "INSERT INTO holds VALUES (?, ?, ?, ?, ?, 0, 0, 0, 0, ?, ?, ?, 0.0, NULL)"
_CHECKPOINT: Final = """
UPDATE holds SET expires_us = ?, micro_neurons = ?, prompt_tokens = ?, cached_tokens = ?, completion_tokens = ?,
    total_ms = ?, first_token_ms = ? WHERE account_id = ? AND request_id = ?
"""
_RELEASE: Final = "DELETE FROM holds WHERE account_id = ? AND request_id = ? RETURNING day, held"
_RECORD_ONCE: Final = "INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_FORGET: Final = """
DELETE FROM ledger WHERE account_id = ? AND day = ? AND request_id = ? AND outcome = ?
    RETURNING micro_neurons, prompt_tokens, cached_tokens, completion_tokens
"""
_EXPIRED: Final = f"""
SELECT held, {_RECORD.replace("outcome", f"'{EXPIRED}'")} FROM holds WHERE account_id = ? AND expires_us <= ?
"""


_pack = msgspec.msgpack.Encoder().encode
_unpack_grant = msgspec.msgpack.Decoder(Grant).decode
_unpack_seals = msgspec.msgpack.Decoder(list[Seal]).decode


class _Found(NamedTuple):
    """The columns of _ASK."""

    requests_per_minute: int
    micro_neurons_per_day: int
    concurrent_requests: int
    burst: int | None
    arrival_us: int
    sweep_us: int
    revoked_at: int | None
    held_day: int | None
    recorded: int
    used: int | None
    running: float


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
        limits = account.limits
        row = (account.id, account.name, account.created_at, *_limit_columns(limits))
        with self._transaction():
            self._run(f"INSERT INTO accounts ({_ACCOUNT}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", row)

    async def account(self, account_id: str) -> Account | None:
        rows = self._rows(f"SELECT {_ACCOUNT} FROM accounts WHERE id = ?", account_id)
        return _account(rows[0]) if rows else None

    async def accounts(self) -> Sequence[Account]:
        return [_account(row) for row in self._rows(f"SELECT {_ACCOUNT} FROM accounts ORDER BY created_at, id")]

    async def set_limits(self, account_id: str, limits: Limits) -> bool:
        columns = "requests_per_minute = ?, micro_neurons_per_day = ?, concurrent_requests = ?, burst = ?"
        with self._transaction():
            changed = self._run(f"UPDATE accounts SET {columns} WHERE id = ?", (*_limit_columns(limits), account_id))
        return changed.rowcount == 1

    async def add_token(self, token: ApiToken, seal: Seal) -> bool:
        times = (token.created_at, token.expires_at, token.revoked_at)
        row = (token.id, token.account_id, token.name, *times, _pack(token.grant), seal.digest, seal.pepper, None)
        with self._transaction():
            if not self._run("SELECT 1 FROM accounts WHERE id = ?", (token.account_id,)).fetchone():
                return False
            self._run(_ADD_TOKEN, row)
        return True

    async def token(self, token_id: str) -> tuple[ApiToken, Sequence[Seal], Account] | None:
        rows = self._rows(f"SELECT {_TOKEN} FROM tokens WHERE id = ?", token_id)
        if not rows:
            return None
        *_, digest, pepper, rolled = rows[0]
        token = _token(rows[0])
        account = await self.account(token.account_id)
        seals = [Seal(digest, pepper), *(_unpack_seals(rolled) if rolled else ())]
        return (token, seals, account) if account else None

    async def change_token(self, token: ApiToken, seals: Sequence[Seal]) -> bool:
        columns = "name = ?, expires_at = ?, permitted = ?, digest = ?, pepper = ?, rolled = ?"
        newest, *rolled = seals
        values = (token.name, token.expires_at, _pack(token.grant), newest.digest, newest.pepper, _pack(rolled))
        with self._transaction():
            return self._run(f"UPDATE tokens SET {columns} WHERE id = ?", (*values, token.id)).rowcount == 1

    async def tokens(self, account_id: str) -> Sequence[ApiToken]:
        rows = self._rows(f"SELECT {_TOKEN} FROM tokens WHERE account_id = ? ORDER BY created_at, id", account_id)
        return [_token(row) for row in rows]

    async def revoke(self, token_id: str, revoked_at: int) -> bool:
        with self._transaction():
            update = "UPDATE tokens SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?"
            return self._run(update, (revoked_at, token_id)).rowcount == 1

    async def reserve(self, hold: Hold) -> Granted | Refused:
        record, now_us = hold.record, self._now_us()
        day, account_id = day_of(now_us), record.account_id
        asked = {"account": account_id, "token": record.token_id, "request": record.request_id, "day": day}
        with self._transaction():
            row = self._run(_ASK, asked).fetchone()
            if row is None:
                return Refused(Refusal.NO_ACCOUNT)
            found = _Found(*row)
            if found.sweep_us <= now_us:
                self._expire(account_id, now_us)
                found = _Found(*self._run(_ASK, asked).fetchone())
            limits = _limits(*row[:4])
            decision = _decide(hold, limits, found, now_us)
            if isinstance(decision, Granted) and found.held_day is None:
                arrival_us = max(found.arrival_us, now_us) + limits.interval_us
                expires_us = now_us + hold.lifetime_us
                self._run(_ARRIVE, (arrival_us, min(found.sweep_us, expires_us), account_id))
                self._run(_COUNT, (account_id, day, 0, 0, 0, 0, 0, hold.held, 1))
                identity = (record.token_id, record.model, record.started_us)
                self._run(_HOLD, (account_id, record.request_id, day, hold.held, expires_us, *identity))
        return decision

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
            self._forget_before(day_of(now_us) - KEPT_DAYS)
            self._tidied_day = day_of(now_us)
        await asyncio.to_thread(self._shorten_log)
        return swept

    def _forget_before(self, day: int) -> None:
        with self._transaction():
            for old in self._run("SELECT account_id, day FROM days WHERE day < ?", (day,)).fetchall():
                for table in ("ledger", "days"):
                    self._run(f"DELETE FROM {table} WHERE account_id = ? AND day = ?", old)

    def _shorten_log(self) -> None:
        """Copies the write-ahead log into the file, which waits for the disk and so has its own thread."""
        try:
            with closing(sqlite3.connect(self._path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    async def totals(self, account_id: str, day: int) -> Totals:
        rows = self._rows(f"SELECT {_DAY} FROM days WHERE account_id = ? AND day = ?", account_id, day)
        return Totals(*rows[0]) if rows else Totals()

    async def records(self, account_id: str, day: int) -> Sequence[UsageRecord]:
        select = f"SELECT {_RECORD} FROM ledger WHERE account_id = ? AND day = ? ORDER BY request_id"
        return [UsageRecord(*row) for row in self._rows(select, account_id, day)]

    async def reconcile(self, account_id: str, day: int) -> Balance:
        days = f"SELECT {_DAY} FROM days WHERE account_id = ? AND day = ?"
        ledger = """SELECT count(*), coalesce(sum(micro_neurons), 0), coalesce(sum(prompt_tokens), 0),
            coalesce(sum(cached_tokens), 0), coalesce(sum(completion_tokens), 0) FROM ledger
            WHERE account_id = ? AND day = ?"""
        holds = "SELECT coalesce(sum(held), 0), count(*) FROM holds WHERE account_id = ? AND day = ?"
        with self._transaction():
            counted, used, held = (self._run(select, (account_id, day)).fetchone() for select in (days, ledger, holds))
        return Balance(Totals(*counted) if counted else Totals(), Totals(*used, *held))

    def _settle(self, record: UsageRecord) -> None:
        account_id, request_id = record.account_id, record.request_id
        released = self._run(_RELEASE, (account_id, request_id)).fetchall()
        day, held = released[0] if released else (record.day, 0)
        self._record(record, day, held, len(released))

    def _expire(self, account_id: str, now_us: int) -> int:
        """Charges the account's expired holds at their checkpoints; sets when to look again."""
        expired = self._run(_EXPIRED, (account_id, now_us)).fetchall()
        self._run("DELETE FROM holds WHERE account_id = ? AND expires_us <= ?", (account_id, now_us))
        for held, *columns in expired:
            record = UsageRecord(*columns)
            self._record(record, record.day, held, 1)
        first = "SELECT coalesce(min(expires_us), ?) FROM holds WHERE account_id = ?"
        self._run(f"UPDATE accounts SET sweep_us = ({first}) WHERE id = ?", (NEVER_US, account_id, account_id))
        return len(expired)

    def _record(self, record: UsageRecord, day: int, held: int, holds: int) -> None:
        """Writes the one record of a request, gives its hold back and counts the cost, all in the hold's day."""
        row = structs.astuple(record if record.day == day else structs.replace(record, day=day))
        if self._run(_RECORD_ONCE, row).rowcount:
            requests, change = 1, row[3:7]
        else:
            requests, change = 0, self._amend(row)
        self._run(_COUNT, (record.account_id, day, requests, *change, -held, -holds))

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


def _decide(hold: Hold, limits: Limits, found: _Found, now_us: int) -> Granted | Refused:
    """Compares everything, adds nothing. The Lua script in store_redis.py takes the same steps in the same order."""
    if found.revoked_at is not None:
        return Refused(Refusal.REVOKED)
    if found.held_day is not None:
        return Granted(found.held_day)
    if found.recorded:
        return Refused(Refusal.RECORDED)
    allowed, used = limits.micro_neurons_per_day, found.used or 0
    if used + hold.held > allowed:
        return Refused(Refusal.NEURONS_PER_DAY, us_left(now_us), allowed, used)
    wait_us = max(found.arrival_us - now_us, 0) + limits.interval_us - limits.at_once * limits.interval_us
    if wait_us > 0:
        return Refused(Refusal.REQUESTS_PER_MINUTE, wait_us, limits.requests_per_minute)
    if found.running >= limits.concurrent_requests:
        return Refused(Refusal.CONCURRENT_REQUESTS, MICRO, limits.concurrent_requests, int(found.running))
    return Granted(day_of(now_us))


def _limit_columns(limits: Limits) -> tuple[int | None, ...]:
    return (limits.requests_per_minute, limits.micro_neurons_per_day, limits.concurrent_requests, limits.burst)


def _token(row: Any) -> ApiToken:
    *columns, permitted = row[:7]
    return structs.replace(ApiToken(*columns), grant=_unpack_grant(permitted)) if permitted else ApiToken(*columns)


def _account(row: Any) -> Account:
    account_id, name, created_at, *limits = row
    return Account(account_id, name, _limits(*limits), created_at)


def _limits(per_minute: int, micro_neurons: int, concurrent: int, burst: int | None) -> Limits:
    return Limits(per_minute, micro_neurons / MICRO, concurrent, burst)


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
