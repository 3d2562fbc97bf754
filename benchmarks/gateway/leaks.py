"""Ten thousand streams, three in ten of whose clients leave at a random moment: nothing may be left afterwards.

    python -m benchmarks.gateway.leaks [--streams 10000] [--leaving 0.3] [--seed N]

Blocks are counted where they are, in the engine's own simulations and in the tests of all processes.
"""

import argparse
import asyncio
import gc
import random
import tempfile
import time
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.record import record
from tenants.records.limits import Limits
from tests.support.served_gateway import open_files, served, visit
from tests.support.waiting import until

AT_ONCE: Final = 250
UNLIMITED: Final = Limits(requests_per_minute=6_000_000, neurons_per_day=1e9, concurrent_requests=1_000_000)


async def run(streams: int, leaving: float, seed: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        async with served(Path(name), limits=UNLIMITED) as gateway:
            gateway.behaviour.step_s = 0.005
            for _ in range(20):
                await visit(gateway, rng, stays=True)
            await gateway.settled()
            gc.collect()
            tasks, files = len(asyncio.all_tasks()), open_files()
            began = time.monotonic()
            left = iter(range(streams))

            async def clients() -> None:
                for _ in left:
                    await visit(gateway, rng, stays=rng.random() >= leaving)

            await asyncio.gather(*(clients() for _ in range(AT_ONCE)))
            print(f"{streams} streams in {time.monotonic() - began:.0f} s")
            await gateway.settled(30)
            await until(lambda: not gateway.server.server_state.connections, 30)
            records = await gateway.records()
            gc.collect()
            await asyncio.sleep(0.1)
            shape = f"{streams} streams, {leaving:.0%} leaving: leaked "
            store = gateway.app._tenancy.store
            balance = await store.quotas.reconcile(gateway.account_id, records[0].day)
            balance.check()
            record("leaks", shape + "reservations", gateway.quota.open + balance.counted.open, "reservations", bound=0)
            record("leaks", shape + "sequences at the replica", gateway.fleet.running, "sequences", bound=0)
            record("leaks", shape + "tasks", max(0, len(asyncio.all_tasks()) - tasks), "tasks", bound=0)
            record("leaks", shape + "file descriptors", max(0, open_files() - files), "descriptors", bound=0)
            twice = len(records) - len({one.request_id for one in records})
            record("leaks", shape + "second usage records", twice, "records", bound=0)
            outcomes = {one.outcome for one in records}
            print({outcome: sum(one.outcome == outcome for one in records) for outcome in sorted(outcomes)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--leaving", type=float, default=0.3, help="share of clients that leave")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print("seed", options.seed)
    uvloop.run(run(options.streams, options.leaving, options.seed))
