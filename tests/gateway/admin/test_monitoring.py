"""What the operator sees of alerts, the store and the tenants that use the most, in both stores where they matter."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from engine.protocol.types import Residency
from gateway.catalogue.catalogue import BUILT_IN
from gateway.observability.alert_conditions import CONDITIONS, UNSEEN
from tenants.records.grants import Permission
from tenants.records.limits import Limits
from tenants.store.protocol import StoreUnavailable
from tests.support.admin_api import House, served_admin
from tests.support.served_gateway import looped
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

LIVE = ("/alerts", "/store", "/top", "/models", "/moves", "/usage/accounts")


@looped
async def test_an_alert_is_pending_then_fires_and_says_what_to_do(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        watch = house.gateway.app._serving.context.metrics.alerts
        watch.look()
        told = (await house.operate("GET", "/alerts")).json["result"]
        assert {item["labels"].get("model") for item in told["alerts"]} <= {BUILT_IN, None}, "which nothing serves here"
        assert all(item["state"] == "pending" for item in told["alerts"])
        assert told["rules"] == len(CONDITIONS)
        assert {item["name"] for item in told["unseen"]} == UNSEEN.keys()
        assert all(item["why"] for item in told["unseen"])
        house.gateway.fleet.move(0, Residency.DISK, ready_ms=-1, problem="it died")
        fleet = house.gateway.app._serving.context.fleet
        await until(lambda: not fleet.serves(MODEL))
        watch.look()
        pending, *_ = (await house.operate("GET", "/alerts")).json["result"]["alerts"]
        assert (pending["name"], pending["state"], pending["for_seconds"]) == ("HearthGatewayNotReady", "pending", 120)
        house.gateway.clock.offset_s += 121
        watch.look()
        told = (await house.operate("GET", "/alerts")).json["result"]["alerts"]
        (nothing,) = [item for item in told if item["labels"].get("model") == MODEL and item["state"] == "firing"]
        assert (nothing["name"], nothing["severity"]) == ("HearthNoReplicaReady", "critical")
        assert nothing["summary"] == f"Nothing serves {MODEL}"
        assert "hearth doctor" in nothing["description"]
        since = datetime.fromisoformat(nothing["since"])
        assert 100 < (datetime.now(UTC).timestamp() + house.gateway.clock.offset_s) - since.timestamp() < 200


@looped
async def test_the_stores_health_is_told_also_while_it_is_away(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        told = (await house.operate("GET", "/store")).json["result"]
        assert told["kind"] == store_url.partition(":")[0]
        assert (told["answers"], told["away"], told["problem"], told["unsettled"]) == (True, False, "", 0)
        assert 0 < told["answer_ms"] < 60_000
        context = house.gateway.app._serving.context
        context.store_health.mark_down(StoreUnavailable("gone"))
        store = house.gateway.app._tenancy.store

        async def fail() -> None:
            raise StoreUnavailable("the disk is full")

        store.ping = fail  # type: ignore[method-assign]
        told = (await house.operate("GET", "/store")).json["result"]
        assert (told["answers"], told["away"], told["outages"]) == (False, True, 1)
        assert told["problem"] == "the disk is full"


async def top(house: House, query: str = "") -> list[tuple[str, int, int, int]]:
    accounts = (await house.operate("GET", f"/top{query}")).json["result"]["accounts"]
    return [(one["name"], one["requests"], one["refused"], one["completion_tokens"]) for one in accounts]


@looped
async def test_who_uses_the_most_now_comes_first_by_name(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url, limits=Limits(requests_per_minute=2)) as house:
        bobs = await house.token(Permission.INFERENCE, account_id=house.bob_id)
        for _ in range(3):
            await house.gateway.run(prompt="hello", max_tokens=3)
        await house.gateway.call(f"/ai/run/{MODEL}", {"prompt": "hi", "max_tokens": 9}, authorization=f"Bearer {bobs}")
        await house.gateway.settled()
        assert await top(house, "?by=requests") == [("test", 3, 1, 6), ("bob", 1, 0, 9)]
        assert (await top(house, "?by=refused&limit=1")) == [("test", 3, 1, 6)]
        house.gateway.behaviour.step_s = 0.05
        running = asyncio.create_task(house.gateway.call(
            f"/ai/run/{MODEL}", {"prompt": "a secret word", "max_tokens": 60}, authorization=f"Bearer {bobs}"
        ))  # fmt: skip
        await until(lambda: house.gateway.fleet.running)
        answer = await house.operate("GET", "/top?by=running")
        first = answer.json["result"]["accounts"][0]
        assert (first["account"], first["name"], first["plan"], first["running"]) == (house.bob_id, "bob", "default", 1)
        assert b"secret" not in answer.content
        assert (await running).status == 200
        for wrong in ("?by=colour", "?seconds=0", "?seconds=301", "?limit=101", "?page=1"):
            assert (await house.operate("GET", f"/top{wrong}")).status == 400, wrong


@looped
async def test_tenants_are_told_nothing_of_it(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        for path in LIVE:
            assert (await house.ask("GET", f"/client/v4/operator{path}")).status == 404
