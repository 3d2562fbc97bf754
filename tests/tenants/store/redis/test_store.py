import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import redis

from tenants.open import open_store
from tenants.records.account_search import AccountSearch
from tenants.records.accounts import Account
from tenants.records.cluster import ClusterAuthority
from tenants.records.grants import Grant
from tenants.records.holds import Cap, DenialReason, Granted, Hold
from tenants.records.limits import Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import EXPIRED, MICRO, Totals, UsageRecord
from tenants.store.protocol import RETENTION_DAYS, StoreUnavailable
from tenants.store.redis.pipeline import PIPELINE_COMMANDS
from tenants.store.redis.store import VERSION, RedisStore
from tests.support.loop_holds import LoopHolds, least_hold_ms, loop_holds
from tests.support.many_accounts import leave_accounts

pytestmark = pytest.mark.anyio
ANN = "a" * 32


def hold(request_id: str, held: int = 100) -> Hold:
    return Hold(UsageRecord(ANN, request_id, 0, 0, 0, 0, 0, EXPIRED, "key", "@cf/a/b", 7, 0.0), held, 60 * MICRO)


@pytest.fixture
async def store(empty_redis_url: str) -> AsyncIterator[RedisStore]:
    """By Redis' own clock."""
    opened = RedisStore(empty_redis_url)
    limits = Limits(requests_per_minute=6_000_000, concurrent_requests=1_000_000)
    await opened.accounts.add(Account(ANN, "ann", limits, 1))
    await opened.accounts.add_token(ApiToken("key", ANN, "laptop", 1), TokenDigest(b"digest", 1))
    yield opened
    await opened.close()


async def test_decisions_are_timed_by_redis(store: RedisStore, empty_redis_url: str) -> None:
    with redis.Redis.from_url(empty_redis_url) as client:
        before_s, _ = client.time()
        decision = await store.quotas.reserve(hold("r"))
        after_s, _ = client.time()
        (expires_us,) = (int(score) for _, score in client.zrange(f"hearth:{{{ANN}}}:expiries", 0, -1, withscores=True))
    assert isinstance(decision, Granted)
    assert before_s // 86_400 <= decision.day <= after_s // 86_400
    assert before_s * MICRO <= expires_us - 60 * MICRO <= (after_s + 1) * MICRO


async def test_a_claim_that_was_asked_for_twice_since_its_answer_was_lost_is_the_askers(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first call with an Idempotency-Key is told that it is in progress, for as long as the key is taken."""
    ask = store._database.pipeline.ask

    async def twice(*commands: Any) -> list[Any]:
        await ask(*commands)
        return await ask(*commands)

    with monkeypatch.context() as patch:
        patch.setattr(store._database.pipeline, "ask", twice)
        assert await store.claims.claim(ANN, "key", b"", 60) is None
    assert await store.claims.claim(ANN, "key", b"other", 60) == b""
    await store.claims.replace(ANN, "key", b"answer", 60)
    assert await store.claims.claim(ANN, "key", b"other", 60) == b"answer"


async def test_a_token_kept_before_there_were_grants_is_read(store: RedisStore, empty_redis_url: str) -> None:
    token = {"id": "old", "account_id": ANN, "name": "n", "created_at": 3, "expires_at": None, "revoked_at": None}
    with redis.Redis.from_url(empty_redis_url) as client:
        client.set("hearth:token:old", ANN)
        packed = msgspec.msgpack.encode((token, {"digest": b"d", "pepper": 1}))
        client.hset(f"hearth:{{{ANN}}}:tokens", "old", packed)  # type: ignore[arg-type]
    found = await store.accounts.token("old")
    assert found is not None
    assert found[:2] == (ApiToken("old", ANN, "n", 3, grant=Grant()), [TokenDigest(b"d", 1)])
    assert {one.id for one in await store.accounts.tokens(ANN)} == {"key", "old"}


async def test_scripts_that_redis_forgot_are_loaded_again(store: RedisStore, empty_redis_url: str) -> None:
    with redis.Redis.from_url(empty_redis_url) as client:
        for n in range(3):
            client.script_flush()
            assert isinstance(await store.quotas.reserve(hold(f"r{n}")), Granted)
            client.script_flush()
            await store.quotas.settle([UsageRecord(ANN, f"r{n}", 0, 1, 0, 0, 0, "done", "key", "m", 7, 0.0)])


async def test_all_keys_of_an_account_share_one_hash_tag(store: RedisStore, empty_redis_url: str) -> None:
    await store.quotas.reserve(hold("a"))
    await store.quotas.reserve(hold("b"))
    await store.quotas.settle([UsageRecord(ANN, "a", 0, 1, 0, 0, 0, "done", "key", "m", 7, 0.0)])
    await store.accounts.revoke("key", 1)
    with redis.Redis.from_url(empty_redis_url) as client:
        keys = {key.decode() for key in client.scan_iter()}
    untagged = {
        "hearth:accounts",
        "hearth:accounts:by_name",
        "hearth:accounts:by_age",
        "hearth:named",
        "hearth:name:ann",
        "hearth:token:key",
    }
    assert untagged < keys
    assert len(keys - untagged) == 9
    assert all(f"{{{ANN}}}" in key for key in keys - untagged)


async def names(store: RedisStore, **search: Any) -> set[str]:
    accounts, count = await store.accounts.search(AccountSearch(**search))
    assert count == len(accounts)
    return {account.name for account in accounts}


async def test_a_search_finds_what_an_earlier_version_added_changed_and_removed(
    store: RedisStore, empty_redis_url: str
) -> None:
    """It knows no lines by which accounts are searched."""
    for index in range(3):
        await store.accounts.add(Account(f"{index:032x}", f"team {index}", Limits(), index))
    with redis.Redis.from_url(empty_redis_url) as client:
        line = client.hget(f"hearth:{{{ANN}}}", "line")
        client.zrem("hearth:accounts:by_name", line)
        client.zrem("hearth:accounts:by_age", "\n".join((ANN, "ann", "default", "0")))
        client.hset(f"hearth:{{{0:032x}}}", "suspended_at", 7)
        client.delete(f"hearth:{{{1:032x}}}")
        client.srem("hearth:accounts", f"{1:032x}")
    assert await names(store) == {"ann", "team 0", "team 2"}
    assert await names(store, suspended=True) == {"team 0"}
    assert await names(store, suspended=False, order="name") == {"ann", "team 2"}
    await store.accounts.remove(f"{2:032x}")
    assert await names(store, order="name") == {"ann", "team 0"}
    with redis.Redis.from_url(empty_redis_url) as client:
        assert client.zcard("hearth:accounts:by_age") == 2


async def test_a_search_among_thousands_does_not_hold_the_loop(store: RedisStore) -> None:
    await leave_accounts(store, 2000, 0, 0)
    await store.accounts.search(AccountSearch())

    async def attempt(number: int) -> LoopHolds:
        async with loop_holds() as holds:
            accounts, count = await store.accounts.search(AccountSearch(name="WORKS", first=1000, limit=200))
        assert (len(accounts), count) == (200, 1999)
        return holds

    assert await least_hold_ms(10, attempt) < 10


async def test_counting_does_not_move_the_end_of_a_day(store: RedisStore, empty_redis_url: str) -> None:
    """Bug elsewhere: every increment resets the time to live, and the window never ends."""
    with redis.Redis.from_url(empty_redis_url) as client:
        ends = set()
        for n in range(3):
            decision = await store.quotas.reserve(hold(f"r{n}"))
            assert isinstance(decision, Granted)
            await store.quotas.settle([UsageRecord(ANN, f"r{n}", decision.day, 1, 0, 0, 0, "done", "key", "m", 7, 0.0)])
            for part in ("day", "ledger"):
                left_ms = client.pttl(f"hearth:{{{ANN}}}:{part}:{decision.day}")
                ends.add(round(time.time() + left_ms / 1_000) - (decision.day + RETENTION_DAYS) * 86_400)
            await asyncio.sleep(1.1)
    assert ends <= {-1, 0, 1}, ends


async def test_a_redis_that_is_not_there_is_an_error_that_says_what_to_do() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    store = open_store(f"redis://127.0.0.1:{port}/0")
    with pytest.raises(StoreUnavailable, match=r"\w\)?: see that it runs, and that \[store\] url"):
        await store.ping()
    with pytest.raises(StoreUnavailable, match="see that it runs"):
        await store.accounts.list()
    await store.close()


async def reserve_all(store: RedisStore, count: int) -> None:
    for n in range(count):
        await store.quotas.reserve(hold(f"r{n}"))


async def test_a_full_redis_is_an_error_that_says_what_to_do(store: RedisStore, empty_redis_url: str) -> None:
    with redis.Redis.from_url(empty_redis_url) as client:
        client.config_set("maxmemory", "1mb")
        client.config_set("maxmemory-policy", "noeviction")
        try:
            with pytest.raises(StoreUnavailable, match="raise maxmemory"):
                await reserve_all(store, 20_000)
        finally:
            client.config_set("maxmemory", "0")
    decision = await store.quotas.reserve(hold("after"))
    assert isinstance(decision, Granted)
    (await store.quotas.reconcile(ANN, decision.day)).check()


async def test_a_connection_that_broke_while_idle_costs_no_request(store: RedisStore, empty_redis_url: str) -> None:
    with redis.Redis.from_url(empty_redis_url) as client:
        for n in range(5):
            assert isinstance(await store.quotas.reserve(hold(f"r{n}")), Granted)
            client.client_kill_filter(_type="normal", skipme=True)


async def test_a_thousand_callers_share_one_connection(store: RedisStore, empty_redis_url: str) -> None:
    decisions = await asyncio.gather(*(store.quotas.reserve(hold(f"r{n}", 1)) for n in range(1_000)))
    assert all(isinstance(decision, Granted) for decision in decisions)
    assert PIPELINE_COMMANDS < 1_000
    with redis.Redis.from_url(empty_redis_url) as client:
        others = [one for one in client.client_list() if one["id"] != str(client.client_id())]
    assert len(others) <= 2  # the second is for long reads
    decision = decisions[0]
    assert isinstance(decision, Granted)
    assert await store.quotas.totals(ANN, decision.day) == Totals(held=1_000, open=1_000)


async def test_what_a_newer_hearth_keeps_is_left_alone(store: RedisStore, empty_redis_url: str) -> None:
    with redis.Redis.from_url(empty_redis_url) as client:
        for _ in range(2):
            await store.ping()
            assert client.get("hearth:version") == str(VERSION).encode()
        client.set("hearth:version", VERSION + 1)
        with pytest.raises(StoreUnavailable, match="a newer Hearth"):
            await store.ping()
        assert client.get("hearth:version") == str(VERSION + 1).encode()


async def test_advice_names_what_makes_redis_forget(store: RedisStore, empty_redis_url: str) -> None:
    with redis.Redis.from_url(empty_redis_url) as client:
        assert [line for line in await store.advice() if "noeviction" in line] == []
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            advice = await store.advice()
        finally:
            client.config_set("maxmemory", "0")
            client.config_set("maxmemory-policy", "noeviction")
    assert any("maxmemory-policy noeviction" in line for line in advice)
    assert any("appendonly yes" in line for line in advice)


async def test_sums_and_records_read_while_decisions_are_made_agree(store: RedisStore) -> None:
    day = time.time() // 86_400
    stop = asyncio.Event()

    async def work(name: int) -> None:
        n = 0
        while not stop.is_set():
            n += 1
            decision = await store.quotas.reserve(hold(f"{name}.{n}", 5))
            assert isinstance(decision, Granted)
            await store.quotas.settle(
                [UsageRecord(ANN, f"{name}.{n}", decision.day, 3, 1, 0, 2, "done", "key", "m", 7, 0.0)]
            )

    working = [asyncio.create_task(work(name)) for name in range(8)]
    for _ in range(10):
        (await store.quotas.reconcile(ANN, int(day))).check()
        await asyncio.sleep(0.01)
    stop.set()
    await asyncio.gather(*working)


async def test_an_emptied_redis_is_an_outage_and_knows_no_strangers(store: RedisStore, empty_redis_url: str) -> None:
    """Else every token would be refused for good, and all usage of the outage written where it is thrown away."""
    with redis.Redis.from_url(empty_redis_url) as client:
        client.flushall()
        asking: list[Callable[[], Awaitable[object]]] = [
            lambda: store.accounts.token("key"),
            lambda: store.accounts.get(ANN),
            lambda: store.quotas.reserve(hold("r")),
            lambda: store.quotas.settle([hold("r").record]),
        ]
        for ask in asking:
            with pytest.raises(StoreUnavailable, match="it was emptied, and must be restored"):
                await ask()
        await store.quotas.remaining(ANN, [Cap("", DenialReason.NEURONS_PER_MONTH, 1, 100)])
        assert client.dbsize() == 0
        await store.cluster.found(ClusterAuthority("eu", b"", b""))
        assert await store.accounts.token("key") is None, "it was founded, and never had one"


async def test_a_settlement_for_an_account_that_is_gone_is_kept_where_others_are_there(store: RedisStore) -> None:
    gone, today = "b" * 32, int(time.time()) // 86_400
    await store.quotas.settle([msgspec.structs.replace(hold("r").record, account_id=gone, day=today, outcome="done")])
    assert [one.request_id for one in await store.quotas.records(gone, today)] == ["r"]


@pytest.mark.parametrize(
    ("begin", "heal"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    ],
    ids=["a replica", "a full one"],
)
async def test_a_redis_that_takes_no_writes_answers_no_ping(
    store: RedisStore, empty_redis_url: str, begin: tuple[str, ...], heal: tuple[str, ...]
) -> None:
    await store.ping()
    with redis.Redis.from_url(empty_redis_url) as client:
        client.execute_command(*begin)
        try:
            with pytest.raises(StoreUnavailable):
                await store.ping()
        finally:
            client.execute_command(*heal)
    await store.ping()
