"""What a gateway spends on a large fleet that it sends nothing to: machines' heartbeats and replicas' loads.

The gateway's side is the real one, `ReplicaFleet` over real sockets, in a process of its own, of which the time on
processors is measured. Machines and replicas are simulated in other processes: they say what agents and replicas say,
when those do. The least that can be is a process that reads the heartbeats' bytes off its sockets and leaves them.
"""

import argparse
import asyncio
import contextlib
import gc
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from benchmarks.record import record
from engine.host.agent import BEAT_S
from engine.protocol import frames
from engine.protocol.address import machine_address
from engine.protocol.types import Residency
from engine.replica.load_reports import LoadReports
from gateway.cluster.connection import HostConnector
from gateway.cluster.fleet import ReplicaFleet
from gateway.cluster.replica_counters import COUNTER_NAMES, RECENT_S
from gateway.identity.files import HostFiles
from gateway.identity.host_identity import HostRole
from gateway.identity.settings import IdentityPaths
from gateway.identity.tls_door import TlsDoor
from gateway.porter.relay import Relay
from tests.support.hosts import host_maker
from tests.support.waiting import until

NAME: Final = "hosts"
PATIENCE_S: Final = 300.0
BOUND: Final = 3.0  # percent of a core
TICK_S: Final = 0.5
MODELS: Final = 50
COUNTERS: Final = (
    *COUNTER_NAMES,
    "computed_tokens",
    "cached_tokens",
    "started",
    "finished_stop",
    "waited_ms",
    "steps_ms",
)


class World(msgspec.Struct, frozen=True):
    """`machines` from number `first` on, below `folder`; of their replicas one in `busy_one_in` computes all the time,
    0: none. `polled`: replicas are of this version, and not of the one before, which said their load again and
    again. `tls`: machines are on other hosts."""

    folder: str
    first: int
    machines: int
    replicas: int
    busy_one_in: int = 0
    polled: bool = True
    tls: bool = False


class SimulatedReplica:
    """A replica as gateways see it."""

    def __init__(self, path: Path, world: World, number: int) -> None:
        self.path, self.number = path, number
        self.model = f"@cf/test/model-{number % MODELS}"
        self.connections: dict[int, asyncio.Transport] = {}
        self.reports = LoadReports()
        self._busy = world.busy_one_in > 0 and number % world.busy_one_in == 0
        self._counters = dict.fromkeys(COUNTERS, 1_000_000 + number)
        self.hello = frames.encode_frame(
            frames.Hello(
                frames.PROTOCOL_OLDEST, self.model, "r", "1", number, 8192, 128_256, 16, 8192,
                frames.PROTOCOL_VERSION, "d" * 64, polled=world.polled,
            )
        )  # fmt: skip
        self._load = self._encoded()

    def _encoded(self) -> bytes:
        counters = self._counters
        running = 8 + counters["steps_ms"] // 500 % 24 if self._busy else 0
        load = frames.ReplicaLoad(
            running, 0, 0, 8000 - running, 4000, counters["steps_ms"] // 10, counters=counters, blocks=8192
        )
        return frames.encode_frame(load)

    def tick(self) -> None:
        """Half a second is over."""
        if self._busy:
            for name in ("computed_tokens", "lookup_tokens", "hit_tokens", "started", "waited_ms", "steps_ms"):
                self._counters[name] += 500
            self._load = self._encoded()
        self.tell(set(self.connections))
        asyncio.get_running_loop().call_later(TICK_S, self.tick)

    def tell(self, turn: set[int]) -> None:
        for number in self.reports.choose(turn, self._load, idle=not self._busy):
            self.connections[number].write(self._load)


class ReplicaSide(asyncio.Protocol):
    """One connection to a replica."""

    def __init__(self, replica: SimulatedReplica) -> None:
        self._replica, self._frames, self._number = replica, frames.FrameReader(), 0

    def connection_made(self, transport: Any) -> None:
        self._number = max(self._replica.connections, default=0) + 1
        self._replica.connections[self._number] = transport
        transport.write(self._replica.hello)
        self._replica.tell({self._number})

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._replica.reports.hear(self._number)
            if isinstance(frame, frames.PollLoad):
                self._replica.reports.poll(self._number)
        self._replica.tell(self._replica.reports.take_polled())

    def connection_lost(self, error: Exception | None) -> None:
        del self._replica.connections[self._number]
        self._replica.reports.drop(self._number)


class SimulatedMachine:
    """A machine's agent as gateways see it: it says where its replicas are, again and again."""

    def __init__(self, folder: Path, replicas: list[SimulatedReplica]) -> None:
        self.folder = folder
        self.connections: set[asyncio.Transport] = set()
        device = Residency.DEVICE
        states = [
            frames.ReplicaState(
                replica.model, f"unix:{replica.path}", device, 1, toward=device, device=index, devices=[index],
                memory=frames.PlacementStatus(device, *[1 << 36] * 6, seconds=1.5), settings="s" * 16,
            )
            for index, replica in enumerate(replicas)
        ]  # fmt: skip
        gpus = [frames.DeviceState("NVIDIA H200", 150 << 30, 140 << 30, 100 << 30)] * len(replicas)
        state = frames.MachineState(folder.name, states, gpus, 1 << 38, 1 << 39, {"wake": 17, "sleep": 16})
        self.state = frames.encode_frame(msgspec.structs.replace(state, protocol=frames.PROTOCOL_VERSION))

    def beat(self) -> None:
        for transport in self.connections:
            transport.write(self.state)
        asyncio.get_running_loop().call_later(BEAT_S, self.beat)


class MachineSide(asyncio.Protocol):
    """One connection to a machine."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine, self._transport = machine, None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._machine.connections.add(transport)
        transport.write(self._machine.state)

    def connection_lost(self, error: Exception | None) -> None:
        self._machine.connections.discard(self._transport)


async def simulate(world: World) -> None:
    """Serves until killed, and prints the machines' addresses once it does."""
    loop, dice, addresses, servers = asyncio.get_running_loop(), random.Random(world.first), list[str](), list[Any]()
    for number in range(world.first, world.first + world.machines):
        folder = Path(world.folder) / f"m{number}"
        folder.mkdir()
        first = number * world.replicas
        replicas = [SimulatedReplica(folder / f"r{i}.sock", world, first + i) for i in range(world.replicas)]
        machine = SimulatedMachine(folder, replicas)
        for replica in replicas:
            servers.append(await loop.create_unix_server(partial(ReplicaSide, replica), str(replica.path)))
            loop.call_later(dice.uniform(0, TICK_S), replica.tick)
        servers.append(await loop.create_unix_server(partial(MachineSide, machine), str(folder / "machine.sock")))
        loop.call_later(dice.uniform(0, BEAT_S), machine.beat)
        if world.tls:
            server, address = await porter(folder)
            servers.append(server)
        addresses.append(address if world.tls else f"unix:{folder}/machine.sock")
    print(*addresses, flush=True)
    await asyncio.Event().wait()


async def porter(folder: Path) -> tuple[asyncio.Server, str]:
    """A porter's door before a machine's sockets, and the address of the machine behind it."""
    files = HostFiles(identity_paths(folder.parent, folder.name))
    door = TlsDoor(
        files,
        lambda _: Relay(folder, lambda: files.credentials().identity, frozenset),
        lambda address, reason: print(address, reason, file=sys.stderr),
    )
    server = await door.listen("127.0.0.1", 0)
    return server, machine_address(folder.name, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")


def identity_paths(folder: Path, name: str) -> IdentityPaths:
    return IdentityPaths(*(folder / "hosts" / name / f"{part}.pem" for part in ("certificate", "key", "authority")))


@contextlib.asynccontextmanager
async def simulated(world: World, processes: int) -> AsyncIterator[tuple[list[str], HostConnector]]:
    """The addresses of a world's machines, which as many processes simulate, and what connects to them."""
    connector = HostConnector(None)
    with tempfile.TemporaryDirectory() as folder:
        if world.tls:
            hosts = host_maker(Path(folder) / "hosts")
            files = hosts.host(HostRole.GATEWAY, "gateway")
            connector = HostConnector(lambda: files.credentials().client)
            for number in range(world.machines):
                hosts.host(HostRole.MACHINE, f"m{number}")
        running, addresses, share = [], [], world.machines // processes
        try:
            for first in range(0, world.machines, share):
                part = msgspec.structs.replace(world, folder=folder, first=first, machines=share)
                command = (sys.executable, "-m", "benchmarks.gateway.control_traffic", "--simulate", encoded(part))
                pipe = asyncio.subprocess.PIPE
                running.append(await asyncio.create_subprocess_exec(*command, stdout=pipe, limit=1 << 24))
            for process in running:
                assert process.stdout is not None
                addresses += (await process.stdout.readline()).decode().split()
            yield addresses, connector
        finally:
            for process in running:
                process.kill()
                await process.wait()


def encoded(world: World) -> str:
    return msgspec.json.encode(world).decode()


async def share_of_core(seconds: float) -> float:
    """What this process takes of a core, in percent."""
    began_s, spent_s = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    return 100 * (time.process_time() - spent_s) / (time.monotonic() - began_s)


async def measure_fleet(world: World, processes: int, seconds: float) -> float:
    """A gateway that knows all of a world's replicas."""
    async with simulated(world, processes) as (addresses, connector):
        fleet = ReplicaFleet(addresses, connector=connector)
        task = asyncio.create_task(fleet.run())
        count = world.machines * world.replicas
        await until(lambda: ready(fleet) == count, PATIENCE_S, "all replicas are known")
        gc.collect()
        gc.freeze()  # as a gateway does
        await asyncio.sleep(2 * RECENT_S)
        share = await share_of_core(seconds)
        assert ready(fleet) == count, "all are there still"
        task.cancel()
        await asyncio.wait([task])
        gc.unfreeze()
    return share


def ready(fleet: ReplicaFleet) -> int:
    links = fleet._replica_links
    return sum(entry.ready for machine in links._machines.values() for entry in machine.replicas.values())


async def measure_floor(world: World, processes: int, seconds: float) -> float:
    """A process that reads what machines say, and leaves it."""
    async with simulated(world, processes) as (addresses, _):
        loop = asyncio.get_running_loop()
        for address in addresses:
            await loop.create_unix_connection(asyncio.Protocol, address.removeprefix("unix:"))
        return await share_of_core(seconds)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", help="what this program says to itself")
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=4, help="that simulate machines")
    parser.add_argument("--part", choices=("floor", "idle", "tenth", "busy", "before", "tls"), action="append")
    asked = parser.parse_args()
    if asked.simulate:
        await simulate(msgspec.json.decode(asked.simulate, type=World))
        return
    plain = World("", 0, asked.machines, asked.replicas)
    worlds = {
        "idle": ("idle", plain),
        "tenth": ("one in ten busy", msgspec.structs.replace(plain, busy_one_in=10)),
        "busy": ("all busy", msgspec.structs.replace(plain, busy_one_in=1)),
        "before": ("idle, of the version before", msgspec.structs.replace(plain, polled=False)),
        "tls": ("idle, on other hosts", msgspec.structs.replace(plain, tls=True)),
    }
    shape = f"{asked.machines} machines x {asked.replicas} replicas"
    for part in asked.part or ("floor", *worlds):
        if part == "floor":
            floor = await measure_floor(plain, asked.processes, asked.seconds)
            record(
                NAME, f"hosts-control-traffic: {shape}, their heartbeats read and left", round(floor, 2), "% of a core"
            )
        else:
            words, world = worlds[part]
            share = await measure_fleet(world, asked.processes, asked.seconds)
            record(NAME, f"hosts-control-traffic: {shape}, {words}", round(share, 2), "% of a core", bound=BOUND)


if __name__ == "__main__":
    uvloop.run(main())
