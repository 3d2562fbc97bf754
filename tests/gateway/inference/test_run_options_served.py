"""How a call is to be run, over sockets and in every dialect: tags, metadata, sessions, deadlines, and no waiting."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine.protocol.types import RejectReason
from tests.support.served_gateway import Answer, Served, looped, served
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

HELLO = [{"role": "user", "content": "hello"}]
# Each dialect's path and a body that asks for so many tokens.
DIALECTS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "native": (f"/ai/run/{MODEL}", lambda most: {"prompt": "hello", "max_tokens": most}),
    "chat": ("/v1/chat/completions", lambda most: {"model": MODEL, "messages": HELLO, "max_tokens": most}),
    "completions": ("/v1/completions", lambda most: {"model": MODEL, "prompt": "hello", "max_tokens": most}),
    "responses": ("/v1/responses", lambda most: {"model": MODEL, "input": "hello", "max_output_tokens": most}),
    "messages": ("/v1/messages", lambda most: {"model": MODEL, "messages": HELLO, "max_tokens": most}),
}
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)


async def called(gateway: Served, dialect: str, query: str = "", most: int = 3, **said: Any) -> Answer:
    """`said` are headers; those of the body are in `body`."""
    path, body = DIALECTS[dialect]
    within = said.pop("body", {})
    return await gateway.call(path + query, {**body(most), **within}, **said)


def failed(answer: Answer) -> tuple[int, str]:
    """The status and the text of an error, whatever its shape."""
    return answer.status, answer.content.decode()


@every_dialect
def test_options_that_are_not_served_are_refused_by_name(tmp_path: Path, dialect: str) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path) as gateway:
            for option in ("websocket=1", "returnRawResponse=true", *["queueRequest=true"] * (dialect != "native")):
                status, text = failed(await called(gateway, dialect, f"?{option}"))
                assert status == 400
                assert option.partition("=")[0] in text
            assert (await called(gateway, dialect, "?queueRequest=false&websocket=0&returnRawResponse=")).status == 200

    call()


# ---- tags and metadata ------------------------------------------------------------------------------------------


@every_dialect
def test_tags_and_metadata_are_in_the_usage_record(tmp_path: Path, dialect: str) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path) as gateway:
            said = {"cf_aig_metadata": '{"user": "u1", "paying": true}'}
            assert (await called(gateway, dialect, "?tags=blue,team:x/y", **said)).status == 200
            await gateway.settled()
            (record,) = await gateway.records()
            assert (record.tags, record.metadata) == ("blue\nteam:x/y", '{"user":"u1","paying":true}')
            assert (await called(gateway, dialect, "?tags=a%20b")).status == 400
            status, text = failed(await called(gateway, dialect, cf_aig_metadata="[1]"))
            assert status == 400
            assert "cf-aig-metadata" in text
            assert len(await gateway.records()) == 1

    call()


@looped
async def test_a_native_body_says_the_same_in_its_options(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        options = {"tags": ["b", "c"], "requestTimeoutMs": 60_000, "rejectIfBusy": False}
        assert (await called(gateway, "native", "?tags=a", body={"options": options})).status == 200
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.tags == "a\nb\nc"
        for wrong, named in (
            ({"tags": ["a b"]}, "options.tags"),
            ({"tags": list("abcdef")}, "options.tags"),
            ({"requestTimeoutMs": 0}, "options.requestTimeoutMs"),
            ({"retries": 3}, "options.retries"),
        ):
            status, text = failed(await called(gateway, "native", body={"options": wrong}))
            assert status == 400
            assert named in text


@looped
async def test_a_call_of_which_nothing_may_be_kept_keeps_neither(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        said = {"cf_aig_metadata": '{"user": "u1"}', "cf_aig_zdr": "true"}
        assert (await called(gateway, "native", "?tags=blue", **said)).status == 200
        await gateway.settled()
        (record,) = await gateway.records()
        assert (record.tags, record.metadata, record.outcome) == ("", "", "done")


# ---- sessions ---------------------------------------------------------------------------------------------------


def _homes(gateway: Served) -> list[int]:
    """How many calls each replica had."""
    return [len(replica.submits) for replica in gateway.fleet.replicas]


async def _idle(gateway: Served) -> None:
    """All replicas say that nothing runs, and the gateway has heard it."""
    for replica in gateway.fleet.replicas:
        replica.load()
    machines = gateway.app._serving.context.fleet._machines.values()
    links = [one.connection for machine in machines for one in machine.replicas.values() if one.connection]
    await until(lambda: not any(link.sequences for link in links))


@looped
async def test_calls_of_a_session_go_to_one_replica_while_it_lives(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=3) as gateway:
        known = gateway.app._serving.context.fleet
        await until(lambda: sum(replica.ready for replica in known.replicas()) == 3)
        for n in range(8):
            prompt = {"prompt": f"{n} something else entirely {n * n}"}
            assert (await called(gateway, "native", body=prompt, x_session_affinity="ses_1")).status == 200
            await _idle(gateway)
        assert sorted(_homes(gateway)) == [0, 0, 8]
        home = gateway.fleet.replicas[_homes(gateway).index(8)]
        home.load(draining=True)
        await until(lambda: sum(replica.ready for replica in known.replicas()) == 2)
        for n in range(3):
            assert (await called(gateway, "chat", x_session_affinity="ses_1", body={"user": str(n)})).status == 200
        assert sorted(_homes(gateway)) == [0, 3, 8]
        await _idle(gateway)
        assert (await called(gateway, "chat", x_session_affinity="ses_1")).status == 200
        assert len(home.submits) == 9, "it is back, and so is the session"


@looped
async def test_a_session_does_not_wait_for_a_replica_that_has_more_than_its_share(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=3) as gateway:
        known = gateway.app._serving.context.fleet
        await until(lambda: sum(replica.ready for replica in known.replicas()) == 3)
        assert (await called(gateway, "native", x_session_affinity="ses_1")).status == 200
        home = gateway.fleet.replicas[_homes(gateway).index(1)]
        home.load(waiting=60)
        await until(lambda: any(seen.load and seen.load.waiting for seen in known.replicas()))
        assert (await called(gateway, "native", x_session_affinity="ses_1")).status == 200
        assert len(home.submits) == 1


@looped
async def test_a_session_id_of_another_account_is_another_session(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=3) as gateway:
        known = gateway.app._serving.context.fleet
        await until(lambda: sum(replica.ready for replica in known.replicas()) == 3)
        homes = set()
        for n in range(12):
            account = await gateway.accounts.create(f"other {n}")
            _, token = await gateway.accounts.mint(account.id, "its")
            before = _homes(gateway)
            said = {"authorization": f"Bearer {token}", "x_session_affinity": "ses_1"}
            assert (await called(gateway, "native", **said)).status == 200
            homes.add(next(i for i, count in enumerate(_homes(gateway)) if count > before[i]))
            await _idle(gateway)
        assert len(homes) > 1
        assert (await called(gateway, "native", x_session_affinity="s" * 257)).status == 400


# ---- deadlines --------------------------------------------------------------------------------------------------


@every_dialect
def test_a_deadline_ends_a_call_with_408(tmp_path: Path, dialect: str) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path) as gateway:
            gateway.behaviour.step_s = 0.02
            began = time.monotonic()
            status, text = failed(await called(gateway, dialect, most=1000, cf_aig_request_timeout="900"))
            assert status == 408
            assert "0.9 s" in text
            assert time.monotonic() - began > 0.8
            await gateway.settled()
            (record,) = await gateway.records()
            assert record.outcome == "timeout"
            assert 0 < record.completion_tokens < 1000, "it began, and did not run to its end"
            assert 0 < gateway.fleet.submits[0].deadline_ms <= 900
            gateway.behaviour.step_s = 0.0
            assert (await called(gateway, dialect, "?requestTimeoutMs=20000")).status == 200
            assert (await called(gateway, dialect, "?requestTimeoutMs=soon")).status == 400

    call()


@every_dialect
def test_a_deadline_ends_a_stream_with_an_event_that_says_so(tmp_path: Path, dialect: str) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path) as gateway:
            gateway.behaviour.step_s = 0.02
            said = {"body": {"stream": True}, "cf_aig_request_timeout": "900"}
            answer = await called(gateway, dialect, most=1000, **said)
            assert answer.status == 200, "it began in time"
            *_, last = [block for block in answer.content.split(b"\n\n") if block and b"[DONE]" not in block]
            assert b"0.9 s" in last
            assert answer.headers["x-request-id"].encode() in answer.content
            await gateway.settled()

    call()


@looped
async def test_the_wait_for_a_replica_counts(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.fleet.replicas[0].load(draining=True)
        known = gateway.app._serving.context.fleet
        await until(lambda: not any(replica.ready for replica in known.replicas()))
        began = time.monotonic()
        status, _ = failed(await called(gateway, "native", cf_aig_request_timeout="120"))
        assert (status, time.monotonic() - began < 15.0) == (408, True)
        await gateway.settled()


@looped
async def test_a_replica_is_told_the_shorter_of_a_plans_wait_and_the_deadline(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        accounts = gateway.accounts
        assert (await called(gateway, "native")).status == 200
        assert (await called(gateway, "native", cf_aig_request_timeout="9000")).status == 200
        account = await accounts.get(gateway.account_id)
        plan = structs.replace(account.plan, name="hasty", wait_s=2.0, revision=1)
        assert await gateway.app._tenancy.store.accounts.put_plan(plan)
        changed = structs.replace(account, plan=plan, revision=account.revision + 1)
        assert await gateway.app._tenancy.store.accounts.update(changed)
        accounts.__dict__.get("_verified", {}).clear()
        _, token = await accounts.mint(account.id, "new")
        said = {"authorization": f"Bearer {token}"}
        assert (await called(gateway, "native", **said)).status == 200
        assert (await called(gateway, "native", **said, cf_aig_request_timeout="500")).status == 200
        none, asked, planned, both = [submit.deadline_ms for submit in gateway.fleet.submits]
        assert none == 0
        assert 8_000 < asked <= 9_000
        assert planned == 2_000
        assert 0 < both <= 500


@looped
async def test_no_deadline_is_longer_than_the_servers(tmp_path: Path) -> None:
    async with served(tmp_path, request_s=0.2) as gateway:
        gateway.behaviour.step_s = 0.02
        status, text = failed(await called(gateway, "native", most=200, cf_aig_request_timeout="60000"))
        assert status == 408
        assert "0.2 s" in text


# ---- no waiting -------------------------------------------------------------------------------------------------


@every_dialect
def test_reject_if_busy_is_refused_at_once_where_it_would_wait(tmp_path: Path, dialect: str) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path) as gateway:
            assert (await called(gateway, dialect, "?rejectIfBusy=true")).status == 200
            assert gateway.fleet.submits[0].deadline_ms == 1000, "others may have filled it since it last said"
            gateway.fleet.replicas[0].load(waiting=1)
            known = gateway.app._serving.context.fleet
            await until(lambda: known.busy(MODEL))
            status, text = failed(await called(gateway, dialect, "?rejectIfBusy=true"))
            assert status == 429
            assert "Capacity temporarily exceeded" in text
            assert len(gateway.fleet.submits) == 1, "no replica was asked"
            assert (await called(gateway, dialect, "?rejectIfBusy=false")).status == 200
            gateway.behaviour.reject = RejectReason.BUSY
            gateway.fleet.replicas[0].load(waiting=0)
            await until(lambda: not known.busy(MODEL))
            assert (await called(gateway, dialect, "?rejectIfBusy=true")).status == 429

    call()


# ---- what every answer says -------------------------------------------------------------------------------------


@every_dialect
def test_an_answer_says_what_it_cost_and_its_own_new_id(tmp_path: Path, dialect: str) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path) as gateway:
            answer = await called(gateway, dialect, x_request_id="chosen-by-the-client")
            await gateway.settled()
            (record,) = await gateway.records()
            assert float(answer.headers["cf-ai-neurons"]) == pytest.approx(record.neurons, abs=1e-6)
            assert answer.headers["x-request-id"] == answer.headers["request-id"] == record.request_id
            assert record.request_id != "chosen-by-the-client"
            wrong = await called(gateway, dialect, body={"max_tokens": "many", "max_output_tokens": "many"})
            assert wrong.status == 400
            assert wrong.headers["x-request-id"].encode() in wrong.content
            assert "cf-ai-neurons" not in wrong.headers

    call()


@looped
async def test_calls_at_once_each_have_their_own_id(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        answers = await asyncio.gather(*(called(gateway, "native") for _ in range(20)))
        assert len({answer.headers["x-request-id"] for answer in answers}) == 20
