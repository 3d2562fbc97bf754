"""What one decision costs: is this token in force, has each limit room, hold it. One Lua call on Redis, one transaction
on SQLite.

    python -m benchmarks.tenants.decisions [--seconds 20] [--rate 500]

Requests come at random (Poisson) at the given rate, spread over accounts: with the limits of the default plan, and with
every limit there is, the account's month, day, rates and concurrency, its token's, and those of a class of models for
either. Each is settled when the next ten have come. Measured from asking the store to its answer, in a process that
does nothing else, and by Redis itself, which logs how long each call ran.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

import redis
import uvloop
from msgspec import structs

from benchmarks.record import record
from tenants.auth.accounts import AccountService
from tenants.limits.caps import RequestSize, caps_of, limited_subjects
from tenants.open import open_store
from tenants.records.accounts import DEFAULT_PLAN
from tenants.records.holds import Granted, Hold
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.usage import DAY_US, EXPIRED, MICRO, UsageRecord
from tenants.store.protocol import Store, StoreUnavailable
from tenants.store.redis import scripts
from tenants.store.redis.store import RedisStore
from tests.support.redis_server import DURABLE, RedisServer

SECRET: Final = b"a benchmark's secret of 32 bytes"
ACCOUNTS: Final = 100
OPEN: Final = 10  # requests of the benchmark that are not settled at any time
LOGGED: Final = 100_000
P50_US: Final = 300.0
P99_US: Final = 3_000.0
WIDE: Final = Limits(
    requests_per_minute=6_000_000,
    neurons_per_day=1e9,
    neurons_per_month=1e10,
    concurrent_requests=100_000,
    input_tokens_per_minute=10**12,
    output_tokens_per_minute=10**12,
)


class Kind(NamedTuple):
    """An account's limits and its token's."""

    of_account: Limits
    of_token: Limits


EVERY: Final = structs.replace(WIDE, classes={"small": WIDE})
KINDS: Final = (Kind(DEFAULT_PLAN.limits, NO_LIMITS), Kind(EVERY, WIDE))
SIZE: Final = RequestSize(micro_neurons=250_000, min_micro_neurons=60_000, input_tokens=100, output_tokens=256)


async def new_subjects(store: Store, kind: "Kind") -> list[tuple[str, str, list[tuple[str, Limits]]]]:
    """Accounts with a token each, and all whose limits a call of a `small` model is measured against."""
    accounts, tokens = AccountService(store, SECRET), []
    for number in range(ACCOUNTS):
        account = await accounts.create(f"account-{number}", kind.of_account)
        token, _ = await accounts.mint(account.id, "benchmark", limits=kind.of_token)
        tokens.append((account.id, token.id, limited_subjects(account.limits, token.id, kind.of_token, "small")))
    return tokens


def hold_of(number: int, account_id: str, token_id: str, subjects: list[tuple[str, Limits]]) -> Hold:
    now_us = int(time.time() * MICRO)
    record = UsageRecord(
        account_id=account_id,
        request_id=f"request-{number}",
        day=now_us // DAY_US,
        micro_neurons=0,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        outcome=EXPIRED,
        token_id=token_id,
        model="@cf/hearth/ember",
        started_us=now_us,
        total_ms=0.0,
        subjects="\n".join(subject for subject, _ in subjects if subject),
    )
    return Hold(record, SIZE.micro_neurons, 60 * MICRO, caps_of(subjects, SIZE), SIZE.output_tokens)


async def measure(store: Store, kind: Kind, rate: float, seconds: float, seed: int) -> list[float]:
    """Microseconds of each decision, and of each that failed on a machine that is too busy."""
    rng, subjects = random.Random(seed), await new_subjects(store, kind)
    waiting: deque[UsageRecord] = deque()
    times: list[float] = []

    async def ask(number: int) -> None:
        hold = hold_of(number, *rng.choice(subjects))
        began = time.perf_counter_ns()
        try:
            decision = await store.quotas.reserve(hold)
        except StoreUnavailable:
            return
        finally:
            times.append((time.perf_counter_ns() - began) / 1_000)
        assert isinstance(decision, Granted), decision
        waiting.append(hold.record)
        if len(waiting) > OPEN:
            with contextlib.suppress(StoreUnavailable):
                await store.quotas.settle([waiting.popleft()])

    due = time.perf_counter()
    async with asyncio.TaskGroup() as asking:
        for number in range(int(rate * seconds)):
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asking.create_task(ask(number))
    return times


def put_down(shape: str, times: list[float]) -> None:
    cuts = statistics.quantiles(times, n=100)
    record("decisions", f"{shape}, p50", round(cuts[49], 1), "µs", bound=P50_US)
    record("decisions", f"{shape}, p99", round(cuts[98], 1), "µs", bound=P99_US)


async def on_redis(folder: Path, options: argparse.Namespace) -> None:
    server = RedisServer(folder, (*DURABLE, "--slowlog-log-slower-than", "0", "--slowlog-max-len", str(LOGGED)))
    server.start()
    try:
        store = RedisStore(server.url)
        for kind in KINDS:
            await measure(store, kind, options.rate, 1.0, options.seed)  # connects, and loads the scripts
            server.ask("SLOWLOG", "RESET")
            times = await measure(store, kind, options.rate, options.seconds, options.seed)
            put_down(f"Redis, {named(kind, options.rate)}: from asking to the answer", times)
            with redis.Redis.from_url(server.url) as client:
                calls = client.slowlog_get(LOGGED)
            durations = [one["duration"] for one in calls if scripts.digest(scripts.RESERVE).encode() in one["command"]]
            put_down(f"Redis, {named(kind, options.rate)}: the Lua call", durations)
        await store.close()
    finally:
        server.close()


async def on_sqlite(folder: Path, options: argparse.Namespace) -> None:
    for kind in KINDS:
        store = open_store(f"sqlite:{folder / 'hearth.db'}")
        times = await measure(store, kind, options.rate, options.seconds, options.seed)
        put_down(f"SQLite, {named(kind, options.rate)}: from asking to the answer", times)
        await store.close()


def named(kind: Kind, rate: float) -> str:
    count = len(caps_of(limited_subjects(kind.of_account, "token", kind.of_token, "small"), SIZE))
    return f"{count} limits, {rate:g} decisions per second"


async def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        await on_redis(Path(name), options)
        await on_sqlite(Path(name), options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each store and kind of account")
    parser.add_argument("--rate", type=float, default=500.0, help="decisions per second")
    parser.add_argument("--seed", type=int, default=1)
    uvloop.run(main(parser.parse_args()))
