"""What the operator sees of machines, their devices and where each model is."""

import asyncio
import io
import os
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from engine.protocol import frames
from engine.protocol.types import Residency
from gateway.admin.machines import MachinesItem
from gateway.commands.terminal.top_view import MoveRates, TopView
from tenants.records.grants import Grant, Permission
from tests.support.admin_api import served_admin
from tests.support.served_gateway import looped, served
from tests.support.stub_replica import MODEL, StubFleet
from tests.support.waiting import until


@looped
async def test_where_each_model_is_and_what_it_holds_and_does(tmp_path: Path) -> None:
    async with served_admin(tmp_path, replicas=2) as house:
        stub, fleet = house.gateway.fleet, house.gateway.app._serving.context.fleet
        placed = frames.PlacementStatus(
            Residency.MEMORY,
            device_bytes=11,
            memory_bytes=12,
            weights_bytes=13,
            kv_bytes=14,
            kept_bytes=15,
        )
        stub.move(0, Residency.MEMORY, Residency.DEVICE, 250, device=0, memory=placed)
        stub.move(1, Residency.DISK, ready_ms=-1, problem="it died again", quarantined=True)
        counters = {"computed_tokens": 0, "lookup_tokens": 0, "hit_tokens": 0}
        stub.replicas[0].load(waiting=2, blocks=64, counters=counters)
        await until(lambda: (seen := fleet.replicas()[0].load) and seen.waiting == 2)
        later = {"computed_tokens": 500, "lookup_tokens": 100, "hit_tokens": 60, "host_hit_tokens": 15}
        later |= {"disk_hit_tokens": 5}
        tiers = frames.TierLoad(300, 400), frames.TierLoad(0, 0)
        stub.replicas[0].load(waiting=2, blocks=64, counters=later, tiers=tiers)
        await until(lambda: fleet.replicas()[0].recent_load.hit_ratio == 0.75)
        (machine,) = (await house.operate("GET", "/machines")).json["result"]["machines"]
        first, second = machine.pop("replicas")
        assert machine == {
            "name": "stub",
            "address": stub.address,
            "problem": "",
            "draining": False,
            "devices": [{"name": "cpu", "total_bytes": 800, "budget_bytes": 600, "held_bytes": 500}],
            "memory_bytes": 70,
            "memory_budget_bytes": 90,
            "moves": {"wake": 3, "sleep": 2, "wake_failed": 1},
        }
        load = first.pop("load")
        assert load.pop("tokens_per_s") > 0
        assert load == {
            **{"running": 0, "waiting": 2, "waiting_tokens": 0, "blocks": 64, "free_blocks": 100, "cached_blocks": 0},
            **{"shared_blocks": 0, "background": 0, "draining": False, "hit_ratio": 0.75, "steps": 0},
            "host_hit_ratio": 0.15,
            "disk_hit_ratio": 0.05,
            "ranks": [],
            "host_tier": {"held_bytes": 300, "room_bytes": 400},
            "disk_tier": {"held_bytes": 0, "room_bytes": 0},
        }
        assert first == {
            **{"model": MODEL, "residency": "MEMORY", "toward": "DEVICE", "ready_ms": 250},
            **{"device": 0, "devices": [0], "role": "BOTH"},
            **{"problem": "", "quarantined": False, "waiting_here": 0, "weights_bytes": 13},
            **{"device_bytes": 11, "kv_bytes": 14, "kept_bytes": 15, "memory_bytes": 12},
        }
        assert (second["residency"], second["ready_ms"], second["device"]) == ("DISK", -1, None)
        assert (second["problem"], second["quarantined"]) == ("it died again", True)


@pytest.mark.parametrize("odd", ["revision", "digest"], ids=["weights", "tokenizer, template or layout"])
@looped
async def test_top_shows_which_replica_computes_with_something_else(odd: str, tmp_path: Path) -> None:
    async with served_admin(tmp_path, replicas=3) as house:
        stub, fleet = house.gateway.fleet, house.gateway.app._serving.context.fleet
        for index, replica in enumerate(stub.replicas):
            setattr(replica, odd, "other" if index == 1 else "as most")
            replica.die()
        await until(lambda: [view.differs for view in fleet.replicas()] == [False, True, False])
        answer = await house.operate("GET", "/machines")
    document = msgspec.convert(answer.json["result"], MachinesItem)
    moves, written = MoveRates(), io.StringIO()
    moves.take(0.0, document.machines)
    Console(width=200, color_system=None, file=written).print(TopView(document, moves))
    (line,) = [line for line in written.getvalue().splitlines() if "not those of most" in line]
    assert line.startswith(f"{MODEL}: its weights, tokenizer, template, KV layout or GPUs are not those")


@looped
async def test_a_machine_that_is_gone_is_told_with_its_last_word_and_why(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        stub, fleet = house.gateway.fleet, house.gateway.app._serving.context.fleet
        stub.move(0, Residency.MEMORY, ready_ms=100)
        await until(lambda: not fleet.serves(MODEL))
        waiting = asyncio.create_task(house.gateway.run(prompt="a secret word"))
        await until(lambda: fleet.waiting(MODEL) == 1)
        os.unlink(stub.address.removeprefix("unix:"))
        for machine in list(stub.machines):
            machine.close()
        await until(lambda: bool(fleet.problems()))
        answer = await house.operate("GET", "/machines")
        (told,) = answer.json["result"]["machines"]
        assert "machine" in told["problem"]
        assert told["replicas"][0]["waiting_here"] == 1
        assert b"secret" not in answer.content
        waiting.cancel()


@looped
async def test_it_is_hidden_from_tenants(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        answer = await house.ask("GET", "/client/v4/operator/machines")
        assert answer.status == 404


@looped
async def test_replicas_and_requests_without_a_word_of_text(tmp_path: Path) -> None:
    async with served_admin(tmp_path, replicas=2) as house:
        house.gateway.behaviour.step_s = 0.05
        running = asyncio.create_task(house.gateway.run(prompt="a secret word", max_tokens=60))
        await until(lambda: house.gateway.fleet.running)
        answer = await house.operate("GET", "/fleet")
        seen = answer.json["result"]
        assert (seen["open_requests"], seen["store_away"], seen["machines"]) == (1, False, {})
        assert [(one["model"], one["ready"], one["residency"]) for one in seen["replicas"]] == [
            (MODEL, True, "DEVICE")
        ] * 2
        assert b"secret" not in answer.content
        assert house.ann_id.encode() not in answer.content
        assert (await running).status == 200


@looped
async def test_one_of_two_machines_of_one_name_is_drained_by_its_address_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, other = StubFleet(tmp_path), StubFleet(tmp_path / "other")
    async with one.serving(), other.serving(), served(tmp_path, machines=[one.address, other.address]) as gateway:
        _, token = await gateway.accounts.mint(gateway.account_id, "operator", grant=Grant((Permission.OPERATOR,)))
        fleet = gateway.app._serving.context.fleet
        await until(lambda: len(fleet.replicas()) == 2)
        path = "/client/v4/operator/machines/stub"
        answer = await gateway.call(path, {"drained": True}, "PATCH", authorization=f"Bearer {token}")
        assert answer.status == 409
        assert one.address in answer.message
        assert other.address in answer.message
