"""A new primary hears again what its gateways were told by the one before, and nothing twice."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis
from msgspec import structs

from tenants.records.accounts import Account
from tenants.records.holds import Cap, DenialReason, Granted
from tenants.records.limits import Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import EXPIRED, MICRO, Totals, UsageRecord
from tenants.store.redis import recent as module
from tenants.store.redis.recent import RecentDecisions
from tenants.store.redis.store import RedisStore
from tests.support.waiting import StoppedClock
from tests.tenants.store.redis.test_store import ANN, hold

pytestmark = pytest.mark.anyio
OUTPUT = Cap("", DenialReason.OUTPUT_TOKENS_PER_MINUTE, 50, 600, cost_us=5 * MICRO, room_us=60 * MICRO)
MONTH = Cap("", DenialReason.NEURONS_PER_MONTH, 100, 10_000)


@pytest.fixture
async def store(empty_redis_url: str) -> AsyncIterator[RedisStore]:
    opened = RedisStore(empty_redis_url)
    await opened.accounts.add(Account(ANN, "ann", Limits(), 1))
    await opened.accounts.add_token(ApiToken("key", ANN, "laptop", 1), TokenDigest(b"digest", 1))
    yield opened
    await opened.close()


Lose = Callable[[], Any]


@pytest.fixture
def lose(store: RedisStore, empty_redis_url: str) -> Lose:
    """Puts Redis back to how it was at the last `keep`, and breaks all connections, as a failover does."""
    kept: dict[bytes, bytes] = {}

    def act(keep: bool = False) -> None:
        with redis.Redis.from_url(empty_redis_url) as client:
            if keep:
                kept.update({key: client.dump(key) for key in client.scan_iter()})  # type: ignore[misc]
                return
            client.flushall()
            client.script_flush()
            for key, value in kept.items():
                client.restore(key, 0, value)
            client.client_kill_filter(_type="normal", skipme=True)
        store._database.primary._heard = "another history"

    return act


def used(request_id: str, day: int, micro_neurons: int = 60, **fields: Any) -> UsageRecord:
    record = hold(request_id).record
    return structs.replace(record, day=day, micro_neurons=micro_neurons, completion_tokens=7, outcome="done", **fields)


async def reserve(store: RedisStore, request_id: str, caps: tuple[Cap, ...] = (OUTPUT, MONTH)) -> int:
    granted = await store.quotas.reserve(structs.replace(hold(request_id), caps=caps, output=50))
    assert isinstance(granted, Granted)
    return granted.day


async def balanced(store: RedisStore, day: int) -> Totals:
    balance = await store.quotas.reconcile(ANN, day)
    balance.check()
    return balance.counted


async def test_holds_and_settlements_that_a_primary_lost_are_there_again_before_the_next_decision(
    store: RedisStore, lose: Lose
) -> None:
    lose(keep=True)
    day = await reserve(store, "open")
    await reserve(store, "done")
    await store.quotas.checkpoint([structs.replace(used("open", day, 20), outcome=EXPIRED)], 60 * MICRO)
    await store.quotas.settle([used("done", day)])
    before, left = await balanced(store, day), await store.quotas.remaining(ANN, [OUTPUT, MONTH])
    lose()
    day = await reserve(store, "next", caps=(structs.replace(MONTH, allowed=100 + 60 + 100),))
    after = await balanced(store, day)
    assert after == structs.replace(before, held=before.held + 100, open=2)
    left_now = await store.quotas.remaining(ANN, [OUTPUT, MONTH])
    assert left_now[1] == left[1] - 100
    await store.quotas.settle([used("open", day), used("next", day)])
    assert await balanced(store, day) == Totals(3, 180, 0, 0, 21)


async def test_what_was_not_lost_is_said_again_and_changes_nothing(store: RedisStore, lose: Lose) -> None:
    day = await reserve(store, "open")
    await reserve(store, "done")
    await store.quotas.settle([used("done", day)])
    await store.accounts.revoke("key", 7)
    before, left = await balanced(store, day), await store.quotas.remaining(ANN, [OUTPUT, MONTH])
    lose(keep=True)
    for _ in range(3):
        lose()
        assert await balanced(store, day) == before
        (month,) = await store.quotas.remaining(ANN, [MONTH])
        assert month == left[1]
    assert {record.request_id for record in await store.quotas.records(ANN, day)} == {"done"}


async def test_a_settlement_finds_the_hold_that_was_not_lost(store: RedisStore, lose: Lose) -> None:
    day = await reserve(store, "r")
    lose(keep=True)
    await store.quotas.settle([used("r", day)])
    settled = await balanced(store, day)
    lose()
    await store.ping()
    assert await balanced(store, day) == settled == Totals(1, 60, 0, 0, 7)


async def test_a_hold_that_another_gateway_settled_is_not_held_again(
    store: RedisStore, lose: Lose, empty_redis_url: str
) -> None:
    day = await reserve(store, "r")
    other = RedisStore(empty_redis_url)
    await other.quotas.settle([used("r", day)])
    await other.close()
    lose(keep=True)
    lose()
    await store.ping()
    assert await balanced(store, day) == Totals(1, 60, 0, 0, 7)


async def test_accounts_tokens_and_revocations_of_the_last_minute_are_there_again(
    store: RedisStore, lose: Lose
) -> None:
    bob = "b" * 32
    lose(keep=True)
    await store.accounts.add(Account(bob, "bob", Limits(), 1))
    await store.accounts.add_token(ApiToken("bobs", bob, "laptop", 1), TokenDigest(b"digest", 1))
    await store.accounts.revoke("key", 7)
    lose()
    found = await store.accounts.token("bobs")
    assert found is not None
    assert found[2].name == "bob"
    assert [token.revoked_at for token in await store.accounts.tokens(ANN)] == [7]


async def test_an_account_that_was_removed_does_not_come_back(store: RedisStore, lose: Lose) -> None:
    bob = "b" * 32
    lose(keep=True)
    await store.accounts.add(Account(bob, "bob", Limits(), 1))
    await store.accounts.remove(bob)
    lose()
    assert await store.accounts.get(bob) is None


async def test_nothing_is_written_where_all_data_is_gone(store: RedisStore, lose: Lose, empty_redis_url: str) -> None:
    """An emptied Redis is no new primary, and waits for its data."""
    day = await reserve(store, "open")
    await store.quotas.settle([used("done", day)])
    store._database.recent._writes.popleft()  # the account's own
    with redis.Redis.from_url(empty_redis_url) as client:
        lose()
        await store.quotas.remaining(ANN, [MONTH])
        assert not [key for key in client.scan_iter() if b":holds" in key or b":ledger:" in key]


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    clock = StoppedClock()
    recent = RecentDecisions(str, clock)
    recent.grant(hold("old"), Granted(1, 100))
    recent.write("key", ("SET", "a", "b"))
    assert len(recent.commands()) == 3
    clock.now_s = 59.0
    recent.renew(hold("old").record)
    clock.now_s = 61.0
    recent.grant(hold("new"), Granted(1, 100))
    assert [command[0] for command in recent.commands()] == ["SCRIPT", "EVALSHA"]
    clock.now_s = 120.5
    recent.grant(hold("newest"), Granted(1, 100))
    assert [key for _, key in recent._holds] == ["new", "newest"]
    recent.settle("a" * 32, "new")
    recent.settle("a" * 32, "newest")
    assert recent.commands() == []


def test_no_more_is_kept_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 10_000)
    recent = RecentDecisions(str, StoppedClock())
    for n in range(100):
        recent.write("key", ("SET", f"{n}", b"x" * 800))
    assert recent._bytes <= 10_000
    assert recent.commands()[-1][1] == "99"
