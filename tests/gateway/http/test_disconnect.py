"""Clients that leave, stop reading or wait, at every phase; afterwards nothing is held anywhere."""

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.http.exchange import Exchange
from tests.support.served_gateway import Served, looped, open_files, served, visit
from tests.support.stub_replica import MODEL
from tests.support.waiting import forever, turns, until

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 5000, "stream": True}
PHASES = [
    "body",
    "quota",
    "replica",
    "before the first token",
    "mid stream",
    "while the engine is silent",
    "whole answer",
]


@contextlib.asynccontextmanager
async def stuck_quota(gateway: Served) -> AsyncIterator[asyncio.Event]:
    """The store is asked for a reservation, which sets the event, and does not answer."""
    store, asked = gateway.app._tenancy.store, asyncio.Event()
    reserve = store.quotas.reserve

    async def stuck(*_: Any) -> None:
        asked.set()
        await forever()

    store.quotas.reserve = stuck  # type: ignore[method-assign, assignment]
    try:
        yield asked
    finally:
        store.quotas.reserve = reserve  # type: ignore[method-assign]


async def leave_in(phase: str, gateway: Served) -> None:
    """Begins a call and leaves in this phase of it."""
    client = await gateway.client()
    behaviour = gateway.behaviour
    behaviour.step_s, behaviour.first_s = 0.01, 0.0
    if phase == "body":
        head = f"POST {gateway.run_path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.token}\r\n"
        client.writer.write(f"{head}content-length: 1000\r\n\r\n{{".encode())
        await until(lambda: gateway.app.open_requests)
    elif phase == "quota":
        async with stuck_quota(gateway) as asked:
            await client.post(gateway.run_path, LONG, gateway.headers)
            await asked.wait()
            client.leave()
            await until(lambda: not gateway.app.open_requests)
    elif phase == "replica":
        await client.post(gateway.run_path.replace(MODEL, "@cf/hearth/ember"), LONG, gateway.headers)
        await until(lambda: gateway.quota.open)
    elif phase == "before the first token":
        behaviour.first_s = 60
        await client.post(gateway.run_path, LONG, gateway.headers)
        await until(lambda: gateway.fleet.running)
    elif phase == "whole answer":
        await client.post(gateway.run_path, {**LONG, "stream": False}, gateway.headers)
        await until(lambda: gateway.fleet.running)
    else:
        behaviour.step_s = 0.01 if phase == "mid stream" else 60
        await client.post(gateway.run_path, LONG, gateway.headers)
        assert await client.head() == 200
        async for event in client.events():
            assert event["response"] or event["p"]
            break
    client.leave()


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_frees_everything_at_once(tmp_path: Path, phase: str) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path) as gateway:
            await leave_in(phase, gateway)
            await gateway.settled(10.0)  # alone each of these calls would last longer
            records = await gateway.records()
            if phase == "body":
                assert records == []
                return
            (record,) = records
            assert record.outcome in ("client_gone", "cancelled")
            received = phase in ("mid stream", "while the engine is silent")
            assert (record.completion_tokens > 0) == received or phase == "whole answer"
            assert (record.micro_neurons > 0) == (record.completion_tokens > 0)
            told = phase not in ("quota", "replica")
            assert len(gateway.fleet.replicas[0].cancels) == told

    call()


@looped
async def test_the_engine_does_not_wait_for_a_client_that_does_not_read_and_it_is_dropped(tmp_path: Path) -> None:
    async with served(tmp_path, blocked_s=0.5) as gateway:
        client = await gateway.client(receive_bytes=4096)
        body = {"prompt": "hello", "max_tokens": 8000, "stream": True}
        await client.post(gateway.run_path, body, gateway.headers)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: gateway.fleet.submits)
        await until(lambda: not gateway.fleet.running)  # all tokens were made, though nobody reads
        assert gateway.quota.open == 1
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.outcome == "client_gone"
        await until(lambda: not gateway.server.server_state.connections)
        client.leave()


@looped
async def test_a_client_that_does_not_read_the_end_does_not_keep_its_connection(tmp_path: Path) -> None:
    async def large(exchange: Exchange) -> None:
        """A little more than the kernel takes."""
        (connection,) = gateway.server.server_state.connections
        while not connection.transport.get_write_buffer_size():
            await exchange.write(bytes(16 << 10))
            await turns()
        await exchange.end(b"")

    async with served(tmp_path, blocked_s=0.3) as gateway:
        gateway.serve_healthz(large)
        client = await gateway.client(receive_bytes=4096)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send("GET", "/healthz", b"")
        await until(lambda: gateway.server.server_state.connections)
        (connection,) = gateway.server.server_state.connections
        await until(lambda: connection.cycle is not None and connection.cycle.response_complete)
        assert connection.transport.get_write_buffer_size()
        connection.timeout_keep_alive_handler()  # type: ignore[union-attr]
        await until(lambda: not gateway.server.server_state.connections)
        client.leave()


@looped
async def test_silence_is_broken_by_comments(tmp_path: Path) -> None:
    async with served(tmp_path, first_byte_s=0.2, ping_s=0.2) as gateway:
        gateway.behaviour.first_s = 1.3
        answer = await gateway.run(prompt="hello", max_tokens=2, stream=True)
        pings = [event for event in answer.events if event == ": ping"]
        assert 2 <= len(pings) <= 7
        assert answer.events[: len(pings)] == pings
        assert answer.events[-1] == "[DONE]"


@looped
async def test_a_stream_has_no_comments_while_it_speaks(tmp_path: Path) -> None:
    async with served(tmp_path, first_byte_s=1.0, ping_s=1.0) as gateway:
        gateway.behaviour.step_s = 0.15
        answer = await gateway.run(prompt="hello", max_tokens=10, stream=True)
        assert ": ping" not in answer.events


@pytest.mark.parametrize("waits_for", ["a replica", "its first token"])
def test_the_first_byte_leaves_in_time_whatever_it_waits_for(tmp_path: Path, waits_for: str) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path, wait_s=2.5, first_byte_s=0.3) as gateway:
            gateway.behaviour.first_s = 2.5
            path = gateway.run_path
            if waits_for == "a replica":
                path = path.replace(MODEL, "@cf/hearth/ember")
            client = await gateway.client()
            await client.post(path, {**LONG, "max_tokens": 2}, gateway.headers)
            assert await client.head() == 200
            events = [event async for event in client.events()]
            assert events[0] == ": ping"
            assert events[-1] == "[DONE]"
            if waits_for == "a replica":
                assert events[-2]["errors"][0]["code"] == 3040
            client.leave()

    call()


@looped
async def test_an_answer_that_is_not_streamed_has_its_true_status_however_long_it_takes(tmp_path: Path) -> None:
    async with served(tmp_path, wait_s=0.5, first_byte_s=0.1) as gateway:
        path = gateway.run_path.replace(MODEL, "@cf/hearth/ember")
        assert (await gateway.call(path, {"prompt": "hello"})).status == 503


@looped
async def test_many_clients_that_leave_at_random_leak_nothing(tmp_path: Path) -> None:
    """The small version of benchmarks/gateway/leaks.py."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    async with served(tmp_path) as gateway:
        gateway.behaviour.step_s = 0.005
        await visit(gateway, rng, stays=True)
        await gateway.settled()
        gc.collect()
        tasks, files = len(asyncio.all_tasks()), open_files()
        for _ in range(6):
            await asyncio.gather(*(visit(gateway, rng, stays=rng.random() > 0.3) for _ in range(50)))
        await gateway.settled()
        await until(lambda: not gateway.server.server_state.connections)
        gc.collect()
        await until(lambda: len(asyncio.all_tasks()) <= tasks and open_files() <= files + 1)
        assert gateway.quota.open == gateway.fleet.running == 0
        records = await gateway.records()
        assert len({record.request_id for record in records}) == len(records)
        assert sum(record.outcome == "done" for record in records) >= 100


@looped
async def test_a_fleet_that_crashes_under_many_streams_leaks_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2) as gateway:
        gateway.behaviour.step_s = 0.005
        calls = [asyncio.create_task(gateway.run(prompt=f"hello {i}", max_tokens=60, stream=True)) for i in range(40)]
        for replica in gateway.fleet.replicas:
            await until(lambda: any(replica.emitted for replica in gateway.fleet.replicas))
            replica.die()
        answers = await asyncio.gather(*calls)
        assert all(answer.status in (200, 500) for answer in answers)
        assert all(answer.events[-1] == "[DONE]" for answer in answers if answer.status == 200)
        await gateway.settled()
        assert len(await gateway.records()) == 40
