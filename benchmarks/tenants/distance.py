"""What does a store cost that is far away? Reservations through a line that delays, beside the line's own round trip.

    python -m benchmarks.tenants.distance [--calls 1000]

One gateway's store, a real Redis, and a relay in a process of its own; a call begins each 4 ms, whatever is away,
and with it a PING on a connection of its own, which tells what the line took at that time.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.record import record
from tenants.open import open_store
from tenants.records.accounts import Account
from tenants.records.holds import Granted, Hold
from tenants.records.limits import Limits
from tenants.records.usage import EXPIRED, MICRO, UsageRecord
from tenants.store.protocol import StoreUnavailable
from tests.support.redis_server import VOLATILE, RedisServer
from tests.support.relay import relay

ROUND_TRIPS_MS: Final = (0, 16, 60, 150)
EVERY_S: Final = 0.004
ANN: Final = "a" * 32


async def measure(server: RedisServer, round_trip_ms: int, calls: int) -> tuple[float, float, float]:
    """Milliseconds of the line's round trip and of a reservation, both medians, and the part that was answered."""
    with relay(server.port, round_trip_ms / 2000) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        line_ms: list[float] = []

        async def ping(began: float, reading: asyncio.Lock) -> None:
            async with reading:  # in the order of asking
                await reader.readline()
            line_ms.append((time.perf_counter() - began) * 1000)

        store = open_store(f"redis://127.0.0.1:{port}/0")
        times: list[float] = []

        async def reserve(number: int) -> None:
            record = UsageRecord(ANN, f"{round_trip_ms}.{number}", 0, 0, 0, 0, 0, EXPIRED, "key", "m", 7, 0.0)
            began = time.perf_counter()
            with suppress(StoreUnavailable):
                if isinstance(await store.quotas.reserve(Hold(record, 1, 60 * MICRO)), Granted):
                    times.append((time.perf_counter() - began) * 1000)

        async with asyncio.TaskGroup() as group:
            reading = asyncio.Lock()
            for number in range(calls):
                group.create_task(reserve(number))
                writer.write(b"PING\r\n")
                group.create_task(ping(time.perf_counter(), reading))
                await asyncio.sleep(EVERY_S)
        writer.close()
        await store.close()
    return statistics.median(line_ms), statistics.median(times), len(times) / calls


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000)
    calls = parser.parse_args().calls
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), VOLATILE)
        server.start()
        try:
            store = open_store(server.url)
            await store.accounts.add(Account(ANN, "ann", Limits(), 1))
            await store.close()
            for round_trip_ms in ROUND_TRIPS_MS:
                line_ms, took_ms, answered = await measure(server, round_trip_ms, calls)
                row = f"hosts-store-{round_trip_ms}"
                record("hosts", f"{row}: p50 of a reservation", round(took_ms, 2), "ms", bound=round(line_ms + 1, 2))
                record("hosts", f"{row}: answered of {calls:,}", answered * 100, "%", bound=100)
        finally:
            server.close()


if __name__ == "__main__":
    uvloop.run(main())
