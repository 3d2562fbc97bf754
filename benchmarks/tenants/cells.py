"""Is anything overspent where five cells share an account's budget, and how much of it lies idle in their leases?

    python -m benchmarks.tenants.cells [--seeds 20] [--seconds 600]

Cells 20 to 120 ms apart with two gateways each, in simulated time: an account at its limit, cuts of 60 s, gateways that
are killed, answers that are lost, late or doubled, clocks up to an hour apart; every fourth run goes over midnight.
After each grant and each end of a call all that was granted and used is compared with the budget; at the end every
ledger is held against what calls used. tests/support/cells.py is the simulation.
"""

import argparse
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.record import record
from tenants.records.usage import MICRO
from tests.support.cells import NOON_S, Outcome, Scenario, simulate

MIDNIGHT_S: Final = NOON_S + 43_200
NAME: Final = "hosts"
STRANDED_MAX: Final = 5.0


def run(seed: int, seconds: float) -> Outcome:
    """One run in a folder of its own."""
    start_s = MIDNIGHT_S - seconds / 2 if seed % 4 == 3 else NOON_S
    with tempfile.TemporaryDirectory() as folder:
        return simulate(Scenario(seed, seconds=seconds, start_s=start_s), Path(folder))


def main() -> None:
    """Runs all seeds, and records the worst of each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    budget, outcomes = Scenario(0).budget, []
    for seed in range(arguments.seeds):
        outcome = run(seed, arguments.seconds)
        outcomes.append(outcome)
        shares = f"stranded {outcome.stranded / budget:.2%}, spent {outcome.spent / budget:.2%}"
        counts = f"granted {outcome.granted}, refused {outcome.refused}, unreachable {outcome.unreachable}"
        print(f"seed {seed}: overspent {outcome.overspent}, {shares}, {counts}", *outcome.complaints, flush=True)
    waits_ms = [wait_ms for outcome in outcomes for wait_ms in outcome.waits_ms]
    shape = f"5 cells, {arguments.seeds} runs of {arguments.seconds:.0f} s"
    overspent = max(max(outcome.overspent, 0) for outcome in outcomes) / MICRO
    stranded = 100 * max(outcome.stranded for outcome in outcomes) / budget
    waited = 100 * sum(wait_ms > 0 for wait_ms in waits_ms) / len(waits_ms)
    record(NAME, f"hosts-cells-overspent: {shape}", overspent, "neurons", bound=0)
    record(NAME, f"hosts-cells-complaints: {shape}", sum(len(one.complaints) for one in outcomes), "count", bound=0)
    record(NAME, f"hosts-cells-stranded: {shape}", round(stranded, 2), "% of a budget", bound=STRANDED_MAX)
    record(NAME, f"hosts-cells-granted: {shape}", sum(one.granted for one in outcomes), "count")
    record(NAME, f"hosts-cells-waited: {shape}", round(waited, 2), "% of calls that waited for another cell")
    record(NAME, f"hosts-cells-wait-p50: {shape}", round(statistics.median(waits_ms), 3), "ms of simulated time")


if __name__ == "__main__":
    main()
