"""What a gateway reports to commands on its host."""

import asyncio
from pathlib import Path

import pytest

from gateway.catalogue.report import report_unlike, unlike_replicas
from gateway.cluster.fleet import ReplicaFleet, ReplicaView
from gateway.settings.config import load_config
from tests.support.served_gateway import looped, served
from tests.support.waiting import until


def test_unlike_replicas_are_reported_for_as_long_as_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.catalogue.report._LOOK_S", 0.01)
    config, unlike = load_config(state_folder=tmp_path), [("m2", "notes")]
    config.run_folder.mkdir(parents=True)

    async def follow() -> None:
        running = asyncio.create_task(report_unlike(config, lambda: list(unlike)))
        await until(lambda: unlike_replicas(config) == [("m2", "notes")])
        unlike.clear()
        await until(lambda: unlike_replicas(config) == [])
        unlike.append(("m3", "notes"))
        await until(lambda: unlike_replicas(config) == [("m3", "notes")])
        running.cancel()
        await asyncio.wait([running])
        assert list(config.run_folder.iterdir()) == []

    asyncio.run(follow())


def test_a_gateway_reports_those_of_its_own_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    views = ReplicaFleet.replicas

    def all_unlike(self: ReplicaFleet) -> list[ReplicaView]:
        found = list(views(self))
        for view in found:
            object.__setattr__(view, "differs", True)
        return found

    monkeypatch.setattr(ReplicaFleet, "replicas", all_unlike)

    @looped
    async def serve() -> None:
        async with served(tmp_path) as gateway:
            config = gateway.app._serving.hosts.config
            config.run_folder.mkdir(parents=True, exist_ok=True)
            (pair,) = await until(lambda: unlike_replicas(config))
            assert pair[0].startswith("unix:")

    serve()
