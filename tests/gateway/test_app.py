"""Routes, credentials and the answers that need no replica."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gateway.settings.config import Config, SettingsError
from gateway.tenancy import open_tenancy
from tenants.store.protocol import StoreUnavailable
from tenants.store.settings import StoreConfig
from tests.support.admin_api import same
from tests.support.served_gateway import Client, Served, looped, served
from tests.support.stub_replica import MODEL

HELLO: dict[str, Any] = {"prompt": "hello", "max_tokens": 2}


async def get(gateway: Served, path: str, token: str | None = None) -> Any:
    headers = gateway.headers if token is None else {"authorization": token} if token else {}
    client = await Client.connect(gateway.port)
    await client.send("GET", path, b"", headers)
    status = await client.head()
    content = await client.body()
    client.leave()
    return status, client.headers, content


@looped
async def test_a_model_may_be_spelled_with_plain_or_encoded_slashes(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        account = f"/client/v4/accounts/{gateway.account_id}"
        for model in (MODEL, quote(MODEL, safe=""), quote(MODEL, safe="@"), "@cf%2Ftest/stub"):
            for prefix in (account, ""):
                answer = await gateway.call(f"{prefix}/ai/run/{model}", HELLO)
                assert answer.status == 200, (prefix, model, answer.content)


@looped
async def test_chat_completions_are_at_both_paths(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        account = f"/client/v4/accounts/{gateway.account_id}"
        for path in (f"{account}/ai/v1/chat/completions", "/ai/v1/chat/completions", "/v1/chat/completions"):
            assert (await gateway.call(path, body)).json["object"] == "chat.completion"


@looped
async def test_credentials_decide(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        other = await gateway.accounts.create("other")
        elsewhere = gateway.run_path.replace(gateway.account_id, other.id)
        nowhere = gateway.run_path.replace(gateway.account_id, "0" * 32)
        unknown = gateway.token[:-8] + ("A" if gateway.token[-8] != "A" else "B") + gateway.token[-7:]
        cases = [
            (gateway.run_path, "", 401, 10000),
            (gateway.run_path, "Basic abc", 401, 10000),
            (gateway.run_path, "Bearer ", 401, 9106),
            (gateway.run_path, "Bearer junk", 401, 9106),
            (gateway.run_path, f"Bearer {unknown}", 401, 9106),
            (elsewhere, f"Bearer {gateway.token}", 403, 10000),
            (nowhere, f"Bearer {gateway.token}", 403, 10000),
            (gateway.run_path.replace(gateway.account_id, "nobody"), f"Bearer {gateway.token}", 404, 7003),
        ]
        for path, authorization, status, code in cases:
            answer = await gateway.call(path, HELLO, authorization=authorization)
            assert (answer.status, answer.code) == (status, code), (path, authorization)
            assert list(answer.json) == ["result", "success", "errors", "messages", "error"]
            assert answer.json["result"] is None
            assert answer.json["error"]["message"] == f"{answer.message} ({answer.headers['x-request-id']})"
        one, two = [await gateway.call(path, HELLO) for path in (elsewhere, nowhere)]
        assert same(one) == same(two)
        assert not gateway.fleet.submits


@looped
async def test_a_revoked_token_opens_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        (token,) = await gateway.accounts.tokens(gateway.account_id)
        await gateway.accounts.revoke(token.id)
        answer = await gateway.run(**HELLO)
        assert (answer.status, answer.code) == (401, 10000)
        assert answer.headers["www-authenticate"] == "Bearer"


@looped
async def test_a_revoked_token_ends_its_running_streams_and_no_others(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.05
        _, other = await gateway.accounts.mint(gateway.account_id, "other")
        (first,) = [one for one in await gateway.accounts.tokens(gateway.account_id) if one.name == "test"]
        clients = []
        for token in (gateway.token, other):
            client = await gateway.client()
            body = {"prompt": "hello", "max_tokens": 5000, "stream": True}
            clients.append(await client.post(gateway.run_path, body, {"authorization": f"Bearer {token}"}))
            assert await client.head() == 200
        await gateway.accounts.revoke(first.id)
        async with asyncio.timeout(5):
            *_, error, done = [event async for event in clients[0].events()]
        assert (error["errors"][0]["code"], done) == (10000, "[DONE]")
        assert gateway.app.open_requests == 1
        for client in clients:
            client.leave()


@looped
async def test_credentials_are_asked_for_before_the_body_is_read(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        client = await gateway.client()
        client.writer.write(f"POST {gateway.run_path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n".encode())
        assert await client.head() == 401
        client.leave()


@looped
async def test_unknown_paths_and_methods_have_their_codes(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        account = f"/client/v4/accounts/{gateway.account_id}"
        for path in ("/", "/ai", "/ai/v1/nothing", "/client/v4/zones", f"{account}/ai/nothing", "/v1/nothing"):
            answer = await gateway.call(path, {})
            assert (answer.status, answer.code) == (404, 7000), path
        for method, path in (("GET", gateway.run_path), ("PUT", "/v1/chat/completions"), ("POST", "/v1/models")):
            answer = await gateway.call(path, {}, method)
            assert (answer.status, answer.code) == (405, 7001), path
        assert "error" in (await gateway.call("/v1/nothing", {})).json


@looped
async def test_openai_errors_carry_both_shapes_on_their_paths(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        answer = await gateway.chat(temperature=9)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "temperature"
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert answer.code == 5006
        assert answer.json["result"] == {}
        refused = await gateway.call("/v1/chat/completions", {}, authorization="")
        assert (refused.status, refused.json["error"]["code"], refused.code) == (401, "invalid_api_key", 10000)
        assert (await gateway.run(prompt=1)).json["error"]["param"] == "prompt"


@looped
async def test_a_body_has_a_limit_announced_or_not(tmp_path: Path) -> None:
    async with served(tmp_path, body_bytes_max=2000) as gateway:
        answer = await gateway.run(prompt="x" * 3000)
        assert (answer.status, answer.code) == (413, 3006)
        client = await gateway.client()
        client.writer.write(
            f"POST {gateway.run_path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.token}\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
            + b"".join(b"3e8\r\n" + b"x" * 1000 + b"\r\n" for _ in range(3))
        )
        assert await client.head() == 413
        client.leave()


@looped
async def test_a_compressed_body_is_refused_by_its_header(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        body = gzip.compress(b'{"prompt": "hello"}')
        answer = await gateway.call(gateway.run_path, body, content_encoding="gzip")
        assert (answer.status, answer.code) == (400, 5006)
        assert "'Content-Encoding'" in answer.message
        plain = await gateway.call(gateway.run_path, {"prompt": "hello", "max_tokens": 1}, content_encoding="identity")
        assert plain.status == 200


@looped
async def test_a_body_that_does_not_come_is_408(tmp_path: Path) -> None:
    async with served(tmp_path, body_s=0.2) as gateway:
        client = await gateway.client()
        head = f"POST {gateway.run_path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.token}\r\n"
        client.writer.write(f'{head}content-length: 100\r\n\r\n{{"prompt":'.encode())
        assert await client.head() == 408
        assert json.loads(await client.body())["errors"][0]["code"] == 3007
        client.leave()


@looped
async def test_too_many_requests_at_once_are_429(tmp_path: Path) -> None:
    async with served(tmp_path, requests=1) as gateway:
        gateway.behaviour.step_s = 0.05
        client = await (await gateway.client()).post(
            gateway.run_path, {**HELLO, "max_tokens": 100, "stream": True}, gateway.headers
        )
        assert await client.head() == 200
        answer = await gateway.run(**HELLO)
        assert (answer.status, answer.code) == (429, 3040)
        client.leave()
        await gateway.settled()
        assert (await gateway.run(**HELLO)).status == 200


@looped
async def test_every_answer_names_its_request(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        answers = [await gateway.run(**HELLO), await gateway.run(prompt=1), await gateway.call("/", {})]
        ids = {answer.headers["x-request-id"] for answer in answers}
        assert len(ids) == 3
        assert answers[1].headers["x-request-id"] in answers[1].message


@looped
async def test_readiness_needs_a_replica_and_a_store_and_no_drain(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        assert (await get(gateway, "/healthz", token=""))[0] == 200
        assert (await get(gateway, "/readyz", token=""))[0] == 200
        gateway.app.drain()
        status, headers, content = await get(gateway, "/readyz", token="")
        assert (status, json.loads(content)["problems"]) == (503, ["draining"])
        assert int(headers["retry-after"]) >= 1
        assert (await get(gateway, "/healthz", token=""))[0] == 200
        answer = await gateway.run(**HELLO)
        assert (answer.status, answer.code) == (503, 3040)
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_what_is_open_to_all_names_no_account_and_no_replica(tmp_path: Path, path: str) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path) as gateway:
            await gateway.run(**HELLO)
            await gateway.settled()
            _, _, content = await get(gateway, path, token="")
            for secret in (gateway.account_id, gateway.token, str(tmp_path), "hello", "sock"):
                assert secret.encode() not in content

    call()


@looped
async def test_a_path_that_names_no_model_is_no_route(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        for path in ("/ai/run/", f"/client/v4/accounts/{gateway.account_id}/ai/run/"):
            answer = await gateway.call(path, body)
            assert (answer.status, answer.code) == (404, 7000), path
        assert not gateway.fleet.submits


@looped
async def test_a_wrong_method_is_told_the_right_one(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        for method, path, allowed in (("GET", gateway.run_path, "POST"), ("POST", "/healthz", "GET, HEAD")):
            answer = await gateway.call(path, b"", method)
            assert (answer.status, answer.code, answer.headers["allow"]) == (405, 7001, allowed)
            assert allowed in answer.message


@looped
async def test_head_is_answered_as_get_without_a_body(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models"):
            client = await gateway.client()
            await client.send("HEAD", path, b"", gateway.headers)
            assert await client.head() == 200, path
            await client.send("GET", "/healthz", b"")
            assert await client.head() == 200
            client.leave()


@looped
async def test_an_authentication_error_says_what_to_send(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        nobody = await gateway.call(gateway.run_path, HELLO, authorization="")
        assert "send 'Authorization: Bearer <token>'" in nobody.message
        elsewhere = await gateway.call(gateway.run_path.replace(gateway.account_id, "0" * 32), HELLO)
        assert "leave the account out of the path" in elsewhere.message


@looped
async def test_a_store_that_is_away_is_told_to_the_operator_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as gateway:

        async def away(_: Any) -> Any:
            raise StoreUnavailable("hearth.db: its disk is full; free some space")

        with caplog.at_level("INFO"), monkeypatch.context() as patch:
            patch.setattr(gateway.app._tenancy.store.quotas, "reserve", away)
            for _ in range(3):
                refused = await gateway.run(**HELLO)
                assert (refused.status, refused.code) == (503, 3040)
                assert "disk" not in refused.message
        with caplog.at_level("INFO"):
            assert (await gateway.run(**HELLO)).status == 200
            assert (await gateway.run(**HELLO)).status == 200
        told = [record for record in caplog.records if record.getMessage().startswith("store_")]
        assert [record.getMessage() for record in told] == ["store_away", "store_back"]
        assert told[0].fields == {"problem": "hearth.db: its disk is full; free some space"}  # type: ignore[attr-defined]


def test_a_store_url_that_cannot_be_is_a_setting_that_is_wrong(tmp_path: Path) -> None:
    config = Config(state_folder=str(tmp_path), store=StoreConfig(url="sentinel://a,b"))
    with pytest.raises(SettingsError, match=r"^\[store\] of hearth.toml: .* lacks the name"):
        open_tenancy(config, b"secret")
