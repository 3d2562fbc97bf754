"""Copies of a SQLite store's file while others write to it, and whether a file is whole. It knows no accounts."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from tenants.store.protocol import StoreUnavailable
from tenants.store.sqlite.schema import SCHEMA_VERSION

PAGES_AT_ONCE: Final = 500
BUSY_S: Final = 5.0

BackupProgress = Callable[[int, int], object]  # pages that are left, and all


def copy(path: Path, target: Path, progress: BackupProgress) -> None:
    """The file as it is at this moment, for this user alone. Writers go on meanwhile: the copy is made from one
    snapshot, which holds back the shortening of the write-ahead log and nothing else. Raises StoreUnavailable."""
    target.touch(mode=0o600)
    with _opened(path) as source, _opened(target) as made:
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from here on it is that snapshot
        source.backup(made, pages=PAGES_AT_ONCE, progress=lambda _, left, pages: progress(left, pages))
        made.execute("PRAGMA journal_mode = DELETE")  # one file, with no log beside it


def check(path: Path) -> int:
    """The schema version of a file that is whole and not of a newer Hearth. Raises StoreUnavailable for others."""
    with _opened(path) as file:
        (verdict,) = file.execute("PRAGMA integrity_check(1)").fetchone()
        (version,) = file.execute("PRAGMA user_version").fetchone()
    if verdict != "ok":
        raise StoreUnavailable(f"{path} is damaged: {verdict}")
    if not 0 < version <= SCHEMA_VERSION:
        raise StoreUnavailable(f"{path} has schema version {version}; this Hearth knows 1 to {SCHEMA_VERSION}")
    return int(version)


def close_up(path: Path) -> None:
    """Makes it one file with no log beside it. A damaged one stays as it is. Raises StoreUnavailable where a process
    has it open."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0.2)) as file:
        try:
            file.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise StoreUnavailable(f"{path} is in use: stop the server that has it open first") from error


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A file that is there. Raises StoreUnavailable."""
    try:
        uri = f"{path.resolve().as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise StoreUnavailable(f"{path}: {error}") from error
