"""The contract of Members: settings, the store, and Kubernetes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from engine.protocol.address import machine_address
from gateway.members.kubernetes import KubernetesApi, KubernetesMembers
from gateway.members.protocol import Members, Membership
from gateway.members.registry import RegistryMembers
from gateway.members.static import StaticMembers
from tenants.open import open_store
from tenants.records.cluster import ClusterAuthority, ClusterMember, JoinOutcome, JoinToken
from tenants.store.protocol import ClusterStore, StoreUnavailable
from tests.support.kubernetes_api import PORT, SERVICE, FakeKubernetes
from tests.support.waiting import holds, until

pytestmark = pytest.mark.anyio
LOOK_S = 0.02


class Source(Protocol):
    """A source of machines that a test changes: names → hosts."""

    members: Members

    async def change(self, machines: dict[str, str]) -> None: ...

    def leave(self) -> None:
        """It does not answer any more."""

    def come_back(self) -> None: ...


class StaticSource:
    def __init__(self, machines: dict[str, str]) -> None:
        self.members: Members = StaticMembers(addresses(machines).machines)


class AwayStore:
    """A ClusterStore that may not answer; all else is the real one's."""

    def __init__(self, store: ClusterStore) -> None:
        self.store = store
        self.away = False

    async def authority(self) -> ClusterAuthority | None:
        if self.away:
            raise StoreUnavailable("it is away")
        return await self.store.authority()

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


class StoreSource:
    def __init__(self, store: ClusterStore) -> None:
        self._store = store
        self._away = AwayStore(store)
        self._machines: dict[str, str] = {}
        self.members: Members = RegistryMembers(self._away, LOOK_S)  # type: ignore[arg-type]

    async def change(self, machines: dict[str, str]) -> None:
        for name in self._machines.keys() - machines.keys():
            await self._store.remove(f"machine/{name}")
        for name, host in machines.items():
            member = ClusterMember(name, "machine", "", "", f"key {name} {host}", f"{host}:{PORT}", 1, 1 << 40)
            await self._store.admit("t", member, 1)
        self._machines = machines

    def leave(self) -> None:
        self._away.away = True

    def come_back(self) -> None:
        self._away.away = False

    def fail_over(self, replica: "StoreSource") -> None:
        self._away.store = replica._store


class KubernetesSource:
    def __init__(self, api: FakeKubernetes) -> None:
        self._api = api
        self.members: Members = KubernetesMembers(KubernetesApi(api.url, None, True), "ml", SERVICE, (LOOK_S, LOOK_S))

    async def change(self, machines: dict[str, str]) -> None:
        self._api.put("slice-1", machines)

    def leave(self) -> None:
        self._api.away = True
        self._api.cut()

    def come_back(self) -> None:
        self._api.away = False


FIRST = {"m1": "10.0.0.1", "m2": "10.0.0.2"}
SECOND = {"m2": "10.0.0.2", "m3": "10.0.0.3"}


def addresses(machines: dict[str, str]) -> Membership:
    return Membership(frozenset(machine_address(name, f"{host}:{PORT}") for name, host in machines.items()))


@pytest.fixture(params=["static", "store", "kubernetes"])
async def any_source(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Source | StaticSource]:
    async with opened(request.param, tmp_path) as source:
        yield source


@pytest.fixture(params=["store", "kubernetes"])
async def source(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Source]:
    async with opened(request.param, tmp_path) as source:
        assert not isinstance(source, StaticSource)
        yield source


@contextlib.asynccontextmanager
async def opened(
    kind: str, folder: Path, machines: dict[str, str] | None = None
) -> AsyncIterator[Source | StaticSource]:
    """A source that has these machines, FIRST if none are named."""
    machines = machines or FIRST
    if kind == "static":
        yield StaticSource(machines)
    elif kind == "store":
        store = open_store(f"sqlite:{folder / 'hearth.db'}")
        await store.cluster.found(ClusterAuthority("test", b"", b""))
        await store.cluster.add_token(JoinToken("t", b"", "machine", "", "", "", 1000, 1 << 40))
        made = StoreSource(store.cluster)
        await made.change(machines)
        yield made
        await store.close()
    else:
        async with FakeKubernetes().serving() as api:
            cluster = KubernetesSource(api)
            await cluster.change(machines)
            yield cluster


@contextlib.asynccontextmanager
async def followed(members: Members) -> AsyncIterator[list[Membership]]:
    """What it tells."""
    told: list[Membership] = []
    task = asyncio.create_task(members.follow(told.append))
    try:
        yield told
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_all_machines_are_told_at_first_and_once(any_source: Source | StaticSource) -> None:
    async with followed(any_source.members) as told:
        await until(lambda: told, 10, "the machines are told")
        await holds(lambda: told == [addresses(FIRST)], 5 * LOOK_S)


async def test_machines_come_and_go(source: Source) -> None:
    async with followed(source.members) as told:
        await until(lambda: told, 10, "the machines are told")
        await source.change(SECOND)
        await until(lambda: told[-1].machines == addresses(SECOND).machines, 10, "the change is told")
        await source.change({})
        await until(lambda: told[-1].machines == frozenset(), 10, "that there are none is told")


async def test_the_last_machines_stay_while_the_source_is_away(source: Source) -> None:
    async with followed(source.members) as told:
        await until(lambda: told, 10, "the machines are told")
        source.leave()
        await holds(lambda: told == [addresses(FIRST)], 10 * LOOK_S)
        await source.change(SECOND)
        source.come_back()
        await until(lambda: told[-1].machines == addresses(SECOND).machines, 10, "the change is told once it is back")


async def test_a_source_that_is_away_at_first_tells_its_machines_later(source: Source) -> None:
    source.leave()
    async with followed(source.members) as told:
        await holds(lambda: told == [], 5 * LOOK_S)
        source.come_back()
        await until(lambda: told == [addresses(FIRST)], 10, "the machines are told")


async def test_a_machine_that_the_store_lost_is_gone_and_not_removed(tmp_path: Path) -> None:
    """A failover may lose what was acknowledged; only an operator's word cuts a machine off."""
    async with (
        opened("store", tmp_path) as source,
        opened("store", tmp_path / "replica", {"m2": "10.0.0.2"}) as replica,
    ):
        assert isinstance(source, StoreSource)
        assert isinstance(replica, StoreSource)
        async with followed(source.members) as told:
            await until(lambda: told, 10, "the machines are told")
            source.fail_over(replica)
            await until(lambda: len(told) == 2, 10, "what the replica knows is told")
            assert told[-1] == addresses({"m2": "10.0.0.2"})


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
async def test_who_was_removed_stays_out_whatever_a_gateway_s_clock_shows(tmp_path: Path, ahead_s: float) -> None:
    async with opened("store", tmp_path) as source:
        assert isinstance(source, StoreSource)
        soon = ClusterMember("m9", "machine", "", "", "key", "10.0.0.9:8791", 1, int(time.time()) + 60)
        assert await source._store.admit("t", soon, 1) is JoinOutcome.ADMITTED
        await source._store.remove(soon.id)
        members = RegistryMembers(source._store, look_s=LOOK_S, clock=lambda: time.time() + ahead_s)
        async with followed(members):
            await until(lambda: members.removed_keys, 10, "the removed key is told")
            assert members.is_removed("key")
