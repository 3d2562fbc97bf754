import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from tenants.records.accounts import Account
from tenants.records.holds import Hold
from tenants.records.limits import Limits
from tenants.records.usage import EXPIRED, MICRO, UsageRecord
from tenants.store.protocol import StoreUnavailable
from tenants.store.sqlite import backup as module
from tenants.store.sqlite.backup import check, close_up, copy
from tenants.store.sqlite.schema import SCHEMA_VERSION
from tenants.store.sqlite.store import SqliteStore
from tests.support.waiting import wait_for

pytestmark = pytest.mark.anyio
ANN = "a" * 32


def quiet(left: int, pages: int) -> None:
    """No progress is shown."""


def hold(request_id: str) -> Hold:
    return Hold(UsageRecord(ANN, request_id, 0, 0, 0, 0, 0, EXPIRED, "key", "@cf/a/b", 7, 0.0), 9, 60 * MICRO)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hearth.db"


async def opened(path: Path, requests: int = 50) -> SqliteStore:
    store = SqliteStore(str(path))
    await store.accounts.add(Account(ANN, "ann", Limits(), 1))
    for n in range(requests):
        await store.quotas.reserve(hold(f"r{n}"))
    return store


class Writer(threading.Thread):
    """Reserves without a pause, in a thread with a connection of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._ending = threading.Event()
        self.written = 0

    def run(self) -> None:
        asyncio.run(self._write())

    async def _write(self) -> None:
        store = SqliteStore(str(self._path))
        while not self._ending.is_set():
            await store.quotas.reserve(hold(f"w{self.written}"))
            self.written += 1
        await store.close()

    def __enter__(self) -> "Writer":
        self.start()
        wait_for(lambda: self.written)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.join()


async def test_a_copy_under_load_is_one_moment_of_the_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGES_AT_ONCE", 4)
    store, target = await opened(path, 500), path.with_name("copy.db")
    seen: list[tuple[int, int, int]] = []
    with Writer(path) as writer:

        def slowly(left: int, pages: int) -> None:
            seen.append((left, pages, writer.written))
            time.sleep(0.002)

        copy(path, target, slowly)
    pieces = len(seen)
    assert pieces > 5
    assert seen[-1][0] == 0
    assert seen[-1][2] > seen[0][2], "nobody wrote meanwhile"
    assert [left for left, *_ in seen] == sorted((left for left, *_ in seen), reverse=True), "it began anew"
    assert check(target) == SCHEMA_VERSION
    made = SqliteStore(str(target))
    day = int(time.time()) // 86_400
    balance = await made.quotas.reconcile(ANN, day)
    balance.check()
    assert 500 < balance.counted.open <= 500 + writer.written
    await made.close()
    await store.close()


async def test_a_copy_is_one_private_file(path: Path) -> None:
    store, target = await opened(path), path.with_name("copy.db")
    copy(path, target, quiet)
    assert target.stat().st_mode & 0o077 == 0
    assert {other.name for other in path.parent.glob("copy*")} == {"copy.db"}
    await store.close()


def test_what_is_not_there_is_not_copied(path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        copy(path, path.with_name("copy.db"), quiet)
    assert not list(path.parent.glob("hearth*"))


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2].ljust(len(content), b"\xa5"))


async def test_a_damaged_file_is_found(path: Path) -> None:
    store = await opened(path)
    await store.close()
    damage(path)
    with pytest.raises(StoreUnavailable, match=r"damaged|malformed"):
        check(path)


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1])
async def test_a_file_of_another_schema_is_found(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(StoreUnavailable, match=f"schema version {version}"):
        check(path)


async def test_a_file_that_a_process_has_open_is_not_closed_up(path: Path) -> None:
    store = await opened(path)
    with pytest.raises(StoreUnavailable, match="in use"):
        close_up(path)
    await store.quotas.reserve(hold("after"))
    await store.close()
    close_up(path)
    assert [other.name for other in path.parent.iterdir()] == ["hearth.db"]


def test_a_file_that_is_no_database_may_be_replaced(path: Path) -> None:
    path.write_bytes(b"no database " * 100)
    close_up(path)
