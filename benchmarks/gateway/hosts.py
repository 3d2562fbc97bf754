"""What becomes of streams, calls and look-ups where there are many hosts: hosts killed, frozen and upgraded under
streams, how many machines a cold call wakes, and what a look-up costs among thousands of replicas.

Hosts are process groups with real agents and schedulers over the stamp engine, which gives the tokens that its KV says;
gateway and clients are one process. Each stream's text is compared with that of an undisturbed run.
"""

import argparse
import asyncio
import contextlib
import functools
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.record import record
from engine.protocol import frames
from engine.protocol.types import Residency
from gateway.cluster import route
from gateway.cluster.fleet import ReplicaFleet
from gateway.cluster.replica_entry import Standing
from tests.support.served_gateway import Served, served
from tests.support.stamp_hosts import StampHost, stamp_hosts
from tests.support.stream_crowd import Heard, all_serve, crowd, fleet_of
from tests.support.stub_replica import MODEL, StubFleet
from tests.support.waiting import until

PATIENCE_S: Final = 120.0
NAME: Final = "hosts"


async def back(gateway: Served, host: StampHost, hosts: int) -> None:
    await asyncio.to_thread(host.kill)
    host.start()
    await asyncio.sleep(0)
    await all_serve(gateway, hosts)


async def measure_kills(rounds: int, streams: int) -> None:
    """One of three hosts is lost under streams: killed, or frozen so that nothing tells of it, in turn."""
    dice = random.Random(1)
    with tempfile.TemporaryDirectory() as folder, stamp_hosts(Path(folder), 3) as hosts:
        async with served(Path(folder), machines=[host.address for host in hosts], request_s=600) as gateway:
            await all_serve(gateway, 3)
            calm = await crowd(gateway, streams)
            errors, others, gaps = 0, 0, {"killed": [0.0], "frozen": [0.0]}
            for number in range(rounds):
                host, how = dice.choice(hosts), ("killed", "frozen")[number % 2]
                running = asyncio.create_task(crowd(gateway, streams))
                await asyncio.sleep(dice.uniform(0.2, 1.5))
                await asyncio.to_thread(host.kill if how == "killed" else host.freeze)
                heard = await running
                errors += sum(bool(one.problem) for one in heard)
                others += sum(one.text != was.text for one, was in zip(heard, calm, strict=True))
                gaps[how].append(max(one.gap_s for one in heard))
                print(number, how, errors, others, round(gaps[how][-1], 2), flush=True)
                await back(gateway, host, 3)
    shape = f"one of 3 hosts lost under {streams} streams, {rounds} times"
    record(NAME, f"hosts-kill-errors: {shape}", errors, "streams", bound=0)
    record(NAME, f"{shape}: texts other than undisturbed", others, "streams", bound=0)
    for how, seconds in gaps.items():
        record(NAME, f"{shape}: longest gap, {how}", round(max(seconds), 3), "s", bound=3.0)
    record(NAME, f"{shape}: longest gap undisturbed", round(max(one.gap_s for one in calm), 3), "s")


async def measure_upgrades(streams: int) -> None:
    """Five hosts are drained, ended, started and undrained in turn, while streams come again and again."""
    with tempfile.TemporaryDirectory() as folder, stamp_hosts(Path(folder), 5, step_ms=25.0) as hosts:
        async with served(Path(folder), machines=[host.address for host in hosts], request_s=600) as gateway:
            await all_serve(gateway, 5)
            calm, fleet = await crowd(gateway, streams), fleet_of(gateway)
            over = asyncio.Event()

            async def keep_on() -> list[Heard]:
                heard: list[Heard] = []
                while not over.is_set():
                    heard += await crowd(gateway, streams)
                return heard

            running = asyncio.create_task(keep_on())
            for host in hosts:
                await asyncio.sleep(1.0)
                fleet.drain(host.name, drained=True)
                await until(functools.partial(idle, fleet, host), PATIENCE_S, "its streams have moved")
                await host.end()
                await until(lambda host=host: not connected(fleet, host), PATIENCE_S, "its end is seen")
                host.start()
                await until(functools.partial(connected, fleet, host), PATIENCE_S, "it can be told")
                fleet.drain(host.name, drained=False)
                await all_serve(gateway, 5)
                print(host.name, "upgraded", flush=True)
            over.set()
            heard = await running
    shape = f"5 hosts upgraded in turn under {streams} streams"
    texts = [one.text for one in calm]
    record(NAME, f"hosts-upgrade-errors: {shape}", sum(bool(one.problem) for one in heard), "streams", bound=0)
    others = sum(one.text != texts[index % streams] for index, one in enumerate(heard))
    record(NAME, f"{shape}: texts other than undisturbed, of {len(heard)}", others, "streams", bound=0)
    record(NAME, f"{shape}: longest gap", round(max(one.gap_s for one in heard), 3), "s", bound=0.5)
    record(NAME, f"{shape}: longest gap undisturbed", round(max(one.gap_s for one in calm), 3), "s")


def idle(fleet: ReplicaFleet, host: StampHost) -> bool:
    machine = fleet._machines[host.address]
    return machine.report.draining and not any(
        entry.connection is not None and entry.connection.regions for entry in machine.replicas.values()
    )


def connected(fleet: ReplicaFleet, host: StampHost) -> bool:
    return fleet._machines[host.address].connection is not None


async def measure_silence(rounds: int) -> None:
    """How long a host that was frozen still gets new calls, and until it is lost."""
    quiet_s, lost_s = [], []
    with tempfile.TemporaryDirectory() as folder, stamp_hosts(Path(folder), 2) as hosts:
        async with served(Path(folder), machines=[host.address for host in hosts]) as gateway:
            fleet = fleet_of(gateway)
            for number in range(rounds):
                await all_serve(gateway, 2)
                host = hosts[number % 2]
                (entry,) = fleet._machines[host.address].replicas.values()
                began_s = time.monotonic()
                await asyncio.to_thread(host.freeze)
                await until(lambda entry=entry: entry.standing is Standing.CLOSED, PATIENCE_S)
                quiet_s.append(time.monotonic() - began_s)
                await until(lambda entry=entry: entry.connection is None, PATIENCE_S)
                lost_s.append(time.monotonic() - began_s)
                await back(gateway, host, 2)
    record(NAME, f"a silent host: no new call, the latest of {rounds}", round(max(quiet_s), 3), "s", bound=1.5)
    shape = f"hosts-silent: lost, the latest of {rounds}"
    record(NAME, shape, round(max(lost_s), 3), "s", bound=3.0, peer="Dynamo 10 s")


async def measure_wakes(machines: int) -> None:
    """How many machines hear of one call for a model that sleeps on all of them."""
    with tempfile.TemporaryDirectory() as folder:
        stubs = []
        for number in range(machines):
            (place := Path(folder) / str(number)).mkdir()
            stubs.append(StubFleet(place))
            stubs[-1].move(0, Residency.MEMORY, ready_ms=300)
        async with contextlib.AsyncExitStack() as stack:
            for stub in stubs:
                await stack.enter_async_context(stub.serving())
            fleet = ReplicaFleet([stub.address for stub in stubs])
            task = asyncio.create_task(fleet.run())
            await until(lambda: len(fleet.replicas()) == machines)
            deadline = asyncio.get_running_loop().time() + PATIENCE_S
            call = asyncio.create_task(fleet.acquire(MODEL, b"s" * 16, b"\0" * 16, deadline))
            await until(lambda: any(stub.wakes for stub in stubs))
            await asyncio.sleep(0.2)
            woken = [stub for stub in stubs if any(wake.requests for wake in stub.wakes)]
            woken[0].move(0, Residency.DEVICE)
            await call
            task.cancel()
            await asyncio.wait([task])
    record(NAME, f"hosts-wakes: machines woken by one cold call, of {machines}", len(woken), "machines", bound=1)


async def measure_lookups(repeats: int) -> None:
    """`pick` among 1,000 replicas, and a gateway's whole choice among 8,000."""
    ring = route.ReplicaRing[int]()
    for number in range(1000):
        ring.add(f"unix:/run/{number}.sock", number)
    loads = [number % 7 for number in range(1000)]
    prompts = [array("I", [number, *range(200)]).tobytes() for number in range(256)]

    def pick(number: int) -> None:
        route.pick(ring, loads.__getitem__, b"s" * 16, prompts[number % 256])

    record(NAME, "hosts-pick-1000: choice among 1000 replicas", _median_us(pick, repeats), "us", bound=25)
    fleet = _large_fleet(1000, 8)
    deadline = asyncio.get_running_loop().time() + 3600

    def link(number: int) -> None:
        choice = fleet.acquire(MODEL, b"s" * 16, prompts[number % 256], deadline)
        try:
            choice.send(None)
        except StopIteration:
            return
        raise AssertionError("it waits")

    record(NAME, "hosts-link-8000: a replica for a call among 8000", _median_us(link, repeats), "us", bound=40)


def _median_us(work: Callable[[int], None], repeats: int) -> float:
    times = []
    for number in range(repeats):
        began = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - began)
    return round(1e6 * statistics.median(times), 2)


def _large_fleet(machines: int, replicas: int) -> ReplicaFleet:
    """A fleet that has heard of so many, without their sockets."""
    fleet, device = ReplicaFleet([]), Residency.DEVICE
    fleet._replica_links.keep = lambda entry: None  # type: ignore[method-assign]
    hello = StubFleet(Path("/nowhere")).replicas[0].hello()
    for number in range(machines):
        states = [
            frames.ReplicaState(MODEL, f"unix:/{number}/{index}", device, 1, toward=device) for index in range(replicas)
        ]
        connection: Any = type("Open", (), {"asked": True, "region_of": lambda self, word: word})()
        fleet.links.connections[f"unix:/{number}"] = connection
        fleet._on_report(f"unix:/{number}", connection, frames.MachineState(f"m{number}", states))
        for entry in fleet._machines[f"unix:/{number}"].replicas.values():
            entry.connection = fleet._open_connection(entry)
            entry.connection._transport = connection
            entry.connection.hello = hello
            fleet._on_change(entry)
    return fleet


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["lookups", "wakes", "silence", "upgrades", "kills"])
    parser.add_argument("--rounds", type=int, default=100, help="hosts that are killed or frozen under streams")
    parser.add_argument("--streams", type=int, default=64)
    asked = parser.parse_args()
    parts: dict[str, Callable[[], Awaitable[None]]] = {
        "lookups": lambda: measure_lookups(5000),
        "wakes": lambda: measure_wakes(5),
        "silence": lambda: measure_silence(10),
        "upgrades": lambda: measure_upgrades(200),
        "kills": lambda: measure_kills(asked.rounds, asked.streams),
    }
    for name in asked.what:
        await parts[name]()


if __name__ == "__main__":
    uvloop.run(main())
