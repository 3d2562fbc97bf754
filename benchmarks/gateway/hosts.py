"""What becomes of streams, calls and look-ups where there are many hosts: hosts killed, frozen and upgraded under
streams, how many machines a cold call wakes, what a look-up costs among thousands of replicas; what TLS adds to a first
token, how long a hundred hosts take to join, and what becomes of connections as certificates are renewed.

Hosts are process groups with real agents and schedulers over the stamp engine, which gives the tokens that its KV says;
gateway and clients are one process. Each stream's text is compared with that of an undisturbed run.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.record import record
from engine.protocol import frames
from engine.protocol.types import Residency, SamplingParams, Scope
from gateway.cluster import route
from gateway.cluster.client import ReplicaConnection
from gateway.cluster.connection import HostConnector, MachineConnection
from gateway.cluster.fleet import ReplicaFleet
from gateway.cluster.replica_entry import Standing
from gateway.identity.authority import authority_digest
from gateway.identity.host_identity import HostRole
from gateway.joining.client import Joined, join_cluster
from gateway.joining.listener import JoinListener
from gateway.joining.service import JoinService
from gateway.joining.token_text import new_token_text
from gateway.porter.settings import PorterSettings
from tenants.open import open_store
from tenants.records.cluster import JoinToken
from tests.support.hosts import SECRET, HostMaker, host_maker
from tests.support.redis_server import free_port
from tests.support.served_gateway import Served, served
from tests.support.stamp_hosts import StampHost, cluster_of, stamp_hosts
from tests.support.stream_crowd import Heard, all_serve, crowd, fleet_of
from tests.support.stub_replica import MODEL, StubFleet
from tests.support.waiting import until

PATIENCE_S: Final = 120.0
NAME: Final = "hosts"
OVER_TLS: Final = " in network namespaces, over TLS,"


async def back(gateway: Served, host: StampHost, hosts: int) -> None:
    await asyncio.to_thread(host.kill)
    host.start()
    await asyncio.sleep(0)
    await all_serve(gateway, hosts)


@contextlib.asynccontextmanager
async def serving_hosts(
    count: int, *, apart: bool, step_ms: float = 10.0
) -> AsyncIterator[tuple[Served, Sequence[StampHost]]]:
    """A gateway before so many hosts that all serve."""
    with tempfile.TemporaryDirectory() as name, stamp_hosts(Path(name), count, step_ms, apart=apart) as hosts:
        folder, addresses = Path(name), [host.address for host in hosts]
        cluster = cluster_of(folder) if apart else None
        async with served(folder, machines=addresses, cluster=cluster, request_s=600) as gateway:
            await all_serve(gateway, count)
            yield gateway, hosts


async def measure_kills(rounds: int, streams: int, *, apart: bool) -> None:
    """One of three hosts is lost under streams: killed, or frozen so that nothing tells of it, or, where they are
    apart, cut off, in turn."""
    dice = random.Random(1)
    faults: dict[str, Callable[[StampHost], None]] = {"killed": StampHost.kill, "frozen": StampHost.freeze}
    faults |= {"cut off": StampHost.cut} if apart else {}
    errors, others, gaps = 0, 0, {how: [0.0] for how in faults}
    async with serving_hosts(3, apart=apart) as (gateway, hosts):
        calm = await crowd(gateway, streams)
        for number in range(rounds):
            host, how = dice.choice(hosts), [*faults][number % len(faults)]
            running = asyncio.create_task(crowd(gateway, streams))
            await asyncio.sleep(dice.uniform(0.2, 1.5))
            await asyncio.to_thread(faults[how], host)
            heard = await running
            errors += sum(bool(one.problem) for one in heard)
            others += sum(one.text != was.text for one, was in zip(heard, calm, strict=True))
            gaps[how].append(max(one.gap_s for one in heard))
            print(number, how, errors, others, round(gaps[how][-1], 2), flush=True)
            await back(gateway, host, 3)
    shape = f"one of 3 hosts{OVER_TLS * apart} lost under {streams} streams, {rounds} times"
    record(NAME, f"hosts-kill-errors: {shape}", errors, "streams", bound=0)
    record(NAME, f"{shape}: texts other than undisturbed", others, "streams", bound=0)
    for how, seconds in gaps.items():
        record(NAME, f"{shape}: longest gap, {how}", round(max(seconds), 3), "s", bound=3.0)
    record(NAME, f"{shape}: longest gap undisturbed", round(max(one.gap_s for one in calm), 3), "s")


async def measure_upgrades(times: int, streams: int, *, apart: bool) -> None:
    """Five hosts are drained, ended, started and undrained in turn, while streams come again and again."""
    async with serving_hosts(5, apart=apart, step_ms=25.0) as (gateway, hosts):
        calm, fleet = await crowd(gateway, streams), fleet_of(gateway)
        over, most = asyncio.Event(), [0]

        async def watch() -> None:
            while not over.is_set():
                replicas = [each for machine in fleet._machines.values() for each in machine.replicas.values()]
                most.append(max((len(each.connection._streams) for each in replicas if each.connection), default=0))
                await asyncio.sleep(0.01)

        async def keep_on() -> list[Heard]:
            heard: list[Heard] = []
            while not over.is_set():
                heard += await crowd(gateway, streams)
            return heard

        running, watching = asyncio.create_task(keep_on()), asyncio.create_task(watch())
        for host in [*hosts] * times:
            await asyncio.sleep(1.0)
            await upgrade(fleet, host)
            await all_serve(gateway, 5)
            print(host.name, "upgraded", flush=True)
        over.set()
        heard = await running
        await watching
    often = "" if times == 1 else f", {times} times,"
    shape = f"5 hosts{OVER_TLS * apart} upgraded in turn{often} under {streams} streams"
    texts = [one.text for one in calm]
    record(NAME, f"hosts-upgrade-errors: {shape}", sum(bool(one.problem) for one in heard), "streams", bound=0)
    others = sum(one.text != texts[index % streams] for index, one in enumerate(heard))
    record(NAME, f"{shape}: texts other than undisturbed, of {len(heard)}", others, "streams", bound=0)
    record(NAME, f"{shape}: longest gap", round(max(one.gap_s for one in heard), 3), "s", bound=0.5)
    record(NAME, f"{shape}: longest gap undisturbed", round(max(one.gap_s for one in calm), 3), "s")
    record(NAME, f"{shape}: most at one replica, which runs 64", max(most), "sequences", bound=64)


async def upgrade(fleet: ReplicaFleet, host: StampHost) -> None:
    """As an operator does it, who waits for each step."""
    fleet.drain(host.name, drained=True)
    await until(lambda: idle(fleet, host), PATIENCE_S, "its streams have moved")
    await host.end()
    await until(lambda: not connected(fleet, host), PATIENCE_S, "its end is seen")
    host.start()
    await until(lambda: connected(fleet, host), PATIENCE_S, "it can be told")
    fleet.drain(host.name, drained=False)


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


class PorteredHost:
    """Stub replicas of one process, and the porter of another one before them."""

    def __init__(self, folder: Path) -> None:
        self.hosts: HostMaker = host_maker(folder / "identities")
        self.near = f"unix:{folder / 'machine.sock'}"
        self._folder, self._listen = folder, f"127.0.0.1:{free_port()}"
        self.far = f"tls:m1@{self._listen}"
        self.renew()
        self._gateway = self.hosts.host(HostRole.GATEWAY, "gw1")
        self.connector = HostConnector(lambda: self._gateway.credentials().client)

    def renew(self) -> None:
        """Both sides get other keys and certificates, as they are renewed by other processes."""
        for role, name in ((HostRole.MACHINE, "m1"), (HostRole.GATEWAY, "gw1")):
            self.hosts.host(role, name)

    @contextlib.asynccontextmanager
    async def serving(self, **behaviour: float) -> AsyncIterator[None]:
        paths = self.hosts.paths("m1")
        settings = PorterSettings(
            folder=str(self._folder), listen=self._listen, address="", certificate=str(paths.certificate),
            key=str(paths.key), authority=str(paths.authority),
        )  # fmt: skip
        stub = {"folder": str(self._folder), **behaviour}
        programs = {
            "tests.support.stub_replica": json.dumps(stub),
            "gateway.porter.porter": msgspec.json.encode(settings).decode(),
        }
        processes = [
            await asyncio.create_subprocess_exec(sys.executable, "-m", *each, stdout=asyncio.subprocess.DEVNULL)
            for each in programs.items()
        ]
        try:
            yield
        finally:
            for process in processes:
                process.kill()
                await process.wait()

    @contextlib.asynccontextmanager
    async def fleet(self, address: str) -> AsyncIterator[ReplicaFleet]:
        """A gateway's side, once the replica can be called."""
        fleet = ReplicaFleet([address], connector=self.connector)
        task = asyncio.create_task(fleet.run())
        await until(lambda: fleet.serves(MODEL), PATIENCE_S, "the host serves")
        yield fleet
        task.cancel()
        await asyncio.wait([task])


async def first_token_s(fleet: ReplicaFleet, number: int, tokens: int = 1) -> float:
    """Seconds to the first token of a call that is read to its end."""
    prompt, began_s = array("I", [number, *range(200)]).tobytes(), time.perf_counter()
    chosen = await fleet.acquire(MODEL, b"s" * 16, prompt, asyncio.get_running_loop().time() + PATIENCE_S)
    stream = chosen.submit(frames.Submit(0, prompt, Scope(), SamplingParams(), tokens))
    await anext(stream)
    spent_s = time.perf_counter() - began_s
    received = 1 + len([step async for step in stream])
    assert received >= tokens
    return spent_s


async def measure_tls(calls: int) -> None:
    """First tokens of one replica, in turn by its unix socket and by its host's porter."""
    with tempfile.TemporaryDirectory() as folder:
        host = PorteredHost(Path(folder))
        async with host.serving(), host.fleet(host.near) as near, host.fleet(host.far) as far:
            times: dict[ReplicaFleet, list[float]] = {near: [], far: []}
            for number in range(2 * calls):
                fleet = (near, far)[number % 2]
                times[fleet].append(await first_token_s(fleet, number))
    plain_ms, tls_ms = (1000 * statistics.median(each[calls // 10 :]) for each in times.values())
    shape = f"hosts-tls-first-token: added over loopback, median of {calls}"
    record(NAME, shape, round(tls_ms - plain_ms, 3), "ms", bound=0.3)
    record(NAME, f"hosts-tls-first-token: without TLS, median of {calls}", round(plain_ms, 3), "ms")


async def measure_joins(hosts: int) -> None:
    """Hosts that join at once by one token, each with a key of its own; they and the gateway are one process."""
    with tempfile.TemporaryDirectory() as folder:
        store, made, port = open_store(f"sqlite:{folder}/hearth.db"), host_maker(Path(folder)), free_port()
        service = JoinService(store.cluster, made.authority, SECRET, list, list)
        listener = JoinListener(made.host(HostRole.GATEWAY, "gw1"), service.answer)
        running = asyncio.create_task(listener.run("127.0.0.1", port))
        text = new_token_text(authority_digest(made.authority.pem))
        token = JoinToken(text.id, text.digest, "machine", "eu-west", "fra1", "", hosts, int(time.time()) + 60)
        await store.cluster.add_token(token)
        await asyncio.sleep(0.5)

        async def join(number: int) -> Joined:
            key = ec.generate_private_key(ec.SECP256R1())
            return await join_cluster(f"127.0.0.1:{port}", text, HostRole.MACHINE, f"m{number}", ":8791", key)

        began_s = time.monotonic()
        joined = await asyncio.gather(*(join(number) for number in range(hosts)))
        spent_s = time.monotonic() - began_s
        assert len({each.certificate for each in joined}) == len(await store.cluster.members()) == hosts
        running.cancel()
        await store.close()
    record(NAME, f"hosts-joins-{hosts}: machines that join at once", round(spent_s, 2), "s", bound=10.0)


async def measure_rotation(times: int, streams: int) -> None:
    """Keys and certificates of both sides change again and again under streams; connections stay, new ones are made."""
    lost, cut = [0], 0
    with tempfile.TemporaryDirectory() as folder:
        host = PorteredHost(Path(folder))
        async with host.serving(step_s=0.02), host.fleet(host.far) as fleet:

            async def keep_on(number: int) -> None:
                while not over.is_set():
                    await first_token_s(fleet, number, tokens=50)

            over, connections = asyncio.Event(), list[MachineConnection | ReplicaConnection]()
            connections += fleet.links.connections.values()
            connections += [each.connection for each in fleet._pools[MODEL].entries if each.connection is not None]
            for connection in connections:
                connection.closed.add_done_callback(lambda _: lost.append(1))
            running = [asyncio.create_task(keep_on(number)) for number in range(streams)]
            for _ in range(times):
                await asyncio.sleep(0.5)
                host.renew()
                async with host.fleet(host.far) as anew:
                    await first_token_s(anew, 0)
            over.set()
            ended = await asyncio.gather(*running, return_exceptions=True)
            lost_count, cut = sum(lost), sum(isinstance(each, BaseException) for each in ended)
    shape = f"{times} times under {streams} streams"
    record(NAME, f"hosts-rotation-lost: certificates of both sides, {shape}", lost_count, "connections", bound=0)
    record(NAME, f"hosts-rotation-lost: streams, {shape}", cut, "streams", bound=0)


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


PARTS: Final[dict[str, Callable[[argparse.Namespace], Awaitable[None]]]] = {
    "lookups": lambda asked: measure_lookups(5000),
    "wakes": lambda asked: measure_wakes(5),
    "tls": lambda asked: measure_tls(2000),
    "joins": lambda asked: measure_joins(100),
    "rotation": lambda asked: measure_rotation(20, asked.streams),
    "silence": lambda asked: measure_silence(10),
    "upgrades": lambda asked: measure_upgrades(asked.upgrades, 200, apart=asked.apart),
    "kills": lambda asked: measure_kills(asked.rounds, asked.streams, apart=asked.apart),
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=100, help="hosts that are killed or frozen under streams")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--upgrades", type=int, default=1, help="of all five hosts")
    parser.add_argument("--apart", action="store_true", help="kill and upgrade hosts in network namespaces, over TLS")
    asked = parser.parse_args()
    for name in asked.what:
        await PARTS[name](asked)


if __name__ == "__main__":
    uvloop.run(main())
