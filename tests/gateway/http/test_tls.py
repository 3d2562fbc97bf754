"""TLS at the listener: what may speak, certificates that change, and that all bounds hold there too."""

import asyncio
import contextlib
import os
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.http.tls import Certificate, expiry, server_context
from gateway.settings.config import SettingsError
from tests.support.certificates import trusting, write_certificate
from tests.support.served_gateway import Client, Served, looped, served
from tests.support.waiting import turns, until

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 5000, "stream": True}


@contextlib.asynccontextmanager
async def secured(folder: Path, **server: Any) -> AsyncIterator[Served]:
    async with served(folder, **write_certificate(folder), **server) as gateway:
        yield gateway


async def connect(gateway: Served, context: ssl.SSLContext | None = None, receive_bytes: int | None = None) -> Client:
    """Through TLS, with the certificate that is in its file now."""
    raw = socket.create_connection(("127.0.0.1", gateway.port))
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.setblocking(False)
    known = context or trusting(gateway.server._limits.certificate)
    return Client(*await asyncio.open_connection(sock=raw, ssl=known, server_hostname="127.0.0.1", limit=1 << 20))


def serial(client: Client) -> int:
    found = client.writer.get_extra_info("ssl_object").getpeercert()
    return int(found["serialNumber"], 16)


def half_open(gateway: Served) -> socket.socket:
    """A client that never says more than the first bytes of TLS."""
    raw = socket.create_connection(("127.0.0.1", gateway.port))
    raw.send(b"\x16\x03\x01\x02\x00\x01")
    return raw


@looped
async def test_a_stream_is_served_over_tls(tmp_path: Path) -> None:
    async with secured(tmp_path) as gateway:
        client = await connect(gateway)
        for _ in range(2):
            await client.post(gateway.run_path, {**LONG, "max_tokens": 5}, gateway.headers)
            assert await client.head() == 200
            assert [event async for event in client.events()][-1] == "[DONE]"
        assert client.writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        client.leave()
        await until(lambda: not gateway.server._listener.connections)


@looped
async def test_tls_1_2_takes_only_ciphers_with_forward_secrecy_and_older_versions_nothing(tmp_path: Path) -> None:
    async with secured(tmp_path) as gateway:
        for version, ciphers, taken in (
            (ssl.TLSVersion.TLSv1_2, "ECDHE+AESGCM", True),
            (ssl.TLSVersion.TLSv1_2, "ECDHE+CHACHA20", True),
            (ssl.TLSVersion.TLSv1_2, "ECDHE+AES:!AESGCM:@SECLEVEL=0", False),
            (ssl.TLSVersion.TLSv1_1, "ALL:@SECLEVEL=0", False),
        ):
            context = trusting(gateway.server._limits.certificate)
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                context.minimum_version = context.maximum_version = version
            context.set_ciphers(ciphers)
            try:
                client = await connect(gateway, context)
            except (ssl.SSLError, OSError):
                assert not taken
            else:
                assert taken
                assert client.writer.get_extra_info("cipher")[0].startswith("ECDHE-")
                client.leave()
        await until(lambda: not gateway.server._listener.connections)


@looped
async def test_a_new_certificate_is_taken_up_and_no_stream_is_dropped(tmp_path: Path) -> None:
    async with secured(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.05
        before = await connect(gateway)
        await before.post(gateway.run_path, {**LONG, "max_tokens": 45}, gateway.headers)
        assert await before.head() == 200
        write_certificate(tmp_path)
        seen = gateway.server._certificate.context
        await until(lambda: gateway.server._certificate.context is not seen)
        after = await connect(gateway)
        assert serial(after) != serial(before)
        assert [event async for event in before.events()][-2]["usage"]["completion_tokens"] == 45
        await before.send("GET", "/healthz", b"")
        assert await before.head() == 200
        before.leave()
        after.leave()


def test_files_that_cannot_be_used_leave_the_certificate_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write_certificate(tmp_path)
    certificate = Certificate(**paths)
    context, old_key = certificate.context, Path(paths["key"]).read_bytes()
    certificate.refresh()
    assert certificate.context is context
    write_certificate(tmp_path)
    new_key = Path(paths["key"]).read_bytes()
    Path(paths["key"]).write_bytes(old_key)  # as between two writes: the certificate is new, its key is not
    for _ in range(3):
        certificate.refresh()
    assert certificate.context is context
    assert [record.getMessage() for record in caplog.records] == [
        f"the certificate before stays in use: the key {paths['key']} is not that of the certificate "
        f"{paths['certificate']}"
    ]
    os.unlink(paths["key"])
    certificate.refresh()
    assert certificate.context is context
    Path(paths["key"]).write_bytes(new_key)
    certificate.refresh()
    assert certificate.context is not context


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda paths: os.unlink(paths["key"]), r"the key .*key\.pem cannot be read: No such file"),
        (lambda paths: os.unlink(paths["certificate"]), r"the certificate .*certificate\.pem cannot be read"),
        (lambda paths: Path(paths["key"]).write_text("junk"), "no certificate chain and unencrypted key in PEM"),
        (lambda paths: Path(paths["certificate"]).write_text(""), "no certificate chain and unencrypted key in PEM"),
    ],
)
def test_what_is_wrong_with_the_files_is_said(tmp_path: Path, harm: Any, said: str) -> None:
    paths = write_certificate(tmp_path)
    harm(paths)
    with pytest.raises(SettingsError, match=said):
        server_context(**paths)


def test_a_key_of_another_certificate_or_with_a_password_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths, other = write_certificate(tmp_path), write_certificate(tmp_path / "other")
    with pytest.raises(SettingsError, match="is not that of the certificate"):
        server_context(paths["certificate"], other["key"])
    with pytest.raises(SettingsError, match="unencrypted key"):  # and nobody is asked for the password
        server_context(**write_certificate(tmp_path, password=b"hush"))
    with pytest.raises(SettingsError, match="cannot be read"):
        expiry(paths["key"])


@looped
async def test_a_handshake_that_does_not_go_on_is_cut_off_and_counts_while_it_lasts(tmp_path: Path) -> None:
    async with secured(tmp_path, header_s=1.0, connections=3) as gateway:
        listener = gateway.server._listener
        silent = [half_open(gateway) for _ in range(3)]
        await until(lambda: listener.connections == 3)
        late = half_open(gateway)
        late.setblocking(False)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.get_running_loop().sock_recv(late, 1) == b""
        assert listener.connections == 3, "it did not wait for one of them to be cut off"
        await until(lambda: not listener.connections)
        client = await connect(gateway)
        await client.send("GET", "/healthz", b"")
        assert await client.head() == 200
        client.leave()
        for one in (*silent, late):
            one.close()


@pytest.mark.parametrize("leaves", ["at once", "half way", "with junk", "with plain HTTP"])
def test_a_client_that_leaves_in_its_handshake_leaves_nothing(tmp_path: Path, leaves: str) -> None:
    @looped
    async def call() -> None:
        async with secured(tmp_path) as gateway:
            listener = gateway.server._listener
            for _ in range(5):
                raw = socket.create_connection(("127.0.0.1", gateway.port))
                if leaves == "half way":
                    raw.send(b"\x16\x03\x01\x02\x00\x01")
                elif leaves == "with junk":
                    raw.send(b"\xff" * 100)
                elif leaves == "with plain HTTP":
                    raw.send(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                await turns(10)  # in which it is accepted and what it sent is read
                raw.close()
            await until(lambda: not listener.connections and not listener._connections_of and not listener._connecting)
            assert not gateway.server.server_state.connections

    call()


@looped
async def test_heads_are_bounded_over_tls(tmp_path: Path) -> None:
    async with secured(tmp_path, header_s=0.3) as gateway:
        client = await connect(gateway)
        await client.send("GET", "/healthz", b"", {"x": "y" * 17_000})
        assert await client.head() == 431
        client.leave()
        client = await connect(gateway)
        client.writer.write(b"GET /healthz HTTP/1.1\r\n")
        assert await client.head() == 408
        client.leave()


@looped
async def test_a_client_that_does_not_read_is_dropped_over_tls_and_little_is_kept_for_it(tmp_path: Path) -> None:
    async with secured(tmp_path, blocked_s=0.5) as gateway:
        gateway.behaviour.context_tokens = 50_000
        gateway.fleet.replicas[0].die()  # it says hello again, with the larger context
        await until(lambda: not gateway.app._serving.context.fleet.hello("@cf/test/stub"))
        await until(lambda: gateway.app._serving.context.fleet.hello("@cf/test/stub"))
        client = await connect(gateway, receive_bytes=4096)
        await client.post(gateway.run_path, {**LONG, "max_tokens": 40_000}, gateway.headers)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: gateway.fleet.submits)
        (connection,) = gateway.server.server_state.connections
        await until(lambda: connection.flow.write_paused)
        assert connection.transport.get_write_buffer_size() < 256 << 10
        await gateway.settled(5.0)
        await until(lambda: not gateway.server._listener.connections, 2)
        (record,) = await gateway.records()
        assert record.outcome == "client_gone"
        client.leave()


@looped
async def test_a_stream_that_outlives_the_drain_is_told_why_over_tls(tmp_path: Path) -> None:
    async with secured(tmp_path, drain_s=0.3) as gateway:
        gateway.behaviour.step_s = 0.02
        client = await connect(gateway)
        await client.post(gateway.run_path, LONG, gateway.headers)
        assert await client.head() == 200
        silent = half_open(gateway)
        await until(lambda: gateway.server._listener.connections == 2)
        stopping = asyncio.create_task(gateway.server.shutdown())
        events = [event async for event in client.events()]
        assert events[-1] == "[DONE]"
        assert "shutting down" in events[-2]["errors"][0]["message"]
        await stopping
        await until(lambda: not gateway.server._listener.connections)
        client.leave()
        silent.close()
