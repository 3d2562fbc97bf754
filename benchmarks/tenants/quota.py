"""What a reservation and its settlement cost on each store, and whether 200 racing clients can overspend.

    python -m benchmarks.tenants.quota

A pair is `await quota.reserve(…)`, `quota.settle(…)` and the write that run() would do. Its bound is what no code of
ours can save: on SQLite two bare transactions that write one row each, on Redis two writes of one key over the same
connection, measured in the same rounds.
"""

import asyncio
import gc
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from benchmarks.record import record
from tenants.auth.accounts import AccountService
from tenants.auth.caller import Caller
from tenants.limits.denials import QuotaExceeded
from tenants.limits.quota import Quota
from tenants.limits.reservation import CallUsage, NeuronPrice, QuotaRequest, Reservation
from tenants.open import open_store
from tenants.records.limits import Limits
from tenants.store.protocol import Store
from tests.support.redis_server import RedisServer

SECRET = b"a benchmark's secret of 32 bytes"
UNLIMITED = Limits(requests_per_minute=6_000_000, neurons_per_day=1e9)
PRICE = NeuronPrice(input=1_000, cached_input=100, output=3_000)
SPENT = CallUsage(prompt_tokens=40, cached_tokens=32, completion_tokens=5, outcome="done")
PAIRS, ROUNDS = 500, 8


async def new_caller(store: Store, limits: Limits) -> Caller:
    accounts = AccountService(store, SECRET)
    account = await accounts.create("benchmark", limits)
    _, text = await accounts.mint(account.id, "benchmark")
    return await accounts.verify(text)


async def pair(quota: Quota, caller: Caller, request_id: str) -> None:
    reservation = await quota.reserve(caller, request_id, QuotaRequest("@cf/hearth/ember", PRICE, 40, 256))
    quota.settle(reservation, SPENT)
    await quota.flush()


async def timed(act: Callable[[str], Awaitable[None]], name: str) -> list[float]:
    """Microseconds of each call."""
    times = []
    for n in range(PAIRS):
        began = time.perf_counter_ns()
        await act(f"{name}.{n}")
        times.append((time.perf_counter_ns() - began) / 1_000)
    return times


async def measure_pairs(
    store: Store, folder: Path, bound: Callable[[str], Awaitable[None]]
) -> tuple[float, float, float]:
    """p50 and p99 of a pair and p50 of the bound; the median over rounds in which both took turns."""
    quota, caller = Quota(store.quotas, folder / "outbox"), await new_caller(store, UNLIMITED)
    p50s, p99s, bounds = [], [], []
    for turn in range(ROUNDS):
        bounds.append(statistics.median(await timed(bound, f"bound{turn}")))
        times = sorted(await timed(lambda name: pair(quota, caller, name), f"pair{turn}"))
        p50s.append(times[PAIRS // 2])
        p99s.append(times[PAIRS * 99 // 100])
    (await store.quotas.reconcile(caller.account.id, int(time.time()) // 86_400)).check()
    return statistics.median(p50s), statistics.median(p99s), statistics.median(bounds)


async def measure_race(url: str, folder: Path) -> tuple[int, float]:
    """200 clients on four gateways want 0.1 neurons each and the account has 3.75: micro-neurons overspent, and how
    many clients were admitted beside the 37 that fit."""
    stores = [open_store(url) for _ in range(4)]
    price, caller = NeuronPrice(input=1_000), await new_caller(stores[0], Limits(neurons_per_day=3.75))
    quotas = [Quota(store.quotas, folder / "outbox") for store in stores]

    async def client(n: int) -> Reservation | None:
        try:
            return await quotas[n % 4].reserve(caller, f"r{n}", QuotaRequest("m", price, 100, 0))
        except QuotaExceeded:
            return None

    admitted = [got for got in await asyncio.gather(*map(client, range(200))) if got]
    reserved = sum(reservation.held for reservation in admitted)
    for store in stores:
        await store.close()
    return max(0, reserved - 3_750_000), len(admitted)


async def measure_burst(store: Store, folder: Path) -> float:
    """Reservations per second when 1,000 clients ask at once."""
    caller = await new_caller(store, Limits(requests_per_minute=6_000_000, concurrent_requests=1_000_000))
    rates = []
    for turn in range(5):
        quota = Quota(store.quotas, folder / "outbox")
        began = time.perf_counter()
        await asyncio.gather(
            *(quota.reserve(caller, f"{turn}.{n}", QuotaRequest("m", PRICE, 1, 1)) for n in range(1_000))
        )
        rates.append(1_000 / (time.perf_counter() - began))
    return statistics.median(rates)


async def on_sqlite(folder: Path) -> None:
    url = f"sqlite:{folder / 'hearth.db'}"
    bare = sqlite3.connect(folder / "bare.db", isolation_level=None)
    for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", "CREATE TABLE rows (name TEXT)"):
        bare.execute(statement)

    async def two_transactions(name: str) -> None:
        for _ in range(2):
            bare.execute("BEGIN IMMEDIATE")
            bare.execute("INSERT INTO rows VALUES (?)", (name,))
            bare.execute("COMMIT")

    await report("SQLite", url, folder, two_transactions)
    bare.close()


async def on_redis(folder: Path) -> None:
    server = RedisServer(folder)
    server.start()
    try:
        store = open_store(server.url)

        async def two_writes(name: str) -> None:
            await store.ping()
            await store.ping()

        await report("Redis over loopback", server.url, folder, two_writes)
        await store.close()
    finally:
        server.close()


async def report(name: str, url: str, folder: Path, bound: Callable[[str], Awaitable[None]]) -> None:
    store = open_store(url)
    gc.collect()
    p50, p99, floor = await measure_pairs(store, folder, bound)
    record("quota", f"{name}: reserve + settle, p50", round(p50, 1), "µs", bound=round(floor, 1))
    record("quota", f"{name}: reserve + settle, p99", round(p99, 1), "µs", bound=round(floor, 1))
    record("quota", f"{name}: 1,000 reservations at once", round(await measure_burst(store, folder)), "per second")
    overspent, admitted = await measure_race(url, folder)
    record("quota", f"{name}: 200 clients race, overspent", overspent, "micro-neurons", bound=0)
    record("quota", f"{name}: 200 clients race, admitted", admitted, "of 37 that fit", bound=37)
    await store.close()


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        await on_sqlite(Path(folder))
        await on_redis(Path(folder))


if __name__ == "__main__":
    uvloop.run(main())
