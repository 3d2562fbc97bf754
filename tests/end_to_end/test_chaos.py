"""Quotas are exact whatever clients, replicas, gateways and Redis do: 200 clients, two gateways, a real Redis.

benchmarks/gateway/chaos.py is the same for as long as one likes, and measures.
"""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.usage import UsageRecord
from tests.end_to_end.cluster import FAULTS, Cluster, Tenant, cluster
from tests.end_to_end.crowd import Crowd, End, Visit
from tests.end_to_end.reckoning import Watch, complain, reckon
from tests.support.served_gateway import looped
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("chaos")

CLIENTS = 200
LEAVING = 0.3
PLENTY = Limits(requests_per_minute=6_000_000, neurons_per_day=1e9, concurrent_requests=100_000)
TENANTS = [
    (PLENTY, NO_LIMITS),
    (structs.replace(PLENTY, neurons_per_day=8), NO_LIMITS),
    (structs.replace(PLENTY, neurons_per_month=12), NO_LIMITS),
    (structs.replace(PLENTY, concurrent_requests=5), NO_LIMITS),
    (structs.replace(PLENTY, requests_per_minute=300, burst=20), NO_LIMITS),
    (structs.replace(PLENTY, output_tokens_per_minute=3_000), NO_LIMITS),
    (structs.replace(PLENTY, input_tokens_per_minute=2_000), NO_LIMITS),
    (PLENTY, Limits(neurons_per_day=6, concurrent_requests=8)),
]


@pytest.fixture
def seed() -> int:
    drawn = random.randrange(1 << 30)
    print("seed", drawn)
    return drawn


@looped
async def test_quotas_are_exact_under_leaving_clients_and_failing_replicas(tmp_path: Path, seed: int) -> None:
    async with cluster(tmp_path) as running:
        tenants = await running.tenants(TENANTS)
        crowd, watch = Crowd(running, tenants, CLIENTS, LEAVING, seed), Watch(running, tenants)
        async with watch.looking(), crowd.coming():
            await asyncio.sleep(8)
        await running.drain_gateways()
        found = await reckon(running, tenants, crowd.visits, watch)
    found.check()
    assert found.lease == 0
    assert {end for end in End if found.ends[end.value]} >= {End.DONE, End.LEFT, End.ERROR, End.REFUSED}
    assert found.ends["done"] > CLIENTS


@looped
async def test_quotas_are_exact_whatever_happens_to_redis_and_to_gateways(tmp_path: Path, seed: int) -> None:
    """Each fault of Redis in turn, and in every second one a gateway is killed."""
    async with cluster(tmp_path) as running:
        tenants = await running.tenants(TENANTS)
        crowd, watch = Crowd(running, tenants, CLIENTS, LEAVING, seed), Watch(running, tenants)
        async with watch.looking(), crowd.coming():
            for number, fault in enumerate(FAULTS.values()):
                await served_again(running, crowd)
                async with fault(running):
                    began = time.monotonic()
                    await asyncio.sleep(0.4)
                    assert any(visit.end is End.DONE and visit.began < began < visit.ended for visit in crowd.visits), (
                        "no stream in flight went on"
                    )
                    if number % 2:
                        running.kill_gateway(number // 2 % 2)
                    await asyncio.sleep(0.3)
                if number % 2:
                    await running.start_gateway(number // 2 % 2)
            await served_again(running, crowd)
        await until(lambda: not running.outbox(), 30, "the outbox is replayed")
        await running.drain_gateways()
        found = await reckon(running, tenants, crowd.visits, watch)
    found.check()
    assert found.ends["away"] > CLIENTS


@pytest.mark.timeout(300)  # four gateways start on the way
@pytest.mark.parametrize("how", ["ended", "hurried", "killed"])
@looped
async def test_all_gateways_that_restart_at_once_tell_their_clients_and_settle_each_call_once(
    tmp_path: Path, seed: int, how: str
) -> None:
    async with cluster(tmp_path) as running:
        tenants = await running.tenants(TENANTS)
        crowd, watch = Crowd(running, tenants, CLIENTS // 4, LEAVING, seed), Watch(running, tenants)
        async with watch.looking(), crowd.coming():
            await served_again(running, crowd)
            if how == "killed":
                for gateway in range(2):
                    running.kill_gateway(gateway)
            else:
                await running.drain_gateways(hurried=how == "hurried")
            await asyncio.gather(*(running.start_gateway(gateway) for gateway in range(2)))
            await served_again(running, crowd)
        await until(lambda: not running.outbox(), 30, "the outbox is replayed")
        await running.drain_gateways()
        found = await reckon(running, tenants, crowd.visits, watch)
    found.check()
    told = {"ended": End.AWAY, "hurried": End.ERROR, "killed": End.CUT}[how]
    assert any(visit.end is told and ("shutting down" in visit.said or told is End.CUT) for visit in crowd.visits)


async def served_again(running: Cluster, crowd: Crowd) -> None:
    """Both gateways served somebody who came after this was called."""
    now = time.monotonic()

    def served(gateway: int) -> bool:
        return any(
            visit.gateway == gateway and visit.end is End.DONE and visit.began > now for visit in crowd.visits[-2000:]
        )

    await until(lambda: all(served(gateway) for gateway in range(len(running.ports))), 30, "both gateways serve")


ANN = Tenant("a" * 32, "key", "hearth_key_secret", PLENTY, NO_LIMITS)
GOOD = {"status": 200, "tokens": 5, "told_prompt_tokens": 20, "told_tokens": 5, "end": End.DONE}
RECORD = UsageRecord(ANN.account_id, "r", 0, 40_000, 20, 0, 5, "done", "key", "@cf/a/b", 7, 1.5)


def visit_of(**fields: Any) -> Visit:
    return Visit(ANN, 0, "hello", 10, 1.0, **{**GOOD, **fields})


def test_a_visit_that_was_charged_as_it_was_served_is_no_cause_for_complaint() -> None:
    broken_off = structs.replace(RECORD, outcome="draining")  # behind a prompt that a replica had read
    assert complain(visit_of(end=End.AWAY, status=503, retry_after_s=1, tokens=0), broken_off, 20, orphan=False) == ""
    assert complain(visit_of(), RECORD, 20, orphan=False) == ""
    assert complain(visit_of(end=End.LEFT, tokens=3), RECORD, 20, orphan=False) == ""
    assert complain(visit_of(end=End.CUT), RECORD, 20, orphan=True) == ""


@pytest.mark.parametrize(
    ("visit", "record", "says"),
    [
        (visit_of(end=End.CUT), RECORD, "ended without a word"),
        (visit_of(end=End.HUNG), RECORD, "ended without a word"),
        (visit_of(end=End.ERROR, status=401), None, "no cause"),
        (visit_of(end=End.AWAY, status=503), None, "when to come back"),
        (visit_of(), None, "no record"),
        (visit_of(end=End.LEFT, tokens=1), None, "no record"),
        (visit_of(end=End.REFUSED, status=429, retry_after_s=1), RECORD, "refused and has a record"),
        (visit_of(end=End.AWAY, status=503, retry_after_s=1), RECORD, "not served and was charged"),
        (visit_of(), structs.replace(RECORD, completion_tokens=11), "more than it asked"),
        (visit_of(end=End.LEFT), structs.replace(RECORD, completion_tokens=4), "more than was charged"),
        (visit_of(tokens=4), RECORD, "given something else"),
        (visit_of(), structs.replace(RECORD, prompt_tokens=21), "given something else"),
        (visit_of(), structs.replace(RECORD, outcome="client_gone"), "given something else"),
        (visit_of(told_tokens=4), RECORD, "told something else"),
    ],
)
def test_the_reckoning_complains(visit: Visit, record: UsageRecord | None, says: str) -> None:
    assert says in complain(visit, record, 20, orphan=False)
