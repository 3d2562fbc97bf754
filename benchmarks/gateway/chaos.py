"""Are quotas exact, and are refusals quick, while clients leave, replicas fail, gateways are killed and Redis is away?

    python -m benchmarks.gateway.chaos [--minutes 10] [--kills 100] [--faults 20] [--only killed slow …] [--seed N]
    python -m benchmarks.gateway.chaos --broken leaving-is-free       a build that is broken on purpose; it must be
noticed

200 clients, two `hearth gateway` processes, a real Redis (appendonly, everysec), and stub replicas of whose sequences
one in twenty fails; three clients in ten leave. What they received is held against limits, ledger and counters.
"Received beyond limits" has for a bound what the requests that died with their gateways had held. "Latency added" is
that of requests that are refused, by their rate or because the store is away, and so need the store and no replica,
less that of GET /healthz at the same time, which needs neither: quantile less quantile.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvloop
from msgspec import structs

from benchmarks.record import record
from tenants.records.limits import NO_LIMITS, Limits
from tests.end_to_end.broken import BREAKS
from tests.end_to_end.cluster import FAULTS, Cluster, Tenant, cluster
from tests.end_to_end.crowd import Crowd, End, Visit, call
from tests.end_to_end.reckoning import Reckoning, Watch, reckon
from tests.support.served_gateway import Client
from tests.support.waiting import until

CLIENTS: Final = 200
LEAVING: Final = 0.3
PAUSE_S: Final = 2.0  # of each client between its visits: two cores serve them all and are not busy
CALM_S: Final = 4.0  # between faults; the system must be normal again well before its end
ADDED_MS: Final = 100.0
NORMAL_S: Final = 2.0
IN_A_ROW: Final = 5
PROBED_S: Final = 0.02
LASTING_S: Final = {"killed": 2.0, "stopped": 10.0, "slow": 5.0, "flushed": 2.0, "read-only": 3.0, "full": 3.0}
PLENTY: Final = Limits(requests_per_minute=6_000_000, neurons_per_day=1e9, concurrent_requests=100_000)


def tenants_for(seconds: float) -> list[tuple[Limits, Limits]]:
    """One that may do everything, and for each limit one whose clients are always at it."""
    tight: list[dict[str, float]] = [
        {},
        {"neurons_per_day": max(8.0, 0.5 * seconds)},
        {"neurons_per_month": max(8.0, 1.0 * seconds)},
        {"concurrent_requests": 5},
        {"requests_per_minute": 300, "burst": 20},
        {"output_tokens_per_minute": 3_000},
        {"input_tokens_per_minute": 2_000},
    ]
    of_accounts = [(structs.replace(PLENTY, **limits), NO_LIMITS) for limits in tight]
    return [*of_accounts, (PLENTY, Limits(neurons_per_day=max(6.0, 0.5 * seconds), concurrent_requests=8))]


@dataclass
class Probe:
    """Asks both gateways all the time: as a caller whose rate is used up, and beside it whether they live, for latency,
    and as a caller who may, for whether all is normal."""

    cluster: Cluster
    refused: Tenant
    served: Tenant
    refusals: list[Visit] = field(default_factory=list)
    answers: list[Visit] = field(default_factory=list)
    lives: list[tuple[float, float]] = field(default_factory=list)  # when it was asked for, and how long it took

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(self._ask(gateway, *what))
                for gateway in range(len(self.cluster.ports))
                for what in ((self.refused, self.refusals), (self.served, self.answers))
            ]
            asking += [group.create_task(self._see(port)) for port in self.cluster.ports]
            try:
                yield
            finally:
                for task in asking:
                    task.cancel()

    async def _ask(self, gateway: int, tenant: Tenant, visits: list[Visit]) -> None:
        while True:
            prompt = f"{len(visits)} hellos"  # one that is in two crashes would be refused for a while
            body = {"native": True, "stream": False, "prompt": prompt, "max_tokens": 1}
            visits.append(await call(self.cluster.ports, gateway, tenant, body))
            await asyncio.sleep(PROBED_S)

    async def _see(self, port: int) -> None:
        while True:
            began = time.monotonic()
            with contextlib.suppress(OSError, EOFError):
                client = await Client.connect(port)
                await (await client.send("GET", "/healthz", b"")).head()
                client.leave()
                self.lives.append((began, time.monotonic() - began))
            await asyncio.sleep(PROBED_S)

    def refused_s(self, since: float, before: float) -> list[float]:
        """How long the refusals took that were asked for in this interval."""
        return [
            visit.headed - visit.began
            for visit in self.refusals
            if since <= visit.began < before and visit.headed is not None and visit.status in (429, 503)
        ]

    def lived_s(self, since: float, before: float) -> list[float]:
        """The same of the answers that need no store."""
        return [took for began, took in self.lives if since <= began < before]

    def normal_s(self, healed: float) -> float:
        """How long after the healing both gateways had begun the first of five calls in a row that ended well."""
        return max(self._normal_s(healed, gateway) for gateway in range(len(self.cluster.ports)))

    def _normal_s(self, healed: float, gateway: int) -> float:
        since = [visit for visit in self.answers if visit.gateway == gateway and visit.began >= healed]
        for first, visit in enumerate(since):
            row = since[first : first + IN_A_ROW]
            if len(row) == IN_A_ROW and all(one.end is End.DONE for one in row):
                return visit.began - healed
        return CALM_S  # not while anybody looked


@dataclass
class Times:
    """What the probe saw of one kind of fault."""

    refused_s: list[float] = field(default_factory=list)
    lived_s: list[float] = field(default_factory=list)
    normal_s: list[float] = field(default_factory=list)

    def added_ms(self, percent: int) -> float:
        refused, lived = (statistics.quantiles(times, n=100)[percent - 1] for times in (self.refused_s, self.lived_s))
        return round((refused - lived) * 1000, 1)


Act = Callable[[Cluster, Probe], Any]


async def measure(act: Act, seconds: float, options: argparse.Namespace) -> Reckoning:
    """A cluster of its own and a crowd, while `act` does what it does; then the reckoning."""
    program = ("-m", "tests.end_to_end.broken", options.broken) if options.broken else ("-m", "gateway.cli")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        async with cluster(Path(name), program) as running:
            tenants = await running.tenants(tenants_for(seconds))
            probes = await running.tenants(
                [(structs.replace(PLENTY, requests_per_minute=1), NO_LIMITS), (PLENTY, NO_LIMITS)]
            )
            probe = Probe(running, refused=probes[0], served=probes[1])
            crowd = Crowd(running, tenants, CLIENTS, LEAVING, options.seed, PAUSE_S)
            watch = Watch(running, tenants)
            async with watch.looking(0.25), crowd.coming(), probe.asking():
                await asyncio.sleep(CALM_S)
                await act(running, probe)
            await until(lambda: not running.outbox(), 30, "the outbox is replayed")
            await running.drain_gateways()
            visits = [*crowd.visits, *probe.refusals, *probe.answers]
            result = await reckon(running, [*tenants, *probes], visits, watch)
    ends = dict(result.ends)
    print(f"    {result.requests} requests, {result.records} records, {ends}, {watch.looks} looks at counters")
    for complaint in result.wrong[:5]:
        print("    WRONG", complaint)
    return result


def put_down(shape: str, result: Reckoning) -> None:
    """Rows of what must be exact."""
    record("chaos", f"{shape}: received beyond limits", result.overspent / 1e6, "neurons", bound=result.lease / 1e6)
    record("chaos", f"{shape}: counters that are not their ledger", result.unbalanced, "counters", bound=0)
    record("chaos", f"{shape}: holds left after the drain", result.held, "holds", bound=0)
    record("chaos", f"{shape}: wrong ends, records or charges", len(result.wrong), f"of {result.requests}", bound=0)


async def plain(options: argparse.Namespace) -> Reckoning:
    """Nothing is killed."""

    async def wait(running: Cluster, probe: Probe) -> None:
        await asyncio.sleep(options.minutes * 60)

    result = await measure(wait, options.minutes * 60, options)
    put_down(f"{CLIENTS} clients for {options.minutes:g} minutes", result)
    return result


async def kills(options: argparse.Namespace) -> Reckoning:
    """Gateways in turn, each started again; the other one serves."""

    async def act(running: Cluster, probe: Probe) -> None:
        rng = random.Random(options.seed)
        for number in range(options.kills):
            running.kill_gateway(number % len(running.ports))
            await running.start_gateway(number % len(running.ports))
            await asyncio.sleep(rng.uniform(0.5, 2.0))

    result = await measure(act, options.kills * 4, options)
    shape = f"gateway killed {options.kills} times"
    put_down(shape, result)
    record("chaos", f"{shape}: received and not charged", result.forgiven / 1e6, "neurons", bound=result.lease / 1e6)
    return result


async def fault(name: str, options: argparse.Namespace) -> Reckoning:
    times = Times()

    async def act(running: Cluster, probe: Probe) -> None:
        for _ in range(options.faults):
            began = time.monotonic()
            async with FAULTS[name](running):
                await asyncio.sleep(LASTING_S[name])
                ended = time.monotonic()
            healed = time.monotonic()
            await asyncio.sleep(CALM_S)
            times.refused_s += probe.refused_s(began, ended)
            times.lived_s += probe.lived_s(began, ended)
            times.normal_s.append(probe.normal_s(healed))

    result = await measure(act, options.faults * (LASTING_S[name] + CALM_S), options)
    shape = f"Redis {name} for {LASTING_S[name]:g} s, {options.faults} times"
    for percent in (50, 99):
        record("chaos", f"{shape}: latency added, p{percent}", times.added_ms(percent), "ms", bound=ADDED_MS)
    record("chaos", f"{shape}: normal again after, longest", round(max(times.normal_s), 2), "s", bound=NORMAL_S)
    put_down(shape, result)
    return result


async def break_it(options: argparse.Namespace) -> None:
    """A short run on a build that is broken on purpose: raises where the reckoning finds nothing wrong."""

    async def act(running: Cluster, probe: Probe) -> None:
        await asyncio.sleep(CALM_S)
        async with FAULTS["stopped"](running):
            await asyncio.sleep(1)
        await asyncio.sleep(CALM_S)

    result = await measure(act, 10, options)
    try:
        result.check()
    except AssertionError as noticed:
        print(f"{options.broken} was noticed: {str(noticed)[:300]}")
    else:
        raise SystemExit(f"{options.broken} was not noticed: {result}")


async def main(options: argparse.Namespace) -> None:
    print("seed", options.seed)
    if options.broken:
        return await break_it(options)
    results: list[Reckoning] = []
    if options.minutes:
        results.append(await plain(options))
    if options.kills:
        results.append(await kills(options))
    if options.faults:
        results.extend([await fault(name, options) for name in options.only])
    for one in results:
        one.check()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="without killing anything; 0 leaves it out")
    parser.add_argument("--kills", type=int, default=100, help="of gateways; 0 leaves them out")
    parser.add_argument("--faults", type=int, default=20, help="of each kind, of Redis; 0 leaves them out")
    parser.add_argument("--only", nargs="+", choices=[*FAULTS], default=[*FAULTS], metavar="KIND", help=f"{[*FAULTS]}")
    parser.add_argument("--broken", choices=[*BREAKS], help="a gateway that is broken on purpose")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    uvloop.run(main(parser.parse_args()))
