"""What uvicorn leaves out: limits on heads and connections, and a drain that tells."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway.http.client_address import address_group
from gateway.http.exchange import PIECE_BYTES, Exchange
from gateway.http.listener import _PAUSE_S, ACCEPTS
from gateway.http.server import PIPELINED_MAX, WRITE_BUFFER_BYTES, listen
from tests.support.served_gateway import Client, Served, looped, served
from tests.support.waiting import holds, turns, until, wait_for

ROOT = Path(__file__).parents[3]
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 5000, "stream": True}


async def streaming(gateway: Served, **body: Any) -> Client:
    """A stream whose first event was read."""
    client = await gateway.client()
    await client.post(gateway.run_path, {**LONG, **body}, gateway.headers)
    assert await client.head() == 200
    async for _ in client.events():
        break
    return client


@pytest.mark.parametrize("at_once", [True, False])
def test_a_head_over_the_limit_is_431(tmp_path: Path, at_once: bool) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path) as gateway:
            for path, headers in (("/healthz", {"x": "y" * 17_000}), ("/" + "p" * 17_000, {})):
                client = await gateway.client()
                if at_once:
                    await client.send("GET", path, b"", headers)
                else:
                    lines = "".join(f"{name}: {value}" for name, value in headers.items())
                    for piece in (f"GET {path}", f" HTTP/1.1\r\n{lines}"):
                        client.writer.write(piece.encode())
                        await asyncio.sleep(0.05)
                assert await client.head() == 431
                assert json.loads(await client.reader.read())["errors"]
                client.leave()
            client = await gateway.client()
            await client.send("GET", "/healthz", b"", {"x": "y" * 15_000})
            assert await client.head() == 200
            client.leave()

    call()


@looped
async def test_endless_heads_are_cut_off_long_before_they_fill_memory(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        client = await gateway.client()
        client.writer.write(b"GET /healthz HTTP/1.1\r\n")
        sent = 0
        try:
            for _ in range(1000):
                client.writer.write(b"x: " + b"y" * 60_000 + b"\r\n")
                await client.writer.drain()
                sent += 60_000
        except OSError:
            pass
        assert sent < 20_000_000
        await until(lambda: not gateway.server.server_state.connections)
        client.leave()


@looped
async def test_a_head_that_does_not_come_is_cut_off(tmp_path: Path) -> None:
    async with served(tmp_path, header_s=0.2) as gateway:
        for start in (b"", b"GET /healthz HTTP/1.1\r\nhost:", b"GET"):
            client = await gateway.client()
            client.writer.write(start)
            assert await client.head() == 408
            assert json.loads(await client.reader.read())["errors"]
            client.leave()
        client = await streaming(gateway, max_tokens=3)  # a head that came is not cut off later
        client.leave()
        gateway.behaviour.step_s = 0.1
        assert (await gateway.run(prompt="hello", max_tokens=5)).status == 200


@looped
async def test_a_kept_connection_serves_one_request_after_the_other(tmp_path: Path) -> None:
    async with served(tmp_path, header_s=0.3) as gateway:
        client = await gateway.client()
        for _ in range(3):
            await client.post(gateway.run_path, {"prompt": "hello", "max_tokens": 2}, gateway.headers)
            assert await client.head() == 200
            assert json.loads(await client.body())["success"]
            await holds(lambda: gateway.server.server_state.connections, 0.2)
        await client.send("GET", "/healthz", b"", {"x": "y" * 17_000})
        assert await client.head() == 431
        client.leave()


@looped
async def test_connections_over_the_limit_are_told_to_come_back(tmp_path: Path) -> None:
    async with served(tmp_path, connections=2) as gateway:
        first, second = await gateway.client(), await gateway.client()
        await first.send("GET", "/healthz", b"")
        assert await first.head() == 200
        third = await gateway.client()
        assert await third.head() == 503
        assert int(third.headers["retry-after"]) >= 1
        for client in (first, second, third):
            client.leave()
        await until(lambda: not gateway.server.server_state.connections)
        assert (await gateway.run(prompt="hello", max_tokens=1)).status == 200


@looped
async def test_junk_is_400(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        client = await gateway.client()
        client.writer.write(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        assert await client.head() == 400
        client.leave()


@looped
async def test_a_drain_lets_streams_end_and_refuses_new_work(tmp_path: Path) -> None:
    async with served(tmp_path, drain_s=5) as gateway:
        gateway.behaviour.step_s = 0.02
        client = await streaming(gateway, max_tokens=40)
        stopping = asyncio.create_task(gateway.server.shutdown())
        await until(lambda: gateway.app.draining)
        answer = await gateway.run(prompt="hello")
        assert (answer.status, answer.code) == (503, 3040)
        assert (answer.headers["connection"], answer.headers["x-should-retry"]) == ("close", "true")
        ready = await gateway.call("/readyz", b"", "GET")
        assert ready.status == 503
        events = [event async for event in client.events()]
        assert events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == 40
        await stopping
        client.leave()


@looped
async def test_a_stream_that_outlives_the_drain_is_told_why(tmp_path: Path) -> None:
    async with served(tmp_path, drain_s=0.3) as gateway:
        gateway.behaviour.step_s = 0.02
        client = await streaming(gateway)
        whole = asyncio.create_task(gateway.run(prompt="hello", max_tokens=5000))
        await until(lambda: gateway.app.open_requests == 2)
        stopping = asyncio.create_task(gateway.server.shutdown())
        events = [event async for event in client.events()]
        assert events[-1] == "[DONE]"
        assert "shutting down" in events[-2]["errors"][0]["message"]
        assert (await whole).status == 503
        assert int((await whole).headers["retry-after"]) >= 1
        await stopping
        assert gateway.quota.open == gateway.fleet.running == 0
        client.leave()


def test_sigterm_drains_a_real_process_and_it_exits_with_0(tmp_path: Path) -> None:
    folder, port = tmp_path, free_port()
    toml = folder / "hearth.toml"
    toml.write_text(f'state_folder = "{folder / "state"}"\n[server]\nport = {port}\ndrain_s = 1.0\n')
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "gateway.cli", "gateway", "--config", str(toml)]
    child = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/healthz"))
        os.kill(child.pid, signal.SIGTERM)
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        child.kill()
        child.wait()


def free_port() -> int:
    listener = listen("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    listener.close()
    return port


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@looped
async def test_a_burst_of_clients_is_accepted_within_a_few_turns_of_the_loop(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        before = len(gateway.server.server_state.connections)
        clients = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(ACCEPTS)]
        await turns(4)
        assert len(gateway.server.server_state.connections) - before == ACCEPTS
        for client in clients:
            client.close()


@looped
async def test_a_request_that_ended_leaves_nothing_to_the_garbage_collector(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        for streamed in (True, False):
            await gateway.run(prompt="hello", max_tokens=5, stream=streamed)
            await gateway.settled()
            gc.collect()
            gc.disable()
            try:
                await gateway.run(prompt="hello", max_tokens=5, stream=streamed)
                await gateway.settled()
                await until(lambda: not gateway.server.server_state.tasks)
                assert not [one for one in gc.get_objects() if isinstance(one, Exchange)]
            finally:
                gc.enable()


def test_a_taken_port_is_an_error() -> None:
    listener = listen("127.0.0.1", 0)
    try:
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", listener.getsockname()[1])
    finally:
        listener.close()


@looped
async def test_endless_trailers_are_cut_off_as_a_head_is(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        client = await gateway.client()
        head = f"POST {gateway.run_path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.token}\r\n"
        client.writer.write(f"{head}transfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n".encode())
        client.writer.write(b"x: " + b"y" * 200 + b"\r\n")
        await client.writer.drain()
        with contextlib.suppress(OSError):
            for _ in range(1000):
                client.writer.write((b"x: " + b"y" * 200 + b"\r\n") * 10)
                await client.writer.drain()
        async with asyncio.timeout(10):
            with contextlib.suppress(OSError):
                await client.reader.read()
        assert not gateway.fleet.submits
        client.leave()


def test_what_was_built_at_start_up_is_no_work_for_the_garbage_collector(tmp_path: Path) -> None:
    script = f"""
import gc
from gateway.app import build_app
from gateway.settings.config import load_config
from gateway.http import server
server.HttpServer.run = lambda server, sockets: print(gc.get_freeze_count() > 10_000)
config = load_config(None, state_folder={str(tmp_path)!r}, port=0)
server.run_server(build_app(config, bytes(32)), config.server, None)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.stdout == "True\n", ended.stderr


@looped
async def test_a_body_that_nobody_reads_ends_in_time_or_the_connection_does(tmp_path: Path) -> None:
    async with served(tmp_path, body_s=0.4) as gateway:
        client = await gateway.client()
        client.writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000000\r\n\r\n")
        assert await client.head() == 200

        async def ended() -> bool:
            """Sends more of the body for as long as there is a connection."""
            with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: uvloop's, where it is closed already
                client.writer.write(bytes(1000))
                await client.writer.drain()
            return not gateway.server.server_state.connections

        await until(ended)
        client.leave()
        client = await gateway.client()  # one that ends in time is no reason to end the connection
        for _ in range(2):
            client.writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
            assert await client.head() == 200
            await client.body()
            client.writer.write(bytes(1000))
            await holds(lambda: gateway.server.server_state.connections, 0.3)
        client.leave()


@looped
async def test_a_body_at_fault_is_400_and_ends_the_request(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        client = await gateway.client()
        head = f"POST {gateway.run_path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.token}\r\n"
        client.writer.write(f"{head}transfer-encoding: chunked\r\n\r\n5\r\n".encode())
        await until(lambda: gateway.app.open_requests)
        client.writer.write(b"{}\r\nx\r\n")
        client.writer.write(b"junk\r\n")
        assert await client.head() == 400
        assert json.loads(await client.reader.read())["errors"][0]["code"] == 6003
        await gateway.settled()
        assert not gateway.fleet.submits
        client.leave()


@looped
async def test_requests_that_wait_behind_one_another_keep_their_bodies(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        client = await gateway.client()
        for tokens in (1, 2, 3):
            await client.post(gateway.run_path, {"prompt": "hello", "max_tokens": tokens}, gateway.headers)
        for tokens in (1, 2, 3):
            assert await client.head() == 200
            assert json.loads(await client.body())["result"]["usage"]["completion_tokens"] == tokens
        client.leave()


@looped
async def test_requests_that_wait_behind_one_another_are_few(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        request = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
        client = await gateway.client()
        client.writer.write(request * PIPELINED_MAX)
        for _ in range(PIPELINED_MAX):
            assert await client.head() == 200
            await client.body()
        client.writer.write(request * 5000)
        with contextlib.suppress(OSError):
            assert await client.reader.read() == b""
        await until(lambda: not gateway.server.server_state.connections)
        client.leave()


@pytest.mark.parametrize("kept", [True, False])
def test_a_client_that_does_not_take_its_answers_is_dropped(tmp_path: Path, kept: bool) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path, blocked_s=0.4) as gateway:
            client = await gateway.client(receive_bytes=2048)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            gateway.serve_healthz(large)
            end = b"" if kept else b"connection: close\r\n"
            client.writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n%s\r\n" % end * (3 if kept else 1))
            await until(lambda: gateway.server.server_state.connections)
            connection.extend(gateway.server.server_state.connections)
            await until(lambda: not gateway.server.server_state.connections)
            await until(lambda: not gateway.server.server_state.tasks)
            client.leave()

    connection: list[Any] = []

    async def large(exchange: Exchange) -> None:
        """More than the kernel takes; so little more, where the connection is not kept, that writing goes on."""
        if kept:
            await exchange.answer(200, bytes(1 << 20), [])
            return
        while not connection[0].transport.get_write_buffer_size():
            await exchange.write(bytes(16 << 10))
            await turns()
        await exchange.end(b"")

    call()


@looped
async def test_a_client_that_takes_a_large_answer_slowly_gets_all_of_it(tmp_path: Path) -> None:
    sent = os.urandom(16 << 20)

    async def large(exchange: Exchange) -> None:
        await exchange.answer(200, sent, [])

    async with served(tmp_path, blocked_s=0.5) as gateway:
        gateway.serve_healthz(large)
        client = await gateway.client(receive_bytes=64 << 10)
        await client.send("GET", "/healthz", b"")
        assert await client.head() == 200
        (connection,), taken = gateway.server.server_state.connections, list[bytes]()
        for _ in range(32):
            taken.append(await client.reader.readexactly(len(sent) // 32))
            await holds(lambda: connection.transport.get_write_buffer_size() <= PIECE_BYTES + WRITE_BUFFER_BYTES, 0.05)
        assert b"".join(taken) == sent
        client.leave()


@looped
async def test_one_address_has_its_share_of_connections_and_a_proxy_that_is_trusted_more(tmp_path: Path) -> None:
    for name, settings, served_ones in (("alone", {}, 2), ("proxied", {"proxies": ["127.0.0.1/32"]}, 4)):
        async with served(tmp_path / name, address_connections=2, connections=4, **settings) as gateway:
            clients = [await gateway.client() for _ in range(5)]
            for client in clients:
                client.writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            statuses = []
            for client in clients:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    statuses.append(await client.head())
            assert statuses.count(200) == served_ones
            for client in clients:
                client.leave()
            await until(lambda: not gateway.server._listener.connections)
            assert (await gateway.call("/healthz", b"", "GET")).status == 200


def test_an_ipv6_customer_is_one_address() -> None:
    assert address_group("2001:db8::1") == address_group("2001:db8::ffff:2") != address_group("2001:db8:0:1::1")
    assert address_group("::ffff:1.2.3.4") == address_group("1.2.3.4") != address_group("1.2.3.5")


@looped
async def test_without_descriptors_the_door_waits_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served(tmp_path) as gateway:
        listener = gateway.server._listener
        full, tried_at = [True], list[float]()

        class Full:
            """A listener of a process that has no descriptor left."""

            def __init__(self, real: socket.socket) -> None:
                self._real = real
                self.fileno = real.fileno

            def accept(self) -> Any:
                if full:
                    tried_at.append(asyncio.get_running_loop().time())
                    raise OSError(errno.EMFILE, "Too many open files")
                return self._real.accept()

        listener._listener = Full(listener._listener)
        client = await gateway.client()
        await client.send("GET", "/healthz", b"")
        await until(lambda: len(tried_at) >= 3)
        assert all(later - earlier > 0.9 * _PAUSE_S for earlier, later in pairwise(tried_at)), "it waits between tries"
        assert len(caplog.records) == len(tried_at)
        full.clear()
        assert await client.head() == 200
        client.leave()


def test_as_many_descriptors_are_allowed_as_connections_need() -> None:
    script = """
import resource
from gateway.http.server import allow_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4000))
print(*map(allow_descriptors, (50, 1000, 9000)), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.stdout == "562 1512 4000 4000 4000\n", ended.stderr
