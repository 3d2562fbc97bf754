"""Placement of models of one, two and four ranks on four simulated devices, a million decisions: whether anything that
is promised is broken, and whether anybody waits for ever.

    python -m benchmarks.engine.tuple_simulation [--decisions 1000000] [--seed 0]

The policy is the product's; moves take simulated time, and some fail. The row is how many lives broke something; each
is printed with its seed.
"""

import argparse
import random
import sys

from tqdm import tqdm

from benchmarks.record import record
from tests.engine.placement.simulation import four_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    decisions, seed, wrong, waits_s = 0, options.seed, 0, 0.0
    with tqdm(total=options.decisions, unit="decision", disable=not sys.stderr.isatty()) as progress:
        while decisions < options.decisions:
            machine, trace = four_devices(random.Random(seed))
            try:
                machine.run(trace)
                waits_s = max(waits_s, machine.waits()[-1])
            except AssertionError as error:
                wrong += 1
                print(f"seed {seed}: {error}", file=sys.stderr)
            decisions += machine.decisions
            seed += 1
            progress.update(machine.decisions)
    print(f"{decisions:,} decisions in {seed - options.seed} lives; nobody waited for longer than {waits_s:.1f} s")
    record("ranks", "tuple-decisions-wrong", wrong, "wrong lives", bound=0)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
