"""Callers behind proxies and the names they call; heads that could be read in two ways; and paths that are no route."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from gateway.http.client_address import ClientAddress, ClientAddressPolicy
from gateway.settings.server import ServerConfig
from tenants.auth.api_token import checksum
from tenants.records.grants import Grant, Permission
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL

PROXIES = {"proxies": ["10.0.0.0/8", "fd00::/8"]}
BODY = b'{"prompt":"hello","max_tokens":2}'


def origin(peer: str, *headers: tuple[bytes, bytes], **server: Any) -> ClientAddress:
    scope = {"client": (peer, 1) if peer else None, "headers": [(b"host", b"x"), *headers]}
    return ClientAddressPolicy(ServerConfig(**server)).client_address(scope)


@pytest.mark.parametrize(
    ("said", "address"),
    [
        (["1.2.3.4"], "1.2.3.4"),
        (["6.6.6.6, 1.2.3.4"], "1.2.3.4"),  # what the caller wrote stands to the left
        (["6.6.6.6", "1.2.3.4"], "1.2.3.4"),  # several headers are one list
        (["6.6.6.6, 1.2.3.4, 10.1.1.1", "10.2.2.2"], "1.2.3.4"),
        (["10.3.3.3, 10.1.1.1"], "10.3.3.3"),  # a caller among the proxies
        (["1.2.3.4:5678"], "1.2.3.4"),
        (["[2001:db8::1]:443"], "2001:db8::1"),
        (["2001:db8::1"], "2001:db8::1"),
        (["::ffff:1.2.3.4"], "1.2.3.4"),
        (["fd00::5, ::ffff:10.0.0.9"], "fd00::5"),
        ([], "10.0.0.1"),
        ([""], "10.0.0.1"),
        (["unknown"], ""),
        (["1.2.3.4, "], ""),
        (["1.2.3.4, 1.2.3"], ""),
        (["1.2.3.4, 01.2.3.4"], ""),
        (["1.2.3.4, [::1]x"], ""),
        (["1.2.3.4 5.6.7.8"], ""),
        (["1.2.3.4\xff"], ""),
        (["1.2.3.4/32"], ""),
    ],
)
def test_the_caller_is_the_last_hop_that_is_no_proxy(said: list[str], address: str) -> None:
    headers = [(b"x-forwarded-for", value.encode("latin-1")) for value in said]
    assert origin("10.0.0.1", *headers, **PROXIES) == ClientAddress(address, True)
    assert origin("::ffff:10.0.0.1", *headers, **PROXIES).address == address


@pytest.mark.parametrize(
    ("said", "address"),
    [
        (["for=1.2.3.4"], "1.2.3.4"),
        (['For="[2001:db8::1]:4711";proto=https;by=10.0.0.1'], "2001:db8::1"),
        (["for=6.6.6.6, for=1.2.3.4;proto=http, for=10.1.1.1"], "1.2.3.4"),
        (["for=6.6.6.6", "proto=https;FOR=1.2.3.4"], "1.2.3.4"),
        (['for=6.6.6.6;host="a,for=7.7.7.7", for="1.2.3.4:80"'], "1.2.3.4"),
        (['for=1.2.3.4;host="a,for=7.7.7.7;"'], "1.2.3.4"),
        (["for=unknown"], ""),
        (["for=_hidden"], ""),
        (["for=1.2.3.4, proto=http"], ""),
        (["for=1.2.3.4;for=5.6.7.8"], ""),
        (['for="1.2.3.4'], ""),
        (['for="1.2.3.4\\""'], ""),
    ],
)
def test_the_caller_of_a_forwarded_header(said: list[str], address: str) -> None:
    headers = [(b"forwarded", value.encode()) for value in said]
    assert origin("10.0.0.1", *headers, **PROXIES, proxy_header="forwarded") == ClientAddress(address, True)


def test_only_the_header_that_the_proxies_write_counts() -> None:
    both = ((b"x-forwarded-for", b"1.2.3.4"), (b"forwarded", b"for=6.6.6.6"))
    assert origin("10.0.0.1", *both, **PROXIES).address == "1.2.3.4"
    assert origin("10.0.0.1", *both, **PROXIES, proxy_header="forwarded").address == "6.6.6.6"


def test_without_a_trusted_proxy_headers_say_nothing() -> None:
    spoofed = (b"x-forwarded-for", b"1.2.3.4")
    assert origin("5.5.5.5", spoofed, **PROXIES) == ClientAddress("5.5.5.5", False)
    assert origin("10.0.0.1", spoofed) == ClientAddress("10.0.0.1", False)
    assert origin("5.5.5.5", **PROXIES) == ClientAddress("5.5.5.5", True)
    assert origin("", spoofed, **PROXIES) == ClientAddress("", False)


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        (b"ai.example.com", True),
        (b"AI.Example.Com:8787", True),
        (b"ai.example.com.", True),
        (b"a.tenants.example.com", True),
        (b"tenants.example.com", False),
        (b"eviltenants.example.com", False),
        (b"ai.example.com.evil.test", False),
        (b"example.com", False),
        (b"127.0.0.1", False),
        (b"[::1]:80", False),
    ],
)
def test_names_are_whole_or_below_a_star(host: bytes, is_served: bool) -> None:
    policy = ClientAddressPolicy(ServerConfig(hosts=["ai.example.com", "*.tenants.example.com"]))
    assert policy.serves_host(host) is is_served
    assert ClientAddressPolicy(ServerConfig()).serves_host(host)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"proxies": ["10.0.0.1/8"]}, "is no network"),
        ({"metrics_networks": ["everyone"]}, "is no network"),
        ({"proxy_header": "x-real-ip"}, "x-forwarded-for"),
        ({"hosts": ["*"]}, "hosts"),
        ({"hosts": ["a.*.com"]}, "hosts"),
        ({"hosts": ["https://a.com"]}, "hosts"),
        ({"certificate": "a.pem"}, "go together"),
        ({"key": "a.pem"}, "go together"),
    ],
)
def test_settings_of_the_edge_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(settings, ServerConfig)


async def raw(gateway: Served, sent: bytes) -> tuple[list[int], bytes]:
    """The statuses of all answers on one connection, and all that came, until it ends or is silent after the first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(sent)
    received = b""
    try:
        received = piece = await reader.read(1 << 16)
        while piece:
            async with asyncio.timeout(0.3):
                piece = await reader.read(1 << 16)
            received += piece
    except (TimeoutError, OSError):
        pass
    writer.close()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", received)], received


@looped
async def test_a_proxys_word_reaches_the_networks_of_a_token(tmp_path: Path) -> None:
    async with served(tmp_path, proxies=["127.0.0.0/8"]) as gateway:
        _, text = await gateway.accounts.mint(gateway.account_id, "bound", grant=Grant(networks=("1.2.3.0/24",)))
        bound = {"authorization": f"Bearer {text}"}
        for said, status in (("1.2.3.4", 200), ("1.2.3.4, 5.6.7.8", 403), ("junk", 403), ("", 403)):
            answer = await gateway.call(gateway.run_path, BODY, **bound, x_forwarded_for=said)
            assert (said, answer.status) == (said, status)
    async with served(tmp_path / "direct") as gateway:
        _, text = await gateway.accounts.mint(gateway.account_id, "bound", grant=Grant(networks=("1.2.3.0/24",)))
        answer = await gateway.call(
            gateway.run_path, BODY, authorization=f"Bearer {text}", x_forwarded_for="1.2.3.4", forwarded="for=1.2.3.4"
        )
        assert answer.status == 403


@looped
async def test_a_name_that_is_not_ours_is_421_but_probes_come_by_address(tmp_path: Path) -> None:
    async with served(tmp_path, hosts=["ai.example.com"]) as gateway:
        for path in (gateway.run_path, "/v1/models", "/client/v4/user/tokens/verify", "/nowhere"):
            answer = await gateway.call(path, BODY, host="evil.test")
            assert answer.status == 421
        assert (await gateway.call(gateway.run_path, BODY, host="AI.example.com:443")).status == 200
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await gateway.call(path, b"", "GET", host="10.0.0.7:8787")).status == 200
        assert len(gateway.fleet.submits) == 1


@looped
async def test_metrics_are_not_there_for_others(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        assert (await gateway.call("/metrics", b"", "GET")).status == 200
        missing = await gateway.call("/nowhere", b"", "GET")
        for header in ("x_forwarded_for", "forwarded", "via"):  # somebody else's proxy stands on this host
            answer = await gateway.call("/metrics", b"", "GET", **{header: "1.2.3.4"})
            assert (answer.status, answer.code) == (missing.status, missing.code) == (404, 7000)
        _, text = await gateway.accounts.mint(gateway.account_id, "scraper", grant=Grant((Permission.OPERATOR,)))
        scraper = {"authorization": f"Bearer {text}"}
        assert (await gateway.call("/metrics", b"", "GET", **scraper, via="x")).status == 200
    async with served(tmp_path / "proxied", proxies=["127.0.0.0/8"], metrics_networks=["10.9.0.0/16"]) as gateway:
        assert (await gateway.call("/metrics", b"", "GET")).status == 404
        assert (await gateway.call("/metrics", b"", "GET", x_forwarded_for="10.8.0.1")).status == 404
        assert (await gateway.call("/metrics", b"", "GET", x_forwarded_for="10.9.0.1")).status == 200


GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
NEXT = b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n"
HEADS = {
    "plain": (GET + b"\r\n", [200]),
    "one after the other": (GET + b"\r\n" + NEXT, [200, 200]),
    "lines before it": (b"\r\n\r\n" + GET + b"\r\n", [200]),
    "spaces after the method": (b"GET   /healthz HTTP/1.1\r\nhost: x\r\n\r\n", [200]),
    "HTTP/1.0": (b"GET /healthz HTTP/1.0\r\nhost: x\r\n\r\n" + NEXT, [200]),
    "close": (GET + b"connection: close\r\n\r\n" + NEXT, [200]),
    "absolute form": (b"GET http://x/healthz HTTP/1.1\r\nhost: x\r\n\r\n", [400]),
    "absolute form of another host": (b"GET http://evil/healthz HTTP/1.1\r\nhost: x\r\n\r\n", [400]),
    "authority form": (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", [400]),
    "asterisk form": (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", [400]),
    "no path": (b"GET ?a=b HTTP/1.1\r\nhost: x\r\n\r\n", [400]),
    "fragment": (b"GET /healthz#x HTTP/1.1\r\nhost: x\r\n\r\n", [400]),
    "null byte in the path": (b"GET /healthz\0 HTTP/1.1\r\nhost: x\r\n\r\n", [400]),
    "high byte in the path": (b"GET /healthz\xff HTTP/1.1\r\nhost: x\r\n\r\n", [400]),
    "HTTP/0.9": (b"GET /healthz\r\n\r\n", [400]),
    "HTTP/1.2": (b"GET /healthz HTTP/1.2\r\nhost: x\r\n\r\n", [400]),
    "HTTP/2 by prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
    "h2c upgrade": (GET + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n\r\n" + NEXT, [200]),
    "websocket upgrade": (GET + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n" + NEXT, [200]),
    "method in lower case": (b"get /healthz HTTP/1.1\r\nhost: x\r\n\r\n", [400]),
    "method that nobody knows": (b"FOO /healthz HTTP/1.1\r\nhost: x\r\n\r\n", [400]),
    "TRACE": (b"TRACE /healthz HTTP/1.1\r\nhost: x\r\n\r\n", [405]),
    "tabs in the request line": (b"GET\t/healthz\tHTTP/1.1\r\nhost: x\r\n\r\n", [400]),
    "bare LF": (b"GET /healthz HTTP/1.1\nhost: x\n\n", [400]),
    "bare LF after a header": (b"GET /healthz HTTP/1.1\r\nhost: x\n\r\n", [400]),
    "bare CR in a header": (GET + b"a: b\rc: d\r\n\r\n", [400]),
    "null byte in a header": (GET + b"a: b\0c\r\n\r\n", [400]),
    "folded header": (GET + b"a: b\r\n c\r\n\r\n", [400]),
    "folded host": (GET[:-2] + b"\r\n y\r\n\r\n", [400]),
    "space before the colon": (b"GET /healthz HTTP/1.1\r\nhost : x\r\n\r\n", [400]),
    "space before the first header": (b"GET /healthz HTTP/1.1\r\n host: x\r\n\r\n", [400]),
    "no host": (b"GET /healthz HTTP/1.1\r\na: b\r\n\r\n", [400]),
    "no host in HTTP/1.0": (b"GET /healthz HTTP/1.0\r\n\r\n", [400]),
    "two hosts": (GET + b"host: y\r\n\r\n", [400]),
    "two equal hosts": (GET + b"Host: x\r\n\r\n", [400]),
    "empty host": (b"GET /healthz HTTP/1.1\r\nhost:\r\n\r\n", [400]),
    "host with a path": (b"GET /healthz HTTP/1.1\r\nhost: x/y\r\n\r\n", [400]),
    "host with a user": (b"GET /healthz HTTP/1.1\r\nhost: a@x\r\n\r\n", [400]),
    "two credentials": (POST + b"authorization: a\r\nauthorization: b\r\n\r\n", [400]),
    "two keys": (POST + b"x-api-key: a\r\nx-api-key: b\r\n\r\n", [400]),
    "length and chunked": (POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + NEXT, [400]),
    "chunked and length": (POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n" + NEXT, [400]),
    "two lengths": (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", [400]),
    "two equal lengths": (POST + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}", [400]),
    "list of lengths": (POST + b"content-length: 2, 2\r\n\r\n{}", [400]),
    "signed length": (POST + b"content-length: +2\r\n\r\n{}", [400]),
    "negative length": (POST + b"content-length: -2\r\n\r\n{}", [400]),
    "length beyond 64 bits": (POST + b"content-length: 99999999999999999999\r\n\r\n{}", [400]),
    "unknown coding": (POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + NEXT, [400]),
    "coding before chunked": (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + NEXT, [400]),
    "coding after chunked": (POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + NEXT, [400]),
    "chunked twice": (POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", [400]),
    "chunked behind a vertical tab": (POST + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n", [400]),
    "chunked in HTTP/1.0": (POST.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", [400]),
    "bare LF after a chunk's size": (POST + b"transfer-encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n", [400]),
    "bare LF in a chunk's extension": (POST + b"transfer-encoding: chunked\r\n\r\n2;a\n{}\r\n0\r\n\r\n", [400]),
    "chunk size with 0x": (POST + b"transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n", [400]),
    "body of a GET, and the next": (GET + b"content-length: 3\r\n\r\nabc" + NEXT, [200, 200]),
}


@looped
async def test_heads_that_could_be_read_in_two_ways_are_refused_and_the_connection_ends(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        found = dict(zip(HEADS, await asyncio.gather(*(raw(gateway, sent) for sent, _ in HEADS.values())), strict=True))
        assert {name: statuses for name, (statuses, _) in found.items()} == {
            name: said for name, (_, said) in HEADS.items()
        }
        ids: list[str] = []
        for name, (statuses, received) in found.items():
            if statuses == [400]:
                body = json.loads(received.partition(b"\r\n\r\n")[2])
                assert (name, body["success"], body["errors"][0]["code"]) == (name, False, 6003)
                id_ = received.partition(b"\r\nx-request-id: ")[2].partition(b"\r\n")[0].decode()
                assert body["error"]["message"].endswith(f" ({id_})"), name
                ids.append(id_)
            ends = statuses == [400] or "upgrade" in name or name in ("close", "HTTP/1.0")
            assert (name, b"connection: close" in received) == (name, ends)
        assert all(ids)
        assert len(ids) == len(set(ids)), "each has a new one"
        assert not gateway.fleet.submits


def paths(account: str) -> dict[str, int]:
    """Targets beside the routes, and what a POST with a token in force gets there."""
    run = f"/client/v4/accounts/{account}/ai/run/{MODEL}"
    return {
        run: 200,
        "/ai/run/%40cf%2Ftest%2Fstub": 200,  # a path is decoded once
        "/%61i/run/@cf/test/stub": 200,
        "/ai/run/%2540cf/test/stub": 400,  # and not twice: a model of that name is not there
        "/ai/run/../../healthz": 400,
        "/ai/run/..%2f..%2fhealthz": 400,
        "/ai/run/@cf/test/stub/": 400,
        "/ai/run/@cf/test/stub%00": 400,
        "/ai/run/@cf/test/stub;a=b": 400,
        "/ai/run/@CF/TEST/STUB": 400,
        "/ai/run/": 404,
        "/ai/run": 400,  # the body names the model
        "/ai//run/@cf/test/stub": 404,
        "//ai/run/@cf/test/stub": 404,
        "/./ai/run/@cf/test/stub": 404,
        "/x/../ai/run/@cf/test/stub": 404,
        "/x/%2e%2e/ai/run/@cf/test/stub": 404,
        "/ai;a=b/run/@cf/test/stub": 404,
        "/AI/run/@cf/test/stub": 404,
        "/ai%00/run/@cf/test/stub": 404,
        "/ai%252frun/@cf/test/stub": 404,
        "/ai\\run\\@cf": 404,
        "/%c0%ae%c0%ae/ai/run/@cf/test/stub": 404,
        "/%zz/ai/run/@cf/test/stub": 404,
        run.replace("/ai/", "/AI/"): 404,
        run.replace("/client", "/client/"): 404,
        run.replace(account, account.upper()): 404,
        run.replace(account, account + "%00"): 404,
        run.replace(account, account + "%0a"): 404,
        run.replace(account, "x/../" + account): 404,
        run.replace(account, account + "/../" + account): 404,
        run.replace(account, "f" * 32): 403,
        f"/client/v4/accounts/{account}/ai/run/{MODEL}?account_id={'f' * 32}": 200,
        "/v1/chat/completions/": 404,
        "/v1/chat/completions;": 404,
        "/v1/chat/completions%20": 404,
        "/V1/chat/completions": 404,
        "/v1//chat/completions": 404,
        "/v1/chat": 404,
        "/v1": 404,
        "/": 404,
        "/healthz": 405,
        "/healthz/": 404,
        "/Healthz": 404,
        "/healthz%00": 404,
        "/metrics/": 404,
        "//metrics": 404,
        "/metrics%2f": 404,
    }


@looped
async def test_a_path_that_is_not_quite_a_route_is_none(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        head = f"host: x\r\nauthorization: Bearer {gateway.token}\r\nconnection: close\r\n"
        head += f"content-length: {len(BODY)}\r\n\r\n"
        found, wanted = {}, paths(gateway.account_id)
        for path in wanted:
            statuses, _ = await raw(gateway, f"POST {path} HTTP/1.1\r\n{head}".encode() + BODY)
            found[path] = statuses[0]
        assert found == wanted
        assert len(gateway.fleet.submits) == list(wanted.values()).count(200)


@looped
async def test_no_header_changes_the_method_or_the_path(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        overrides = {
            "x-http-method-override": "POST",
            "x-http-method": "POST",
            "x-method-override": "POST",
            "x-original-url": gateway.run_path,
            "x-rewrite-url": gateway.run_path,
            "x-forwarded-prefix": "/v1",
            "x-forwarded-host": "evil.test",
            "x-accel-redirect": "/metrics",
        }
        for name, value in overrides.items():
            answer = await gateway.call(gateway.run_path, BODY, "GET", **{name: value})
            assert (name, answer.status) == (name, 405)
            answer = await gateway.call("/nowhere", BODY, **{name: value})
            assert (name, answer.status) == (name, 404)
        answer = await gateway.call(gateway.run_path + "?_method=DELETE", BODY)
        assert answer.status == 200
        assert len(gateway.fleet.submits) == 1


@looped
async def test_refused_credentials_cannot_be_told_apart(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        minted = {}
        for name in ("revoked", "expired", "rolled"):
            expiry = time.time() - 60 if name == "expired" else None
            token, minted[name] = await gateway.accounts.mint(gateway.account_id, name, expiry)
            if name == "revoked":
                await gateway.accounts.revoke(token.id)
            elif name == "rolled":
                await gateway.accounts.roll(token.id)
        key_id, secret = gateway.token[7:18], gateway.token[19:62]
        credentials = {
            "unknown": checked(f"hearth_{'0' * 11}_{secret}"),
            "wrong secret": checked(f"hearth_{key_id}_{'0' * 43}"),
            "wrong in its last letter": checked(gateway.token[:61] + ("1" if gateway.token[61] == "0" else "0")),
            **minted,
            "JWT": "eyJhbGciOiJSUzI1NiIsImtpZCI6ImEifQ.eyJpc3MiOiJodHRwczovL2V2aWwudGVzdCJ9.c2lnbmF0dXJl",
            "JWT without a signature": "eyJhbGciOiJub25lIn0.eyJpc3MiOiJodHRwczovL2V2aWwudGVzdCJ9.",
        }
        places = [
            ("POST", gateway.run_path),
            ("POST", gateway.run_path.replace(gateway.account_id, "f" * 32)),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/client/v4/user/tokens/verify"),
            ("GET", f"/client/v4/accounts/{gateway.account_id}/tokens"),
        ]
        for method, path in places:
            answers = {}
            for name, credential in credentials.items():
                answer = await gateway.call(path, BODY, method, authorization=f"Bearer {credential}")
                request_id = answer.headers.pop("x-request-id")
                assert answer.headers.pop("request-id") == request_id
                del answer.headers["date"]
                answers[name] = (answer.status, answer.headers, answer.content.replace(request_id.encode(), b""))
            assert answers["unknown"][0] == 401
            for name, answer in answers.items():
                assert (path, name, answer) == (path, name, answers["unknown"])
        assert not gateway.fleet.submits


def checked(text: str) -> str:
    """A token's text with its checksum, so that it is looked up."""
    return text + checksum(text)


class Sealed(bytes):
    """A digest that may not be compared with ==, which stops at the first byte that differs."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared with ==")

    __hash__ = bytes.__hash__


@looped
async def test_secrets_are_compared_in_constant_time(tmp_path: Path) -> None:
    """What a clock could show of 32 bytes is a nanosecond, far below what a run on shared cores can tell apart; so
    the comparison itself is held."""
    async with served(tmp_path) as gateway:
        store, looked_up = gateway.app._tenancy.store, 0
        token = store.accounts.token

        async def sealed(token_id: str) -> Any:
            nonlocal looked_up
            looked_up += 1
            found = await token(token_id)
            assert found is not None
            record, seals, account = found
            return record, [structs.replace(seal, digest=Sealed(seal.digest)) for seal in seals], account

        store.accounts.token = sealed  # type: ignore[method-assign]
        wrong = checked(gateway.token[:61] + ("1" if gateway.token[61] == "0" else "0"))
        assert (await gateway.call(gateway.run_path, BODY)).status == 200
        assert (await gateway.call(gateway.run_path, BODY, authorization=f"Bearer {wrong}")).status == 401
        assert looked_up >= 2
