"""Queued requests through a whole gateway: submitted, run, fetched, listed, cancelled, charged, parked, taken over."""

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine.protocol.types import RejectReason, Residency
from gateway.batch import worker
from gateway.settings.config import ModelEntryConfig, PriceConfig
from tenants.records.accounts import Settings
from tenants.records.batches import BATCH_ITEMS_MAX, ITEM_BYTES_MAX, OPEN_BATCHES_MAX, BatchStatus
from tenants.records.grants import Grant
from tenants.records.limits import Limits
from tests.gateway.test_open_requests import CHANGES, ENDS_WITHIN_S, classed
from tests.support.served_gateway import Answer, Served, looped, served
from tests.support.stub_replica import MODEL
from tests.support.waiting import holds, until

pytestmark = pytest.mark.usefixtures("impatient")
QUEUE = "?queueRequest=true"
PARKED = ("account suspended", "region set")  # it goes on when that is over, or elsewhere


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks more often than in service."""
    monkeypatch.setattr(worker, "LOOK_S", 0.05)
    monkeypatch.setattr(worker, "RENEW_S", 0.05)
    monkeypatch.setattr(worker, "TIDY_S", 0.05)
    monkeypatch.setattr(worker, "AGAIN_S", 0.05)
    monkeypatch.setattr(worker, "CHECK_S", 0.05)


def requests(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"number {n}", "max_tokens": 5, "external_reference": f"r{n}", **fields} for n in range(count)]


async def submit(world: Served, count: int = 3, **fields: Any) -> str:
    answer = await world.call(world.run_path + QUEUE, {"requests": requests(count, **fields)})
    assert answer.status == 200, answer.content
    result = answer.json["result"]
    assert result == {"status": "queued", "request_id": result["request_id"], "model": MODEL}
    return str(result["request_id"])


async def refused(world: Served, body: Any, query: str = QUEUE, **headers: str) -> Answer:
    answer = await world.call(world.run_path + query, body, **headers)
    assert answer.status >= 400, answer.content
    return answer


async def poll(world: Served, request_id: str, query: str = "") -> Any:
    answer = await world.call(world.run_path + query, {"request_id": request_id})
    assert answer.status == 200, answer.content
    return answer.json["result"]


async def ended(world: Served, request_id: str) -> Any:
    async def result() -> Any:
        polled = await poll(world, request_id)
        return None if polled.get("status") in ("queued", "running") else polled

    return await until(result)


async def state(world: Served, request_id: str) -> Any:
    return (await world.call(f"/ai/batches/{request_id}", None, "GET")).json["result"]


def running(world: Served) -> int:
    return sum(world.app._batches.running.values())


async def closed(world: Served, request_id: str) -> Any:
    """A batch that has ended, whoever may still ask for it."""
    batches = world.app._serving.batches

    async def batch() -> Any:
        found = await batches.batches.get(world.account_id, request_id)
        return found if found is not None and not found.status.open else None

    found = await until(batch)
    cipher = batches.encryption.cipher(world.account_id, request_id)
    results = await batches.batches.results(world.account_id, request_id, 0, found.items)
    return {
        "status": found.status,
        "responses": [json.loads(cipher.open_result(one.place, one.result)) for one in results],
    }


def reasons(result: Any) -> list[int]:
    """The codes of the errors of a batch's results."""
    assert all(error["message"] for one in result["responses"] for error in one["errors"])
    return [error["code"] for one in result["responses"] for error in one["errors"]]


def generating(world: Served, count: int) -> bool:
    """Whether so many requests run, each with some of its tokens."""
    calls = [one.request.call for one in world.app._batches._claimed.values() if one.request is not None]
    return len(calls) == count and all(call is not None and call.work.running.completion_tokens for call in calls)  # type: ignore[attr-defined]


# Submitting and fetching


@looped
async def test_a_batch_is_answered_with_each_requests_own_answer_in_order(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        request_id = await submit(world, 40)
        result = await ended(world, request_id)
        live = (await world.run(prompt="number 7", max_tokens=5)).json["result"]
        responses = result["responses"]
        assert [one["id"] for one in responses] == list(range(40))
        assert [one["external_reference"] for one in responses] == [f"r{n}" for n in range(40)]
        assert all(one["success"] for one in responses)
        assert responses[7]["result"]["response"] == live["response"]
        spent = [one["result"]["usage"] for one in responses]
        assert result["usage"] == {
            name: sum(one[name] for one in spent) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        }
        assert await poll(world, request_id, QUEUE) == result


@looped
async def test_each_request_has_one_record_at_the_batch_price_and_the_counters_agree(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        request_id = await submit(world, 20)
        result = await ended(world, request_id)
        await world.settled()
        records = await world.records()
        assert {one.request_id for one in records} == {f"{request_id}-{n}" for n in range(20)}
        assert {(one.outcome, one.model) for one in records} == {("done", MODEL)}
        for one in records:
            assert one.micro_neurons == -(-(one.prompt_tokens * 500 + one.completion_tokens * 2000) // 1)
        assert sum(one.micro_neurons for one in records) == sum(
            round(one["result"]["usage"]["neurons"] * 1e6) for one in result["responses"]
        )
        (await world.app._tenancy.store.quotas.reconcile(world.account_id, records[0].day)).check()


@looped
async def test_a_price_of_its_own_holds_for_the_whole_batch(tmp_path: Path) -> None:
    price = PriceConfig(input=1000.0, cached_input=100.0, output=4000.0, batch=0.0)
    folder = str(Path(__file__).parents[3] / "engine" / "builtin_model")
    async with served(tmp_path, models=[ModelEntryConfig(name=MODEL, folder=folder, price=price)]) as world:
        await ended(world, await submit(world))
        assert [one.micro_neurons for one in await world.records()] == [0, 0, 0]


@looped
async def test_one_wrong_request_fails_alone_where_only_the_model_can_tell(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        body = {"requests": [{"prompt": "a"}, {"prompt": "b", "logit_bias": {"6001": 1}}, {"prompt": "word " * 9000}]}
        answer = await world.call(world.run_path + QUEUE, body)
        result = await ended(world, answer.json["result"]["request_id"])
        first, second, third = result["responses"]
        assert first["success"]
        assert first["external_reference"] is None
        assert (second["success"], second["errors"][0]["code"]) == (False, 5006)
        assert (third["success"], third["errors"][0]["code"]) == (False, 3030)
        assert "6001 is no token id" in second["errors"][0]["message"]
        assert "result" not in second


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"requests": []}, "'requests'"),
        ({"requests": "a"}, "'requests'"),
        ({"prompt": "a"}, "'requests'"),
        ({"requests": [{"prompt": "a"}], "model": "b"}, "unknown field model"),
        ({"requests": [{"prompt": "a"}, {}]}, "'requests[1].prompt'"),
        ({"requests": [{"prompt": "a"}, {"messages": [{"role": "user"}]}]}, "'requests[1].messages[0].content'"),
        ({"requests": [{"prompt": "a", "stream": True}]}, "'requests[0].stream'"),
        ({"requests": [{"prompt": "a", "temperature": 9}]}, "'requests[0].temperature'"),
        ({"requests": [{"prompt": "a", "colour": "red"}]}, "'requests[0].colour'"),
        ({"requests": [{"prompt": "a", "external_reference": 7}]}, "'requests[0].external_reference'"),
        ({"requests": [{"prompt": "a", "options": {"rejectIfBusy": True}}]}, "'requests[0].options'"),
        ({"requests": ["a"]}, "requests[0]"),
        (
            {"requests": [{"prompt": "a"}, {"prompt": "a" * ITEM_BYTES_MAX}]},
            "a request of a batch has at most 1048576 bytes",
        ),
        ({"requests": [{"prompt": "a"}] * (BATCH_ITEMS_MAX + 1)}, "1 to 10000"),
    ],
)
@looped
async def test_what_is_wrong_is_named_with_its_place_and_nothing_is_kept(tmp_path: Path, body: Any, said: str) -> None:
    async with served(tmp_path) as world:
        answer = await refused(world, body)
        assert (answer.status, answer.code) == (400, 5006)
        assert said in answer.message
        assert (await world.call("/ai/batches", None, "GET")).json["result"] == []


@looped
async def test_options_that_do_not_go_with_a_queue_are_refused_by_name(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        body = {"requests": requests(1)}
        assert "queueRequest" in (await refused(world, body, "?queueRequest=perhaps")).message
        assert "rejectIfBusy" in (await refused(world, body, QUEUE + "&rejectIfBusy=true")).message
        assert "queueRequest=true" in (await refused(world, body, "")).message
        malformed = await refused(world, b'{"requests": [{"prompt": "a"}')
        assert "not valid JSON" in malformed.message


@looped
async def test_tags_and_metadata_go_into_every_record(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        headers = {"cf_aig_metadata": '{"team": "a"}'}
        answer = await world.call(world.run_path + QUEUE + "&tags=x,y", {"requests": requests(2)}, **headers)
        await ended(world, answer.json["result"]["request_id"])
        for record in await world.records():
            assert (record.tags, json.loads(record.metadata)) == ("x\ny", {"team": "a"})


# Whose it is


@looped
async def test_another_accounts_batch_is_as_one_that_is_not_there(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        request_id = await submit(world)
        other = await world.accounts.create("other")
        _, token = await world.accounts.mint(other.id, "other")
        asks: list[tuple[str, Any, str]] = [
            (f"/ai/run/{MODEL}", {"request_id": request_id}, "POST"),
            (f"/ai/batches/{request_id}", None, "GET"),
            (f"/ai/batches/{request_id}", None, "DELETE"),
        ]
        for path, body, method in asks:
            foreign = await world.call(path, body, method, authorization=f"Bearer {token}")
            missing = await world.call(
                path.replace(request_id, "0" * 36),
                body and {"request_id": "0" * 36},
                method,
                authorization=f"Bearer {token}",
            )
            assert (foreign.status, foreign.code) == (404, 1003)
            assert foreign.json["errors"] == missing.json["errors"]
        listed = await world.call("/ai/batches", None, "GET", authorization=f"Bearer {token}")
        assert listed.json["result"] == []
        assert (await world.call("/ai/batches", None, "GET", authorization="")).status == 401


@looped
async def test_a_token_of_other_models_sees_nothing_of_it(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        request_id = await submit(world)
        _, token = await world.accounts.mint(world.account_id, "other", grant=Grant(models=("@cf/hearth/*",)))
        answer = await world.call(f"/ai/batches/{request_id}", None, "GET", authorization=f"Bearer {token}")
        assert answer.status == 404


@looped
async def test_batches_are_listed_newest_first_and_by_status(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        path = f"/client/v4/accounts/{world.account_id}/ai/batches"
        first = await submit(world)
        await ended(world, first)
        world.behaviour.first_s = 60.0
        second = await submit(world, 2)
        listed = (await world.call(path, None, "GET")).json["result"]
        assert {one["request_id"] for one in listed} == {first, second}
        (done,) = (await world.call(f"{path}?status=done", None, "GET")).json["result"]
        assert (done["request_id"], done["status"]) == (first, "done")
        assert done["requests"] == {"total": 3, "succeeded": 3, "failed": 0}
        assert done == await state(world, first)
        assert (await world.call(f"{path}?status=lost", None, "GET")).status == 400
        assert (await world.call(path, {}, "POST")).status == 405
        assert (await world.call(f"{path}/{first}", {}, "POST")).status == 405


# Cancelling


@looped
async def test_cancelling_keeps_what_is_done_and_stops_what_runs(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        first = await submit(world, 2)
        await ended(world, first)
        world.behaviour.step_s = 0.2
        request_id = await submit(world, 30, max_tokens=1000)
        await until(lambda: running(world) > 0)
        answer = await world.call(f"/ai/batches/{request_id}", None, "DELETE")
        assert answer.json["result"]["status"] == "cancelled"
        await until(lambda: running(world) == 0)
        await world.settled()
        assert world.fleet.running == 0
        result = await poll(world, request_id)
        assert (result["status"], result["responses"]) == ("cancelled", [])
        again = await world.call(f"/ai/batches/{request_id}", None, "DELETE")
        assert again.json["result"]["status"] == "cancelled"
        done = await world.call(f"/ai/batches/{first}", None, "DELETE")
        assert done.json["result"]["status"] == "done"
        records = await world.records()
        assert {one.outcome for one in records if one.request_id.startswith(request_id)} <= {"cancelled"}
        (await world.app._tenancy.store.quotas.reconcile(world.account_id, records[0].day)).check()


# What cannot run now


@looped
async def test_a_rate_holds_the_batch_back_and_fails_none_of_it(tmp_path: Path) -> None:
    async with served(tmp_path, limits=Limits(requests_per_minute=600, burst=2)) as world:
        result = await ended(world, await submit(world, 8))
        assert all(one["success"] for one in result["responses"])
        assert len(await world.records()) == 8


@looped
async def test_a_budget_that_is_used_up_parks_the_batch_until_there_is_more(tmp_path: Path) -> None:
    async with served(tmp_path, limits=Limits(neurons_per_day=0.07)) as world:
        request_id = await submit(world, 8)

        async def some_succeeded() -> bool:
            return (await state(world, request_id))["requests"]["succeeded"] and not running(world)

        await until(some_succeeded)
        parked = await state(world, request_id)
        assert (parked["status"], parked["requests"]["failed"]) == ("running", 0)
        assert 0 < parked["requests"]["succeeded"] < 8
        assert sum(one.micro_neurons for one in await world.records()) <= 70_000


@looped
async def test_what_no_budget_can_ever_pay_for_fails(tmp_path: Path) -> None:
    async with served(tmp_path, limits=Limits(neurons_per_day=0.01)) as world:
        result = await ended(world, await submit(world, 2, max_tokens=100))
        assert [one["errors"][0]["code"] for one in result["responses"]] == [4006, 4006]


@looped
async def test_a_replica_that_goes_away_costs_nothing_but_time(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        world.behaviour.die_at = 3
        request_id = await submit(world, 3)
        await until(lambda: world.app._serving.context.fleet.hello(MODEL) is None)
        world.behaviour.die_at = None
        result = await ended(world, request_id)
        succeeded = [one for one in result["responses"] if one["success"]]
        refusals = [one["errors"][0]["code"] for one in result["responses"] if not one["success"]]
        assert len(succeeded) + len(refusals) == 3
        assert set(refusals) <= {5012}, "only what was there in two crashes is given up"
        records = await world.records()
        assert len([one for one in records if one.outcome == "done"]) == len(succeeded)
        assert len({one.request_id for one in records}) == len(records)


@looped
async def test_nothing_is_claimed_while_live_requests_wait_at_the_replica(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        world.fleet.replicas[0].load(waiting=3)
        await until(lambda: not world.app._serving.context.fleet.spare(MODEL, 100))
        request_id = await submit(world, 2)

        async def queued() -> bool:
            return (await state(world, request_id))["status"] == "queued"

        await holds(queued, 0.3)
        world.fleet.replicas[0].load(waiting=0)
        await ended(world, request_id)


@looped
async def test_a_fault_with_one_request_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LEASE_S", 0.3)
    async with served(tmp_path) as world:
        faults: list[str] = []
        checks = world.app._batches._checks
        admit = checks.admit

        async def faulty(*arguments: Any) -> Any:
            if not faults:
                faults.append("not foreseen")
                raise RuntimeError(faults[0])
            return await admit(*arguments)

        monkeypatch.setattr(checks, "admit", faulty)
        request_id = await submit(world, 3)
        result = await ended(world, request_id)
        assert faults
        assert [one["success"] for one in result["responses"]] == [True] * 3
        assert running(world) == 0


@looped
async def test_what_a_replica_has_no_place_for_is_tried_again(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        world.behaviour.reject = RejectReason.BUSY
        request_id = await submit(world, 2)
        await until(lambda: len(world.fleet.submits) >= 4)  # they were tried again
        assert (await state(world, request_id))["requests"]["succeeded"] == 0
        world.behaviour.reject = None
        result = await ended(world, request_id)
        assert all(one["success"] for one in result["responses"])


@looped
async def test_a_revoked_token_ends_its_batches(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        token, text = await world.accounts.mint(world.account_id, "short-lived")
        world.app._batches.stop()
        body, header = {"requests": requests(3)}, f"Bearer {text}"
        answer = await world.call(world.run_path + QUEUE, body, authorization=header)
        request_id = answer.json["result"]["request_id"]
        await world.accounts.revoke(token.id)
        world.app._batches._stopped = False
        result = await ended(world, request_id)
        assert (result["status"], reasons(result)) == (BatchStatus.FAILED, [10000])
        assert await world.records() == []


@pytest.mark.parametrize("name", CHANGES)
@looped
async def test_what_refuses_a_new_call_refuses_a_batchs_next_request(tmp_path: Path, name: str) -> None:
    change = CHANGES[name]
    async with classed(tmp_path) as world:
        world.app._batches.stop()
        request_id = await submit(world, 3, max_tokens=200)
        await change.make(world)
        world.app._batches._stopped = False
        if name in PARKED:
            await holds(lambda: not world.fleet.submits, 0.3)
            batch = await world.app._tenancy.store.batches.get(world.account_id, request_id)
            assert batch is not None
            assert batch.status.open
        elif name == "secret rolled":
            await until(lambda: len(world.fleet.submits) == 3, what="its token is as good as before")
        else:
            result = await closed(world, request_id)
            assert set(reasons(result)) == {change.code}
            assert result["status"] in (BatchStatus.FAILED, BatchStatus.DONE)
            assert (not world.fleet.submits, await world.records()) == (True, [])


@pytest.mark.parametrize("name", CHANGES)
@looped
async def test_what_refuses_a_new_call_ends_a_batchs_running_requests(tmp_path: Path, name: str) -> None:
    change = CHANGES[name]
    async with classed(tmp_path) as world:
        world.behaviour.step_s = 0.05
        request_id = await submit(world, 3, max_tokens=5000)
        await until(lambda: generating(world, 3))
        await change.make(world)
        if name == "secret rolled":
            await holds(lambda: running(world) == 3, 0.3)
            return
        await until(lambda: running(world) == 0, ENDS_WITHIN_S)
        await until(lambda: not world.fleet.running)
        records = await world.records()
        if name in PARKED:
            assert records == [], "it runs again"
            return
        result = await closed(world, request_id)
        assert set(reasons(result)) == {change.code}
        assert {record.outcome for record in records} == {change.outcome}
        assert all(0 < record.completion_tokens < 5000 for record in records)
        (await world.app._tenancy.store.quotas.reconcile(world.account_id, records[0].day)).check()


@looped
async def test_a_gateway_of_another_region_leaves_it_to_those_that_may_serve_it(tmp_path: Path) -> None:
    async with served(tmp_path, region="eu") as world:
        world.app._batches.stop()
        request_id = await submit(world, 2)
        settings = Settings(regions=("us",))
        await world.accounts.update(world.account_id, lambda one: structs.replace(one, settings=settings))
        world.app._batches._stopped = False
        await holds(lambda: not world.fleet.submits, 0.3)
        await world.accounts.update(world.account_id, lambda one: structs.replace(one, settings=Settings()))
        result = await ended(world, request_id)
        assert all(one["success"] for one in result["responses"])


@looped
async def test_a_request_whose_lease_ran_out_here_and_that_is_claimed_again_ends_no_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LEASE_S", 0.05)  # a gateway that stood still, as it were
    monkeypatch.setattr(worker, "RENEW_S", 60.0)
    async with served(tmp_path) as world:
        world.behaviour.first_s = 0.5
        request_id = await submit(world, 1)
        await until(lambda: len(world.fleet.submits) > 1)
        world.behaviour.first_s = 0.0
        assert all(one["success"] for one in (await ended(world, request_id))["responses"])
        await until(lambda: not world.app._batches.running.total())
        again = await ended(world, await submit(world, 1))
        assert all(one["success"] for one in again["responses"]), "it works on"


@looped
async def test_what_no_machine_of_its_regions_serves_waits_and_wakes_one_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "TIDY_S", 0.02)
    async with served(tmp_path, region="eu", machine_region="us") as world:
        fleet, demanded = world.app._serving.context.fleet, list[int]()

        def demand(model: str, requests: int, weight: float, *regions: tuple[str, ...]) -> None:
            if regions == (("eu",),):
                demanded.append(requests)

        monkeypatch.setattr(fleet, "set_batch_demand", demand)
        world.app._batches.stop()
        await submit(world, 1)
        settings = Settings(regions=("eu",))
        await world.accounts.update(world.account_id, lambda one: structs.replace(one, settings=settings))
        world.app._batches._stopped = False
        await until(lambda: demanded[:2] == [1, 0])  # it is put back for a while, and the demand ends
        assert not world.fleet.submits


@looped
async def test_a_model_that_ends_meanwhile_fails_what_is_left(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        world.app._batches.stop()
        request_id = await submit(world, 2)
        model = world.app._serving.endpoint.catalogue.find(MODEL)
        assert model is not None
        ended_model = structs.replace(model.settings, planned_deprecation_date=date(2020, 1, 1))
        object.__setattr__(model, "settings", ended_model)
        world.app._batches._stopped = False

        async def done() -> bool:
            return (await state(world, request_id))["status"] == "done"

        await until(done)
        found = (await state(world, request_id))["requests"]
        assert (found["succeeded"], found["failed"]) == (0, 2)
        assert await world.records() == []


@looped
async def test_a_batch_of_a_model_that_was_removed_waits_is_cancelled_and_runs_once_it_is_back(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        catalogue = world.app._serving.endpoint.catalogue
        models = list(catalogue)
        world.app._batches.stop()
        waiting, cancelled = await submit(world, 2), await submit(world, 2)
        catalogue.replace([model for model in models if model.name != MODEL], {})
        world.app._batches._stopped = False
        await holds(lambda: not world.fleet.submits, 0.3)
        assert (await state(world, waiting))["status"] == "queued"
        assert (await refused(world, {"requests": requests(1)})).code == 5007
        assert (await world.call(f"/ai/batches/{cancelled}", None, "DELETE")).status == 200
        catalogue.replace(models, {})
        assert all(one["success"] for one in (await ended(world, waiting))["responses"])
        assert (await state(world, cancelled))["status"] == "cancelled"
        assert len(await world.records()) == 2


# What is kept


@looped
async def test_what_is_kept_is_not_to_be_read_and_zero_retention_keeps_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        canary = "quokka-canary"
        request_id = await submit(world, 2, prompt=canary, external_reference=canary)
        result = await ended(world, request_id)
        answer = result["responses"][0]["result"]["response"].encode()
        kept = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("hearth.db*")))  # noqa: ASYNC240
        assert request_id.encode() in kept
        assert canary.encode() not in kept
        assert answer not in kept
        refusal = await refused(world, {"requests": requests(1)}, cf_aig_zdr="true")
        assert (refusal.status, refusal.code) == (400, 5006)
        assert "zero retention" in refusal.message
        settings = Settings(zero_retention=True)
        await world.accounts.update(world.account_id, lambda one: structs.replace(one, settings=settings))
        with closing(sqlite3.connect(tmp_path / "hearth.db")) as file:
            assert file.execute("SELECT count(*) FROM batch_items").fetchone() == (0,)
        world.see_changes()
        assert (await world.call(world.run_path, {"request_id": request_id})).status == 404
        assert "zero retention" in (await refused(world, {"requests": requests(1)})).message


@looped
async def test_results_are_kept_for_their_time_and_then_deleted(tmp_path: Path) -> None:
    async with served(tmp_path, batch_keep_s=60) as world:
        request_id = await submit(world)
        await ended(world, request_id)
        times = await state(world, request_id)
        kept = datetime.fromisoformat(times["expires_at"]) - datetime.fromisoformat(times["ended_at"])
        assert kept.total_seconds() == 60
        world.app._tenancy.store._file.clock = lambda: time.time() + 50  # type: ignore[attr-defined]

        async def kept_on() -> bool:
            return "usage" in await poll(world, request_id)

        await holds(kept_on, 0.3)
        world.app._tenancy.store._file.clock = lambda: time.time() + 61  # type: ignore[attr-defined]

        async def deleted() -> bool:
            return (await world.call(world.run_path, {"request_id": request_id})).status == 404

        await until(deleted)
        with closing(sqlite3.connect(tmp_path / "hearth.db")) as file:
            assert file.execute("SELECT count(*) FROM batch_items").fetchone() == (0,)


@looped
async def test_open_batches_are_limited(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        world.app._batches.stop()
        for _ in range(OPEN_BATCHES_MAX):
            await submit(world, 1)
        answer = await refused(world, {"requests": requests(1)})
        assert (answer.status, answer.code) == (429, 3021)
        assert "retry-after" in answer.headers


# Gateways that come and go


@looped
async def test_a_restart_goes_on_where_the_gateway_stopped(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        world.behaviour.step_s = 0.05
        request_id = await submit(world, 40, max_tokens=20)
        account_id, token = world.account_id, world.token
        await until(lambda: running(world) > 0 and world.fleet.replicas[0].emitted)
    async with served(tmp_path, account_name="another") as world:
        world.account_id, world.token = account_id, token
        result = await ended(world, request_id)
        assert all(one["success"] for one in result["responses"])
        records = await world.records()
        assert sorted(one.request_id for one in records) == sorted(f"{request_id}-{n}" for n in range(40))
        assert {one.outcome for one in records} == {"done"}
        (await world.app._tenancy.store.quotas.reconcile(account_id, records[0].day)).check()


@looped
async def test_batches_for_a_model_that_sleeps_wake_it_after_a_while_as_lightly_as_can_be_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ASLEEP_S", 2.0)
    async with served(tmp_path) as world:
        fleet, memory, device = world.fleet, Residency.MEMORY, Residency.DEVICE
        fleet.move(0, memory, ready_ms=200)
        await until(lambda: not world.app._serving.context.fleet.serves(MODEL))
        request_id = await submit(world, 5)
        await holds(lambda: not fleet.wakes, 0.5)  # it has not waited for long
        await until(lambda: bool(fleet.wakes))
        assert not fleet.submits, "nothing was claimed for it"
        assert (await state(world, request_id))["status"] == "queued"
        assert (fleet.wakes[0].model, fleet.wakes[0].requests, fleet.wakes[0].weight) == (
            MODEL,
            1,
            worker.SLEEPING_WEIGHT_MIN,
        )
        live = asyncio.create_task(world.run(prompt="hello", max_tokens=2))
        await until(lambda: fleet.wakes[-1].weight == 1.0)
        live.cancel()
        await until(lambda: fleet.wakes[-1].weight == worker.SLEEPING_WEIGHT_MIN)
        fleet.move(0, memory, toward=device)
        await until(lambda: fleet.wakes[-1].requests == 0)
        fleet.move(0, device)
        result = await ended(world, request_id)
        assert all(one["success"] for one in result["responses"])


@looped
async def test_what_was_claimed_for_a_model_that_goes_to_sleep_is_queued_again(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        world.behaviour.first_s = 60.0
        request_id = await submit(world, 3)
        await until(lambda: world.fleet.running == 3)
        world.behaviour.first_s = 0.0
        world.fleet.move(0, Residency.MEMORY, ready_ms=200)
        await until(lambda: not running(world) and not world.fleet.running)
        world.fleet.move(0, Residency.DEVICE)
        result = await ended(world, request_id)
        assert all(one["success"] for one in result["responses"])
        assert len(await world.records()) == 3


def ahead(hours: float) -> float:
    return time.time() + 3600 * hours


def asked_by(world: Served, weight: float) -> bool:
    """Whether the machine was asked last for a request of about that weight."""
    return bool(world.fleet.wakes) and abs(world.fleet.wakes[-1].weight - weight) < 0.001


@looped
async def test_an_old_batch_asks_for_its_model_as_a_plain_call_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as world:
        world.fleet.move(0, Residency.DISK, ready_ms=200)
        await until(lambda: not world.app._serving.context.fleet.serves(MODEL))
        await submit(world, 2)
        for hours, weight in ((0.1, 0.1 / 24), (12, 0.5), (30, 1.0)):
            monkeypatch.setattr(world.app._batches, "_calendar", partial(ahead, hours))
            await until(partial(asked_by, world, weight))
