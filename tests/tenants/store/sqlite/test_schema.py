"""Files of every earlier version, with requests that were open as the server stopped, go on as they are."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tenants.limits.caps import RequestSize, caps_of
from tenants.records.accounts import DEFAULT_PLAN
from tenants.records.holds import Granted, Hold
from tenants.records.limits import Limits
from tenants.records.tokens import TokenDigest
from tenants.records.usage import DAY_US, EXPIRED, MICRO, Totals, UsageRecord
from tenants.store.sqlite.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION
from tenants.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.anyio
ANN, BOB = "a" * 32, "b" * 32
OF_BATCHES = 5  # the version that has bodies in the rows of their items
OPEN, LONG_OPEN = "open", "expired before it was taken along"


def old_file(path: Path, version: int, now_s: float) -> None:
    """As that version would have left it: `ann` has a settled request, one that is open, and one that expired."""
    day, now_us = int(now_s * MICRO) // DAY_US, int(now_s * MICRO)
    scripts, filled = (SCHEMA, *MIGRATIONS), min(version, 2)  # what comes later made its rows of these
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        for script in scripts[:filled]:
            file.executescript(script)
        run = file.execute
        run("INSERT INTO accounts VALUES (?, 'Änn \"A\"', 11, 60, 5500000, 7, 4, ?, ?)", (ANN, now_us + 9, now_us - 1))
        run("INSERT INTO accounts VALUES (?, 'bob', 12, 1, 0, 1, NULL, 0, ?)", (BOB, 1 << 62))
        columns = "id, account_id, name, created_at, expires_at, revoked_at, digest, pepper"
        run(f"INSERT INTO tokens ({columns}) VALUES ('key', ?, 'laptop', 1, NULL, NULL, ?, 1)", (ANN, b"digest"))
        run(f"INSERT INTO tokens ({columns}) VALUES ('gone', ?, 'phone', 1, 99, 50, ?, 1)", (ANN, b"other"))
        run("INSERT INTO ledger VALUES (?, 'done', ?, 30, 3, 2, 5, 'done', 'key', '@cf/a/b', 7, 1.5, NULL)", (ANN, day))
        for request, expires_us, used in ((OPEN, now_us + 60 * MICRO, 4), (LONG_OPEN, now_us - 1, 6)):
            row = (ANN, request, day, 100, expires_us, used)
            run("INSERT INTO holds VALUES (?, ?, ?, ?, ?, ?, 1, 0, 1, 'key', '@cf/a/b', 7, 0.0, NULL)", row)
        run("INSERT INTO days VALUES (?, ?, 1, 30, 3, 2, 5, 200, 2)", (ANN, day))
        for script in scripts[filled:version]:
            file.executescript(script)
        run(f"PRAGMA user_version = {version}")


@pytest.fixture(params=range(1, SCHEMA_VERSION))
def path(request: pytest.FixtureRequest, tmp_path: Path, clock: Any) -> Path:
    found = tmp_path / "hearth.db"
    old_file(found, request.param, clock.now_s)
    return found


async def test_accounts_tokens_and_limits_are_taken_along(path: Path, clock: Any) -> None:
    store = SqliteStore(str(path), clock)
    ann, bob = await store.accounts.list()
    assert (ann.name, ann.created_at, ann.revision, ann.plan) == ('Änn "A"', 11, 1, DEFAULT_PLAN)
    assert ann.limits == Limits(requests_per_minute=60, neurons_per_day=5.5, concurrent_requests=7, burst=4)
    assert bob.limits == Limits(requests_per_minute=1, neurons_per_day=0.0, concurrent_requests=1)
    gone, key = await store.accounts.tokens(ANN)
    assert (gone.id, gone.expires_at, gone.revoked_at) == ("gone", 99, 50)
    assert await store.accounts.token("key") == (key, [TokenDigest(b"digest", 1)], ann)
    await store.close()


async def test_open_requests_are_settled_and_expired_ones_charged_once(path: Path, clock: Any) -> None:
    store = SqliteStore(str(path), clock)
    assert await store.quotas.totals(ANN, clock.day) == Totals(1, 30, 3, 2, 5, 200, 2)
    (await store.quotas.reconcile(ANN, clock.day)).check()
    assert await store.quotas.sweep() == 1
    final = UsageRecord(ANN, OPEN, clock.day, 50, 10, 0, 10, "done", "key", "@cf/a/b", 7, 9.0)
    await store.quotas.settle([final])
    await store.quotas.settle([final])
    assert await store.quotas.totals(ANN, clock.day) == Totals(3, 86, 14, 2, 16)
    (await store.quotas.reconcile(ANN, clock.day)).check()
    outcomes = {record.request_id: record.outcome for record in await store.quotas.records(ANN, clock.day)}
    assert outcomes == {"done": "done", OPEN: "done", LONG_OPEN: EXPIRED}
    await store.close()


async def test_what_was_used_before_counts_against_the_limits_of_today(path: Path, clock: Any) -> None:
    store = SqliteStore(str(path), clock)
    asked = UsageRecord(ANN, "next", 0, 0, 0, 0, 0, EXPIRED, "key", "@cf/a/b", 7, 0.0)
    limits = Limits(requests_per_minute=60, neurons_per_month=1.0, concurrent_requests=7)
    granted = await store.quotas.reserve(Hold(asked, 10, 60 * MICRO, caps_of([("", limits)], RequestSize(10, 10))))
    assert isinstance(granted, Granted)
    budget, rate, at_once = granted.remaining
    assert budget == MICRO - 30 - 100 - 6 - 10
    assert rate == 60 * MICRO - 9 - MICRO
    assert at_once == 7 - 1 - 1
    await store.close()


async def test_requests_of_a_batch_that_wait_or_run_are_taken_along(tmp_path: Path, clock: Any) -> None:
    path = tmp_path / "hearth.db"
    old_file(path, OF_BATCHES, clock.now_s)
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        batch = "'one', ?, 'key', '@cf/a/b', 3, 600, 1, ?, 'running', NULL, 1, 0, 0, 0"
        file.execute(f"INSERT INTO batches VALUES ({batch})", (ANN, int(clock.now_s) + 600))
        file.execute("INSERT INTO batch_lines VALUES ('@cf/a/b', ?, 0)", (ANN,))
        columns = "batch_id, place, account_id, model, body, state, until, tries, result"
        for place, (body, state, result) in enumerate(((b"", 2, b"result"), (b"leased", 1, None), (b"waits", 0, None))):
            row = ("one", place, ANN, "@cf/a/b", body, state, clock.now_s - 1, 1, result)
            file.execute(f"INSERT INTO batch_items ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    store = SqliteStore(str(path), clock)
    items = await store.batches.claim("@cf/a/b", 20.0, 10)
    assert [(item.place, item.body) for item in items] == [(1, b"leased"), (2, b"waits")]
    assert [one.result for one in await store.batches.results(ANN, "one", 0, 10)] == [b"result"]
    await store.close()


async def test_it_is_taken_along_once(path: Path, clock: Any) -> None:
    for _ in range(2):
        store = SqliteStore(str(path), clock)
        (await store.quotas.reconcile(ANN, clock.day)).check()
        await store.close()
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert not {name for name in tables if name.startswith("old_")}
