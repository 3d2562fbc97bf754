import asyncio
import os
import resource
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tenants.records.accounts import Account
from tenants.records.batches import BatchJob
from tenants.records.grants import Grant
from tenants.records.holds import DenialReason, Denied, Granted, Hold
from tenants.records.limits import Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import EXPIRED, MICRO, Totals, UsageRecord
from tenants.store.protocol import RETENTION_DAYS, StoreUnavailable
from tenants.store.sqlite import file as module
from tenants.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.anyio
ANN = "a" * 32


def hold(request_id: str, held: int = 100) -> Hold:
    return Hold(UsageRecord(ANN, request_id, 0, 0, 0, 0, 0, EXPIRED, "key", "@cf/a/b", 7, 0.0), held, 60 * MICRO)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "hearth.db"


async def opened(path: Path, clock: Any = None, **limits: Any) -> SqliteStore:
    store = SqliteStore(str(path), clock)
    await store.accounts.add(Account(ANN, "ann", Limits(**limits), 1))
    await store.accounts.add_token(ApiToken("key", ANN, "laptop", 1), TokenDigest(b"digest", 1))
    return store


async def test_all_is_there_after_a_restart(path: Path, clock: Any) -> None:
    store = await opened(path, clock)
    await store.quotas.reserve(hold("r"))
    await store.close()
    again = SqliteStore(str(path), clock)
    assert await again.quotas.totals(ANN, clock.day) == Totals(held=100, open=1)
    (await again.quotas.reconcile(ANN, clock.day)).check()
    await again.close()


async def test_only_the_owner_may_read_the_file(path: Path) -> None:
    store = await opened(path)
    for file in path.parent.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file
    await store.close()


async def reserve_until_it_fails(store: SqliteStore) -> tuple[int, str]:
    """How many requests were granted before the store could not any more, and what it said."""
    for granted in range(2_000):
        try:
            await store.quotas.reserve(hold(f"r{granted}"))
        except StoreUnavailable as error:
            return granted, str(error)
    raise AssertionError("the disk was never full")


async def test_a_full_disk_is_an_error_that_says_so_and_passes(path: Path, clock: Any) -> None:
    store = await opened(path, clock, requests_per_minute=6_000_000, concurrent_requests=1_000_000)
    (pages,) = store._file.run("PRAGMA page_count").fetchone()
    store._file.run(f"PRAGMA max_page_count = {pages + 1}")
    granted, problem = await reserve_until_it_fails(store)
    assert "disk is full; free some space" in problem
    balance = await store.quotas.reconcile(ANN, clock.day)
    balance.check()
    assert balance.counted.open == granted, "half a decision was kept"
    store._file.run("PRAGMA max_page_count = 1000000")
    assert await store.quotas.reserve(hold("after")) == Granted(clock.day, 100)
    await store.close()


async def test_a_disk_without_room_for_the_logs_index_is_not_said_to_be_broken_alone(path: Path) -> None:
    store = await opened(path)
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE  # what SQLite says of a full disk as it opens a file
    assert "is full or fails; free some space" in str(store._file._unavailable(error))
    await store.close()


async def test_a_read_only_file_is_an_error_that_says_so(path: Path, clock: Any) -> None:
    store = await opened(path, clock)
    store._file.run("PRAGMA query_only = 1")
    with pytest.raises(StoreUnavailable, match="writable for this user"):
        await store.quotas.reserve(hold("r"))
    await store.close()


def test_a_file_that_is_no_database_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "hearth.db").write_bytes(b"this is a text and not a database\n" * 500)
    with pytest.raises(StoreUnavailable, match="no SQLite database"):
        SqliteStore(str(tmp_path / "hearth.db"))


def damage(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(module.PAGE_BYTES)
        file.write(b"\xa5" * (size - module.PAGE_BYTES))


async def test_a_damaged_file_is_an_error_that_says_so(path: Path, clock: Any) -> None:
    store = await opened(path, clock)
    for n in range(50):
        await store.quotas.reserve(hold(f"r{n}"))
    await store.close()
    damage(path)
    with pytest.raises(StoreUnavailable, match=r"damaged; stop Hearth, then save what is left"):
        await (await opened(path, clock)).quotas.reserve(hold("x"))


def test_a_path_that_cannot_be_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="folder exists"):
        SqliteStore(str(tmp_path / "file" / "hearth.db"))
    with pytest.raises(StoreUnavailable, match="folder exists"):
        SqliteStore(str(tmp_path))


async def test_a_file_of_the_first_version_is_taken_along(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as first:
        first.executescript(module.SCHEMA)
        first.execute("INSERT INTO accounts VALUES (?, 'ann', 1, 60, 5, 7, NULL, 0, 0)", (ANN,))
        first.execute("INSERT INTO tokens VALUES ('key', ?, 'laptop', 1, NULL, NULL, ?, 1)", (ANN, b"digest"))
        first.execute("PRAGMA user_version = 1")
    for _ in range(2):  # the second time there is nothing left to do
        store = SqliteStore(str(path))
        found = await store.accounts.token("key")
        assert found is not None
        assert found[:2] == (ApiToken("key", ANN, "laptop", 1, grant=Grant()), [TokenDigest(b"digest", 1)])
        assert await store.accounts.update_token(found[0], [TokenDigest(b"next", 1), *found[1]])
        assert await store.accounts.update_token(found[0], found[1])
        await store.close()
    with closing(sqlite3.connect(path)) as kept:
        assert kept.execute("PRAGMA user_version").fetchone() == (module.SCHEMA_VERSION,)


async def test_a_file_of_a_newer_hearth_is_left_alone(path: Path) -> None:
    store = await opened(path)
    store._file.run(f"PRAGMA user_version = {module.SCHEMA_VERSION + 1}")
    await store.close()
    with pytest.raises(StoreUnavailable, match="newer Hearth"):
        SqliteStore(str(path))


async def test_a_writer_that_never_ends_is_waited_for_no_longer_than_the_limit(path: Path, clock: Any) -> None:
    store = await opened(path, clock)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="another process has been writing"):
        await store.quotas.reserve(hold("r"))
    assert time.monotonic() - began < 10 * module.BUSY_S
    assert await store.quotas.totals(ANN, clock.day) == Totals(), "reading needs no turn"
    other.execute("ROLLBACK")
    assert await store.quotas.reserve(hold("r")) == Granted(clock.day, 100)
    other.close()
    await store.close()


async def test_days_that_are_too_old_are_removed(path: Path, clock: Any) -> None:
    store = await opened(path, clock)
    old = UsageRecord(ANN, "old", clock.day - RETENTION_DAYS - 1, 5, 0, 0, 0, "done", "key", "m", 7, 0.0)
    kept = UsageRecord(ANN, "kept", clock.day - RETENTION_DAYS, 5, 0, 0, 0, "done", "key", "m", 7, 0.0)
    await store.quotas.settle([old, kept])
    await store.quotas.sweep()
    assert await store.quotas.totals(ANN, old.day) == Totals()
    assert list(await store.quotas.records(ANN, old.day)) == []
    assert (await store.quotas.totals(ANN, kept.day)).requests == 1
    await store.close()


def holds_in_file_alone(path: Path) -> int:
    """What is left of the store when its write-ahead log is lost."""
    alone = path.with_name("alone.db")
    alone.write_bytes(path.read_bytes())
    with closing(sqlite3.connect(alone)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        return int(connection.execute("SELECT count(*) FROM holds").fetchone()[0]) if "holds" in tables else 0


async def test_the_sweep_copies_the_log_into_the_file(path: Path, clock: Any) -> None:
    store = await opened(path, clock)
    for n in range(100):
        await store.quotas.reserve(hold(f"r{n}"))
    in_file = holds_in_file_alone(path)
    await store.quotas.sweep()
    assert (in_file, holds_in_file_alone(path)) == (0, 100)
    assert await store.quotas.totals(ANN, clock.day) == Totals(held=10_000, open=100)
    await store.close()


CLIENT = """
import asyncio, sys
from tenants.records.holds import Cap, DenialReason, Granted, Hold
from tenants.store.sqlite.store import SqliteStore
from tenants.records.usage import UsageRecord

async def main(path, name, clients):
    store, granted = SqliteStore(path), 0
    cap = Cap("", DenialReason.NEURONS_PER_DAY, 100, 3_700, 100)
    print("ready", flush=True)
    sys.stdin.readline()
    for n in range(int(clients)):
        record = UsageRecord("a" * 32, f"{name}.{n}", 0, 0, 0, 0, 0, "expired", "key", "m", 7, 0.0)
        granted += isinstance(await store.quotas.reserve(Hold(record, 100, 60_000_000, (cap,))), Granted)
    print(granted, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def run_race(path: Path, processes: int, clients: int) -> int:
    """All processes begin at the same moment; how many of their clients were let in."""
    command = [sys.executable, "-c", CLIENT, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([*command, str(n), str(clients)], **pipes) for n in range(processes)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    return sum(int(racer.communicate(timeout=60)[0]) for racer in racers)


async def test_200_clients_of_four_processes_race_for_one_budget_and_none_overspends(path: Path) -> None:
    store = await opened(path)
    day_before = int(time.time()) // 86_400
    granted = await asyncio.to_thread(run_race, path, 4, 50)
    if int(time.time()) // 86_400 == day_before:
        assert granted == 37
        assert await store.quotas.totals(ANN, day_before) == Totals(held=3_700, open=37)
        (await store.quotas.reconcile(ANN, day_before)).check()
    await store.close()


def test_processes_that_open_a_new_file_at_once_all_succeed(path: Path) -> None:
    code = "import sys; from tenants.store.sqlite.store import SqliteStore; SqliteStore(sys.argv[1])"
    openers = [subprocess.Popen([sys.executable, "-c", code, str(path)], stderr=subprocess.PIPE) for _ in range(6)]
    for opener in openers:
        _, problems = opener.communicate(timeout=60)
        assert opener.returncode == 0, problems.decode()


def test_a_new_file_that_another_process_holds_for_longer_than_a_call_would_wait_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite refuses the change to WAL at once where another connection may hold the file, whatever its timeout."""
    monkeypatch.setattr(module, "BUSY_S", 0.05)
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        release = threading.Timer(10 * module.BUSY_S, other.execute, ["ROLLBACK"])
        release.start()
        SqliteStore(str(path))
        assert not release.is_alive()
        release.join()


async def test_the_command_line_suspends_and_revokes_beside_a_running_server(path: Path, clock: Any) -> None:
    server, command_line = await opened(path, clock), SqliteStore(str(path), clock)
    ann = await command_line.accounts.get(ANN)
    assert ann is not None
    assert await command_line.accounts.update(structs.replace(ann, revision=2, suspended_at=1))
    assert await server.quotas.reserve(hold("a")) == Denied(DenialReason.SUSPENDED)
    assert await command_line.accounts.update(structs.replace(ann, revision=3))
    assert isinstance(await server.quotas.reserve(hold("a")), Granted)
    await command_line.accounts.revoke("key", 5)
    assert not isinstance(await server.quotas.reserve(hold("b")), Granted)
    await command_line.close()
    await server.close()


async def test_a_ping_fails_where_nothing_can_be_written(path: Path, clock: Any) -> None:
    store = await opened(path, clock)
    await store.ping()
    size, most = path.with_name(f"{path.name}-wal").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most[1]))  # as on a full disk, no file can grow
    try:
        with pytest.raises(StoreUnavailable):
            await store.ping()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    await store.ping()
    await store.close()


@pytest.mark.parametrize("size_bytes", [100, 150_000, 1 << 20])
async def test_a_batch_that_arrives_leaves_no_long_log_to_whoever_commits_next(
    path: Path, clock: Any, size_bytes: int
) -> None:
    """Copying a long log into the file held the loop for 3 to 12 ms; a thread does it before a commit has to."""
    store = await opened(path, clock)
    body, count = bytes(size_bytes), min(5_000, 8_000_000 // size_bytes)
    assert await store.batches.begin(BatchJob("one", ANN, "key", "@cf/a/b", count, 600, 7, 3607))
    at_once = 64 if size_bytes == 100 else 1
    for first in range(0, count, at_once):
        await store.batches.add_items(ANN, "one", first, [body] * min(at_once, count - first))
    assert os.stat(f"{path}-wal").st_size < module.LOG_PAGES_MAX * module.PAGE_BYTES
    await store.batches.open(ANN, "one")
    assert (await store.batches.claim("@cf/a/b", 20.0, 1))[0].body == body
    await store.close()
