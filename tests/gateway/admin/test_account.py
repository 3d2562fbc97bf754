"""An account in its administrators' hands: what they may change, and that no change is lost."""

import asyncio
import base64
import hmac
from pathlib import Path
from typing import Any

from tenants.records.limits import Limits
from tests.gateway.inference.test_jwt_callers import trusting
from tests.support.admin_api import served_admin
from tests.support.served_gateway import looped


@looped
async def test_what_is_left_out_of_a_change_stays_as_it_is(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        before = await house.ask("GET", house.account)
        assert (before.json["result"]["name"], before.headers["etag"]) == ("test", '"1"')
        settings = {"zero_retention": True, "regions": ["eu-1"], "notices": {"url": "https://ann.example/hook"}}
        await house.ask("PATCH", house.account, {"settings": settings})
        changed = await house.ask("PATCH", house.account, {"name": " ann ", "settings": {"notices": None}})
        assert changed.headers["etag"] == '"3"'
        again = (await house.ask("GET", house.account)).json["result"]
        assert again == changed.json["result"]
        assert again["name"] == "ann"
        assert again["settings"] == {
            "zero_retention": True, "cache_scope": "tenant", "cache_keep_s": None, "sharing": [], "regions": ["eu-1"],
            "notices": None,
        }  # fmt: skip
        entries = await house.audited(house.ann_id)
        assert [(action, target) for _, action, target in entries] == [("account.settings", house.ann_id)] * 2
        assert {actor for actor, _, _ in entries} == {house.ann.split("_")[1]}


@looped
async def test_a_change_that_is_based_on_an_older_one_is_refused(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        etag = (await house.ask("GET", house.account)).headers["etag"]
        first = await house.ask("PATCH", house.account, {"name": "first"}, if_match=etag)
        assert first.status == 200
        for stale in (etag, '"999"', "rubbish", 'W/"2"'):
            second = await house.ask("PATCH", house.account, {"name": "second"}, if_match=stale)
            assert (second.status, second.code) == (412, 1012), stale
        assert (await house.ask("PATCH", house.account, {"name": "x"}, if_none_match="*")).status == 412
        assert (await house.ask("PATCH", house.account, {"name": "x"}, if_none_match='"2"')).status == 400
        assert (await house.gateway.accounts.get(house.ann_id)).name == "first"
        for current in (first.headers["etag"], "*"):
            answer = await house.ask("PATCH", house.account, {"name": "third"}, if_match=current)
            assert answer.status == 200
        assert len(await house.audited(house.ann_id)) == 3


@looped
async def test_two_writers_with_etags_lose_nothing(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        refused = 0

        async def write(letter: str) -> None:
            nonlocal refused
            for number in range(8):
                while True:
                    read = await house.ask("GET", house.account)
                    regions = [*read.json["result"]["settings"]["regions"], f"{letter}-{number}"]
                    change = {"settings": {"regions": regions}}
                    answer = await house.ask("PATCH", house.account, change, if_match=read.headers["etag"])
                    if answer.status == 200:
                        break
                    assert answer.status == 412
                    refused += 1

        await asyncio.gather(write("a"), write("b"))
        account = await house.gateway.accounts.get(house.ann_id)
        assert set(account.settings.regions) == {f"{letter}-{number}" for letter in "ab" for number in range(8)}
        assert refused, "the writers never met"
        assert account.revision == 17


WRONG: list[tuple[Any, str]] = [
    (b"", "body"),
    ([], "object"),
    ({"name": ""}, "name"),
    ({"name": "a\nb"}, "printable"),
    ({"name": "n" * 101}, "name"),
    ({"plan": "free"}, "plan"),
    ({"settings": {"color": "red"}}, "settings.color"),
    ({"settings": {"zero_retention": "yes"}}, "zero_retention"),
    ({"settings": {"cache_keep_s": -1}}, "cache_keep_s"),
    ({"settings": {"cache_scope": "world"}}, "cache_scope"),
    ({"settings": {"regions": ["EU"]}}, "regions"),
    ({"settings": {"regions": ["a", "a"]}}, "twice"),
    ({"settings": {"sharing": ["0" * 32]}}, "this one among them"),
    ({"settings": {"sharing": ["bob"]}}, "sharing"),
    ({"settings": {"notices": {"url": "ftp://ann.example"}}}, "https"),
    ({"settings": {"notices": {"url": "http://ann.example"}}}, "https"),
    ({"settings": {"notices": {"url": "https://ann.example", "at": [2]}}}, "'at'"),
    (b'{"name": "a", "name": "b"}', "twice"),
    (b'{"name": "' + b"n" * 70_000 + b'"}', "too large"),
]


@looped
async def test_a_wrong_change_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        before = await house.gateway.accounts.get(house.ann_id)
        for body, named in WRONG:
            answer = await house.ask("PATCH", house.account, body)
            assert answer.status in (400, 413), named
            assert named in answer.message
        assert await house.gateway.accounts.get(house.ann_id) == before
        assert await house.audited(house.ann_id) == []


@looped
async def test_an_unknown_field_of_the_query_is_refused(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        answer = await house.ask("GET", f"{house.account}?colour=red")
        assert answer.status == 400
        assert "colour" in answer.message


@looped
async def test_head_has_the_etag_and_no_body(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        client = await house.gateway.client()
        await client.send("HEAD", house.account, b"", {"authorization": f"Bearer {house.ann}"})
        assert (await client.head(), client.headers["etag"]) == (200, '"1"')
        await client.send("GET", house.account, b"", {"authorization": f"Bearer {house.ann}"})
        assert await client.head() == 200, "a body was sent behind the head"
        client.leave()


@looped
async def test_a_jwt_administers_and_is_named_in_the_audit_log(tmp_path: Path) -> None:
    async with trusting(tmp_path) as setting:
        gateway = setting.gateway
        path = f"/client/v4/accounts/{gateway.account_id}"
        for permission, status in (("usage:read", 403), ("account:admin", 200)):
            bearer = setting.bearer(sub="app-7", hearth_permissions=permission)
            assert (await gateway.call(path, {"name": "new"}, "PATCH", authorization=bearer)).status == status
        entries = (await gateway.call(f"{path}/audit", b"", "GET", authorization=bearer)).json["result"]
        assert [entry["actor"].endswith(":app-7") for entry in entries] == [True]
        operator = await gateway.call("/client/v4/operator/accounts", b"", "GET", authorization=bearer)
        assert operator.status == 404


@looped
async def test_the_key_that_is_shown_is_the_one_that_signs(tmp_path: Path) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        received.put_nowait(head + await reader.readexactly(length))
        writer.write(b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    limits = Limits(neurons_per_day=0.02)
    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    async with server, served_admin(tmp_path, limits=limits, private_notices=True) as house:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
        changed = await house.ask("PATCH", house.account, {"settings": {"notices": {"url": url, "at": [0.1]}}})
        assert changed.status == 200, changed.content
        shown = (await house.ask("GET", f"{house.account}/notices/key")).json["result"]["key"]
        house.gateway.see_changes()
        assert (await house.gateway.run(prompt="hello", max_tokens=2)).status == 200
        async with asyncio.timeout(15):
            head, _, body = (await received.get()).partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:])
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(shown.removeprefix("whsec_"))
        wanted = f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}"
        assert wanted.lower() == headers["webhook-signature"]
