"""What live callers notice of a long queue: `hearth serve` with the built-in model, real sockets and a real store.

    python -m benchmarks.gateway.batch [--rounds 10] [--requests 30] [--queued 10000] [--device cpu]

A round asks the same live requests at the same random moments twice: with nothing queued, and beside a queue of this
length, in random order, so that what else the machine does falls on both. They come so often that the replica is at
work for them for about a third of the time. Latencies are of all rounds together.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.record import record
from tests.end_to_end.beside_queue import below, measure
from tests.end_to_end.conftest import serving

BOUND: Final = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    settings = f'device = "{options.device}"\n'  # in [machine], with which the settings of serving() end
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), settings) as hearth:
        seen = asyncio.run(measure(hearth, options.rounds, options.requests, options.queued))
    shape = f"{options.device}, beside {options.queued:,} queued ÷ alone"
    record("batch", f"live p95, {shape}", round(seen.ratio(0.95), 3), "×", bound=BOUND)
    record("batch", f"live p50, {shape}", round(seen.ratio(0.5), 3), "×")
    record("batch", f"live p95, {options.device}, alone", round(1e3 * below(seen.alone_s, 0.95), 1), "ms")
    record("batch", f"queued requests done meanwhile, {options.device}", round(seen.drained / seen.drained_s, 2), "1/s")


if __name__ == "__main__":
    main()
