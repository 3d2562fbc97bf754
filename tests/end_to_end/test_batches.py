"""Queued requests on a real server with the built-in model: killed in the middle, started again, charged exactly."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway.batch.worker import LEASE_S
from tenants.limits.quota import HOLD_S
from tenants.open import open_store
from tenants.records.usage import EXPIRED, MICRO, UsageRecord, day_of
from tests.end_to_end.beside_queue import measure
from tests.end_to_end.conftest import EMBER, Hearth, serving
from tests.end_to_end.ledger import read_totals
from tests.support.waiting import wait_for

REQUESTS = 60
pytestmark = pytest.mark.timeout(300)  # a machine with other work takes a while for so many


def submit(client: httpx.Client, count: int = REQUESTS) -> str:
    requests = [
        {"messages": [{"role": "user", "content": f"Count to {n}."}], "max_tokens": 40, "external_reference": str(n)}
        for n in range(count)
    ]
    answer = client.post(f"/ai/run/{EMBER}?queueRequest=true", json={"requests": requests})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["result"]["request_id"])


def poll(client: httpx.Client, request_id: str) -> Any:
    return client.post(f"/ai/run/{EMBER}", json={"request_id": request_id}).json()["result"]


def state(client: httpx.Client, request_id: str) -> Any:
    return client.get(f"/ai/batches/{request_id}").json()["result"]


def records(folder: Path, account_id: str) -> list[UsageRecord]:
    async def read() -> list[UsageRecord]:
        store = open_store(f"sqlite:{folder / '.hearth' / 'hearth.db'}")
        try:
            return list(await store.quotas.records(account_id, day_of(int(time.time() * MICRO))))
        finally:
            await store.close()

    return asyncio.run(read())


def kill(hearth: Hearth) -> None:
    """The gateway, as the kernel ends a process that has no memory left, and then what is left of the machine."""
    others = hearth.processes()[1:]
    hearth.process.kill()
    hearth.process.wait()
    _, left = psutil.wait_procs(others, 15)
    assert not left


def test_a_batch_outlives_its_gateway_and_every_request_of_it_is_charged_once(tmp_path: Path) -> None:
    with serving(tmp_path) as hearth:
        with hearth.client() as client:
            other = submit(client, 400)
            wait_for(lambda: state(client, other)["requests"]["succeeded"] >= 5, 30, "some are done")
            cancelled = client.delete(f"/ai/batches/{other}").json()["result"]
            assert cancelled["status"] == "cancelled"
            request_id = submit(client)
            wait_for(lambda: state(client, request_id)["requests"]["succeeded"] >= 5, 30, "some are done")
            assert poll(client, request_id) == {"status": "running", "request_id": request_id, "model": EMBER}
        kill(hearth)
    with serving(tmp_path) as hearth, hearth.client() as client:
        wait_for(lambda: state(client, request_id)["status"] == "done", LEASE_S + 60, "all are done")
        result = poll(client, request_id)
        assert [one["external_reference"] for one in result["responses"]] == [str(n) for n in range(REQUESTS)]
        assert all(one["success"] and one["result"]["response"] for one in result["responses"])
        kept = poll(client, other)
        assert kept["status"] == "cancelled"
        assert len(kept["responses"]) == cancelled["requests"]["succeeded"]
        # A request of the cancelled batch may have run as the gateway was killed: its hold ends when nobody renews it.
        wait_for(lambda: read_totals(tmp_path, hearth.account_id).open == 0, HOLD_S + 30, "no hold is left")
    found = {record.request_id: record for record in records(tmp_path, hearth.account_id)}
    own = [found[f"{request_id}-{n}"] for n in range(REQUESTS)]
    assert {record.outcome for record in own} == {"done"}
    told = [one["result"]["usage"] for one in result["responses"]]
    assert [(one.prompt_tokens, one.completion_tokens) for one in own] == [
        (one["prompt_tokens"], one["completion_tokens"]) for one in told
    ]
    assert result["usage"]["total_tokens"] == sum(one["total_tokens"] for one in told)
    others = [record for id, record in found.items() if id.startswith(other)]
    assert {one.outcome for one in others} <= {"done", "cancelled", EXPIRED}
    assert len(others) >= cancelled["requests"]["succeeded"]
    assert len(found) == len(own) + len(others) == read_totals(tmp_path, hearth.account_id).requests


def test_live_callers_hardly_notice_a_queue(tmp_path: Path) -> None:
    """benchmarks/gateway/batch.py measures what is asserted here with room for a machine that has other work."""
    with serving(tmp_path) as hearth:
        seen = asyncio.run(measure(hearth, rounds=1, requests=8, queued=400))
    assert seen.ratio(0.5) < 3.0
    assert seen.drained
