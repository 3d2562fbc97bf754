"""How an issuer's keys come here and go: over a real HTTPS server that rotates, fails, is slow, or is not itself."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tenants.auth import jwks
from tenants.auth.jwks import JWKS_BYTES_MAX, JwksCache, parse_jwks
from tests.support.issuers import JwksServer, documents, jwk, url64
from tests.support.waiting import holds, until

pytestmark = pytest.mark.anyio
FIRST = {"keys": [jwk("EdDSA", "1")]}
BOTH = {"keys": [jwk("EdDSA", "1"), jwk("EdDSA next", "2")]}
SECOND = {"keys": [jwk("EdDSA next", "2")]}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[JwksServer]:
    serving = JwksServer()
    serving.documents = {"/keys": FIRST}
    async with serving.serving(tmp_path):
        yield serving


@pytest.fixture
def keys(server: JwksServer, tmp_path: Path) -> JwksCache:
    return JwksCache(f"https://localhost:{server.port}/keys", "EdDSA", str(tmp_path / "ca.pem"))


@pytest.fixture
async def running(keys: JwksCache) -> AsyncIterator[JwksCache]:
    task = asyncio.create_task(keys.run())
    yield keys
    task.cancel()


async def failed(keys: JwksCache) -> str:
    await keys.refresh()
    assert keys.problem
    return keys.problem


async def test_keys_are_fetched_before_anybody_asks(running: JwksCache, server: JwksServer) -> None:
    await until(lambda: running.known is not None)
    assert set(running.known) == {"1"}
    assert await running.key("1") is running.known["1"]
    assert server.fetches == ["/keys"]


async def test_a_key_that_is_new_is_fetched_when_it_is_first_met(running: JwksCache, server: JwksServer) -> None:
    assert await running.key("1")
    server.documents["/keys"] = BOTH
    assert await running.key("2")
    assert await running.key("1")
    assert len(server.fetches) == 2


async def test_a_withdrawn_key_is_gone_after_the_next_fetch(
    running: JwksCache, server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "REFRESH_S", 0.05)
    assert await running.key("1")
    server.documents["/keys"] = SECOND
    assert await running.key("2")
    assert "1" not in (running.known or {})
    server.documents["/keys"] = {"keys": []}
    await until(lambda: not running.known)
    assert running.problem is None, "an issuer may withdraw all"


async def test_made_up_ids_cause_one_fetch_in_a_while(
    running: JwksCache, server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await running.key("1")
    for number in range(50):
        assert await running.key(f"made-up-{number}") is None
    assert len(server.fetches) == 2
    monkeypatch.setattr(running, "_next_request", 0.0)
    assert await running.key("made-up") is None
    assert len(server.fetches) == 3


async def test_a_thundering_herd_makes_one_fetch(running: JwksCache, server: JwksServer) -> None:
    assert await running.key("1")
    server.documents["/keys"] = BOTH
    server.delay_s = 0.1
    found = await asyncio.gather(*(running.key("2") for _ in range(500)))
    assert all(found)
    assert len(server.fetches) == 2


async def test_those_who_come_before_the_first_fetch_lands_share_it(running: JwksCache, server: JwksServer) -> None:
    server.delay_s = 0.1
    assert all(await asyncio.gather(*(running.key("1") for _ in range(100))))
    await holds(lambda: server.fetches == ["/keys"], 0.15)


async def test_a_fetch_that_failed_is_tried_again_soon(
    running: JwksCache, server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "RETRY_S", 0.05)
    server.status = "500 Sorry"
    assert await running.key("1") is None
    server.status = "200 OK"
    await until(lambda: running.known is not None)


async def test_one_that_waits_and_leaves_spoils_nothing_for_others(running: JwksCache, server: JwksServer) -> None:
    assert await running.key("1")
    server.documents["/keys"] = BOTH
    server.delay_s = 0.1
    first, second = (asyncio.create_task(running.key("2")) for _ in range(2))
    await until(lambda: len(server.fetches) == 2)
    first.cancel()
    assert await second
    assert len(server.fetches) == 2


async def test_the_last_good_keys_stay_while_the_issuer_is_down(
    running: JwksCache, server: JwksServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "REFRESH_S", 0.02)
    monkeypatch.setattr(jwks, "RETRY_S", 0.02)
    assert await running.key("1")
    for status, document in (("500 Sorry", BOTH), ("200 OK", b"<html>"), ("200 OK", {"keys": "none"})):
        server.status, server.documents["/keys"] = status, document
        seen = len(server.fetches)
        await until(lambda: len(server.fetches) >= seen + 3)  # noqa: B023
        assert running.problem
        assert set(running.known or {}) == {"1"}
    server.status, server.documents["/keys"] = "200 OK", SECOND
    await until(lambda: set(running.known or {}) == {"2"})
    assert running.problem is None


async def test_a_server_that_is_not_there_is_a_problem_in_words(tmp_path: Path) -> None:
    keys = JwksCache("https://localhost:1/keys", "EdDSA", None)
    assert "1" in await failed(keys)
    assert keys.known is None
    assert "certificates.pem" in await failed(
        JwksCache("https://localhost:1/", "EdDSA", str(tmp_path / "certificates.pem"))
    )


async def test_a_redirect_is_not_followed(keys: JwksCache, server: JwksServer) -> None:
    server.documents["/other"] = FIRST
    server.status, server.head = "302 Found", "location: /other\r\n"
    assert "302" in await failed(keys)
    assert server.fetches == ["/keys"]


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(("extra", "taken"), [(0, True), (1, False), (10 << 20, False)])
async def test_no_more_than_64_kib_are_read(
    chunked: bool, extra: int, taken: bool, keys: JwksCache, server: JwksServer
) -> None:
    body = b'{"keys": []}'
    server.documents["/keys"] = body + b" " * (JWKS_BYTES_MAX - len(body) + extra)
    server.chunked = chunked
    await keys.refresh()
    assert (keys.known == {}) is taken
    assert (keys.problem is None) is taken


async def test_an_endless_head_is_not_read_to_its_end(keys: JwksCache, server: JwksServer) -> None:
    server.head = "".join(f"x-{number}: {'x' * 1000}\r\n" for number in range(1000))
    assert await failed(keys)


async def test_a_slow_issuer_is_given_up(keys: JwksCache, server: JwksServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwks, "FETCH_S", 0.2)
    server.delay_s = 60
    started = asyncio.get_running_loop().time()
    assert "within" in await failed(keys)
    assert asyncio.get_running_loop().time() - started < 30


async def test_an_answer_that_is_no_http_is_refused(keys: JwksCache, server: JwksServer) -> None:
    server.status = "200 OK\r\n\x00bad"
    assert "no HTTP" in await failed(keys)


async def test_half_an_answer_is_none(keys: JwksCache, server: JwksServer) -> None:
    server.head = "x: y\r\n\r\n"  # the head ends early, and the length is that of the document
    assert await failed(keys)


async def test_a_certificate_that_nobody_trusts_is_refused(keys: JwksCache, server: JwksServer) -> None:
    stranger = JwksCache(f"https://localhost:{server.port}/keys", "EdDSA", None)
    assert "certificate" in (await failed(stranger)).lower()
    assert server.fetches == []
    await keys.refresh()
    assert keys.known


async def test_another_hosts_certificate_is_refused(tmp_path: Path) -> None:
    server = JwksServer()
    server.documents = {"/keys": FIRST}
    async with server.serving(tmp_path, "other.example") as url:
        assert "localhost" in await failed(JwksCache(f"{url}/keys", "EdDSA", str(tmp_path / "ca.pem")))
    assert server.fetches == []


async def test_a_file_is_read_again_in_time(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = JwksCache(str(path), "EdDSA", None)
    assert "keys.json" in await failed(keys)
    path.write_bytes(b" " * (JWKS_BYTES_MAX + 1))
    assert "more than" in await failed(keys)
    path.write_text('{"keys": []}')
    await keys.refresh()
    assert keys.known == {}


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


@pytest.mark.parametrize("algorithm", ["EdDSA", "ES256", "RS256"])
def test_only_keys_for_this_use_are_taken(algorithm: str) -> None:
    assert set(parse_jwks(encoded(documents()[f"/{algorithm}"]), algorithm)) == {f"{algorithm}-1"}


@pytest.mark.parametrize(
    "changes",
    [
        {"kty": "EC"}, {"kty": "oct"}, {"kty": None}, {"crv": "Ed448"}, {"crv": None}, {"use": "enc"}, {"use": None},
        {"alg": "ES256"}, {"alg": None}, {"key_ops": []}, {"key_ops": "verify"}, {"key_ops": 1}, {"d": "AAAA"},
        {"x": None}, {"x": 1}, {"x": ""}, {"x": url64(b"x" * 31)}, {"x": "!!!!"}, {"kid": None}, {"kid": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_key_that_does_not_fit_is_left_out(changes: dict[str, Any]) -> None:
    entry = {**jwk("EdDSA", "1"), **changes}
    assert parse_jwks(encoded({"keys": [entry, jwk("EdDSA next", "2")]}), "EdDSA").keys() == {"2"}


@pytest.mark.parametrize(
    "changes",
    [{"n": None}, {"n": 5}, {"e": url64(b"\0")}, {"e": url64(b"\2")}, {"n": url64(b"\1" * 8193)}, {"n": ""}],
    ids=lambda changes: str(changes)[:20],
)
def test_an_rsa_key_that_is_none_is_left_out(changes: dict[str, Any]) -> None:
    assert parse_jwks(encoded({"keys": [jwk("RS256", "1", **changes)]}), "RS256") == {}


def test_a_point_that_is_not_on_the_curve_is_left_out() -> None:
    assert parse_jwks(encoded({"keys": [jwk("ES256", "1", x=url64(b"\1" * 32))]}), "ES256") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (encoded({"keys": [jwk("EdDSA", "1"), jwk("EdDSA next", "1")]}), "same kid"),
        (encoded({"keys": {"1": jwk("EdDSA", "1")}}), "no list of keys"),
        (encoded({}), "no list of keys"),
        (encoded([jwk("EdDSA", "1")]), "JSON"),
        (b'{"keys": [], "keys": []}', "twice"),
        (b'{"keys": [NaN]}', "JSON"),
        (b"{" + b'"a":{' * 9000, "JSON"),
        (b"", "JSON"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else value,
)
def test_a_wrong_set_is_refused_as_a_whole(text: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_jwks(text, "EdDSA")


@pytest.mark.parametrize("entry", [None, 1, "key", [], {}])
def test_what_is_no_key_is_left_out(entry: Any) -> None:
    assert parse_jwks(encoded({"keys": [entry]}), "EdDSA") == {}
