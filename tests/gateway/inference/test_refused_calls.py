"""Calls that are refused before they are reserved: they count for requests per minute, and bytes have a limit too."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tenants.records.limits import Limits
from tests.support.served_gateway import Answer, Served, looped, served
from tests.support.stub_replica import MODEL

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SMALL = 100_000  # bytes that may come in a second; four times as many at once

Refused = Callable[[Served], Awaitable[Answer]]
REFUSED: dict[str, tuple[int, Refused]] = {
    "a wrong field": (400, lambda gateway: gateway.chat(n=0)),
    "no JSON": (400, lambda gateway: gateway.call(CHAT, b"{")),
    "another model": (404, lambda gateway: gateway.chat(model="@cf/no/such")),
    "a long prompt": (400, lambda gateway: gateway.chat(messages=[{"role": "user", "content": "x" * 500_000}])),
    "an empty batch": (400, lambda gateway: gateway.call(f"/ai/run/{MODEL}?queueRequest=true", {"requests": []})),
    "no batch": (404, lambda gateway: gateway.call(f"/ai/run/{MODEL}", {"request_id": "none"})),
    "a large body": (413, lambda gateway: gateway.call(CHAT, b" " * 2_000_000)),
    "a key of its own": (400, lambda gateway: gateway.call(CHAT, {}, idempotency_key="one")),
}


@pytest.mark.parametrize("name", REFUSED)
@looped
async def test_a_refused_call_counts_as_a_request_of_the_minute(tmp_path: Path, name: str) -> None:
    status, ask = REFUSED[name]
    async with served(tmp_path, limits=Limits(requests_per_minute=2), body_bytes_max=1_000_000) as gateway:
        assert [(await ask(gateway)).status for _ in range(3)] == [status, status, 429]
        refused = await ask(gateway)
        assert (refused.status, refused.code) == (429, 3021)
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert "requests per minute" in refused.message
        assert (await gateway.chat(max_tokens=1)).status == 429, "nor is there room for a good one"
        assert await gateway.records() == [], "and nothing is charged"


@looped
async def test_a_call_counts_once_however_it_ends(tmp_path: Path) -> None:
    async with served(tmp_path, limits=Limits(requests_per_minute=3)) as gateway:
        late = {"max_tokens": 1, "response_format": {"type": "json_object"}}
        assert (await gateway.run(messages=HELLO, **late)).code == 5024, "it was reserved before it was refused"
        assert [(await gateway.chat(n=0)).status for _ in range(3)] == [400, 400, 429]


@looped
async def test_a_tokens_own_limit_counts_its_refused_calls(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        _, text = await gateway.accounts.mint(gateway.account_id, "own", limits=Limits(requests_per_minute=1))
        own = {"authorization": f"Bearer {text}"}
        assert [(await gateway.call(CHAT, {}, **own)).status for _ in range(2)] == [400, 429]
        assert (await gateway.call(CHAT, {})).status == 400, "other tokens of the account have none"


@looped
async def test_a_revoked_token_is_told_so_where_its_account_has_no_requests_left(tmp_path: Path) -> None:
    async with served(tmp_path, limits=Limits(requests_per_minute=1)) as gateway:
        (token,) = await gateway.accounts.tokens(gateway.account_id)
        assert (await gateway.chat(max_tokens=1)).status == 200
        await gateway.accounts.revoke(token.id)
        assert (await gateway.chat(max_tokens=1)).status == 401


@looped
async def test_bytes_of_an_account_and_second_have_a_limit(tmp_path: Path) -> None:
    async with served(tmp_path, account_bytes=SMALL, body_bytes_max=200_000) as gateway:
        body = b" " * 200_000
        assert [(await gateway.call(CHAT, body)).status for _ in range(3)] == [400, 400, 429]
        refused = await gateway.call(CHAT, body)
        assert (refused.status, refused.code) == (429, 3021)
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        assert "may send 100,000 bytes per second" in refused.message
        other = await gateway.accounts.create("other")
        _, text = await gateway.accounts.mint(other.id, "other")
        assert (await gateway.call(CHAT, body, authorization=f"Bearer {text}")).status == 400, "accounts are apart"


@looped
async def test_bytes_that_are_not_announced_count_as_they_come(tmp_path: Path) -> None:
    async with served(tmp_path, account_bytes=SMALL, body_bytes_max=1_000_000) as gateway:
        head = {"host": "test", "transfer-encoding": "chunked", **gateway.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        piece = b"%x\r\n%b\r\n" % (150_000, b" " * 150_000)
        for status in (400, 429):
            client = await gateway.client()
            client.writer.write(f"POST {CHAT} HTTP/1.1\r\n{lines}\r\n".encode() + 6 * piece + b"0\r\n\r\n")
            assert await client.head() == status
            client.leave()


@looped
async def test_the_largest_body_is_always_served_once(tmp_path: Path) -> None:
    async with served(tmp_path, account_bytes=1024, body_bytes_max=200_000) as gateway:
        text = {"messages": HELLO, "max_tokens": 1, "metadata": {"note": "x" * 500}}
        body = json.dumps({"model": MODEL, **text}).encode().ljust(200_000)
        assert [(await gateway.call(CHAT, body)).status for _ in range(2)] == [200, 429]
