"""Calls that are sent again with the same Idempotency-Key: one answer, charged once, on sockets and on both stores."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gateway.http.sse import PING
from gateway.inference import pipeline, replay
from gateway.inference.replay import AnswerRecorder
from tenants.records.limits import Limits
from tenants.store.protocol import StoreUnavailable
from tests.gateway.test_open_requests import CHANGES, classed
from tests.support.served_gateway import Answer, Served, looped, served
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

TEN = {"prompt": "hello", "max_tokens": 10}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10}


async def asked(gateway: Served, body: Any = None, key: str = "k", path: str | None = None, **said: str) -> Answer:
    return await gateway.call(path or gateway.run_path, body or TEN, idempotency_key=key, **said)


async def charged(gateway: Served) -> int:
    """How many calls cost something."""
    await gateway.settled()
    return len([record for record in await gateway.records() if record.micro_neurons])


def replayed(answer: Answer) -> bool:
    return answer.headers.get("idempotent-replayed") == "true"


@pytest.mark.parametrize("path", [f"/ai/run/{MODEL}", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_first_answer_is_repeated_and_charged_once(tmp_path: Path, store_url: str, path: str, stream: bool) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path, store_url=store_url) as gateway:
            body = {**(CHAT if path.startswith("/v1") else TEN), "stream": stream}
            first = await asked(gateway, body, path=path)
            again = [await asked(gateway, body, path=path) for _ in range(3)]
            assert first.status == 200
            assert not replayed(first)
            assert {(one.status, one.content, replayed(one)) for one in again} == {(200, first.content, True)}
            assert {one.headers["content-type"] for one in again} == {first.headers["content-type"]}
            assert len({one.headers["x-request-id"] for one in (first, *again)}) == 4
            if not stream:
                assert float(first.headers["cf-ai-neurons"]) > 0
                assert {float(one.headers["cf-ai-neurons"]) for one in again} == {0.0}
            assert (await charged(gateway), len(gateway.fleet.submits)) == (1, 1)

    call()


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("stream", [False, True])
@looped
async def test_what_refuses_a_new_call_refuses_its_answer(tmp_path: Path, name: str, stream: bool) -> None:
    change = CHANGES[name]
    async with classed(tmp_path) as gateway:
        body = {"prompt": "hello", "max_tokens": 200, "stream": stream}
        first = await asked(gateway, body)
        assert replayed(await asked(gateway, body))
        await change.make(gateway)
        gateway.see_changes()
        again = await asked(gateway, body)
        assert (again.status >= 400, again.code, replayed(again)) == (True, change.code, False)
        assert first.content not in again.content
        assert await charged(gateway) == 1


@looped
async def test_each_answer_is_one_request_of_its_rate_and_no_tokens(tmp_path: Path, store_url: str) -> None:
    limits = Limits(requests_per_minute=4, neurons_per_day=0.1)
    async with served(tmp_path, limits=limits, store_url=store_url) as gateway:
        first = await asked(gateway)
        again = [await asked(gateway) for _ in range(4)]
        assert [(one.status, replayed(one)) for one in again] == [(200, True)] * 3 + [(429, False)]
        assert (again[3].code, "4 requests per minute" in again[3].message) == (3021, True)
        assert all("requests" in one.headers["ratelimit"] for one in again)
        assert (await charged(gateway), len(gateway.fleet.submits)) == (1, 1)
        records = await gateway.records()
        assert sorted(record.prompt_tokens for record in records)[:-1] == [0] * 3
        assert sum(record.micro_neurons for record in records) == round(1e6 * float(first.headers["cf-ai-neurons"]))


@looped
async def test_an_answer_that_used_the_budget_up_is_there_all_the_same(tmp_path: Path) -> None:
    async with served(tmp_path, limits=Limits(neurons_per_day=0.05)) as gateway:
        first = await asked(gateway)
        while (await gateway.run(**TEN)).status == 200:
            pass  # some of its tokens fit
        again = await asked(gateway)
        assert (again.status, again.content, replayed(again)) == (200, first.content, True)


@looped
async def test_the_answer_to_a_batch_is_refused_like_a_new_batch(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        body, path = {"requests": [TEN]}, gateway.run_path + "?queueRequest=true"
        first = await asked(gateway, body, path=path)
        again = await asked(gateway, body, path=path)
        assert (again.content, replayed(again)) == (first.content, True)
        await CHANGES["model taken"].make(gateway)
        gateway.see_changes()
        assert (await asked(gateway, body, path=path)).code == 3041


@looped
async def test_twenty_at_once_are_one(tmp_path: Path, store_url: str) -> None:
    async with served(tmp_path, store_url=store_url) as gateway:
        gateway.behaviour.first_s = 0.2
        answers = await asyncio.gather(*(asked(gateway) for _ in range(20)))
        whole = [answer for answer in answers if answer.status == 200]
        assert len(whole) >= 1
        assert all((answer.status, answer.code) == (409, 1010) for answer in answers if answer not in whole)
        assert (await charged(gateway), len(gateway.fleet.submits)) == (1, 1)


@looped
async def test_a_key_is_one_request_of_one_token_on_one_path(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        assert (await asked(gateway)).status == 200
        other = await asked(gateway, {**TEN, "max_tokens": 9})
        assert (other.status, other.code) == (422, 1011)
        assert (await asked(gateway, path=gateway.run_path + "?tags=a")).status == 422
        assert not replayed(await asked(gateway, key="k2"))
        assert not replayed(await asked(gateway, path=f"/ai/run/{MODEL}"))
        account = await gateway.accounts.create("bob")
        for owner in (account.id, gateway.account_id):
            _, token = await gateway.accounts.mint(owner, "another")
            theirs = await asked(gateway, path=f"/ai/run/{MODEL}", authorization=f"Bearer {token}")
            assert (theirs.status, replayed(theirs)) == (200, False)
        for key in ("", "k" * 256, "a b"):
            assert (await gateway.call(gateway.run_path, TEN, **{"Idempotency-Key": key or " "})).status == 400, key


@looped
async def test_what_fails_leaves_its_key_free(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.fail_at = 3
        for stream in (False, True):
            body = {**TEN, "stream": stream}
            gateway.behaviour.fail_at = 3
            broken = await asked(gateway, body, key=f"k{stream}")
            assert b"Internal server error" in broken.content
            gateway.behaviour.fail_at = None
            mended = await asked(gateway, body, key=f"k{stream}")
            assert (mended.status, replayed(mended)) == (200, False)
            assert replayed(await asked(gateway, body, key=f"k{stream}"))
        gateway.behaviour.step_s = 0.02
        late = await asked(gateway, key="late", cf_aig_request_timeout="60")
        assert late.status == 408
        gateway.behaviour.step_s = 0.0
        assert (await asked(gateway, key="late")).status == 200
        assert (await asked(gateway, {"prompt": ""}, key="bad")).status == 400
        assert (await asked(gateway, key="bad")).status == 200


@looped
async def test_a_bug_leaves_the_key_of_its_call_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as gateway:
        with monkeypatch.context() as broken:
            broken.setattr(pipeline, "check_prompt_fits", lambda *_: 1 // 0)
            assert (await asked(gateway)).status == 500
        again = await asked(gateway)
        assert (again.status, replayed(again)) == (200, False)


@looped
async def test_a_call_goes_on_when_its_client_leaves_and_is_there_when_it_asks_again(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.02
        client = await gateway.client()
        await client.post(gateway.run_path, TEN, {**gateway.headers, "idempotency-key": "k"})
        await until(lambda: gateway.fleet.running)
        client.leave()
        assert await charged(gateway) == 1
        again = await asked(gateway)
        assert (again.status, replayed(again)) == (200, True)
        assert again.json["result"]["usage"]["completion_tokens"] == 10
        (record,) = await gateway.records()
        assert (record.outcome, record.completion_tokens) == ("done", 10)


@looped
async def test_a_stream_that_its_client_leaves_ends_there_and_frees_its_key(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.02
        body = {"prompt": "hello", "max_tokens": 400, "stream": True}
        client = await gateway.client()
        await client.post(gateway.run_path, body, {**gateway.headers, "idempotency-key": "k"})
        await until(lambda: gateway.fleet.running)
        client.leave()
        await gateway.settled()
        (record,) = await gateway.records()
        assert (record.outcome, record.completion_tokens < 400) == ("client_gone", True)
        gateway.behaviour.step_s = 0.0
        assert not replayed(await asked(gateway, body))


@looped
async def test_an_answer_too_large_to_keep_is_neither_repeated_nor_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as gateway:
        monkeypatch.setattr(replay, "ANSWER_BYTES_MAX", 300)
        for stream in (False, True):
            body = {**TEN, "stream": stream, "max_tokens": 60}
            assert (await asked(gateway, body, key=f"k{stream}")).status == 200
            again = await asked(gateway, body, key=f"k{stream}")
            assert (again.status, again.code) == (409, 1010)
            assert "too large" in again.message
        assert await charged(gateway) == 2


@looped
async def test_no_account_fills_the_store_with_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as gateway:
        monkeypatch.setattr(replay, "ACCOUNT_BYTES_MAX", 500)
        for n in range(4):
            assert (await asked(gateway, key=f"k{n}")).status == 200
        kept = [(await asked(gateway, key=f"k{n}")).status for n in range(4)]
        assert kept[0] == 200
        assert kept[-1] == 409


@looped
async def test_of_a_call_of_which_nothing_may_be_kept_no_answer_is(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        refused = await asked(gateway, cf_aig_zdr="true")
        assert refused.status == 400
        assert "Idempotency-Key" in refused.message
        assert await charged(gateway) == 0


@looped
async def test_the_store_alone_opens_no_answer(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        answer = await asked(gateway, key="the-clients-own-key")
        said = answer.json["result"]["response"].encode()
        with sqlite3.connect(tmp_path / "hearth.db") as file:
            (value,) = file.execute("SELECT value FROM claims").fetchone()
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        written = (tmp_path / "hearth.db").read_bytes()
        for secret in (said, b"hello", b"the-clients-own-key"):
            assert secret not in value
            assert secret not in written


@looped
async def test_a_store_that_is_away_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as gateway:
        store = gateway.app._tenancy.store

        async def away(*_: object) -> bytes | None:
            raise StoreUnavailable("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(store.claims, "replace", away)
            assert (await asked(gateway)).status == 200, "the answer was there before it could not be kept"
            assert (await asked(gateway)).code == 1010
            broken.setattr(store.claims, "claim", away)
            refused = await asked(gateway, key="k2")
            assert refused.status == 503
            assert refused.headers["retry-after"] == "1"


def test_a_copy_holds_what_was_sent_without_comments_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "ANSWER_BYTES_MAX", 10)
    copy = AnswerRecorder()
    for piece in (b"", b"abc", PING[:0], b"defg"):
        copy.append(piece)
    assert copy.body == b"abcdefg"
    copy.append(b"hij")
    assert copy.body == b"abcdefghij"
    copy.append(b"k")
    assert copy.body is None
    copy.append(b"")
    assert copy.body is None
    with_ping = AnswerRecorder()
    with_ping.append(PING)
    assert with_ping.body == b""
