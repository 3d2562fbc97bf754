"""A real primary, replicas and Sentinels in network namespaces: killed, cut off and healed under gateways' stores."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from msgspec import structs

from benchmarks.tenants.failover import STRICT, cut_link
from tenants.open import open_store
from tenants.records.accounts import Account
from tenants.records.holds import Granted
from tenants.records.limits import NO_LIMITS, Limits
from tenants.store.protocol import Store, StoreUnavailable
from tenants.store.redis.replicas import Replicas
from tests.end_to_end.cluster import cluster
from tests.end_to_end.crowd import Crowd, End
from tests.end_to_end.reckoning import Watch, reckon
from tests.end_to_end.test_chaos import PLENTY, served_again
from tests.support.sentinels import NAME, SentinelNetwork, can_make_namespaces
from tests.support.waiting import until, wait_for
from tests.tenants.store.redis.test_store import ANN, hold

CLIENTS = 40

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.xdist_group("failover"),
    pytest.mark.skipif(not can_make_namespaces(), reason="needs network namespaces, which root can make"),
]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[SentinelNetwork]:
    with SentinelNetwork(tmp_path).running() as running:
        yield running


@pytest.fixture
async def store(network: SentinelNetwork) -> AsyncIterator[Store]:
    opened = open_store(network.url)
    await opened.accounts.add(Account(ANN, "ann", Limits(), 1))
    yield opened
    await opened.close()


async def granted(store: Store, request_id: str, strict: bool = False) -> bool:
    try:
        return isinstance(await store.quotas.reserve(structs.replace(hold(request_id, 1), strict=strict)), Granted)
    except StoreUnavailable:
        return False


async def test_a_store_follows_to_the_server_that_is_promoted(network: SentinelNetwork, store: Store) -> None:
    assert await granted(store, "before")
    assert [line for line in await store.advice() if "down-after-milliseconds" not in line] == []
    network.hosts[0].kill()
    await until(lambda: granted(store, "after"), what="another one grants")
    assert any("1 of 2 replicas follow" in line for line in await store.advice())


async def test_a_store_follows_a_failover_that_an_operator_asks_for(network: SentinelNetwork, store: Store) -> None:
    assert await granted(store, "before")
    network.hosts[1].ask("SENTINEL", "FAILOVER", NAME, port=26379)
    await asyncio.to_thread(network.promoted, seen_by=1)
    await until(lambda: granted(store, "after"), what="the new one grants")
    assert (await store.quotas.totals(ANN, int(network.hosts[1].ask("TIME")[0]) // 86_400)).open == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_what_clients_of_two_gateways_received_is_in_the_ledger_after_the_primary_was_lost(
    network: SentinelNetwork, tmp_path: Path, fault: signal.Signals
) -> None:
    """Real gateways and streams: those in flight go on, calls meanwhile are told when to come back. A primary that was
    only frozen comes back when another one has taken its place."""
    (folder := tmp_path / "gateways").mkdir()
    async with cluster(folder, store_url=network.url) as running:
        tenants = await running.tenants([(PLENTY, NO_LIMITS)] * 2)
        crowd, watch = Crowd(running, tenants, CLIENTS, 0.1, random.randrange(1 << 30)), Watch(running, tenants)
        async with watch.looking(), crowd.coming():
            await served_again(running, crowd)
            network.hosts[0].processes[0].send_signal(fault)
            lost = time.monotonic()
            await until(
                lambda: any(visit.end is End.AWAY and visit.began > lost for visit in crowd.visits),
                what="a call is told that the store is away",
            )
            await served_again(running, crowd)
            if fault is signal.SIGSTOP:
                network.hosts[0].processes[0].send_signal(signal.SIGCONT)
                await asyncio.to_thread(wait_for, lambda: network.hosts[0].ask("ROLE")[0] == b"slave", 60, "it follows")
                await served_again(running, crowd)
        await until(lambda: not running.outbox(), 30, "the outbox is replayed")
        await running.drain_gateways()
        found = await reckon(running, tenants, crowd.visits, watch)
    found.check()
    assert found.ends["done"] > CLIENTS // 4
    assert any(visit.end is End.DONE and visit.began < lost < visit.ended for visit in crowd.visits)


async def test_advice_says_what_lets_a_primary_that_is_cut_off_go_on(network: SentinelNetwork, store: Store) -> None:
    network.hosts[0].ask("CONFIG", "SET", "min-replicas-max-lag", "10")
    assert any("set `min-replicas-max-lag 1`" in line for line in await store.advice())
    network.hosts[0].ask("CONFIG", "SET", "min-replicas-to-write", "0")
    assert any("set `min-replicas-to-write 1`" in line for line in await store.advice())
    for host in network.hosts:
        host.ask("SENTINEL", "SET", NAME, "quorum", "1", port=26379)
    assert any("set the quorum to 2" in line for line in await store.advice())


def test_a_cut_link_loses_nothing_and_passes_what_one_side_granted_meanwhile(tmp_path: Path) -> None:
    """benchmarks/tenants/failover.py does the same with many seeds, and measures."""
    outcome = cut_link(tmp_path, random.randrange(1 << 30))
    assert outcome.verdict.complaints == []
    assert (outcome.verdict.lost, outcome.verdict.passed[STRICT]) == (0, 0)
    kinds = {(event.gateway, event.kind) for event in outcome.events}
    assert kinds >= {(gateway, kind) for gateway in ("near", "far") for kind in ("granted", "refused", "unknown")}


def test_the_checker_finds_a_build_that_says_nothing_again(tmp_path: Path) -> None:
    outcome = cut_link(tmp_path, random.randrange(1 << 30), "silent")
    assert outcome.verdict.lost > 0
    assert any("is in no ledger" in text for text in outcome.verdict.complaints)


async def promoted_without(network: SentinelNetwork, store: Store) -> int:
    """How many strict holds a gateway was granted while host 1 was cut off and that are gone once host 1 is primary,
    and the gateway as well as the other two servers are lost."""
    assert await granted(store, "before", strict=True)
    key = f"hearth:{{{ANN}}}:holds"
    await until(lambda: b"before" in network.hosts[1].ask("HKEYS", key), what="the replica has what was granted")
    network.hosts[1].cut()
    await until(lambda: _lags(network), what="the replica lags")
    away = [await granted(store, f"away-{number}", strict=True) for number in range(5)]
    await store.close()
    for host in (network.hosts[0], network.hosts[2]):
        host.processes[0].kill()
    network.hosts[1].heal()
    for sentinel in network.hosts:  # one that has been away may have to be told of the other's end
        with suppress(redis.ResponseError):
            sentinel.ask("SENTINEL", "FAILOVER", NAME, port=26379)
    await asyncio.to_thread(wait_for, lambda: network.hosts[1].ask("ROLE")[0] == b"master", 60, "host 1 is primary")
    held = network.hosts[1].ask("HKEYS", key)
    assert b"before" in held
    return sum(away) - sum(f"away-{number}".encode() in held for number in range(5) if away[number])


def _lags(network: SentinelNetwork) -> bool:
    replication = network.hosts[0].ask("INFO", "replication")
    return any(replication[f"slave{number}"]["lag"] > 2 for number in range(2))


async def test_a_strict_plan_is_refused_while_a_replica_is_away(network: SentinelNetwork, store: Store) -> None:
    network.hosts[1].ask("CONFIG", "SET", "min-replicas-to-write", "0")
    assert await promoted_without(network, store) == 0


async def test_waiting_for_one_of_two_replicas_loses_what_was_strict(
    network: SentinelNetwork, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken build that the promise has to tell from the right one."""

    async def enough(self: Replicas) -> None: ...

    monkeypatch.setattr(Replicas, "require_all", enough)
    monkeypatch.setattr(Replicas, "count", lambda self: 1)
    network.hosts[1].ask("CONFIG", "SET", "min-replicas-to-write", "0")
    assert await promoted_without(network, store) > 0  # of five, of which a busy machine may have granted fewer
