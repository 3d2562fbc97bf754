"""Requests to servers of others reach the address that was checked, under the host's name, over real sockets."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tenants import outbound
from tenants.outbound import PrivateAddress, is_public, read_body, send
from tests.support.issuers import JwksServer

pytestmark = pytest.mark.anyio
HOST = "keys.hearth.test"


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Lets every host have these addresses; returns the hosts that were resolved."""
    hosts: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        hosts.append(host)
        return list(addresses)

    monkeypatch.setattr(outbound, "resolve", resolve)
    return hosts


async def test_a_request_goes_to_the_resolved_address_under_the_hosts_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = resolving(monkeypatch, "127.0.0.1")
    server = JwksServer()
    server.documents = {"/keys?x=1": b"document"}
    async with server.serving(tmp_path, HOST):
        tls = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        async with send("GET", f"https://{HOST}:{server.port}/keys?x=1", tls, headers={}) as response:
            assert response.status_code == 200
            assert await read_body(response, 100) == b"document"
        with pytest.raises(OSError, match=r"certificate.*other\.hearth\.test"):
            async with send("GET", f"https://other.hearth.test:{server.port}/", tls, headers={}):
                pass
    assert hosts == [HOST, "other.hearth.test"], "each is resolved once"


@contextlib.asynccontextmanager
async def plain_server(answer: bytes) -> AsyncIterator[tuple[int, list[str]]]:
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heads
    finally:
        server.close()


async def test_the_next_address_is_tried_where_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "127.0.0.9", "127.0.0.1")
    async with plain_server(b"HTTP/1.1 204 No\r\n\r\n") as (port, heads):
        headers = {"x-one": "1"}
        async with send("POST", f"http://{HOST}:{port}/x?y=z", None, headers=headers, content=b"body") as response:
            assert response.status_code == 204
    (head,) = heads
    line, *rest = head.lower().split("\r\n")
    assert line == "post /x?y=z http/1.1"
    expected = {f"host: {HOST}:{port}", "x-one: 1", "content-length: 4", "connection: close"}
    assert expected == set(filter(None, rest)), "nothing that is not asked for is sent"


async def test_one_private_address_is_enough_to_refuse_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with plain_server(b"") as (port, heads):
        for addresses in (("127.0.0.1",), ("1.1.1.1", "127.0.0.1"), ("::ffff:127.0.0.1",)):
            resolving(monkeypatch, *addresses)
            with pytest.raises(PrivateAddress, match="no public address"):
                async with send("GET", f"http://{HOST}:{port}/", None, headers={}, public_only=True):
                    pass
    assert heads == []


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fe80::1%eth0", "::ffff:10.0.0.1", "2002:a00:1::", "224.0.0.1",
     "0.0.0.0", "100.64.0.1", "fd00::1", "192.168.0.1", "64:ff9b::a00:1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1",
     "::10.0.0.1", "fec0::2"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
    assert is_public("1.1.1.1")
    assert is_public("2606:4700::1111")
    assert is_public("64:ff9b::101:101"), "as a network without IPv4 calls it"


@pytest.mark.parametrize(
    "answer",
    [b"junk\r\n", b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"],
    ids=["junk", "endless head", "half a body"],
)
async def test_what_is_no_whole_answer_is_a_value_error(answer: bytes) -> None:
    async with plain_server(answer) as (port, _):
        with pytest.raises(ValueError, match="no HTTP"):
            async with send("GET", f"http://127.0.0.1:{port}/", None, headers={}) as response:
                await read_body(response, 100)


@pytest.mark.parametrize("url", ["ftp://1.1.1.1/", "http://1.1.1.1:x/", "https://1.1.1.1/"])
async def test_a_url_that_cannot_be_called_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        async with send("GET", url, None, headers={}):
            pass


async def test_a_refused_connection_says_what_the_system_says() -> None:
    with pytest.raises(OSError, match=r"[Cc]onnect"):
        async with send("GET", "http://127.0.0.1:1/", None, headers={}):
            pass
