"""Soft caps: notices over real sockets, signed, retried, and to nowhere that the operator would not want."""

import asyncio
import base64
import contextlib
import hmac
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gateway.webhook import TRIES_MAX, WebhookSender
from tenants.auth.accounts import AccountService
from tenants.limits.caps import LimitStatus
from tenants.limits.soft_caps import SoftCaps, notice_signer, webhook_secret
from tenants.open import open_store
from tenants.records.accounts import Notice, Notices, Settings
from tenants.records.holds import DenialReason
from tenants.records.limits import Limits
from tenants.store.protocol import StoreUnavailable
from tests.support.served_gateway import SECRET, looped, served
from tests.support.waiting import StoppedClock, holds, until

TEN: dict[str, Any] = {"prompt": "hello", "max_tokens": 10}


class Receiver:
    """An HTTP server that keeps what it is told. `answers` are its next answers; 200 when there are none."""

    def __init__(self) -> None:
        self.told: list[tuple[dict[str, str], Any]] = []
        self.answers: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in head[1:] if line)
        headers = {name.lower(): value for name, value in pairs}
        body = await reader.readexactly(int(headers["content-length"]))
        self.told.append((headers | {"line": head[0], "body": body.decode()}, json.loads(body)))
        answer = self.answers.pop(0) if self.answers else b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        if answer != b"silence":
            writer.write(answer)
            writer.close()


@contextlib.asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    receiving = Receiver()
    server = await asyncio.start_server(receiving.serve, "127.0.0.1", 0)
    receiving.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hearth?x=1"
    try:
        yield receiving
    finally:
        server.close()


@looped
async def test_a_part_of_a_budget_that_is_used_is_told_once_and_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.webhook.LOOK_S", 0.1)
    monkeypatch.setattr("tenants.limits.soft_caps.WRITE_S", 0.1)
    limits = Limits(neurons_per_day=0.2)
    async with receiver() as told, served(tmp_path, limits=limits, private_notices=True) as gateway:
        settings = Settings(notices=Notices(told.url, (0.5, 1.0)))
        await gateway.accounts.update(gateway.account_id, lambda account: structs.replace(account, settings=settings))
        gateway.see_changes()
        for _ in range(3):
            await gateway.run(**TEN)
        await until(lambda: bool(told.told))
        refused = [await gateway.run(prompt="hello " * 100, max_tokens=5) for _ in range(3)]
        assert [answer.status for answer in refused] == [429] * 3
        await until(lambda: len(told.told) >= 2)
        await holds(lambda: len(told.told) == 2, 0.5)
        assert [body["data"]["part"] for _, body in told.told] == [0.5, 1.0], "each is told once"
        headers, body = told.told[0]
        assert headers["line"] == "POST /hearth?x=1 HTTP/1.1"
        assert body["type"] == "limit.used"
        assert body["data"]["account_id"] == gateway.account_id
        assert body["data"]["limit"] == "neurons_per_day"
        assert 0.1 <= body["data"]["used_or_reserved"] <= 0.2
        secret = base64.b64decode(webhook_secret(notice_signer(SECRET)(gateway.account_id)).removeprefix("whsec_"))
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{headers['body']}".encode()
        expected = base64.b64encode(hmac.digest(secret, signed, "sha256")).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"


def webhook(folder: Path, clock: StoppedClock, private: bool = True) -> tuple[Any, WebhookSender]:
    store = open_store(f"sqlite:{folder / 'hearth.db'}", clock)
    return store, WebhookSender(store.notices, notice_signer(SECRET), clock, private=private)


@looped
async def test_a_notice_is_tried_again_later_and_later_until_it_is_taken(tmp_path: Path) -> None:
    clock = StoppedClock(1_800_000_000.0)
    store, sender = webhook(tmp_path, clock)
    async with receiver() as told:
        told.answers = [b"HTTP/1.1 500 No\r\n\r\n", b"HTTP/1.1 302 Found\r\nlocation: /x\r\n\r\n", b"junk\r\n"]
        await store.notices.add(Notice("n", "a" * 32, told.url, b"{}", clock.now_s))
        tried_at = []
        for second in range(100):
            if await sender.deliver():
                tried_at.append(second)
            clock.now_s += 1
        assert tried_at == [0, 5, 15, 35]
        assert len(told.told) == 4
        assert len({headers["webhook-id"] for headers, _ in told.told}) == 1
    await store.close()


@looped
async def test_a_receiver_that_is_gone_or_never_takes_it_is_left_alone(tmp_path: Path) -> None:
    clock = StoppedClock(1_800_000_000.0)
    store, sender = webhook(tmp_path, clock)
    async with receiver() as told:
        told.answers = [b"HTTP/1.1 410 Gone\r\n\r\n"]
        await store.notices.add(Notice("gone", "a" * 32, told.url, b"{}", clock.now_s))
        assert await sender.deliver() == 1
        told.answers = [b"HTTP/1.1 503 No\r\n\r\n"] * 100
        await store.notices.add(Notice("never", "a" * 32, told.url, b"{}", clock.now_s))
        for _ in range(TRIES_MAX + 5):
            await sender.deliver()
            clock.now_s += 4000
        assert len(told.told) == 1 + TRIES_MAX
    await store.close()


@looped
async def test_a_silent_receiver_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.webhook.SEND_S", 0.3)
    clock = StoppedClock(1_800_000_000.0)
    store, sender = webhook(tmp_path, clock)
    async with receiver() as silent, receiver() as told:
        silent.answers = [b"silence"]
        await store.notices.add(Notice("n1", "a" * 32, silent.url, b"{}", clock.now_s))
        await store.notices.add(Notice("n2", "a" * 32, told.url, b"{}", clock.now_s))
        assert await sender.deliver() == 2
        assert len(told.told) == 1
        assert await store.notices.claim(clock.now_s + 5, 0, 9) != [], "the silent one is tried again"
    await store.close()


@looped
async def test_private_addresses_and_plain_http_are_for_the_operator_to_allow(tmp_path: Path) -> None:
    clock = StoppedClock(1_800_000_000.0)
    store, sender = webhook(tmp_path, clock, private=False)
    async with receiver() as told:
        for n, url in enumerate((told.url, told.url.replace("http:", "https:"), "https://localhost:1/")):
            await store.notices.add(Notice(f"n{n}", "a" * 32, url, b"{}", clock.now_s))
        assert await sender.deliver() == 3
        assert told.told == []
    await store.close()


@looped
async def test_a_store_that_is_away_keeps_what_is_to_be_told(tmp_path: Path) -> None:
    clock = StoppedClock(1_800_000_000.0)
    store, _ = webhook(tmp_path, clock)
    accounts = AccountService(store, SECRET, clock)
    account = await accounts.create("ann")
    settings = Settings(notices=Notices("https://ann.example/"))
    account = await accounts.update(account.id, lambda one: structs.replace(one, settings=settings))
    thresholds = SoftCaps(store.notices, clock)
    day = LimitStatus("", DenialReason.NEURONS_PER_DAY, 10.0, 1.0, 5)
    thresholds.check(account, [day, LimitStatus("", DenialReason.REQUESTS_PER_MINUTE, 9, 0, 1)])
    store._file.run("PRAGMA query_only = 1")
    with pytest.raises(StoreUnavailable):
        await thresholds.flush()
    store._file.run("PRAGMA query_only = 0")
    await thresholds.flush()
    (notice,) = await store.notices.claim(clock.now_s, 9, 9)
    assert json.loads(notice.body)["data"]["part"] == 0.8
    await store.close()
