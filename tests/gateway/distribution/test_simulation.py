"""Several hosts and one catalogue, by seeds: changes on two gateways at once, a store that is away or loses a change,
notices that come late or never, sources that cut and damage files, machines that are gone for a while. Nothing runs
beside the test: hosts take steps in a drawn order, on one clock.
"""

import asyncio
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import save_file

from gateway.catalogue.manifest import manifest_digest, read_manifest
from gateway.catalogue.mirror import CatalogueMirror, holders, mirrored_settings, read_mirror, write_mirror
from gateway.distribution.fetch import FetchError, FileSource
from gateway.distribution.keeper import KEEP_S, CatalogueKeeper, LocalFiles
from gateway.distribution.status import READY, read_status, write_status
from gateway.distribution.transfer import TransferError
from gateway.distribution.vault import ModelVault
from gateway.distribution.watch import AWAY_S, CatalogueWatch, document_digest
from gateway.settings.config import Config
from tenants.open import open_store
from tenants.records.catalogue import CatalogueFile, CatalogueModel, ClusterCatalogue, HostCatalogue, encode_catalogue
from tenants.records.cluster import ClusterAuthority, ClusterMember, JoinToken
from tenants.store.protocol import StoreUnavailable

MACHINES = 4
STEPS = 120
ROUNDS = 30  # without faults, in which all come to the same


@dataclass
class Faults:
    """What goes wrong now, as shares of what is tried."""

    cut: float = 0.0
    damaged: float = 0.0
    lost: float = 0.0
    away: bool = False


@dataclass
class FaultyStore:
    """A cluster's store that is away at times."""

    inner: Any
    faults: Faults

    def __getattr__(self, name: str) -> Any:
        async def ask(*arguments: Any) -> Any:
            if self.faults.away:
                raise StoreUnavailable("it is away")
            return await getattr(self.inner, name)(*arguments)

        return ask


@dataclass
class PeerSource:
    """Another host's files, over a bad line."""

    name: str
    host: "SimulatedHost"
    draw: random.Random
    faults: Faults

    def read(self, sha256: str, offset: int) -> Iterator[bytes]:
        path = self.host.keeper.find(sha256) if self.host.alive else None
        if path is None:
            raise TransferError(f"{self.name}: it has no such file")
        content = bytearray(path.read_bytes()[offset:])
        if content and self.draw.random() < self.faults.damaged:
            content[self.draw.randrange(len(content))] ^= 1
        if self.draw.random() < self.faults.cut:
            yield bytes(content[: len(content) // 2])
            raise TransferError(f"{self.name}: it ended half-way")
        yield bytes(content)


class SimulatedHost:
    """A host: its mirror, its files, and what it was told and has not read yet."""

    def __init__(self, world: "World", member_id: str) -> None:
        self.id = member_id
        self.name = member_id.partition("/")[2]
        self.alive = True
        self.waiting: bytes | None = None  # an answer that is on its way
        self.config = Config(state_folder=str(world.folder / self.name))
        self.config.run_folder.mkdir(parents=True)
        self.status = self.config.run_folder / "status.json"
        self.vault = ModelVault(self.config.cluster.models_folder(self.config.state))

        def sources(mirror: CatalogueMirror, model: CatalogueModel) -> Sequence[FileSource]:
            having = mirror.having.get(model.name, ())
            return [PeerSource(each, world.hosts[each], world.draw, world.faults) for each in having if each != self.id]

        self.keeper = CatalogueKeeper(
            self.vault,
            lambda: read_mirror(self.config.cluster.mirror_path(self.config.state)),
            sources,
            lambda: self.id.startswith("machine/"),
            lambda status: write_status(self.status, status),
            lambda: world.now,
        )

    @property
    def mirror(self) -> CatalogueMirror:
        return read_mirror(self.config.cluster.mirror_path(self.config.state))

    @property
    def served(self) -> set[str]:
        return {settings["name"] for settings in mirrored_settings(self.config, self.mirror)}

    def check(self) -> None:
        """Each folder of a model has exactly the files that it is named after, whatever happened on their way."""
        for place in self.vault.places():
            assert manifest_digest(read_manifest(place, lambda _: True)) == place.name
        for settings in mirrored_settings(self.config, self.mirror):
            assert Path(settings["folder"]).is_dir()


@dataclass
class World:
    """All hosts, one store, and what operators were told that it is."""

    folder: Path
    draw: random.Random
    now: float = 1_000_000.0
    faults: Faults = field(default_factory=Faults)
    hosts: dict[str, SimulatedHost] = field(default_factory=dict)
    models: dict[str, CatalogueModel] = field(default_factory=dict)
    before: ClusterCatalogue = field(default_factory=ClusterCatalogue)
    revisions: set[str] = field(default_factory=set)
    watches: list[CatalogueWatch] = field(default_factory=list)
    made: int = 0

    async def build(self) -> None:
        self.store = open_store(f"sqlite:{self.folder / 'hearth.db'}").cluster
        await self.store.found(ClusterAuthority("test", b"", b""))
        await self.store.add_token(JoinToken("t", b"", "", "", "", "", 99, 2**40))
        names = [*(f"machine/m{number}" for number in range(MACHINES)), "gateway/gw1", "gateway/gw2"]
        for each in names:
            role, _, name = each.partition("/")
            await self.store.admit("t", ClusterMember(name, role, "", "", each, f"{name}:1", 0, 2**40), 0)
            self.hosts[each] = SimulatedHost(self, each)
        members = await self.store.members()
        for each in names[MACHINES:]:
            host = self.hosts[each]
            store = FaultyStore(self.store, self.faults)
            self.watches.append(
                CatalogueWatch(
                    store,
                    lambda: members,
                    each,
                    host.config.cluster.mirror_path(host.config.state),
                    host.status,
                    lambda: self.now,
                )  # type: ignore[arg-type]
            )

    @property
    def machines(self) -> list[SimulatedHost]:
        return [host for host in self.hosts.values() if host.id.startswith("machine/")]

    async def change(self) -> None:
        """An operator on one of the gateways' hosts changes one model; another may have been quicker."""
        seen = await self.store.catalogue() or ClusterCatalogue()
        changes = [self._changed(seen) for _ in range(self.draw.choice([1, 1, 2]))]
        taken = [await self.store.put_catalogue(change, seen.revision) for change in changes]
        assert taken == [True, *[False] * (len(changes) - 1)], "of changes to one revision one is taken"
        assert changes[0].revision not in self.revisions
        self.revisions.add(changes[0].revision)
        self.before = seen
        self.models = {model.name: model for model in changes[0].models}

    def _changed(self, seen: ClusterCatalogue) -> ClusterCatalogue:
        models = {model.name: model for model in seen.models}
        kind = self.draw.choice(["add", "add", "set", "remove"]) if models else "add"
        if kind == "add" and len(models) < 5:
            model = self._new_model()
            models[model.name] = model
        elif kind == "remove":
            del models[self.draw.choice(sorted(models))]
        else:
            name = self.draw.choice(sorted(models))
            settings = {"machines": self.draw.randrange(3), "priority": 1.0 + self.draw.random()}
            models[name] = structs.replace(models[name], settings=settings)
        revision = f"{seen.number + 1}-{secrets.token_hex(4)}"
        return ClusterCatalogue(revision, sorted(models.values(), key=lambda model: model.name))

    def _new_model(self) -> CatalogueModel:
        """A model whose folder is on a gateway's host."""
        self.made += 1
        name, origin = f"model{self.made}", self.hosts[self.draw.choice(["gateway/gw1", "gateway/gw2"])]
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(msgspec.json.encode({"number": self.made % 3}).decode())
        weights = np.full(64, self.made % 2, np.float32)  # some models have a file in common
        save_file({"weight": weights}, folder / "model.safetensors")
        files = read_manifest(folder, lambda _: True)
        origin.vault.link_folder(files, folder)
        return CatalogueModel(name, {"machines": self.draw.randrange(3)}, files)

    async def lose_last_change(self) -> None:
        """The store fails over to a replica that lacks the last change."""
        inner: Any = self.store
        inner._replace("catalogue", "", encode_catalogue(self.before))
        self.models = {model.name: model for model in self.before.models}

    async def ask(self, host: SimulatedHost) -> None:
        """A machine asks one of the gateways for news; the answer may be lost, or read later."""
        if host.waiting is not None:
            document, host.waiting = host.waiting, None
            write_mirror(
                host.config.cluster.mirror_path(host.config.state), msgspec.json.decode(document, type=CatalogueMirror)
            )
            return
        known = (
            host.config.cluster.mirror_path(host.config.state).read_bytes()
            if host.config.cluster.mirror_path(host.config.state).exists()
            else b""
        )
        watch = self.draw.choice(self.watches)
        try:
            answer = await watch.answer(host.id, read_status(host.status), document_digest(known))
        except StoreUnavailable:
            return
        if answer and self.draw.random() >= self.faults.lost:
            host.waiting = answer

    async def step(self, host: SimulatedHost) -> None:
        if host.alive and host.id.startswith("machine/"):
            await self.ask(host)
        if host.alive:
            host.keeper.step()
        host.check()

    def hold(self, model: CatalogueModel) -> set[str]:
        return set(holders(self.hosts["gateway/gw1"].mirror, model))


async def disturbed(world: World) -> None:
    draw = world.draw
    for _ in range(STEPS):
        world.now += draw.choice([0.1, 1.0, 5.0, 30.0])
        match draw.randrange(16):
            case 0 | 1:
                await world.change()
            case 2:
                world.faults.away = not world.faults.away
            case 3:
                host = draw.choice(world.machines)
                host.alive = not host.alive
            case 4 if draw.random() < 0.3:
                await world.lose_last_change()
            case 5 | 6 | 7:
                await draw.choice(world.watches).look()
            case _:
                await world.step(draw.choice(list(world.hosts.values())))


async def calm(world: World, rounds: int = ROUNDS) -> None:
    """No faults any more, all are there."""
    world.faults.cut = world.faults.damaged = world.faults.lost = 0.0
    world.faults.away = False
    for host in world.hosts.values():
        host.alive = True
    for _ in range(rounds):
        world.now += 10.0
        for watch in world.watches:
            await watch.look()
        for host in world.hosts.values():
            await world.step(host)


@pytest.mark.parametrize("seed", range(4))
def test_all_hosts_come_to_the_store_s_catalogue_with_files_that_have_their_sums(seed: int, tmp_path: Path) -> None:
    async def simulate() -> None:
        world = World(tmp_path, random.Random(seed), faults=Faults(cut=0.2, damaged=0.2, lost=0.3))
        await world.build()
        await disturbed(world)
        await calm(world)
        stored = await world.store.catalogue() or ClusterCatalogue()
        assert {model.name: model for model in stored.models} == world.models
        for host in world.hosts.values():
            assert host.mirror.catalogue == stored, (seed, host.id)
        for model in stored.models:
            serving = {host.name for host in world.machines if model.name in host.served}
            copies = model.settings.get("machines") or MACHINES
            assert serving == world.hold(model), (seed, model.name)
            assert len(serving) == min(copies, MACHINES), (seed, model.name)
            for gateway in ("gateway/gw1", "gateway/gw2"):
                assert model.name in world.hosts[gateway].served, "a gateway has what it reads of a model"
        for host in world.hosts.values():
            assert host.served <= world.models.keys(), (seed, host.id)
        world.now += KEEP_S
        await calm(world, 1)
        for host in world.machines:
            assert {place.name for place in host.vault.places()} == {
                manifest_digest(world.models[name].files) for name in host.served
            }, "what nobody asks for is removed"
            assert list(host.vault.incoming.iterdir()) == []

    asyncio.run(simulate())


def test_a_machine_that_stays_away_is_replaced_and_takes_its_place_again(tmp_path: Path) -> None:
    async def simulate() -> None:
        world = World(tmp_path, random.Random(0))
        await world.build()
        model = structs.replace(world._new_model(), settings={"machines": 1})
        await world.store.put_catalogue(ClusterCatalogue("1-a", [model]), "")
        world.models = {model.name: model}
        await calm(world)
        (first,) = [host for host in world.machines if model.name in host.served]
        first.alive = False
        for _ in range(int(AWAY_S) // 5):
            world.now += 10.0
            for watch in world.watches:
                await watch.look()
            for host in world.hosts.values():
                await world.step(host)
        (second,) = [host for host in world.machines if model.name in host.served and host.alive]
        assert second is not first
        await calm(world)
        assert [host for host in world.machines if model.name in host.served] == [first]

    asyncio.run(simulate())


def test_a_host_that_takes_files_without_their_sums_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the simulation itself: it finds a keeper that publishes what a source gave."""

    def unsummed(self: object, file: CatalogueFile, sources: Sequence[FileSource]) -> Path:
        path = self._folder / file.sha256  # type: ignore[attr-defined]
        others = [each for each in sources if not isinstance(each, LocalFiles)]
        if not others:
            raise FetchError("no host has it")
        source = others[0]
        path.write_bytes(b"".join(source.read(file.sha256, 0)))
        return path

    monkeypatch.setattr("gateway.distribution.fetch.FileFetcher.fetch", unsummed)

    async def simulate() -> None:
        world = World(tmp_path, random.Random(0), faults=Faults(damaged=1.0))
        await world.build()
        await world.store.put_catalogue(ClusterCatalogue("1-a", [world._new_model()]), "")
        for _ in range(20):
            world.now += 10.0
            for watch in world.watches:
                await watch.look()
            for host in world.hosts.values():
                await world.step(host)

    with pytest.raises(AssertionError):
        asyncio.run(simulate())


def test_reports_of_progress_say_how_much_is_there(tmp_path: Path) -> None:
    async def simulate() -> None:
        world = World(tmp_path, random.Random(0))
        await world.build()
        model = structs.replace(world._new_model(), settings={})
        await world.store.put_catalogue(ClusterCatalogue("1-a", [model]), "")
        await calm(world, 8)
        total = sum(file.bytes for file in model.files)
        reports: Sequence[HostCatalogue] = await world.store.catalogue_reports()
        machines = [report for report in reports if report.member_id.startswith("machine/")]
        assert len(machines) == MACHINES
        for report in machines:
            (progress,) = report.models
            assert (progress.state, progress.bytes, progress.bytes_total) == (READY, total, total)

    asyncio.run(simulate())
