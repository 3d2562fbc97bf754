"""The gateway's instructions per token event, in two checkouts in turns: they scatter by a hundredth on a machine whose
CPU seconds scatter by a fifth. `perf` counts what the gateway's process runs outside the kernel.

Streams are of 512 tokens, whose cost is the tokens', and of 8, whose cost is the request's.

    python -m benchmarks.gateway.instructions --before ../before --old benchmarks.gateway
"""

import argparse
import asyncio
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import uvloop

OVERHEAD: Final = "benchmarks.gateway.overhead"
STREAMS: Final = 64
SHAPES: Final = (("native", 512), ("native", 8), ("openai", 512), ("openai", 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the checkout to compare with")
    parser.add_argument("--old", default=OVERHEAD, help=f"its module like {OVERHEAD}, which is the default")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run (default: 3)")
    parser.add_argument("--count", nargs=3, metavar=("MODULE", "DIALECT", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        module, dialect, tokens = options.count
        print(count(importlib.import_module(module), dialect, int(tokens), options.seconds))
        return
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """Records both checkouts' medians."""
    from benchmarks.pairs import ROOT, commit_of  # the other checkout, where this file counts too, may lack both
    from benchmarks.record import record

    checkouts = [(ROOT, OVERHEAD, None)]
    if options.before:
        checkouts.insert(0, (options.before, options.old, commit_of(options.before)))
    counts: dict[tuple[str, int, str | None], list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for dialect, tokens in SHAPES:
            for folder, module, peer in checkouts:
                counts[dialect, tokens, peer].append(run(folder, module, dialect, tokens, options.seconds))
    for (dialect, tokens, peer), values in counts.items():
        shape = f"{dialect}, {STREAMS} streams of {tokens} tokens: instructions per token event"
        record("house", shape, statistics.median(values), "instructions", peer=peer)
        if peer is None and options.before:
            before = statistics.median(counts[dialect, tokens, checkouts[0][2]])
            print(f"{'':12} {statistics.median(values) / before:.3f} of {checkouts[0][2]}")


def run(folder: Path, module: str, dialect: str, tokens: int, seconds: float) -> float:
    """Counts in `folder`, its packages first, by this file."""
    command = [sys.executable, __file__, "--seconds", str(seconds), "--count", module, dialect, str(tokens)]
    environment = {**os.environ, "PYTHONPATH": f"{folder.resolve()}"}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def count(overhead: Any, dialect: str, tokens: int, seconds: float) -> float:
    """Starts a replica's stub and a gateway by a checkout's own module, loads them, and counts."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        account, token = asyncio.run(overhead.make_account(folder))
        with overhead.stub(folder), overhead.gateway(folder) as (server, port):
            path, body = overhead.request(dialect, account, tokens)
            overhead.ready(int(port))
            overhead.pin(server)
            return uvloop.run(_per_event(overhead.load(int(port), path, token, body, STREAMS), server.pid, seconds))


async def _per_event(load: Any, pid: int, seconds: float) -> float:
    async with load as received:
        await asyncio.sleep(seconds / 2)
        began, events = time.perf_counter(), received.events
        perf = await asyncio.create_subprocess_exec(
            *("perf", "stat", "-x,", "-e", "instructions:u", "-p", str(pid), "sleep", str(seconds)),
            stderr=asyncio.subprocess.PIPE,
        )
        _, printed = await perf.communicate()
        events_per_s = (received.events - events) / (time.perf_counter() - began)
        return float(printed.split(b",")[0]) / seconds / events_per_s


if __name__ == "__main__":
    main()
