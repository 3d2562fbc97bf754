"""Calls for a model that sleeps: held with their stream open, answered when it wakes, refused where they cannot be."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine.protocol import frames
from engine.protocol.types import RejectReason, Residency
from gateway.cluster import connection
from gateway.inference import replica_wait
from gateway.settings.config import ModelEntryConfig
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

DISK, MEMORY, DEVICE = Residency
VECTORS = "@cf/test/vectors"


async def put_to_sleep(gateway: Served, index: int = 0, **told: Any) -> None:
    gateway.fleet.move(index, MEMORY, **{"ready_ms": 400, **told})
    await until(lambda: not gateway.app._serving.context.fleet.serves(gateway.fleet.replicas[index].model))


def wakes_after(gateway: Served, seconds: float, index: int = 0) -> None:
    """The machine moves the replica to the device once it is asked, and takes so long."""

    def woken(wake: frames.ModelDemand) -> None:
        if wake.requests and gateway.fleet.replicas[index].state.toward is not DEVICE:
            gateway.fleet.move(index, MEMORY, toward=DEVICE, ready_ms=int(1000 * seconds))
            asyncio.get_running_loop().call_later(seconds, gateway.fleet.move, index, DEVICE)

    gateway.fleet.woken = woken


async def plan(gateway: Served, **terms: Any) -> str:
    """The text of a token of an account of its own, whose plan says so."""
    account = await gateway.accounts.create(f"of {terms}")
    named = structs.replace(account.plan, name="-".join(terms), revision=1, **terms)
    assert await gateway.app._tenancy.store.accounts.put_plan(named)
    assert await gateway.app._tenancy.store.accounts.update(
        structs.replace(account, plan=named, revision=account.revision + 1)
    )
    return (await gateway.accounts.mint(account.id, "of a plan"))[1]


@looped
async def test_a_streams_head_and_pings_leave_in_time_while_its_model_wakes(tmp_path: Path) -> None:
    async with served(tmp_path, first_byte_s=0.4, ping_s=0.4) as gateway:
        await put_to_sleep(gateway)
        wakes_after(gateway, 3.0)
        client = await gateway.client()
        began = time.monotonic()
        await client.post(gateway.run_path, {"prompt": "hello", "max_tokens": 3, "stream": True}, gateway.headers)
        assert await client.head() == 200
        assert gateway.fleet.replicas[0].state.residency is MEMORY, "the head leaves while its model sleeps"
        arrived = [(event, time.monotonic() - began) async for event in client.events()]
        pings = [at for event, at in arrived if event == ": ping"]
        assert 2 <= len(pings) <= 9
        assert max(later - earlier for earlier, later in zip([0.0, *pings], [*pings, 3.0], strict=True)) < 2.0
        texts = [event for event, _ in arrived if isinstance(event, dict)]
        assert "errors" not in str(texts)
        assert arrived[-1][0] == "[DONE]"
        await gateway.settled()
        (record,) = await gateway.records()
        assert (record.outcome, record.completion_tokens) == ("done", 3)


@looped
async def test_calls_of_two_tenants_are_held_with_their_quota_and_one_wake_serves_all(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await put_to_sleep(gateway)
        heavy = await plan(gateway, weight=4.0)
        calls = [asyncio.create_task(gateway.run(prompt="hello", max_tokens=2)) for _ in range(5)]
        await until(lambda: gateway.app._serving.context.fleet.waiting(MODEL) == 5)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        calls += [
            asyncio.create_task(gateway.call("/v1/chat/completions", body, authorization=f"Bearer {heavy}"))
            for _ in range(5)
        ]
        await until(lambda: gateway.app._serving.context.fleet.waiting(MODEL) == 10)
        assert gateway.quota.open == 10
        await until(lambda: gateway.fleet.wakes[-1].requests == 10)
        assert gateway.fleet.wakes[-1].weight == 4.0
        assert 29_000 < gateway.fleet.wakes[-1].patience_ms <= 30_000
        gateway.fleet.move(0, MEMORY, toward=DEVICE)
        await until(lambda: len(gateway.fleet.submits) == 10)
        assert [submit.terms.weight for submit in gateway.fleet.submits] == [4.0] * 5 + [1.0] * 5
        gateway.fleet.move(0, DEVICE)
        assert [answer.status for answer in await asyncio.gather(*calls)] == [200] * 10
        await until(lambda: gateway.fleet.wakes[-1].requests == 0)


@looped
async def test_a_caller_who_leaves_counts_no_longer_at_once(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await put_to_sleep(gateway)
        client = await gateway.client()
        await client.post(gateway.run_path, {"prompt": "hello", "max_tokens": 3}, gateway.headers)
        await until(lambda: bool(gateway.fleet.wakes) and gateway.fleet.wakes[-1].requests == 1)
        client.leave()
        await until(lambda: gateway.fleet.wakes[-1].requests == 0, 10.0)  # it would have waited for 30 s
        await gateway.settled()
        (record,) = await gateway.records()
        assert (record.outcome, record.micro_neurons) == ("client_gone", 0)


@looped
async def test_past_the_least_of_all_deadlines_it_is_503_with_the_expected_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_wait, "ANSWER_MARGIN_S", 0.4)  # as much as a busy machine may need
    async with served(tmp_path, wait_s=1.5) as gateway:
        await put_to_sleep(gateway, ready_ms=6_500)
        hasty = {"authorization": f"Bearer {await plan(gateway, wait_s=0.2)}"}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        order: list[str] = []

        async def call(name: str, wait_s: float, headers: dict[str, str]) -> None:
            began = time.monotonic()
            answer = await gateway.call("/v1/chat/completions", body, **headers)
            order.append(name)
            assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, 3040, "7")
            assert answer.json["error"]["code"] == "loading"
            assert "is being loaded" in answer.message
            assert time.monotonic() - began >= wait_s

        await asyncio.gather(
            call("the gateway's", 1.5, {}),
            call("the call's", 0.5, {"cf_aig_request_timeout": "1000"}),
            call("the plan's", 0.2, hasty),
        )
        assert order == ["the plan's", "the call's", "the gateway's"]
        await gateway.settled()
        assert all(record.micro_neurons == 0 for record in await gateway.records())


@looped
async def test_whose_time_ends_in_a_replica_that_wakes_is_told_when_to_come_back(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await put_to_sleep(gateway, toward=DEVICE, ready_ms=6_500)
        gateway.behaviour.reject = RejectReason.BUSY
        answer = await gateway.run(prompt="hello")
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, 3040, "7")
        assert "is being loaded" in answer.message
        await gateway.call(gateway.run_path, {"prompt": "hello"}, cf_aig_request_timeout="300")
        assert gateway.fleet.submits[-1].deadline_ms <= 280, "a moment is left for the answer"
        gateway.fleet.move(0, DEVICE)
        await until(lambda: gateway.app._serving.context.fleet.serves(MODEL))
        assert (await gateway.run(prompt="hello")).status == 429, "it waited for others"


@looped
async def test_a_call_that_is_not_to_wait_is_429_at_once_and_wakes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        await put_to_sleep(gateway, ready_ms=2_500)
        answer = await gateway.call(gateway.run_path + "?rejectIfBusy=true", {"prompt": "hello"})
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, 3040, "3")
        gateway.fleet.move(0, MEMORY, toward=DEVICE, ready_ms=200)
        await until(lambda: gateway.app._serving.context.fleet.expected_s(MODEL) == 1)
        answer = await gateway.call(gateway.run_path + "?rejectIfBusy=true", {"prompt": "hello"})
        assert (answer.status, answer.code) == (429, 3040), "it would wait for the move's end"
        gateway.fleet.move(0, MEMORY, ready_ms=0)
        await until(lambda: gateway.app._serving.context.fleet.expected_s(MODEL) is None)
        answer = await gateway.call(gateway.run_path + "?rejectIfBusy=true", {"prompt": "hello"})
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, 3040, "5"), "nobody can tell when"
        assert gateway.fleet.wakes == []


@looped
async def test_what_can_never_be_is_503_at_once_and_its_cause_is_the_operators(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path) as gateway:
        problem = "it needs 80 GiB and there are 40"
        gateway.fleet.move(0, DISK, ready_ms=-1, problem=problem)
        await until(lambda: not gateway.app._serving.context.fleet.serves(MODEL))
        began = time.monotonic()
        answers = [await gateway.run(prompt="hello") for _ in range(3)]
        assert time.monotonic() - began < 10.0, "nobody waited"
        for answer in answers:
            assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, 3040, "30")
            assert "Nothing can serve" in answer.message
            assert "GiB" not in answer.content.decode()
        (told,) = [record for record in caplog.records if record.message == "replica_cannot_serve"]
        assert told.__dict__["fields"]["problem"] == problem
        gateway.fleet.move(0, DISK, ready_ms=41_000, problem="it died again", quarantined=True)
        known = gateway.app._serving.context.fleet
        await until(lambda: known.replicas()[0].state.quarantined)
        for query in ("", "?rejectIfBusy=true"):
            answer = await gateway.call(gateway.run_path + query, {"prompt": "hello"})
            assert (answer.status, answer.headers["retry-after"]) == (503, "41")
        assert gateway.fleet.wakes == []


@looped
async def test_texts_that_no_replica_began_with_wait_for_the_model_to_come_back(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "engine" / "builtin_model"
    models = [ModelEntryConfig(name=VECTORS, folder=str(folder), task="Text Embeddings")]
    async with served(tmp_path, models=models, stubs=[VECTORS]) as gateway:
        gateway.behaviour.first_s = 60.0
        call = asyncio.create_task(
            gateway.call("/v1/embeddings", {"model": VECTORS, "input": [f"text {n}" for n in range(20)]})
        )
        replica = gateway.fleet.replicas[1]
        await until(lambda: len(replica.submits) == 20)
        await put_to_sleep(gateway, 1)
        await until(lambda: len(replica.cancels) == 20 and not replica.running)
        await until(lambda: gateway.app._serving.context.fleet.waiting(VECTORS) == 1)
        gateway.fleet.move(1, DEVICE)
        await until(lambda: len(replica.submits) == 40)  # before the first of them has ended
        replica.hurry()
        answer = await call
        assert answer.status == 200, answer.content
        assert len(answer.json["data"]) == 20


@looped
async def test_texts_that_come_back_to_a_replica_that_reads_too_slowly_are_429(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(__file__).parents[3] / "engine" / "builtin_model"
    models = [ModelEntryConfig(name=VECTORS, folder=str(folder), task="Text Embeddings")]
    async with served(tmp_path, models=models, stubs=[VECTORS]) as gateway:
        gateway.behaviour.first_s = 60.0
        call = asyncio.create_task(gateway.call("/v1/embeddings", {"model": VECTORS, "input": ["a", "b"]}))
        await until(lambda: len(gateway.fleet.replicas[1].submits) == 2)
        await put_to_sleep(gateway, 1)
        await until(lambda: gateway.app._serving.context.fleet.waiting(VECTORS) == 1)
        monkeypatch.setattr(connection, "WRITE_BYTES_MAX", -1)
        gateway.fleet.move(1, DEVICE)
        answer = await call
        assert (answer.status, answer.code) == (429, 3040)


@looped
async def test_a_gateway_is_ready_while_its_models_sleep_and_can_be_woken_in_time(tmp_path: Path) -> None:
    async with served(tmp_path, wait_s=5.0) as gateway:

        async def ready() -> bool:
            return (await gateway.call("/readyz", b"", "GET")).status == 200

        assert await ready()
        await put_to_sleep(gateway, ready_ms=900)
        assert await ready()
        for told in ({"ready_ms": 60_000}, {"ready_ms": -1, "problem": "it never fits"}, {"ready_ms": 0}):
            gateway.fleet.move(0, DISK, **told)
            await until(lambda: gateway.app._serving.context.fleet.replicas()[0].expected_s in (None, 60.0))
            assert not await ready()
            await put_to_sleep(gateway, ready_ms=900)
            await until(lambda: gateway.app._serving.context.fleet.replicas()[0].expected_s == 0.9)
        gateway.fleet.move(0, DEVICE, toward=MEMORY)
        await until(lambda: gateway.app._serving.context.fleet.replicas()[0].expected_s == 1.0)
        assert await ready()
