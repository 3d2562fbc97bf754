"""A gateway's watch on the catalogue, on a store that is away, empty, or tells of silent machines."""

import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from gateway.catalogue.mirror import CatalogueMirror, read_mirror
from gateway.distribution.status import FAILED, READY
from gateway.distribution.watch import AWAY_S, SAY_AGAIN_S, CatalogueWatch, document_digest
from tenants.open import open_store
from tenants.records.catalogue import CatalogueFile, CatalogueModel, ClusterCatalogue, HostCatalogue, ModelProgress
from tenants.records.cluster import ClusterAuthority, ClusterMember, JoinToken
from tenants.store.protocol import ClusterStore, StoreUnavailable

pytestmark = pytest.mark.anyio
MODEL = CatalogueModel("notes", {}, [CatalogueFile("config.json", 2, "ab" * 32)])
NOTES = ClusterCatalogue("1-a", [MODEL])


@dataclass
class AwayStore:
    """A cluster's store; while `away` it answers nothing. `asked` counts what was stored of reports."""

    inner: ClusterStore
    away: bool = False
    empty: bool = False
    reports: int = 0

    def __getattr__(self, name: str) -> Any:
        async def ask(*arguments: Any) -> Any:
            if self.away:
                raise StoreUnavailable("it is away")
            if self.empty:
                return {"catalogue": ClusterCatalogue(), "authority": None}.get(name, [])
            self.reports += name == "report_catalogue"
            return await getattr(self.inner, name)(*arguments)

        return ask


@dataclass
class Watched:
    """A watch with a clock of its own."""

    store: AwayStore
    folder: Path
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.members = [
            ClusterMember(name, role, "", "", name, f"{name}:1", 0, 2**40)
            for role, name in (("gateway", "gw1"), ("machine", "m1"), ("machine", "m2"))
        ]
        self.watch = self.started()

    def started(self) -> CatalogueWatch:
        """A gateway that starts anew."""
        mirror, status = self.folder / "catalogue.json", self.folder / "status.json"
        return CatalogueWatch(self.store, lambda: self.members, "gateway/gw1", mirror, status, lambda: self.now)  # type: ignore[arg-type]

    async def told(self, member_id: str = "machine/m1") -> CatalogueMirror | None:
        document = await self.watch.answer(member_id, None, "")
        return msgspec.json.decode(document, type=CatalogueMirror) if document else None

    async def say(self, member_id: str, state: str, problem: str = "") -> None:
        report = HostCatalogue("machine/another", "1-a", [ModelProgress("notes", state, 2, 2, problem)])
        await self.watch.answer(member_id, report, "")

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        await self.watch.look()


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    opened = open_store(f"sqlite:{tmp_path / 'hearth.db'}")
    store = opened.cluster
    await store.found(ClusterAuthority("test", b"", b""))
    await store.add_token(JoinToken("t", b"", "", "", "", "", 9, 2**40))
    made = Watched(AwayStore(store), tmp_path)
    for member in made.members:
        await store.admit("t", member, 0)
    yield made
    await opened.close()


async def test_a_member_is_told_the_catalogue_once_and_anew_as_it_changes(watched: Watched) -> None:
    assert await watched.told() is None, "there is none"
    await watched.store.inner.put_catalogue(NOTES, "")
    await watched.watch.look()
    first = await watched.watch.answer("machine/m1", None, "")
    mirror = msgspec.json.decode(first, type=CatalogueMirror)
    assert (mirror.own, mirror.catalogue, mirror.machines) == ("machine/m1", NOTES, ["m1", "m2"])
    assert mirror.peers == {"gateway/gw1": "gw1:1", "machine/m1": "m1:1", "machine/m2": "m2:1"}
    assert read_mirror(watched.folder / "catalogue.json") == structs.replace(mirror, own="gateway/gw1")
    assert await watched.watch.answer("machine/m1", None, document_digest(first)) == b""
    await watched.store.inner.put_catalogue(ClusterCatalogue("2-b"), "1-a")
    await watched.watch.look()
    second = await watched.told()
    assert second is not None
    assert second.catalogue == ClusterCatalogue("2-b")


async def test_while_the_store_is_away_the_last_catalogue_stays_and_machines_still_get_it(watched: Watched) -> None:
    await watched.store.inner.put_catalogue(NOTES, "")
    await watched.watch.look()
    watched.store.away = True
    await watched.pass_time(10)
    await watched.say("machine/m1", READY)
    told = await watched.told()
    assert told is not None
    assert told.catalogue == NOTES
    assert read_mirror(watched.folder / "catalogue.json").catalogue == NOTES
    watched.watch = watched.started()
    await watched.watch.look()
    assert await watched.told() is None, "a gateway that starts now knows nothing to tell"
    assert read_mirror(watched.folder / "catalogue.json").catalogue == NOTES, "and its host keeps what it had"


async def test_an_emptied_store_counts_as_away_and_a_lost_change_does_not(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    await watched.store.inner.put_catalogue(NOTES, "")
    await watched.store.inner.put_catalogue(ClusterCatalogue("2-b", [MODEL]), "1-a")
    await watched.watch.look()
    watched.store.empty = True
    await watched.pass_time(1)
    told = await watched.told()
    assert told is not None
    assert told.catalogue.revision == "2-b"
    assert "emptied" in caplog.text
    watched.store.empty = False
    await watched.store.inner.put_catalogue(NOTES, "2-b")  # as after a failover
    await watched.pass_time(1)
    told = await watched.told()
    assert told is not None
    assert told.catalogue == NOTES
    assert "has lost changes of the catalogue: it is at 1-a, and was at 2-b" in caplog.text


async def test_a_report_is_stored_under_the_name_of_who_says_it_as_it_changes_and_once_in_a_while(
    watched: Watched,
) -> None:
    await watched.store.inner.put_catalogue(NOTES, "")
    await watched.watch.look()
    await watched.say("machine/m1", READY)
    await watched.say("machine/m1", READY)
    assert watched.store.reports == 1
    (report,) = await watched.store.inner.catalogue_reports()
    assert report.member_id == "machine/m1", "and not the name that the report says"
    await watched.pass_time(SAY_AGAIN_S)
    await watched.say("machine/m1", READY)
    assert watched.store.reports == 2
    told = await watched.told()
    assert told is not None
    assert told.having == {"notes": ["machine/m1"]}


async def test_a_machine_that_failed_or_is_silent_is_named_and_a_gateway_of_its_name_is_not(watched: Watched) -> None:
    await watched.store.inner.put_catalogue(NOTES, "")
    await watched.watch.look()
    await watched.say("machine/m1", FAILED, "the disk is full")
    await watched.say("machine/m2", READY)
    await watched.say("gateway/gw1", FAILED, "the disk is full")
    await watched.pass_time(2)
    told = await watched.told()
    assert told is not None
    assert (told.failed, told.having) == ({"notes": ["m1"]}, {"notes": ["machine/m2"]})
    await watched.pass_time(AWAY_S + 1)
    told = await watched.told()
    assert told is not None
    assert told.failed == {"notes": ["m1", "m2"]}
    watched.store.away = True
    await watched.pass_time(100)
    watched.store.away = False
    await watched.pass_time(1)
    told = await watched.told()
    assert told is not None
    assert told.failed == {"notes": ["m1"]}, "a gateway that was without the store forgives first"


class ReadModels(list[ModelProgress]):
    """A report's models; `threads` are those that read it, one entry each time."""

    threads: list[int]

    def __iter__(self) -> Iterator[ModelProgress]:
        self.threads.append(threading.get_ident())
        return super().__iter__()


async def test_a_report_is_read_once_a_look_beside_the_loop_however_many_models_and_members_there_are(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [structs.replace(MODEL, name=f"notes-{number}") for number in range(20)]
    read = ReadModels(ModelProgress(model.name, READY, 2, 2) for model in models)
    read.threads = []

    async def catalogue_reports() -> list[HostCatalogue]:
        return [HostCatalogue("machine/m1", "1-a", read, said_at=1000)]

    monkeypatch.setattr(watched.store, "catalogue_reports", catalogue_reports, raising=False)
    await watched.store.inner.put_catalogue(ClusterCatalogue("1-a", models), "")
    await watched.watch.look()
    for member in watched.members:
        told = await watched.told(member.id)
        assert told is not None
        assert told.having == {model.name: ["machine/m1"] for model in models}
    assert len(read.threads) == 1, "it is read for each model, or for each member"
    assert threading.get_ident() not in read.threads
