"""The Zipf load of benchmarks.engine.standby on a simulated H200: what first tokens wait for, where no GPU is at hand.

    python -m benchmarks.engine.standby_simulation [--models 6] [--minutes 5] [--seeds 8] [--in-turn]

The policy is the product's; what moves, copies and tokens take is as measured on one H200. It writes no row: nothing of
this is measured. With `--in-turn` a wake is ordered once the last one is there, as before HANDOVER_S.
"""

import argparse
from collections import Counter

from benchmarks.engine.standby import AWAKE_BYTES, ROOM_FOR_TWO
from engine.placement import capacity, policy
from tests.engine.placement.simulation import Job, first_token_waits, percentile, standby


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--over-commit", type=float, help="awake models ÷ bytes of the device; else 46 GiB")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--in-turn", action="store_true")
    options = parser.parse_args()
    if options.in_turn:
        order_wakes_in_turn()
    device_bytes = ROOM_FOR_TWO
    if options.over_commit:
        device_bytes = int(options.models * AWAKE_BYTES / options.over_commit)
    jobs: list[Job] = []
    for seed in range(options.seeds):
        machine, trace = standby(seed, options.minutes, options.models, device_bytes)
        machine.run(trace)
        jobs += machine.done
        waits_s = first_token_waits(machine.done)
        waited = f"p50 {percentile(waits_s, 50):.3f} s, p95 {percentile(waits_s, 95):.3f} s"
        print(f"seed {seed}: {waited}, {machine.arrivals / len(machine.done):.2f} wakes a call", flush=True)
    _report(jobs)


def order_wakes_in_turn() -> None:
    """No wake is ordered before the last one is there."""
    capacity.HANDOVER_S, policy.HANDOVER_S = 1e-9, 0.0  # type: ignore[misc]


def _report(jobs: list[Job]) -> None:
    waits_s = first_token_waits(jobs)
    figures = ", ".join(f"p{percent} {percentile(waits_s, percent):.3f} s" for percent in (50, 95, 99))
    print(f"all {len(jobs)}, simulated: {figures}, at most {waits_s[-1]:.2f}")
    slow = [job for job in jobs if job.first_at and job.first_at - job.request.at >= percentile(waits_s, 95)]
    held_s: Counter[str] = Counter()
    for job in slow:
        held_s.update(job.held_s)
    parts = ", ".join(f"{seconds / len(slow):.3f} s for {what}" for what, seconds in held_s.most_common())
    print(f"the slowest {len(slow)} waited on average {parts}")


if __name__ == "__main__":
    main()
