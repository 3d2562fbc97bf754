"""Sums of usage in the SQLite file: kept by triggers, whoever writes, and made of the ledger where they are missing."""

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tenants.records.accounts import Account
from tenants.records.holds import Hold
from tenants.records.limits import Limits
from tenants.records.usage import EXPIRED, MICRO, Totals, UsageRecord, UsageRow
from tenants.store.protocol import OTHER_TAGS, RETENTION_DAYS, TAGGED_MAX
from tenants.store.sqlite import quotas
from tenants.store.sqlite.file import SqliteFile
from tenants.store.sqlite.store import SqliteStore
from tests.support.waiting import turns

pytestmark = pytest.mark.anyio
ANN, BOB = "a" * 32, "b" * 32
PLACES = ", ".join("?" * len(UsageRecord.__struct_fields__))


@pytest.fixture
async def store(tmp_path: Path, clock: Any) -> AsyncIterator[SqliteStore]:
    opened = SqliteStore(str(tmp_path / "hearth.db"), clock)
    for account_id in (ANN, BOB):
        await opened.accounts.add(Account(account_id, account_id, Limits(), 1))
    yield opened
    await opened.close()


def record(account_id: str, request_id: str, day: int, **fields: Any) -> UsageRecord:
    plain = UsageRecord(account_id, request_id, day, 10, 3, 2, 5, "done", "key", "m", int(request_id[1:]), 1.0)
    return structs.replace(plain, **fields)


async def check_sums(store: SqliteStore, days: range) -> None:
    """Compares them with the records themselves."""
    for account_id in (ANN, BOB):
        expected: dict[tuple[Any, ...], list[int]] = {}
        for day in days:
            for one in await store.quotas.records(account_id, day):
                sums = expected.setdefault((day, one.token_id, one.model, one.tags), [0] * 5)
                counts = (1, one.micro_neurons, one.prompt_tokens, one.cached_tokens, one.completion_tokens)
                sums[:] = [before + more for before, more in zip(sums, counts, strict=True)]
        rows = (await store.quotas.usage([account_id], days[0], days[-1])).get(account_id, ())
        assert [structs.astuple(row) for row in rows] == [
            (*key[:3], *sums, key[3]) for key, sums in sorted(expected.items())
        ]


async def test_sums_equal_the_ledger_whatever_is_settled(
    store: SqliteStore, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteFile, "shorten_log", lambda file: None)  # which waits for the disk
    dice = random.Random(5)
    days = range(clock.day - 2, clock.day + 1)
    for n in range(400):
        made = record(
            dice.choice((ANN, BOB)),
            f"r{dice.randrange(150)}",
            dice.choice(days),
            micro_neurons=dice.randrange(100),
            outcome=dice.choice(("done", EXPIRED)),
            token_id=f"k{dice.randrange(2)}",
            tags=dice.choice(("", "x", "x\ny")),
        )
        if n % 3:
            await store.quotas.settle([made])
        else:
            await store.quotas.reserve(Hold(made, 9, MICRO))
            clock.now_s += 0.5
        await store.quotas.sweep()
    await check_sums(store, range(clock.day - 3, clock.day + 1))


async def test_sums_of_a_file_of_before_are_made_when_it_is_opened(tmp_path: Path, clock: Any) -> None:
    path = tmp_path / "hearth.db"
    await SqliteStore(str(path), clock).close()
    late = clock.day - 1
    with closing(sqlite3.connect(path)) as file:
        version = file.execute("PRAGMA user_version").fetchone()
        for name in ("TRIGGER usage_grows", "TRIGGER usage_shrinks", "TABLE usage", "TABLE usage_rows"):
            file.execute(f"DROP {name}")
        made = [record(ANN, f"r{n}", clock.day, tags="x" if n % 2 else "", token_id=f"k{n % 3}") for n in range(60)]
        made += [record(BOB, f"r{n}", late, tags=f"t{n:05}") for n in range(TAGGED_MAX + 3)]
        file.executemany(f"INSERT INTO ledger VALUES ({PLACES})", [structs.astuple(one) for one in made])
        file.commit()
    for _ in range(2):  # opened again, it is left as it is
        store = SqliteStore(str(path), clock)
        await check_sums(store, range(clock.day, clock.day + 1))
        rows = (await store.quotas.usage([BOB], late, late))[BOB]
        assert [row.tags for row in rows] == [OTHER_TAGS, *(f"t{n:05}" for n in range(TAGGED_MAX))]
        assert rows[0].requests == 3
        await store.close()
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == version, "the Hearth of before opens it as well"


async def test_what_a_hearth_of_before_writes_is_summed(store: SqliteStore, clock: Any, tmp_path: Path) -> None:
    """By its own statements, which name no sums."""
    with closing(sqlite3.connect(tmp_path / "hearth.db")) as file:
        insert = f"INSERT INTO ledger VALUES ({PLACES}) ON CONFLICT DO NOTHING"
        for n in range(30):
            made = record(ANN, f"r{n % 20}", clock.day, outcome=EXPIRED, tags="x" if n % 2 else "")
            file.execute(insert, structs.astuple(made))
        remove = "DELETE FROM ledger WHERE account_id = ? AND day = ? AND request_id = ? AND outcome = ?"
        file.execute(remove, (ANN, clock.day, "r3", EXPIRED))
        file.execute(insert, structs.astuple(record(ANN, "r3", clock.day, micro_neurons=77, tags="x")))
        file.commit()
    await check_sums(store, range(clock.day, clock.day + 1))


async def test_old_records_are_removed_some_at_a_time_with_their_sums(
    store: SqliteStore, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "REMOVED_AT_ONCE", 10)
    old, kept = clock.day - RETENTION_DAYS - 1, clock.day - RETENTION_DAYS
    await store.quotas.settle([record(ANN, f"r{n}", old) for n in range(95)])
    await store.quotas.settle([record(ANN, "r1", kept), record(BOB, "r1", old)])
    called = 0

    async def call() -> None:
        nonlocal called
        while True:
            called += 1
            await turns()

    beside = asyncio.create_task(call())
    await store.quotas.sweep()
    beside.cancel()
    assert called >= 10, "others had their turns"
    assert list(await store.quotas.records(ANN, old)) == list(await store.quotas.records(BOB, old)) == []
    assert await store.quotas.totals(ANN, old) == Totals()
    assert await store.quotas.usage([ANN, BOB], 0, clock.day) == {ANN: [UsageRow(kept, "key", "m", 1, 10, 3, 2, 5)]}


def test_a_look_up_of_usage_reads_no_ledger(tmp_path: Path) -> None:
    """So that a million records cost nothing there."""
    with closing(SqliteFile(str(tmp_path / "hearth.db")).connection) as file:
        select = quotas._USAGE.format(token_id="token_id", model="model", tags="''")
        steps = [step[-1] for step in file.execute(f"EXPLAIN QUERY PLAN {select}", ('["a"]', 1, 2))]
        assert any("SEARCH usage USING PRIMARY KEY (account_id=? AND day>? AND day<?)" in step for step in steps), steps
        assert not any("ledger" in step for step in steps)
        steps = [step[-1] for step in file.execute(f"EXPLAIN QUERY PLAN {quotas._REMOVE_RECORDS}", ("a", 1, 2))]
        assert not any(step.startswith("SCAN ledger") for step in steps), steps
