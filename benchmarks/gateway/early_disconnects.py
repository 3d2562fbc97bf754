"""Ten thousand streams, three in ten of whose clients leave early: what is left, and how soon their blocks are free.

    python -m benchmarks.gateway.early_disconnects [--streams 10000] [--leaving 0.3]

Gateway, store and a stub replica behind its socket, and all clients in this process: a delay of the loop is in every
figure. The time is from the client's close to the Cancel at the replica, which frees the blocks in its next step.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.record import record
from tenants.records.limits import Limits
from tests.support.early_disconnects import Held, leaving
from tests.support.served_gateway import served

PER_SECOND: Final = 100.0
FREE_MS: Final = {50: 50.0, 99: 500.0}
MEMORY_MB: Final = 32.0
UNLIMITED: Final = Limits(requests_per_minute=6_000_000, neurons_per_day=1e9, concurrent_requests=1_000_000)


async def run(streams: int, share: float) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        async with served(Path(name), limits=UNLIMITED) as gateway:
            await leaving(gateway, range(1, 501), PER_SECOND, share)
            before, began = Held.now(gateway), time.monotonic()
            waited_ms = await leaving(gateway, range(1000, 1000 + streams), PER_SECOND, share)
            print(f"{streams} streams in {time.monotonic() - began:.0f} s, {len(waited_ms)} left at the replica")
            after = Held.now(gateway)
    shape = f"{streams} streams, {PER_SECOND:g}/s, {share:.0%} leaving: "
    for what in ("requests", "holds", "sequences", "connections"):
        record("leaving", f"{shape}{what} left", getattr(after, what), what, bound=0)
    for what in ("tasks", "descriptors"):
        more = getattr(after, what) - getattr(before, what)
        record("leaving", f"{shape}{what} left", max(0, more), what, bound=0)
    grown = (after.memory_bytes - before.memory_bytes) / (1 << 20)
    record("leaving", f"{shape}memory grown", round(grown, 1), "MiB", bound=MEMORY_MB)
    for percent, bound in FREE_MS.items():
        value = waited_ms[len(waited_ms) * percent // 100]
        record("leaving", f"{shape}close to Cancel, p{percent}", round(value, 2), "ms", bound=bound)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--leaving", type=float, default=0.3, help="share of clients that leave")
    options = parser.parse_args()
    uvloop.run(run(options.streams, options.leaving))
