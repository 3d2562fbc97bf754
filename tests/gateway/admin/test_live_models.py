"""Models as they are now, and the latest moves, as the operator sees them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from engine.protocol.types import Residency, TierLoad
from tests.support.admin_api import served_admin
from tests.support.served_gateway import looped
from tests.support.stub_replica import MODEL
from tests.support.waiting import until


@looped
async def test_a_models_replicas_and_load_are_summed(tmp_path: Path) -> None:
    async with served_admin(tmp_path, replicas=3) as house:
        stub, fleet = house.gateway.fleet, house.gateway.app._serving.context.fleet
        stub.move(1, Residency.MEMORY, Residency.DEVICE, 250)
        stub.move(2, Residency.DISK, ready_ms=-1, problem="it died again", quarantined=True)
        stub.replicas[0].load(waiting=2, blocks=64)
        await until(lambda: (seen := fleet.replicas()[0].load) and seen.waiting == 2)
        await until(lambda: fleet.replicas()[2].state.quarantined)
        (told,) = (await house.operate("GET", "/models")).json["result"]
        places = ("replicas", "on_device", "in_memory", "on_disk", "ready", "moving", "quarantined")
        assert [told[name] for name in places] == [3, 1, 1, 1, 1, 1, 1]
        assert (told["model"], told["ready_in_ms"], told["waiting_here"]) == (MODEL, 0, 0)
        assert told["waiting"] >= 2
        assert "it died again" in told["problems"]
        assert (told["host_tier"], told["disk_tier"], told["host_hit_ratio"]) == (None, None, None)


@looped
async def test_what_lies_below_the_pools_of_a_models_replicas_is_summed(tmp_path: Path) -> None:
    async with served_admin(tmp_path, replicas=3) as house:
        stub, fleet = house.gateway.fleet, house.gateway.app._serving.context.fleet
        names = ("computed_tokens", "lookup_tokens", "hit_tokens", "host_hit_tokens", "disk_hit_tokens")
        for counts in ((0, 0, 0, 0, 0), (500, 100, 60, 15, 5)):
            for replica, disk in zip(stub.replicas[:2], (TierLoad(700, 900), None), strict=True):
                counters = dict(zip(names, counts, strict=True))
                replica.load(blocks=64, counters=counters, tiers=(TierLoad(100, 400), disk))
            await until(lambda n=counts[0]: all(  # type: ignore[misc]
                each.load and each.load.counters.get("computed_tokens") == n for each in fleet.replicas()[:2]
            ))  # fmt: skip
        (told,) = (await house.operate("GET", "/models")).json["result"]
        assert told["host_tier"] == {"held_bytes": 200, "room_bytes": 800}
        assert told["disk_tier"] == {"held_bytes": 700, "room_bytes": 900}
        assert [told[f"{tier}hit_ratio"] for tier in ("", "host_", "disk_")] == [0.75, 0.15, 0.05]


@looped
async def test_wakes_are_a_timeline_that_can_be_narrowed(tmp_path: Path) -> None:
    async with served_admin(tmp_path, replicas=2) as house:
        stub, fleet = house.gateway.fleet, house.gateway.app._serving.context.fleet
        for residency, toward in (
            (Residency.DEVICE, Residency.MEMORY), (Residency.MEMORY, Residency.MEMORY),
            (Residency.MEMORY, Residency.DEVICE), (Residency.DEVICE, Residency.DEVICE),
        ):  # fmt: skip
            stub.move(0, residency, toward)
            await until(lambda r=residency, t=toward: (  # type: ignore[misc]
                fleet.replicas()[0].state.residency is r and fleet.replicas()[0].state.toward is t
            ))  # fmt: skip
        moves = (await house.operate("GET", "/moves")).json["result"]
        assert [(one["kind"], one["from"], one["to"]) for one in moves] == [
            ("wake", "MEMORY", "DEVICE"), ("sleep", "DEVICE", "MEMORY"),
        ]  # fmt: skip
        assert all(one["seconds"] >= 0 and one["problem"] == "" and one["model"] == MODEL for one in moves)
        later = (datetime.now(UTC) + timedelta(hours=1)).isoformat().replace("+00:00", "Z")
        for query, count in (
            ("kind=wake", 1), ("limit=1", 1), ("model=other", 0), (f"since={later}", 0), (f"model={MODEL}", 2),
        ):  # fmt: skip
            assert len((await house.operate("GET", f"/moves?{query}")).json["result"]) == count, query
        for wrong in ("kind=grow", "limit=0", "since=yesterday"):
            assert (await house.operate("GET", f"/moves?{wrong}")).status == 400
