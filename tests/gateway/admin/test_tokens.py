"""The tokens' part of the API, over sockets: Cloudflare's shapes, and what a grant forbids."""

import asyncio
from pathlib import Path
from typing import Any

import cloudflare
import pytest

from gateway.admin import tokens as module
from tenants.records.grants import Grant, Permission
from tests.support.admin_api import same, served_admin
from tests.support.sdks import client_of
from tests.support.served_gateway import Answer, Served, looped, served
from tests.support.stub_replica import MODEL

HELLO: dict[str, Any] = {"prompt": "hello", "max_tokens": 2}
INFERENCE = [{"effect": "allow", "permission_groups": [{"id": "inference"}]}]


async def admin(gateway: Served) -> str:
    _, text = await gateway.accounts.mint(
        gateway.account_id, "admin", grant=Grant((Permission.ACCOUNT_ADMIN, Permission.INFERENCE))
    )
    return f"Bearer {text}"


async def call(gateway: Served, method: str, path: str, token: str, body: Any = b"") -> Answer:
    account = f"/client/v4/accounts/{gateway.account_id}"
    return await gateway.call(f"{account}/tokens{path}", body, method, authorization=token)


@looped
async def test_a_tokens_life(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        boss = await admin(gateway)
        wanted = {
            "name": "ci", "policies": INFERENCE, "models": ["@cf/test/*"], "expires_on": "2099-01-02T03:04:05Z",
            "condition": {"request_ip": {"in": ["127.0.0.0/8"]}},
        }  # fmt: skip
        made = await call(gateway, "POST", "", boss, wanted)
        assert made.status == 200, made.content
        assert made.headers["cache-control"] == "no-store"
        token = made.json["result"]
        first = token.pop("value")
        assert token["policies"][0]["permission_groups"] == [{"id": "inference", "name": "inference"}]
        assert token["policies"][0]["resources"] == {f"com.cloudflare.api.account.{gateway.account_id}": "*"}
        assert (token["status"], token["expires_on"], token["models"]) == (
            "active", "2099-01-02T03:04:05Z", ["@cf/test/*"],
        )  # fmt: skip
        assert (await call(gateway, "GET", f"/{token['id']}", boss)).json["result"] == token
        assert (await gateway.call(gateway.run_path, HELLO, authorization=f"Bearer {first}")).status == 200

        rolled = await call(gateway, "PUT", f"/{token['id']}/value", boss, {"grace_seconds": 600})
        second = rolled.json["result"]
        for text in (first, second):
            answer = await gateway.call(gateway.run_path, HELLO, authorization=f"Bearer {text}")
            assert answer.status == 200

        changed = await call(gateway, "PUT", f"/{token['id']}", boss, {"name": "ci 2", "policies": INFERENCE})
        assert changed.json["result"]["name"] == "ci 2"
        assert changed.json["result"]["models"] == ["*"]
        assert changed.json["result"]["expires_on"] is None

        listed = (await call(gateway, "GET", "?per_page=2&page=2", boss)).json
        earlier = (await call(gateway, "GET", "?per_page=2", boss)).json["result"]
        assert {one["name"] for one in [*earlier, *listed["result"]]} == {"test", "admin", "ci 2"}
        assert listed["result_info"] == {"count": 1, "page": 2, "per_page": 2, "total_count": 3}
        assert (await call(gateway, "GET", "?page=9", boss)).json["result"] == []

        ended = await call(gateway, "DELETE", f"/{token['id']}", boss)
        assert ended.json["result"] == {"id": token["id"]}
        for method in ("GET", "DELETE"):
            assert (await call(gateway, method, f"/{token['id']}", boss)).status == 404
        for text in (first, second):
            assert (await gateway.call(gateway.run_path, HELLO, authorization=f"Bearer {text}")).status == 401


@looped
async def test_any_token_may_ask_about_itself(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        (token,) = await gateway.accounts.tokens(gateway.account_id)
        for path in ("/client/v4/user/tokens/verify", f"/client/v4/accounts/{gateway.account_id}/tokens/verify"):
            answer = await gateway.call(path, b"", "GET")
            assert answer.status == 200
            verified = answer.json["result"]
            assert (verified["id"], verified["status"], verified["expires_on"]) == (token.id, "active", None)
            assert (verified["account_id"], verified["account_name"]) == (gateway.account_id, "test")
            assert (verified["permissions"], verified["models"]) == (["inference"], ["*"])
            assert answer.json["messages"][0]["message"] == "This API Token is valid and active"
        assert (await gateway.call("/client/v4/user/tokens/verify", b"", "GET", authorization="")).status == 401
        assert (await gateway.call("/client/v4/user/tokens/verify", b"")).status == 405


@looped
async def test_tokens_are_an_administrators_to_see_and_a_foreign_one_is_like_none(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        boss, plain = await admin(gateway), f"Bearer {gateway.token}"
        other = await gateway.accounts.create("other")
        foreign, _ = await gateway.accounts.mint(other.id, "theirs")
        for method, path, body in (
            ("GET", "", b""), ("POST", "", {"name": "n", "policies": INFERENCE}), ("GET", f"/{foreign.id}", b""),
            ("PUT", f"/{foreign.id}", {"name": "n", "policies": INFERENCE}), ("DELETE", f"/{foreign.id}", b""),
            ("PUT", f"/{foreign.id}/value", b""),
        ):  # fmt: skip
            answer = await call(gateway, method, path, plain, body)
            assert (answer.status, answer.code) == (403, 9109), (method, path)
            elsewhere = f"/client/v4/accounts/{other.id}/tokens{path}"
            answer = await gateway.call(elsewhere, body, method, authorization=boss)
            assert (answer.status, answer.code) == (403, 10000), (method, path)
            if foreign.id in path:
                theirs = await call(gateway, method, path, boss, body)
                nobodys = await call(gateway, method, path.replace(foreign.id, "A" * 11), boss, body)
                assert theirs.status == 404, (method, path)
                assert same(theirs) == same(nobodys), (method, path)
        assert [token.name for token in await gateway.accounts.tokens(other.id)] == ["theirs"]
        assert (await gateway.accounts.token(foreign.id)).revoked_at is None


@looped
async def test_what_a_grant_forbids_is_refused_before_anything_runs(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        for grant, code in (
            (Grant(models=("@hf/*",)), 3041),
            (Grant((Permission.USAGE_READ,)), 9109),
            (Grant(networks=("10.0.0.0/8",)), 9109),
        ):
            _, text = await gateway.accounts.mint(gateway.account_id, "narrow", grant=grant)
            for path, body in (
                (gateway.run_path, HELLO),
                ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}),
            ):
                answer = await gateway.call(path, body, authorization=f"Bearer {text}")
                assert (answer.status, answer.code) == (403, code), grant
        assert not gateway.fleet.submits
        assert not await gateway.records()


@looped
async def test_a_token_is_shown_the_models_that_it_may_call(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        account = f"/client/v4/accounts/{gateway.account_id}/ai"
        for grant, seen in ((Grant(), True), (Grant(models=("@hf/*",)), False)):
            _, text = await gateway.accounts.mint(gateway.account_id, "narrow", grant=grant)
            listed = await gateway.call("/v1/models", b"", "GET", authorization=f"Bearer {text}")
            found = await gateway.call(f"{account}/models/search", b"", "GET", authorization=f"Bearer {text}")
            assert (MODEL in [model["id"] for model in listed.json["data"]]) is seen
            assert (MODEL in [model["name"] for model in found.json["result"]]) is seen
            assert found.json["result_info"]["total_count"] == len(found.json["result"])


WRONG: list[tuple[Any, str]] = [
    (b"", "no body; send a JSON object"),
    ({"policies": INFERENCE}, "name"),
    ({"name": "n"}, "policies"),
    ({"name": " ", "policies": INFERENCE}, "name"),
    ({"name": "n", "policies": []}, "policies"),
    ({"name": "n", "policies": [{"permission_groups": [{"id": "operator"}]}]}, "permission_groups"),
    ({"name": "n", "policies": [{**INFERENCE[0], "effect": "deny"}]}, "effect"),
    ({"name": "n", "policies": [{**INFERENCE[0], "resources": {"account.x": "*"}}]}, "resources"),
    ({"name": "n", "policies": INFERENCE, "expires_on": "2001-01-01T00:00:00Z"}, "past"),
    ({"name": "n", "policies": INFERENCE, "expires_on": "tomorrow"}, "expires_on"),
    ({"name": "n", "policies": INFERENCE, "models": ["a\n"]}, "model pattern"),
    ({"name": "n", "policies": INFERENCE, "condition": {"request_ip": {"in": ["10.0.0.1/8"]}}}, "network"),
    ({"name": "n", "policies": INFERENCE, "color": "red"}, "color"),
    ({"name": "n", "policies": INFERENCE, "limits": {"requests_per_minute": 0}}, "requests_per_minute"),
]  # fmt: skip


@looped
async def test_a_wrong_body_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        before = await house.gateway.accounts.tokens(house.ann_id)
        for body, named in WRONG:
            answer = await house.ask("POST", f"{house.account}/tokens", body)
            assert answer.status == 400, named
            assert named in answer.message
        assert await house.gateway.accounts.tokens(house.ann_id) == before


@looped
async def test_a_tokens_own_limits_hold_and_are_shown(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        wanted = {"name": "slow", "policies": INFERENCE, "limits": {"requests_per_minute": 1}}
        made = (await house.ask("POST", f"{house.account}/tokens", wanted)).json["result"]
        assert made["limits"] == {"requests_per_minute": 1}
        ran = [
            await house.gateway.call(house.gateway.run_path, HELLO, authorization=f"Bearer {made['value']}")
            for _ in "ab"
        ]
        assert [one.status for one in ran] == [200, 429]
        path = f"{house.account}/tokens/{made['id']}"
        changed = await house.ask("PUT", path, {"name": "slow", "policies": INFERENCE})
        assert changed.json["result"]["limits"] == {}
        assert (await house.ask("GET", path)).json == changed.json


@looped
async def test_lists_in_both_directions(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        ids = [
            [one["id"] for one in (await house.ask("GET", f"{house.account}/tokens?{query}")).json["result"]]
            for query in ("", "direction=asc", "direction=desc")
        ]
        assert ids[0] == ids[1] == ids[2][::-1]
        assert len(ids[0]) == 2


@looped
async def test_the_official_sdk_keeps_an_accounts_tokens(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        cloud = client_of(cloudflare.AsyncCloudflare, house.gateway.base_url, house.ann)
        policies: Any = [{"effect": "allow", "permission_groups": [{"id": "inference"}], "resources": {}}]
        tokens = cloud.accounts.tokens
        made = await tokens.create(account_id=house.ann_id, name="sdk", policies=policies)
        assert made is not None
        assert (await house.gateway.call("/v1/models", b"", "GET", authorization=f"Bearer {made.value}")).status == 200
        seen = await tokens.get(made.id, account_id=house.ann_id)
        assert (seen.name, seen.status, hasattr(seen, "value")) == ("sdk", "active", False)
        listed = await tokens.list(account_id=house.ann_id, direction="desc", per_page=50)
        assert made.id in [one.id for one in listed.result]
        changed = await tokens.update(made.id, account_id=house.ann_id, name="sdk 2", policies=policies)
        assert changed.name == "sdk 2"
        rolled = await tokens.value.update(made.id, account_id=house.ann_id)
        assert rolled.startswith("hearth_")
        assert rolled != made.value
        assert (await tokens.verify(account_id=house.ann_id)).status == "active"
        assert (await cloud.user.tokens.verify()).status == "active"
        assert (await tokens.delete(made.id, account_id=house.ann_id)).id == made.id
        told = [action for _, action, target in await house.audited(house.ann_id) if target == made.id]
        assert told == ["token.create", "token.change", "token.roll", "token.revoke"]
        await cloud.close()


@looped
async def test_a_hundred_tokens_at_once_are_all_made_and_noted(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        body = {"name": "n", "policies": INFERENCE}
        made = await asyncio.gather(*(house.ask("POST", f"{house.account}/tokens", body) for _ in range(100)))
        assert {answer.status for answer in made} == {200}
        targets = [target for _, _, target in await house.audited(house.ann_id)]
        assert sorted(targets) == sorted(answer.json["result"]["id"] for answer in made)


@looped
async def test_an_administrator_cannot_become_the_operator_by_a_token_of_its_account(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        administrator = await house.token(Permission.ACCOUNT_ADMIN, account_id=house.operator_id)
        path = f"/client/v4/accounts/{house.operator_id}/tokens/{house.operator.split('_')[1]}"
        assert (await house.ask("GET", path, token=administrator)).status == 200
        for method, where, body in (
            ("PUT", f"{path}/value", b""), ("PUT", path, {"name": "n", "policies": INFERENCE}), ("DELETE", path, b""),
        ):  # fmt: skip
            answer = await house.ask(method, where, body, administrator)
            assert (answer.status, answer.code) == (403, 9109), (method, where)
        assert (await house.operate("GET", "/accounts")).status == 200
        both = await house.token(Permission.ACCOUNT_ADMIN, Permission.OPERATOR, account_id=house.operator_id)
        assert (await house.ask("PUT", f"{path}/value", b"", both)).status == 200
        scraper = await house.token(Permission.METRICS_READ, account_id=house.operator_id)
        rolled = f"/client/v4/accounts/{house.operator_id}/tokens/{scraper.split('_')[1]}/value"
        assert (await house.ask("PUT", rolled, b"", administrator)).status == 403, "it names all accounts"
        assert (await house.ask("PUT", rolled, b"", both)).status == 200


@looped
async def test_an_account_has_so_many_tokens_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS_MAX", 3)
    async with served_admin(tmp_path) as house:
        body = {"name": "n", "policies": INFERENCE}
        made = await house.ask("POST", f"{house.account}/tokens", body)
        full = await house.ask("POST", f"{house.account}/tokens", body, idempotency_key="k")
        assert (full.status, full.code) == (409, 1009)
        await house.ask("DELETE", f"{house.account}/tokens/{made.json['result']['id']}")
        assert (await house.ask("POST", f"{house.account}/tokens", body, idempotency_key="k")).status == 200


@looped
async def test_what_policies_can_name_is_what_creations_take(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        found = (await house.ask("GET", f"{house.account}/tokens/permission_groups")).json["result"]
        for group in found:
            body = {"name": "one", "policies": [{"permission_groups": [{"id": group["id"]}]}]}
            assert (await house.ask("POST", f"{house.account}/tokens", body)).status == 200
        assert Permission.OPERATOR not in {group["id"] for group in found}
        for query, ids in (("name=inference", ["inference"]), ("scope=com.cloudflare.api.user", []), ("name=x", [])):
            shown = await house.ask("GET", f"{house.account}/tokens/permission_groups?{query}")
            assert [group["id"] for group in shown.json["result"]] == ids
