"""One SQLite file in WAL mode, called inline. It knows no tables; schema.py has them.

A commit survives a killed process. It is not forced to the disk (`synchronous=NORMAL`), so a power cut may take the
last moments with it; the file itself stays whole.
"""

import asyncio
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from tenants.records.accounts import name_key
from tenants.records.usage import MICRO
from tenants.store.protocol import Clock, StoreUnavailable
from tenants.store.sqlite.schema import CLUSTER, LEASES, MIGRATIONS, SCHEMA, SCHEMA_VERSION, USAGE

BUSY_S: Final = 1.0  # how long to wait for another process's write
OPEN_BUSY_S: Final = 15.0  # and at opening, when no call waits: others may be making the file, on a slow disk
LOOK_MS: Final = 1  # SQLite sleeps for so long before it says that the file is busy
PAGE_BYTES: Final = 2_048  # a commit writes whole pages; a pair of calls costs 4 µs less than with the default
# A write-ahead log of this many pages is copied into the file by whoever commits, unless sweep() did it before. Every
# version of the few pages that all decisions touch is in it, so a long one makes each look-up slower.
LOG_PAGES_MAX: Final = 1_000
LARGE_WRITE_PAGES: Final = 400  # in the log since a thread shortened it, after which one does so again


class SqliteFile:
    """One connection, used by one thread at a time; other processes may write beside it. `clock` is in seconds."""

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        """Creates the file, or brings it to SCHEMA_VERSION. Raises StoreUnavailable."""
        self._path = Path(path)
        self._large_pages = 0
        self._busy_s = OPEN_BUSY_S
        self.clock = clock or time.time
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self.run = self.connection.execute
            self.run(f"PRAGMA busy_timeout = {LOOK_MS}")
            self.run(f"PRAGMA page_size = {PAGE_BYTES}")
            self._patiently("PRAGMA journal_mode = WAL", pause_s=LOOK_MS / 1_000)  # SQLite refuses this one at once
            self.run("PRAGMA synchronous = NORMAL")
            self.run(f"PRAGMA wal_autocheckpoint = {LOG_PAGES_MAX}")
            self.connection.create_function("name_key", 1, name_key, deterministic=True)  # for a migration
        except (sqlite3.Error, OSError) as error:
            raise self._unavailable(error) from error
        self._migrate()
        self._busy_s = BUSY_S

    def _migrate(self) -> None:
        with self.transaction():
            (version,) = self.run("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise StoreUnavailable(f"{self._path} was written by a newer Hearth; run that one, or use another file")
            summed = self.run("SELECT 1 FROM sqlite_schema WHERE name = 'usage'").fetchone()
            for script in (*(SCHEMA, *MIGRATIONS)[version:], *(() if summed else (USAGE,)), CLUSTER, LEASES):
                for statement in _statements(script):
                    self.run(statement)
            if version < SCHEMA_VERSION:
                self.run(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def now_us(self) -> int:
        return int(self.clock() * MICRO)

    def rows(self, statement: str, *values: Any) -> list[Any]:
        """All rows of a query. Raises StoreUnavailable."""
        try:
            return self._patiently(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    def write(self, statement: str, *values: Any) -> int:
        """Commits one statement; returns how many rows it changed. Raises StoreUnavailable."""
        with self.transaction():
            return self.run(statement, values).rowcount

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits what `run` does inside, or nothing of it. Raises StoreUnavailable."""
        try:
            self._patiently("BEGIN IMMEDIATE")
            yield
            self.run("COMMIT")
        except BaseException as error:
            if self.connection.in_transaction:
                self.run("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._unavailable(error) from error
            raise

    def _patiently(self, statement: str, values: Any = (), pause_s: float = 0.0) -> sqlite3.Cursor:
        """Runs what other processes may keep from beginning. It looks again and again: SQLite's own waiting sleeps ever
        longer, and misses the pauses of a process that writes much."""
        deadline = time.monotonic() + self._busy_s
        while True:
            try:
                return self.run(statement, values)
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() > deadline:
                    raise
                if pause_s:
                    time.sleep(pause_s)

    def snapshot(self, *queries: tuple[str, Any]) -> list[list[Any]]:
        """All rows of each query, of one moment. It may take long, and so belongs into a thread. Raises
        StoreUnavailable."""
        with self._second_connection() as connection:
            connection.execute("BEGIN")
            return [connection.execute(statement, values).fetchall() for statement, values in queries]

    @contextmanager
    def _second_connection(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._unavailable(error) from error

    async def wrote(self, values: Sequence[bytes]) -> None:
        """Lets a thread shorten the log once large values were written to it, before a commit has to: copying a
        thousand pages takes that 3 to 12 ms."""
        self._large_pages += sum(1 + len(value) // PAGE_BYTES for value in values)
        if self._large_pages >= LARGE_WRITE_PAGES:
            self._large_pages = 0
            await asyncio.to_thread(self.shorten_log)

    def shorten_log(self) -> None:
        """Copies the write-ahead log into the file, which waits for the disk and so belongs into a thread."""
        with self._second_connection() as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _unavailable(self, error: sqlite3.Error | OSError) -> StoreUnavailable:
        code = sqlite3.SQLITE_CANTOPEN if isinstance(error, OSError) else getattr(error, "sqlite_errorcode", 0) & 0xFF
        advice = _ADVICE.get(code, "see the message of SQLite before it").format(busy_s=self._busy_s)
        return StoreUnavailable(f"{self._path}: {error}: {advice}")


def _statements(script: str) -> Iterator[str]:
    """The statements between semicolons, those of triggers whole."""
    statement = ""
    for part in script.strip().rstrip(";").split(";"):
        statement += f"{part};"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


_READ_ONLY: Final = "make the file, its folder and its disk writable for this user"
_BUSY: Final = "another process has been writing for over {busy_s:g} s; find who has the file open"
# For the operator, by SQLite's primary error code.
_ADVICE: Final = {
    sqlite3.SQLITE_FULL: "its disk is full; free some space, and what could not be written follows from the outbox",
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: "check that its folder exists and that this user may write there",
    sqlite3.SQLITE_BUSY: _BUSY,
    sqlite3.SQLITE_LOCKED: _BUSY,
    sqlite3.SQLITE_CORRUPT: "the file is damaged; stop Hearth, then save what is left with `sqlite3 FILE .recover`",
    sqlite3.SQLITE_NOTADB: "the file is no SQLite database; name another one in [store] url, or move it away",
    sqlite3.SQLITE_IOERR: "its disk is full or fails; free some space, else look into the system's log",
}
