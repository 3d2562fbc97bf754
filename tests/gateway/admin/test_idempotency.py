"""Creations that are sent again: one effect, one answer, and no secret that the store could tell."""

import asyncio
import sqlite3
from pathlib import Path

import pytest
import redis

from tenants.auth.api_token import parse_token
from tenants.records.grants import Grant
from tenants.store.protocol import StoreUnavailable
from tests.support.admin_api import served_admin
from tests.support.served_gateway import looped

POLICIES = [{"permission_groups": [{"id": "inference"}]}]


@looped
async def test_twenty_equal_requests_at_once_make_one_account(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        asked = [house.operate("POST", "/accounts", {"name": "once"}, idempotency_key="k") for _ in range(20)]
        answers = await asyncio.gather(*asked)
        assert {answer.status for answer in answers} <= {200, 409}
        made = {answer.content for answer in answers if answer.status == 200}
        assert len(made) == 1
        assert all(answer.code == 1010 for answer in answers if answer.status == 409)
        again = await house.operate("POST", "/accounts", {"name": "once"}, idempotency_key="k")
        assert {again.content} == made
        assert again.headers["etag"] == '"1"'
        names = [account.name for account in await house.gateway.accounts.list()]
        assert names.count("once") == 1
        assert len(await house.audited(again.json["result"]["id"])) == 1


@looped
async def test_a_key_is_one_request_of_one_account(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        body = {"name": "n", "policies": POLICIES}
        path = f"{house.account}/tokens"
        first = await house.ask("POST", path, body, idempotency_key="k")
        other = await house.ask("POST", path, {**body, "name": "m"}, idempotency_key="k")
        assert (other.status, other.code) == (422, 1011)
        bobs = await house.ask(
            "POST", f"/client/v4/accounts/{house.bob_id}/tokens", body, house.bob, idempotency_key="k"
        )
        assert bobs.status == 200
        assert bobs.json["result"]["id"] != first.json["result"]["id"]
        colleague = await house.token()
        theirs = await house.ask("POST", path, body, colleague, idempotency_key="k")
        assert theirs.json["result"]["value"] != first.json["result"]["value"]
        without = [await house.ask("POST", path, body) for _ in range(2)]
        assert len({first.content, *(one.content for one in without)}) == 3
        for key in ("", "k" * 256, "a b"):
            assert (await house.ask("POST", path, body, **{"Idempotency-Key": key or " "})).status == 400, key


@looped
async def test_an_answer_is_told_again_only_to_who_may_still_ask(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        path, body, administrator = f"{house.account}/tokens", {"name": "n", "policies": POLICIES}, await house.token()
        first = await house.ask("POST", path, body, administrator, idempotency_key="k")
        again = await house.ask("POST", path, body, administrator, idempotency_key="k")
        assert (again.status, again.content) == (200, first.content)
        await house.gateway.accounts.update_token(parse_token(administrator), "narrowed", None, Grant())
        house.gateway.see_changes()
        refused = await house.ask("POST", path, body, administrator, idempotency_key="k")
        assert (refused.status, refused.code) == (403, 9109)
        assert first.json["result"]["value"].encode() not in refused.content


@looped
async def test_a_refused_creation_leaves_its_key_free(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        body = {"name": "late", "plan": "free"}
        assert (await house.operate("POST", "/accounts", body, idempotency_key="k")).status == 400
        await house.operate("PUT", "/plans/free", {})
        assert (await house.operate("POST", "/accounts", body, idempotency_key="k")).status == 200


@looped
async def test_a_creation_that_broke_off_is_never_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served_admin(tmp_path) as house:
        store = house.gateway.app._tenancy.store

        async def away(*_: object) -> bool:
            raise StoreUnavailable("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(store.audit, "append", away)
            answer = await house.operate("POST", "/accounts", {"name": "half"}, idempotency_key="k")
            assert answer.status == 503
        again = await house.operate("POST", "/accounts", {"name": "half"}, idempotency_key="k")
        assert (again.status, again.code) == (409, 1010)
        assert [account.name for account in await house.gateway.accounts.list()].count("half") == 1


@looped
async def test_a_secret_is_told_again_and_is_nowhere_in_the_store(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        body = {"name": "n", "policies": POLICIES}
        first, again = [
            await house.ask("POST", f"{house.account}/tokens", body, idempotency_key="a-key-of-the-client")
            for _ in "ab"
        ]
        assert first.content == again.content
        text = first.json["result"]["value"]
        assert (await house.gateway.call("/v1/models", b"", "GET", authorization=f"Bearer {text}")).status == 200
        kept_bytes = dump(store_url)
        assert first.json["result"]["id"].encode() in kept_bytes
        assert text.split("_")[2].encode() not in kept_bytes
        assert b"a-key-of-the-client" not in kept_bytes


def dump(url: str) -> bytes:
    """All that the store has."""
    if url.startswith("sqlite:"):
        path = url.removeprefix("sqlite:")
        with sqlite3.connect(path) as file:
            tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            rows = [row for name in tables for row in file.execute(f"SELECT * FROM {name}")]
        values = [value if isinstance(value, bytes) else str(value).encode() for row in rows for value in row]
        return b"\n".join([*values, *(Path(f"{path}{end}").read_bytes() for end in ("", "-wal"))])
    with redis.Redis.from_url(url) as client:
        found = []
        for key in client.scan_iter():
            kind = client.type(key)
            read = {b"string": client.get, b"hash": client.hgetall, b"list": lambda k: client.lrange(k, 0, -1),
                    b"set": client.smembers, b"zset": lambda k: client.zrange(k, 0, -1)}[kind]  # fmt: skip
            value = read(key)
            parts = (
                [*value, *value.values()] if isinstance(value, dict) else [value] if isinstance(value, bytes) else value
            )
            found += [key, *parts]
        return b"\n".join(found)
