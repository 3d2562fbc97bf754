"""JWTs of an issuer through a whole gateway: they run and are metered, and what is wrong with one is told to nobody."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway import open_requests
from gateway.batch import worker
from tenants.auth import jwks
from tenants.auth.issuers import IssuerUnavailable
from tenants.records.accounts import Account
from tenants.records.limits import Limits
from tenants.store.protocol import StoreUnavailable
from tests.gateway.batch.test_batch import closed, reasons
from tests.support.admin_api import same
from tests.support.issuers import ACCOUNT, JwksServer, World, documents
from tests.support.jwt_attacks import ATTACKS, FORM
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

HELLO: dict[str, Any] = {"prompt": "hello", "max_tokens": 2}
VERIFY = "/client/v4/user/tokens/verify"


class Setting(NamedTuple):
    gateway: Served
    world: World
    keys: JwksServer

    def bearer(self, **claims: Any) -> str:
        return f"Bearer {self.world.jwt(**{'hearth_account': self.gateway.account_id, **claims})}"


@contextlib.asynccontextmanager
async def trusting(folder: Path, status: str = "200 OK") -> AsyncIterator[Setting]:
    """A gateway that trusts the issuers of a World, whose keys' server answers with `status`."""
    keys = JwksServer()
    keys.documents, keys.status = documents(), status
    async with keys.serving(folder) as url:
        world = World(time.time(), url, str(folder / "ca.pem"))
        async with served(folder, issuers=world.settings, address_failures=10_000) as gateway:
            yield Setting(gateway, world, keys)


def can_be_sent(text: str) -> bool:
    """As a header's value; spaces around one are not part of it."""
    return text.isascii() and text.isprintable() and text == text.strip()


@looped
async def test_a_jwt_runs_a_model_and_its_account_is_charged(tmp_path: Path) -> None:
    async with trusting(tmp_path) as setting:
        gateway, bearer = setting.gateway, setting.bearer(sub="app-7")
        for path, body in (
            (gateway.run_path, HELLO),
            (f"/ai/run/{MODEL}", HELLO),
            ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}),
        ):
            answer = await gateway.call(path, body, authorization=bearer)
            assert answer.status == 200, answer.content
        await gateway.settled()
        records = await gateway.records()
        assert [(one.account_id, one.token_id) for one in records] == [(gateway.account_id, "jwt:eddsa:app-7")] * 3
        assert all(one.micro_neurons > 0 for one in records)
        listed = await gateway.call("/v1/models", b"", "GET", authorization=bearer)
        assert MODEL in [model["id"] for model in listed.json["data"]]


@looped
async def test_another_accounts_path_is_answered_like_nobodys(tmp_path: Path) -> None:
    async with trusting(tmp_path) as setting:
        gateway, bearer = setting.gateway, setting.bearer()
        other = await gateway.accounts.create("other")
        answers = [
            await gateway.call(f"/client/v4/accounts/{account_id}/ai/run/{MODEL}", HELLO, authorization=credential)
            for account_id in (other.id, "f" * 32)
            for credential in (bearer, f"Bearer {gateway.token}")
        ]
        assert {answer.status for answer in answers} == {403}
        assert all(same(answer) == same(answers[0]) for answer in answers)
        assert not gateway.fleet.submits


@looped
async def test_a_jwt_may_ask_about_itself(tmp_path: Path) -> None:
    async with trusting(tmp_path) as setting:
        answer = await setting.gateway.call(VERIFY, b"", "GET", authorization=setting.bearer())
        assert answer.status == 200
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(setting.world.now + 600))
        assert answer.json["result"] == {
            "id": "jwt:eddsa:ann",
            "status": "active",
            "expires_on": ends,
            "account_id": setting.gateway.account_id,
            "account_name": "test",
            "models": ["*"],
            "permissions": ["inference"],
        }


@looped
async def test_claims_narrow_what_it_may_do(tmp_path: Path) -> None:
    async with trusting(tmp_path) as setting:
        gateway = setting.gateway
        for claims, code in (({"hearth_models": "@hf/*"}, 3041), ({"hearth_permissions": "usage:read"}, 9109)):
            answer = await gateway.call(gateway.run_path, HELLO, authorization=setting.bearer(**claims))
            assert (answer.status, answer.code) == (403, code)
        tokens = f"/client/v4/accounts/{gateway.account_id}/tokens"
        for claims, status in (({}, 403), ({"hearth_permissions": "account:admin"}, 200)):
            answer = await gateway.call(tokens, b"", "GET", authorization=setting.bearer(**claims))
            assert answer.status == status


@looped
async def test_every_attack_is_answered_like_a_token_of_nobody(tmp_path: Path) -> None:
    """Those that have not even a JWT's form are answered like any other text that is no token."""
    async with trusting(tmp_path) as setting:
        gateway = setting.gateway
        await gateway.app._tenancy.store.accounts.add(Account(ACCOUNT, "red", Limits(), 0))
        _, ended = await gateway.accounts.mint(gateway.account_id, "ended")
        await gateway.accounts.revoke(ended.split("_")[1])
        refused = [
            same(await gateway.call(VERIFY, b"", "GET", authorization=f"Bearer {text}"))
            for text in (ended, "hearth_junk")
        ]
        sent = [(attack, text) for attack in ATTACKS if can_be_sent(text := attack.make(setting.world))]
        for attack, text in sent:
            answer = await gateway.call(VERIFY, b"", "GET", authorization=f"Bearer {text}")
            assert same(answer) == refused[attack.reason == FORM], attack.name
        assert len(sent) > 200
        good = await gateway.call(VERIFY, b"", "GET", authorization=f"Bearer {setting.world.jwt()}")
        assert good.status == 200, "the table proves nothing"


@looped
async def test_a_stream_ends_when_its_jwt_expires(tmp_path: Path) -> None:
    async with trusting(tmp_path) as setting:
        gateway = setting.gateway
        gateway.behaviour.step_s = 0.05
        clients = []
        for bearer in (setting.bearer(exp=int(time.time()) + 1.5), setting.bearer()):
            client = await gateway.client()
            body = {"prompt": "hello", "max_tokens": 5000, "stream": True}
            clients.append(await client.post(gateway.run_path, body, {"authorization": bearer}))
            assert await client.head() == 200
        async with asyncio.timeout(1.5 + open_requests.CHECK_S + 1):
            *_, error, done = [event async for event in clients[0].events()]
        assert (error["errors"][0]["code"], done) == (10000, "[DONE]")
        assert gateway.app.open_requests == 1
        for client in clients:
            client.leave()


@looped
async def test_a_jwts_expiry_ends_its_stream_while_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(open_requests, "CHECK_S", 0.05)
    async with trusting(tmp_path) as setting:
        gateway = setting.gateway
        gateway.behaviour.step_s = 0.05
        client = await gateway.client()
        body = {"prompt": "hello", "max_tokens": 5000, "stream": True}
        await client.post(gateway.run_path, body, {"authorization": setting.bearer()})
        assert await client.head() == 200
        with monkeypatch.context() as broken:
            for name in ("get", "token"):
                broken.setattr(gateway.app._tenancy.store.accounts, name, away)
            gateway.clock.offset_s += 601
            async with asyncio.timeout(5):
                *_, error, done = [event async for event in client.events()]
        assert (error["errors"][0]["code"], done) == (10000, "[DONE]")


def let_it_expire(setting: Setting) -> None:
    setting.gateway.clock.offset_s += 601


def withdraw_its_key(setting: Setting) -> None:
    documents = setting.keys.documents
    documents["/EdDSA"] = {"keys": [{**key, "kid": "another"} for key in documents["/EdDSA"]["keys"]]}


@pytest.mark.parametrize("end", [let_it_expire, withdraw_its_key])
@looped
async def test_a_batch_has_its_jwts_rights_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Setting], None]
) -> None:
    for name in ("CHECK_S", "LOOK_S"):
        monkeypatch.setattr(worker, name, 0.05)
    monkeypatch.setattr(jwks, "REFRESH_S", 0.05)
    async with trusting(tmp_path) as setting:
        gateway = setting.gateway
        gateway.behaviour.step_s = 0.05
        body = {"requests": [{"prompt": "hello", "max_tokens": 5000}]}
        bearer = setting.bearer(hearth_models="@cf/test/*")
        answer = await gateway.call(f"{gateway.run_path}?queueRequest=true", body, authorization=bearer)
        batch_id = answer.json["result"]["request_id"]
        await until(lambda: gateway.fleet.running)
        (claimed,) = gateway.app._batches._claimed.values()
        assert claimed.request is not None
        assert claimed.request.caller.grant.models == ("@cf/test/*",)
        end(setting)

        assert reasons(await closed(gateway, batch_id)) == [10000]
        await until(lambda: not gateway.fleet.running)  # the replica hears of it a moment later


@looped
async def test_a_batch_waits_for_the_keys_of_its_jwts_issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that has not fetched them yet claims it, puts it back, and runs it once it knows them."""
    monkeypatch.setattr(worker, "LOOK_S", 0.05)
    async with trusting(tmp_path) as setting:
        gateway, verifier = setting.gateway, setting.gateway.accounts._issuers
        assert verifier is not None
        proven, tried = verifier.check_key, list[str]()

        async def not_fetched(token_id: str, kid: str) -> None:
            tried.append(kid)
            raise IssuerUnavailable("not fetched yet")

        monkeypatch.setattr(verifier, "check_key", not_fetched)
        answer = await gateway.call(
            f"{gateway.run_path}?queueRequest=true", {"requests": [HELLO]}, authorization=setting.bearer()
        )
        batch_id = answer.json["result"]["request_id"]
        await until(lambda: len(tried) > 1)
        assert not gateway.app._batches._context.store_health.down
        monkeypatch.setattr(verifier, "check_key", proven)
        assert (await closed(gateway, batch_id))["responses"][0]["success"]


@looped
async def test_without_its_issuers_keys_nothing_is_said_of_a_jwt(tmp_path: Path) -> None:
    """And ApiTokens are taken all the same; once the issuer is back, so is the JWT."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jwks, "RETRY_S", 0.1)
        async with trusting(tmp_path, "500 Sorry") as setting:
            gateway, bearer = setting.gateway, setting.bearer()
            answer = await gateway.call(gateway.run_path, HELLO, authorization=bearer)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert "issuer" in answer.message
            assert (await gateway.run(**HELLO)).status == 200
            setting.keys.status = "200 OK"

            async def taken() -> bool:
                return (await gateway.call(gateway.run_path, HELLO, authorization=bearer)).status == 200

            await until(taken)
