"""What does a failover of the store lose, pass and hold up? A primary is cut off, another promoted, the link healed.

    python -m benchmarks.tenants.failover [--seeds 20] [--broken silent]

Three hosts are namespaces, each with a real Redis and a Sentinel. A gateway's quota with clients stays beside the
primary that is cut off, another one is outside; one account has no limits, one is at its limit, and one is at its limit
under a strict plan. What they were told is held against ledger and counters of the primary that there is in the end.
A promoted server takes writes once a replica follows it, as min-replicas-to-write says. Needs root.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import redis

from benchmarks.record import record
from benchmarks.tenants.store_worker import HELD, account
from tenants.open import open_store
from tenants.records.usage import MICRO
from tests.support.sentinels import PORT, SentinelNetwork
from tests.support.store_history import Event, FinalState, Slack, Verdict, judge
from tests.support.waiting import wait_for, wait_for_a_day

ROOT: Final = Path(__file__).parents[2]
PLENTY, TIGHT, STRICT = "a" * 32, "b" * 32, "c" * 32
CLIENTS: Final = 8
TIGHT_CALLS: Final = 330
STRICT_CALLS: Final = 330
BEFORE_S: Final = (2.0, 4.0)
AFTER_PROMOTION_S: Final = 2.5
HEALED_S: Final = 3.0
GUARD_S: Final = 2.1  # within which nothing more is granted by a primary that is cut off


@dataclass(frozen=True)
class Outcome:
    """Seconds are counted from the cut; `serving_s` from the promoted one's first write to the first grant outside."""

    verdict: Verdict
    events: list[Event]
    promoted_s: float
    writable_s: float
    serving_s: float
    last_grant_s: float  # of the primary that was cut off


def cut_link(folder: Path, seed: int, broken: str = "") -> Outcome:
    """One run on hosts of its own."""
    wait_for_a_day()
    drawn = random.Random(seed)
    with SentinelNetwork(folder).running() as network:
        accounts = _accounts()
        asyncio.run(_found(network.url, accounts))
        near = _Worker(network, "near", folder, seed, accounts, broken, inside=True)
        far = _Worker(network, "far", folder, seed + 1, accounts, broken, inside=False)
        try:
            time.sleep(drawn.uniform(*BEFORE_S))
            cut_s = time.monotonic()
            network.hosts[0].cut()
            promoted_s, writable_s = _promotion(network)
            time.sleep(AFTER_PROMOTION_S)
            network.hosts[0].heal()
            healed_s = time.monotonic()
            wait_for(lambda: network.hosts[0].ask("ROLE")[0] == b"slave", what="the old primary follows")
            time.sleep(HEALED_S)
        finally:
            events = [*near.end(), *far.end()]
        states = asyncio.run(_states(network.url, accounts))
    slack = {TIGHT: Slack("near", cut_s, cut_s + GUARD_S)}
    on_cut_off = [event.ended_s for event in events if event.gateway == "near" and event.kind == "granted"]
    first = min(event.ended_s for event in events if _grants_after(event, "far", promoted_s))
    last = max((ended for ended in on_cut_off if ended < healed_s), default=cut_s)
    times = (promoted_s - cut_s, writable_s - cut_s, first - writable_s, last - cut_s)
    return Outcome(judge(events, states, slack), events, *times)


def _grants_after(event: Event, gateway: str, since_s: float) -> bool:
    return event.gateway == gateway and event.kind == "granted" and event.ended_s > since_s


def _accounts() -> list[tuple[str, float | None, bool]]:
    return [
        (PLENTY, None, False),
        (TIGHT, TIGHT_CALLS * HELD / MICRO, False),
        (STRICT, STRICT_CALLS * HELD / MICRO, True),
    ]


async def _found(url: str, accounts: Sequence[tuple[str, float | None, bool]]) -> None:
    store = open_store(url)
    for one in accounts:
        await store.accounts.add(account(*one))
    await store.close()


async def _states(url: str, accounts: Sequence[tuple[str, float | None, bool]]) -> dict[str, FinalState]:
    store, day, states = open_store(url), int(time.time()) // 86_400, {}
    for account_id, neurons, _ in accounts:
        ledger = await store.quotas.records(account_id, day)
        allowed = None if neurons is None else round(neurons * MICRO)
        states[account_id] = FinalState(ledger, await store.quotas.reconcile(account_id, day), allowed)
    await store.close()
    return states


def _promotion(network: SentinelNetwork) -> tuple[float, float]:
    """When another one says that it is the primary, and when it takes a write."""
    others = [redis.Redis(host.address, PORT, socket_timeout=1) for host in network.hosts[1:]]

    def any_says(answer: Callable[[redis.Redis], bool]) -> bool:
        found = False
        for other in others:
            with suppress(redis.RedisError):
                found = found or answer(other)
        return found

    wait_for(lambda: any_says(lambda one: one.execute_command("ROLE")[0] == b"master"), what="one is promoted")
    promoted_s = time.monotonic()
    wait_for(lambda: any_says(lambda one: bool(one.set("benchmark", "1"))), what="it takes writes")
    return promoted_s, time.monotonic()


class _Worker:
    """A process of store_worker, inside of the namespace of the first host or outside of all."""

    def __init__(
        self,
        network: SentinelNetwork,
        name: str,
        folder: Path,
        seed: int,
        accounts: Sequence[object],
        broken: str,
        *,
        inside: bool,
    ) -> None:
        self._history = folder / f"{name}.history"
        place = ["ip", "netns", "exec", network.hosts[0].namespace] if inside else []
        arguments = (network.url, name, str(folder), str(seed), str(CLIENTS), json.dumps(accounts))
        command = [*place, sys.executable, "-m", "benchmarks.tenants.store_worker", *arguments]
        with (folder / f"{name}.log").open("w") as log:
            self._process = subprocess.Popen(
                [*command, *([broken] if broken else [])],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", (folder / f"{name}.log").read_text()

    def end(self) -> list[Event]:
        """Its events, once all that it settled is written."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
        return msgspec.json.decode(self._history.read_bytes(), type=list[Event])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--broken", default="", help="a build that is broken on purpose: silent")
    options = parser.parse_args()
    outcomes = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(outcome := cut_link(Path(folder), seed, options.broken))
        verdict = outcome.verdict
        settled = sum(event.kind == "settled" for event in outcome.events)
        times = (outcome.promoted_s, outcome.writable_s, outcome.serving_s, outcome.last_grant_s)
        print(
            f"seed {seed}: {settled} settled, lost {verdict.lost}, passed {list(verdict.passed.values())}; promoted "
            f"after %.2f s, takes writes after %.2f s, served %.3f s later; the cut-off one granted for %.2f s; "
            f"{len(verdict.complaints)} complaints {verdict.complaints[:3]}" % times,
            flush=True,
        )
    if not options.broken:
        _record(outcomes)


def _record(outcomes: Sequence[Outcome]) -> None:
    runs = f"{len(outcomes)} cuts"
    settled = sum(event.kind == "settled" for outcome in outcomes for event in outcome.events)
    rows = [
        ("hosts-failover-settled", settled, "count", None),
        ("hosts-failover-lost", sum(outcome.verdict.lost for outcome in outcomes) / MICRO, "neurons", 0),
        ("hosts-failover-passed", max(outcome.verdict.passed[TIGHT] for outcome in outcomes) / MICRO, "neurons", None),
        ("hosts-failover-strict-passed", sum(one.verdict.passed[STRICT] for one in outcomes) / MICRO, "neurons", 0),
        ("hosts-failover-complaints", sum(len(outcome.verdict.complaints) for outcome in outcomes), "count", 0),
        ("hosts-failover-last-grant", max(outcome.last_grant_s for outcome in outcomes), "s after the cut", GUARD_S),
        ("hosts-failover-serving", max(outcome.serving_s for outcome in outcomes), "s after the first write", 0.5),
        ("hosts-failover-promoted", statistics.median(outcome.promoted_s for outcome in outcomes), "s", None),
        ("hosts-failover-writable", statistics.median(outcome.writable_s for outcome in outcomes), "s", None),
    ]
    for shape, value, unit, bound in rows:
        record("hosts", f"{shape}: {runs}", round(value, 3), unit, bound=bound)


if __name__ == "__main__":
    main()
