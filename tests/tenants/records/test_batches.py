"""The contract of Batches, run on SQLite and on a real Redis."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tenants.open import open_store
from tenants.records.batches import (
    OPEN_BATCHES_MAX,
    OPEN_ITEMS_MAX,
    WAITING_S,
    BatchJob,
    BatchJobItem,
    BatchStatus,
    QueueDepth,
)
from tenants.records.holds import DenialReason, Denied, Granted
from tenants.records.usage import EXPIRED, MICRO, Totals
from tenants.store.protocol import Store, StoreUnavailable
from tenants.store.sqlite.store import SqliteStore
from tests.support.waiting import until
from tests.tenants.store.test_contract import ANN, BOB, LIFE_US, balanced, hold, open_account, record

pytestmark = pytest.mark.anyio
MODEL, OTHER = "@cf/hearth/ember", "@cf/hearth/other"
LEASE_S = 20.0


def new_batch(clock: Any, id: str = "one", items: int = 3, account_id: str = ANN, model: str = MODEL) -> BatchJob:
    now = int(clock())
    return BatchJob(id, account_id, "key", model, items, keep_s=600, created_at=now, expires_at=now + 3600)


async def submit(store: Store, batch: BatchJob) -> BatchJob:
    assert await store.batches.begin(batch)
    await store.batches.add_items(batch.account_id, batch.id, 0, [f"{batch.id} {n}".encode() for n in range(2)])
    await store.batches.add_items(
        batch.account_id, batch.id, 2, [f"{batch.id} {n}".encode() for n in range(2, batch.items)]
    )
    await store.batches.open(batch.account_id, batch.id)
    found = await store.batches.get(batch.account_id, batch.id)
    assert found is not None
    return found


async def claimed(store: Store, most: int = 100, model: str = MODEL) -> list[BatchJobItem]:
    return list(await store.batches.claim(model, LEASE_S, most))


async def end(store: Store, item: BatchJobItem, day: int, cost: int = 30) -> bool:
    used = record(item.request_id, day, cost, account_id=item.account_id)
    return await store.batches.end(item, True, b"result of " + item.body, used)


async def test_a_batch_comes_back_as_it_was_kept_and_is_its_accounts_alone(store: Store, clock: Any) -> None:
    batch = new_batch(clock)
    kept = await submit(store, batch)
    assert kept == structs.replace(batch, expires_at=batch.created_at + WAITING_S)
    assert await store.batches.of_account(ANN) == [kept]
    assert await store.batches.get(BOB, batch.id) is None
    assert await store.batches.of_account(BOB) == []
    assert not await store.batches.close(BOB, batch.id, BatchStatus.CANCELLED)
    assert await store.batches.results(BOB, batch.id, 0, 10) == []


async def test_large_items_are_claimed_all_the_same_if_not_all_at_once(store: Store, clock: Any) -> None:
    batch, bodies = new_batch(clock), [bytes([n]) * 200_000 for n in range(3)]
    await store.batches.begin(batch)
    await store.batches.add_items(ANN, batch.id, 0, bodies)
    await store.batches.open(ANN, batch.id)
    first, second = await claimed(store), await claimed(store)
    assert [item.body for item in first + second] == bodies
    assert len(first) >= 2


async def test_nobody_sees_a_batch_before_all_of_it_is_there(store: Store, clock: Any) -> None:
    batch = new_batch(clock)
    await store.batches.begin(batch)
    await store.batches.add_items(ANN, batch.id, 0, [b"a", b"b"])
    assert await store.batches.get(ANN, batch.id) is None
    assert await store.batches.of_account(ANN) == []
    assert await claimed(store) == []


async def test_repeating_what_got_no_answer_changes_nothing(store: Store, clock: Any) -> None:
    batch = new_batch(clock)
    for _ in range(2):
        assert await store.batches.begin(batch)
        await store.batches.add_items(ANN, batch.id, 0, [b"a", b"b", b"c"])
    for _ in range(2):
        await store.batches.open(ANN, batch.id)
    assert [item.body for item in await claimed(store)] == [b"a", b"b", b"c"]
    assert await claimed(store) == []


async def test_items_are_claimed_in_order_and_by_one_alone_for_a_lease(store: Store, clock: Any) -> None:
    await submit(store, new_batch(clock))
    first = await claimed(store, 2)
    assert [(item.place, item.body, item.tries) for item in first] == [(0, b"one 0", 1), (1, b"one 1", 1)]
    assert first[0].request_id == "one-0"
    assert [item.place for item in await claimed(store)] == [2]
    assert await claimed(store) == []
    found = await store.batches.get(ANN, "one")
    assert found is not None
    assert found.status == BatchStatus.RUNNING


async def test_what_a_killed_gateway_had_is_taken_up_again_before_what_came_later(store: Store, clock: Any) -> None:
    await submit(store, new_batch(clock, "one"))
    await claimed(store, 2)
    clock.now_s += LEASE_S - 1
    assert [item.place for item in await claimed(store)] == [2]
    clock.now_s += 1.1
    again = await claimed(store)
    assert sorted((item.place, item.tries) for item in again) == [(0, 2), (1, 2)]


async def test_a_renewed_lease_lasts_and_says_what_must_not_run_any_more(store: Store, clock: Any) -> None:
    await submit(store, new_batch(clock, "one"))
    await submit(store, new_batch(clock, "two"))
    items = await claimed(store)
    clock.now_s += LEASE_S - 1
    await store.batches.close(ANN, "two", BatchStatus.CANCELLED)
    stopped = await store.batches.renew(items, LEASE_S)
    assert {item.batch_id for item in stopped} == {"two"}
    clock.now_s += LEASE_S - 1
    assert await claimed(store) == []
    clock.now_s += 2
    assert len(await claimed(store)) == 3


async def test_accounts_take_turns(store: Store, clock: Any) -> None:
    await submit(store, new_batch(clock, "many", 40))
    await submit(store, new_batch(clock, "few", 4, BOB))
    owners = []
    for _ in range(6):
        clock.now_s += 0.1
        owners += [item.account_id for item in await claimed(store, 2)]
    assert Counter(owners) == {ANN: 8, BOB: 4}


async def test_models_have_lines_of_their_own(store: Store, clock: Any) -> None:
    await submit(store, new_batch(clock, "one", 2))
    await submit(store, new_batch(clock, "two", 2, model=OTHER))
    assert {item.batch_id for item in await claimed(store, model=OTHER)} == {"two"}
    assert await store.batches.waiting([MODEL, OTHER]) == {
        MODEL: QueueDepth(2, int(clock())),
        OTHER: QueueDepth(2, int(clock())),
    }


async def test_what_is_put_back_waits_with_all_of_its_account_and_was_not_tried(store: Store, clock: Any) -> None:
    await submit(store, new_batch(clock, "one", 4))
    await submit(store, new_batch(clock, "other", 2, BOB))
    items = await claimed(store, 2)
    await store.batches.put_back(items, 60.0)
    assert {item.account_id for item in await claimed(store)} == {BOB}
    assert await claimed(store) == []
    clock.now_s += 61
    again = [item for item in [*await claimed(store), *await claimed(store)] if item.account_id == ANN]
    assert [(item.place, item.tries) for item in again] == [(0, 1), (1, 1), (2, 1), (3, 1)]


async def test_the_end_of_an_item_keeps_its_result_and_charges_it_in_one_step(store: Store, clock: Any) -> None:
    await open_account(store)
    await submit(store, new_batch(clock))
    items = await claimed(store)
    for item in items:
        assert isinstance(await store.quotas.reserve(hold(item.request_id, clock.day)), Granted)
    assert (await balanced(store, clock.day)).open == 3
    assert await end(store, items[1], clock.day)
    assert await store.batches.end(items[0], False, b"wrong", None)
    assert await store.batches.results(ANN, "one", 0, 10) == [(0, False, b"wrong"), (1, True, b"result of one 1")]
    assert await store.batches.results(ANN, "one", 1, 1) == [(1, True, b"result of one 1")]
    assert await end(store, items[2], clock.day)
    found = await store.batches.get(ANN, "one")
    assert found is not None
    assert (found.status, found.succeeded, found.failed) == (BatchStatus.DONE, 2, 1)
    assert (found.prompt_tokens, found.completion_tokens) == (180, 300)
    assert (found.ended_at, found.expires_at) == (int(clock()), int(clock()) + 600)
    assert await balanced(store, clock.day) == Totals(2, 60, 180, 120, 300, held=100, open=1)
    assert await store.batches.waiting([MODEL]) == {}


async def test_an_item_that_two_ran_ends_and_is_charged_once(store: Store, clock: Any) -> None:
    await open_account(store)
    await submit(store, new_batch(clock))
    first = (await claimed(store, 1))[0]
    await store.quotas.reserve(hold(first.request_id, clock.day))
    clock.now_s += LEASE_S + 1
    second = next(item for item in await claimed(store) if item.place == 0)
    assert isinstance(await store.quotas.reserve(hold(second.request_id, clock.day)), Granted)
    assert await end(store, second, clock.day, 30)
    assert not await end(store, first, clock.day, 40)
    assert await store.quotas.reserve(hold(first.request_id, clock.day)) == Denied(DenialReason.RECORDED)
    assert await balanced(store, clock.day) == Totals(1, 30, 90, 60, 150)
    assert len(await store.quotas.records(ANN, clock.day)) == 1


async def test_one_whose_hold_expired_runs_again_and_is_recorded_once(store: Store, clock: Any) -> None:
    await open_account(store)
    await submit(store, new_batch(clock))
    (item,) = await claimed(store, 1)
    await store.quotas.reserve(hold(item.request_id, clock.day))
    clock.now_s += LIFE_US / MICRO + 1
    await store.quotas.sweep()
    assert [one.outcome for one in await store.quotas.records(ANN, clock.day)] == [EXPIRED]
    again = next(one for one in await claimed(store) if one.place == 0)
    assert isinstance(await store.quotas.reserve(hold(again.request_id, clock.day)), Granted)
    assert await end(store, again, clock.day, 30)
    assert await balanced(store, clock.day) == Totals(1, 30, 90, 60, 150)
    assert [one.outcome for one in await store.quotas.records(ANN, clock.day)] == ["done"]


async def test_a_cancelled_batch_keeps_what_was_done_and_runs_no_more(store: Store, clock: Any) -> None:
    await open_account(store)
    await submit(store, new_batch(clock, items=4))
    done, running = await claimed(store, 2)
    await end(store, done, clock.day)
    assert await store.batches.close(ANN, "one", BatchStatus.CANCELLED)
    assert not await store.batches.close(ANN, "one", BatchStatus.FAILED)
    assert await claimed(store) == []
    assert not await end(store, running, clock.day, 7)
    found = await store.batches.get(ANN, "one")
    assert found is not None
    assert (found.status, found.succeeded, found.failed) == (BatchStatus.CANCELLED, 1, 0)
    assert [result.place for result in await store.batches.results(ANN, "one", 0, 10)] == [0]
    assert (await balanced(store, clock.day)).micro_neurons == 37
    clock.now_s += LEASE_S + 1
    assert await claimed(store) == []
    assert await store.batches.waiting([MODEL]) == {}


async def test_what_has_expired_is_gone(store: Store, clock: Any) -> None:
    await open_account(store)
    await submit(store, structs.replace(new_batch(clock), keep_s=1))
    for item in await claimed(store):
        await end(store, item, clock.day)
    assert await store.batches.get(ANN, "one") is not None
    clock.now_s += 2
    await store.batches.sweep()

    async def gone() -> bool:  # Redis ends its keys in time of its own
        return await store.batches.get(ANN, "one") is None

    await until(gone)
    assert await store.batches.of_account(ANN) == []
    assert await store.batches.results(ANN, "one", 0, 10) == []


async def test_an_accounts_open_batches_and_items_are_limited(store: Store, clock: Any) -> None:
    for n in range(OPEN_BATCHES_MAX):
        assert await store.batches.begin(new_batch(clock, f"b{n}", 1))
        await store.batches.open(ANN, f"b{n}")
    assert not await store.batches.begin(new_batch(clock, "more", 1))
    assert await store.batches.begin(new_batch(clock, "others", 1, BOB))
    await store.batches.close(ANN, "b0", BatchStatus.CANCELLED)
    assert not await store.batches.begin(new_batch(clock, "large", OPEN_ITEMS_MAX))
    assert await store.batches.begin(new_batch(clock, "more", OPEN_ITEMS_MAX - OPEN_BATCHES_MAX + 1))


async def test_dropping_an_accounts_batches_leaves_nothing_of_them(store: Store, clock: Any) -> None:
    await submit(store, new_batch(clock, "one"))
    await submit(store, new_batch(clock, "others", account_id=BOB))
    (item,) = await claimed(store, 1)
    await store.batches.discard(item.account_id)
    assert await store.batches.of_account(item.account_id) == []
    assert {one.account_id for one in await claimed(store)} == {ANN, BOB} - {item.account_id}
    assert await store.batches.renew([item], LEASE_S) == [item]
    assert not await store.batches.end(item, True, b"late", None)


async def test_every_method_says_store_unavailable_during_an_outage(store: Store, clock: Any, outage: Any) -> None:
    await submit(store, new_batch(clock))
    (item,) = await claimed(store, 1)
    batches = store.batches
    asks = [
        lambda: batches.begin(new_batch(clock, "two")),
        lambda: batches.add_items(ANN, "one", 0, [b""]),
        lambda: batches.open(ANN, "one"),
        lambda: batches.claim(MODEL, LEASE_S, 1),
        lambda: batches.renew([item], LEASE_S),
        lambda: batches.put_back([item], 1.0),
        lambda: batches.end(item, True, b"", None),
        lambda: batches.close(ANN, "one", BatchStatus.CANCELLED),
    ]
    with outage():
        for ask in asks:
            with pytest.raises(StoreUnavailable):
                await ask()


async def test_bodies_in_sqlite_go_with_what_waited_for_them(tmp_path: Path, clock: Any) -> None:
    store = SqliteStore(str(tmp_path / "hearth.db"), clock)
    await open_account(store)

    def bodies() -> int:
        ((count,),) = store._file.rows("SELECT count(*) FROM batch_bodies")
        assert isinstance(count, int)
        return count

    for id in ("ended", "cancelled", "dropped"):
        await submit(store, new_batch(clock, id))
    assert bodies() == 9
    for item in await claimed(store, 3):
        assert await end(store, item, clock.day)
    assert bodies() == 6
    assert await store.batches.close(ANN, "cancelled", BatchStatus.CANCELLED)
    assert bodies() == 3
    clock.now_s += WAITING_S
    await submit(store, new_batch(clock, "swept next"))
    await store.batches.sweep()
    assert bodies() == 3
    await store.batches.discard(ANN)
    assert bodies() == 0
    await store.close()


@pytest.mark.parametrize("seed", range(4))
async def test_gateways_that_die_at_any_moment_lose_nothing_and_charge_nothing_twice(
    store: Store, store_url: str, clock: Any, seed: int
) -> None:
    """Two gateways claim, reserve and end; one step of each dies at random, and time goes on."""
    dice = random.Random(seed)
    await open_account(store)
    other = open_store(store_url, clock)
    total = {"one": 7, "two": 12}
    for id, items in total.items():
        await submit(store, new_batch(clock, id, items))

    async def work(gateway: Store) -> None:
        for item in await gateway.batches.claim(MODEL, LEASE_S, dice.randint(1, 4)):
            if dice.random() < 0.2:
                return  # dies with what it claimed
            decision = await gateway.quotas.reserve(hold(item.request_id, clock.day))
            if isinstance(decision, Denied):
                assert decision.reason == DenialReason.RECORDED
                continue
            if dice.random() < 0.2:
                return
            await end(gateway, item, decision.day, 30)
            if dice.random() < 0.2:
                return

    for _ in range(400):
        await asyncio.gather(work(store), work(other))
        clock.now_s += dice.choice([0.1, 1, LEASE_S / 2, LIFE_US / MICRO + 1])
        await store.quotas.sweep()
        found = [await store.batches.get(ANN, id) for id in total]
        assert all(one is not None for one in found)
        if all(one is not None and one.status == BatchStatus.DONE for one in found):
            break
    else:
        raise AssertionError(f"seed {seed}: not done")
    clock.now_s += LIFE_US / MICRO + 1
    await store.quotas.sweep()
    counted = await balanced(store, clock.day)
    assert (counted.requests, counted.micro_neurons, counted.open) == (19, 19 * 30, 0)
    records = await store.quotas.records(ANN, clock.day)
    assert {one.request_id for one in records} == {f"{id}-{n}" for id, items in total.items() for n in range(items)}
    for id, items in total.items():
        results = await store.batches.results(ANN, id, 0, 100)
        assert [result.result for result in results] == [f"result of {id} {n}".encode() for n in range(items)]
    await other.close()
