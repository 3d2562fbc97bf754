"""gateway/authentication.py: the answer to a credential that opens nothing, and how often one may come."""

from pathlib import Path

import pytest

from tenants.limits import local_rate
from tests.support.served_gateway import Answer, Served, looped, served
from tests.support.stub_replica import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
JUNK = "Bearer junk"
NETWORKS = ["127.0.0.0/8"]


async def ask(gateway: Served, authorization: str = JUNK, **headers: str) -> Answer:
    return await gateway.call("/v1/chat/completions", CHAT, authorization=authorization, **headers)


@looped
async def test_junk_is_401_in_every_dialect_with_the_scheme_to_use(tmp_path: Path) -> None:
    kinds = {
        "/v1/chat/completions": "invalid_request_error",
        "/v1/messages": "authentication_error",
        "/ai/run/@cf/any": "invalid_request_error",
        "/v1/models": "invalid_request_error",
        "/client/v4/user/tokens/verify": "invalid_request_error",
    }
    async with served(tmp_path) as gateway:
        for path, kind in kinds.items():
            method = "GET" if path.endswith(("models", "verify")) else "POST"
            for headers in ({"authorization": JUNK}, {"authorization": "", "x_api_key": "junk"}):
                answer = await gateway.call(path, CHAT, method, **headers)
                assert (answer.status, answer.code, answer.json["error"]["type"]) == (401, 9106, kind), path
                assert (answer.json["result"], answer.json["success"]) == (None, False), path
                assert answer.headers["www-authenticate"] == "Bearer"


@looped
async def test_an_address_whose_credentials_fail_too_often_is_429_and_a_good_token_works_there(tmp_path: Path) -> None:
    async with served(tmp_path, address_failures=3) as gateway:
        assert [(await ask(gateway)).status for _ in range(5)] == [401, 401, 401, 429, 429]
        token, text = await gateway.accounts.mint(gateway.account_id, "gone")
        await gateway.accounts.revoke(token.id)
        refused = await ask(gateway, f"Bearer {text}")
        assert (refused.status, refused.code) == (429, 9106), "whatever it is that opens nothing"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert (await gateway.chat(max_tokens=1)).status == 200, "others share the address"
        assert (await gateway.call("/v1/messages", CHAT, authorization=JUNK)).json["error"][
            "type"
        ] == "rate_limit_error"


@looped
async def test_behind_a_trusted_proxy_each_client_has_its_own_failures(tmp_path: Path) -> None:
    async with served(tmp_path, address_failures=1, proxies=NETWORKS) as gateway:
        clients = ["192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8:0:1::1"]
        for client in clients:
            assert (await ask(gateway, x_forwarded_for=client)).status == 401, client
            assert (await ask(gateway, x_forwarded_for=client)).status == 429, client
        assert (await ask(gateway, x_forwarded_for="2001:db8::ffff:2")).status == 429, "one /64 is one customer"


@looped
async def test_nobody_chooses_the_address_that_is_counted(tmp_path: Path) -> None:
    async with served(tmp_path, address_failures=1) as gateway:
        assert (await ask(gateway, x_forwarded_for="192.0.2.1")).status == 401
        assert (await ask(gateway, x_forwarded_for="192.0.2.2")).status == 429


@looped
async def test_addresses_without_end_take_no_memory_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_rate, "KEYS_MAX", 4)
    async with served(tmp_path, address_failures=1, proxies=NETWORKS) as gateway:
        for last in range(9):
            assert (await ask(gateway, x_forwarded_for=f"192.0.2.{last}")).status == 401
        assert (await ask(gateway, x_forwarded_for="192.0.2.8")).status == 429, "the last ones are known"
        assert (await ask(gateway, x_forwarded_for="192.0.2.0")).status == 401, "the first ones are forgotten"
