"""What a million usage records cost whoever asks for usage, and what an import costs the calls beside it.

    python -m benchmarks.tenants.ledger [--records 1000000]

One account has the records, of three days, two tokens, three models and some tags. Usage is asked for as the API does
by default, and by day alone. Then another process imports 30,000 records of another account with two more subjects
each, and this one reserves and settles a request every few milliseconds: its longest wait is the figure, and the
longest that is allowed is the bound. On SQLite and on a real Redis.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from benchmarks.record import record
from tenants import export
from tenants.open import open_store
from tenants.records.accounts import Account
from tenants.records.holds import Granted, Hold
from tenants.records.limits import Limits
from tenants.records.usage import MICRO, UsageRecord
from tenants.store.protocol import Store, StoreUnavailable
from tests.support.redis_server import DURABLE, RedisServer

SECRET: Final = b"a benchmark's secret of 32 bytes"
LARGE, IMPORTED, CALLER = "a" * 32, "b" * 32, "c" * 32
IMPORTED_RECORDS: Final = 30_000
AT_ONCE: Final = 100
WAIT_MS: Final = 50.0
DAY: Final = int(time.time()) // 86_400


def usage_record(account_id: str, number: int, subjects: str = "") -> UsageRecord:
    token, model, tags = f"token{number % 2}", f"@cf/model/{number % 3}", f"team:{number % 5}" if number % 4 else ""
    day = DAY - number % 3
    return UsageRecord(
        account_id, f"r{number:08}", day, 10, 100, 10, 20, "done", token, model, 7, 1.0, None, subjects, tags
    )


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url)
    try:
        yield store
    finally:
        await store.close()


async def fill(store: Store, account_id: str, count: int, subjects: str = "") -> None:
    await store.accounts.add(Account(account_id, "bench", Limits(), 1))
    for first in range(0, count, AT_ONCE):
        numbers = range(first, min(count, first + AT_ONCE))
        records = [usage_record(account_id, number, subjects) for number in numbers]
        while True:
            with contextlib.suppress(StoreUnavailable):  # while Redis grows, an answer may be late
                await store.quotas.settle(records)
                break


async def write_export(path: Path) -> None:
    async with opened(f"sqlite:{path}.db") as store:
        await fill(store, IMPORTED, IMPORTED_RECORDS, "class:large\ntoken:of-it")
        accounts = await store.accounts.list()
        lines = export.export(store, SECRET, accounts, DAY * 86_400, whole=True, usage=True, audit=False)
        content = b"".join([line async for line in lines])
    path.write_bytes(content)  # noqa: ASYNC240 nothing else runs on this loop


async def import_export(url: str, path: Path) -> None:
    async with opened(url) as store:
        with path.open("rb") as file:
            await export.inspect_export(file, store, SECRET, lambda _: None)
            counts = await export.import_accounts(file, store, lambda _: None)
    assert counts.records == IMPORTED_RECORDS


def in_this_process(work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
    asyncio.run(work(*arguments))


async def usage_ms(store: Store, count: int, *by: tuple[str, ...]) -> float:
    """The median of five."""
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        usage = await store.quotas.usage([LARGE], DAY - 29, DAY, *by)
        taken.append(1e3 * (time.perf_counter() - began))
        assert sum(row.requests for row in usage[LARGE]) == count
    return round(sorted(taken)[2], 1)


async def calls_beside_an_import(store: Store, url: str, path: Path) -> tuple[list[float], float]:
    """What each reservation and settlement waited, in milliseconds, and the seconds of the import."""
    importer = multiprocessing.get_context("spawn").Process(target=in_this_process, args=(import_export, url, path))
    began, waits, number = time.perf_counter(), list[float](), 0
    importer.start()
    while importer.is_alive():
        number += 1
        asked = usage_record(CALLER, number)
        for act in (store.quotas.reserve(Hold(asked, 100, 60 * MICRO)), store.quotas.settle([asked])):
            start = time.perf_counter()
            answer = await act
            waits.append(1e3 * (time.perf_counter() - start))
            assert answer is None or isinstance(answer, Granted)
        await asyncio.sleep(0.003)
    assert importer.exitcode == 0
    return waits, time.perf_counter() - began


async def measure(name: str, url: str, count: int, path: Path) -> None:
    async with opened(url) as store:
        await fill(store, CALLER, 0)
        await fill(store, LARGE, count)
        shape = f"{name}, {count:,} records"
        record("ledger", f"{shape}: usage by day, token, model, tags", await usage_ms(store, count), "ms")
        record("ledger", f"{shape}: usage by day", await usage_ms(store, count, ()), "ms")
        waits, import_s = await calls_beside_an_import(store, url, path)
        longest = round(max(waits), 1)
        record("ledger", f"{shape}: longest wait of a call beside an import", longest, "ms", bound=WAIT_MS)
        record("ledger", f"{shape}: import of {IMPORTED_RECORDS:,}, process and all", round(import_s, 1), "s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=1_000_000)
    count = parser.parse_args().records
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "export.jsonl"
        asyncio.run(write_export(path))
        asyncio.run(measure("SQLite", f"sqlite:{folder / 'hearth.db'}", count, path))
        server = RedisServer(folder, DURABLE)
        server.start()
        try:
            asyncio.run(measure("Redis", server.url, count, path))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
