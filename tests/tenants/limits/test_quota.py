"""Reservations from the gateway's side, on both stores."""

import asyncio
import dataclasses
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec import structs

from tenants.auth.accounts import AccountService
from tenants.auth.caller import Caller
from tenants.auth.errors import UnknownToken
from tenants.limits import quota as module
from tenants.limits.denials import AlreadyRecorded, QuotaExceeded
from tenants.limits.outbox import Outbox
from tenants.limits.quota import Quota
from tenants.limits.reservation import CallUsage, NeuronPrice, QuotaRequest, Reservation
from tenants.open import open_store
from tenants.records.accounts import DEFAULT_PLAN
from tenants.records.holds import Hold
from tenants.records.limits import Limits
from tenants.records.usage import EXPIRED, MICRO, Totals
from tenants.store.protocol import Store, StoreUnavailable
from tests.support.waiting import holds, turns, until
from tests.tenants.conftest import SECRET

pytestmark = pytest.mark.anyio
PRICE = NeuronPrice(input=1_000, cached_input=100, output=3_000)
MODEL = "@cf/hearth/ember"
DONE = CallUsage(
    prompt_tokens=40, cached_tokens=32, completion_tokens=5, outcome="done", first_token_ms=3.5, total_ms=20.5
)
DONE_COST = 8 * 1_000 + 32 * 100 + 5 * 3_000


@pytest.fixture
def quota(store: Store, tmp_path: Path, clock: Any) -> Quota:
    return Quota(store.quotas, tmp_path / "outbox", clock)


async def reserved(quota: Quota, caller: Any, request_id: str, prompt: int = 40, completion: int = 10) -> Reservation:
    return await quota.reserve(caller, request_id, QuotaRequest(MODEL, PRICE, prompt, completion))


async def balanced(store: Store, caller: Any, day: int) -> Totals:
    balance = await store.quotas.reconcile(caller.account.id, day)
    balance.check()
    return balance.counted


async def recorded(store: Store, caller: Any, day: int, requests: int) -> bool:
    with suppress(StoreUnavailable):
        return (await store.quotas.totals(caller.account.id, day)).requests == requests
    return False


# ---- prices

counts = some.integers(0, 1_000_000)
prices = some.floats(0, 1e6)


@given(prices, prices, prices, counts, counts, counts, counts)
def test_a_settlement_within_the_reserved_counts_never_costs_more_than_was_held(
    input_: float, cached_input: float, output: float, prompt: int, cached: int, completion: int, less: int
) -> None:
    price = NeuronPrice(max(input_, cached_input), min(input_, cached_input), output)
    held = price.micro_neurons(prompt, 0, completion)
    assert 0 <= price.micro_neurons(prompt, min(cached, prompt), max(completion - less, 0)) <= held


def test_a_request_costs_its_tokens_at_their_prices_rounded_up() -> None:
    assert NeuronPrice(2.5, 0.5, 10).micro_neurons(3, 1, 2) == 26  # 2 · 2.5 + 0.5 + 20 = 25.5
    assert NeuronPrice(1, 1, 1).micro_neurons(0, 0, 0) == 0
    assert NeuronPrice().micro_neurons(1_000, 0, 1_000) == 0


@pytest.mark.parametrize("wrong", [(-1, -1, 0), (1, 2, 0), (1, 0, -1), (float("nan"), 0, 0), (1, 0, float("inf"))])
def test_a_price_that_makes_no_sense_is_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="prices"):
        NeuronPrice(*wrong)


# ---- one request


async def test_tokens_are_charged_and_not_requests(quota: Quota, store: Store, new_caller: Any, clock: Any) -> None:
    """Bug elsewhere: a charge of 1 per request instead of its tokens."""
    caller = await new_caller()
    reservation = await reserved(quota, caller, "r")
    assert reservation.held == 40 * 1_000 + 10 * 3_000
    assert await balanced(store, caller, clock.day) == Totals(held=reservation.held, open=1)
    quota.settle(reservation, DONE)
    await quota.flush()
    assert await balanced(store, caller, clock.day) == Totals(1, DONE_COST, 40, 32, 5)
    assert reservation.neurons(DONE) == DONE_COST / MICRO
    (record,) = await store.quotas.records(caller.account.id, clock.day)
    assert record == reservation.record(DONE, "done")
    assert (record.model, record.token_id, record.first_token_ms, record.total_ms) == (
        MODEL,
        caller.token_id,
        3.5,
        20.5,
    )


async def test_what_a_strict_plan_reserves_is_held_strictly(
    quota: Quota, store: Store, new_caller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, held = await new_caller(), []
    reserve = store.quotas.reserve
    monkeypatch.setattr(store.quotas, "reserve", lambda hold: held.append(hold.strict) or reserve(hold))
    await reserved(quota, caller, "open")
    account = structs.replace(caller.account, plan=structs.replace(caller.account.plan, strict=True))
    await reserved(quota, dataclasses.replace(caller, account=account), "strict")
    assert held == [False, True]


async def test_a_reservation_is_settled_once(quota: Quota, store: Store, new_caller: Any, clock: Any) -> None:
    caller = await new_caller()
    reservation = await reserved(quota, caller, "r")
    quota.settle(reservation, DONE)
    quota.settle(reservation, structs.replace(DONE, completion_tokens=10))
    quota.checkpoint(reservation, structs.replace(DONE, completion_tokens=9))
    quota.check()
    await quota.flush()
    quota.settle(reservation, structs.replace(DONE, completion_tokens=10))
    await quota.flush()
    assert (quota.open, quota.unwritten) == (0, 0)
    assert await balanced(store, caller, clock.day) == Totals(1, DONE_COST, 40, 32, 5)


async def test_a_retried_reservation_is_the_same_one(quota: Quota, store: Store, new_caller: Any, clock: Any) -> None:
    caller = await new_caller()
    first = await reserved(quota, caller, "r")
    assert await reserved(quota, caller, "r") is first
    assert (quota.open, (await balanced(store, caller, clock.day)).open) == (1, 1)
    quota.settle(first, DONE)
    await quota.flush()
    with pytest.raises(AlreadyRecorded):
        await reserved(quota, caller, "r")


async def test_settling_waits_for_nobody_and_raises_nothing(
    quota: Quota, new_caller: Any, outage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = await new_caller()
    reservations = [await reserved(quota, caller, f"r{n}") for n in range(100)]
    with outage():
        began = time.perf_counter()
        for reservation in reservations:
            quota.settle(reservation, DONE)
        assert time.perf_counter() - began < 10.0, "not even a tenth of a second each"
    assert quota.unwritten == 100
    await quota.flush()


async def test_settlements_are_written_while_run_runs(quota: Quota, store: Store, new_caller: Any, clock: Any) -> None:
    caller = await new_caller()
    running = asyncio.create_task(quota.run())
    for requests in range(1, 6):
        quota.settle(await reserved(quota, caller, f"r{requests}"), DONE)
        await until(partial(recorded, store, caller, clock.day, requests))
    assert (await balanced(store, caller, clock.day)).micro_neurons == 5 * DONE_COST
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await quota.close()


# ---- refusals


async def test_the_day_budget_refuses_until_midnight_utc(quota: Quota, new_caller: Any, clock: Any) -> None:
    caller = await new_caller(neurons_per_day=0.1)
    quota.settle(await reserved(quota, caller, "a"), CallUsage(40, 0, 10, "done"))
    await quota.flush()
    with pytest.raises(QuotaExceeded, match="00:00 UTC") as refused:
        await reserved(quota, caller, "b")
    assert (refused.value.limit, refused.value.retry_after_s) == ("neurons_per_day", 43_200)
    assert "may need 0.07 neurons, and 0.07 of today's 0.1 of" in refused.value.message
    clock.now_s += 43_199.5
    with pytest.raises(QuotaExceeded) as refused:
        await reserved(quota, caller, "b")
    assert refused.value.retry_after_s == 1
    clock.now_s += 0.5
    await reserved(quota, caller, "b")
    quota.check()


async def test_a_request_that_can_never_fit_is_told_so(quota: Quota, store: Store, new_caller: Any, clock: Any) -> None:
    caller = await new_caller(neurons_per_day=0.069999)
    with pytest.raises(QuotaExceeded, match=r"0\.07 neurons, and .* has 0\.069999 for .* can never run; sh") as refused:
        await reserved(quota, caller, "a")
    assert refused.value.limit == "neurons_per_day"
    assert await balanced(store, caller, clock.day) == Totals()
    assert quota.open == 0


async def test_the_rate_says_when_to_come_back(quota: Quota, new_caller: Any, clock: Any) -> None:
    caller = await new_caller(requests_per_minute=8, burst=1)
    await reserved(quota, caller, "a")
    with pytest.raises(QuotaExceeded, match="8 requests per minute") as refused:
        await reserved(quota, caller, "b")
    assert (refused.value.limit, refused.value.retry_after_s) == ("requests_per_minute", 8)
    clock.now_s += refused.value.retry_after_s
    await reserved(quota, caller, "b")


async def test_too_many_at_once_are_refused(quota: Quota, new_caller: Any) -> None:
    caller = await new_caller(concurrent_requests=1)
    first = await reserved(quota, caller, "a")
    with pytest.raises(QuotaExceeded) as refused:
        await reserved(quota, caller, "b")
    assert (refused.value.limit, refused.value.retry_after_s) == ("concurrent_requests", 1)
    quota.settle(first, DONE)
    await quota.flush()
    await reserved(quota, caller, "b")


async def test_what_a_caller_says_of_a_request_is_in_its_record(
    quota: Quota, store: Store, new_caller: Any, clock: Any
) -> None:
    caller = await new_caller()
    demand = QuotaRequest("m", NeuronPrice(), 1, 1, tags=("a", "b"), metadata='{"user":7}')
    quota.settle(await quota.reserve(caller, "r", demand), DONE)
    await quota.flush()
    (record,) = await store.quotas.records(caller.account.id, clock.day)
    assert (record.tags, record.metadata) == ("a\nb", '{"user":7}')


async def test_a_token_revoked_after_it_was_verified_starts_nothing(
    quota: Quota, accounts: AccountService, new_caller: Any
) -> None:
    caller = await new_caller()
    await accounts.revoke(caller.token_id)
    with pytest.raises(UnknownToken):
        await reserved(quota, caller, "a")
    assert quota.open == 0


async def test_unsettled_requests_are_limited(quota: Quota, new_caller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNSETTLED_MAX", 3)
    caller = await new_caller()
    reservations = [await reserved(quota, caller, f"r{n}") for n in range(3)]
    quota.settle(reservations[0], DONE)
    with pytest.raises(StoreUnavailable, match="3"):
        await reserved(quota, caller, "r3")
    await quota.flush()
    await reserved(quota, caller, "r3")
    quota.check()


# ---- the caller leaves


async def test_a_caller_who_leaves_while_reserving_leaves_no_hold(
    quota: Quota, store: Store, new_caller: Any, clock: Any
) -> None:
    """Bug elsewhere: CancelledError is not an Exception, and the reservation stays."""
    caller = await new_caller(requests_per_minute=100_000)
    dice = random.Random(3)
    for turn in range(60):
        asking = [asyncio.create_task(reserved(quota, caller, f"r{turn}.{n}")) for n in range(5)]
        await turns(dice.randrange(12))
        if dice.random() < 0.5:
            await asyncio.sleep(dice.random() * 0.0005)
        for task in asking:
            task.cancel()
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(outcome, Reservation):
                quota.settle(outcome, DONE)
            else:
                assert isinstance(outcome, asyncio.CancelledError)
    await asyncio.sleep(0.05)
    await quota.flush()
    totals = await balanced(store, caller, clock.day)
    assert (totals.held, totals.open, quota.open) == (0, 0, 0)


async def test_answers_never_reach_another_caller(quota: Quota, store: Store, new_caller: Any) -> None:
    """After cancelled calls each question still gets its own answer."""
    callers = [await new_caller() for _ in range(4)]
    dice = random.Random(4)

    async def look(caller: Any) -> None:
        account = await store.accounts.get(caller.account.id)
        assert account is not None
        assert account.id == caller.account.id
        found = await store.accounts.token(caller.token_id)
        assert found is not None
        assert (found[0].id, found[2].id) == (caller.token_id, caller.account.id)

    for _ in range(60):
        tasks = [asyncio.create_task(look(dice.choice(callers))) for _ in range(6)]
        await turns(dice.randrange(8))
        for task in dice.sample(tasks, 3):
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), repr(outcome)


# ---- the store is away


async def test_settlements_of_an_outage_are_replayed_with_none_lost_and_none_doubled(
    quota: Quota, store: Store, new_caller: Any, clock: Any, outage: Any, tmp_path: Path
) -> None:
    caller = await new_caller()
    reservations = [await reserved(quota, caller, f"r{n}") for n in range(20)]
    for reservation in reservations[:5]:
        quota.settle(reservation, DONE)
    await quota.flush()
    with outage():
        for n, reservation in enumerate(reservations[5:15]):
            quota.settle(reservation, DONE)
            if n % 4 == 3:
                await quota.flush()
        await quota.flush()
        with pytest.raises(StoreUnavailable):
            await reserved(quota, caller, "x")
        assert quota.unwritten == 0, "they wait in memory although the outbox works"
        with pytest.raises(StoreUnavailable):
            await quota.replay()
    for reservation in reservations[15:]:
        quota.settle(reservation, DONE)
    await quota.flush()
    # A frozen Redis still runs, when it thaws, the one call of four settlements that had reached it.
    assert (await balanced(store, caller, clock.day)).requests in (10, 14)
    for _ in range(2):
        await quota.replay()
    assert await balanced(store, caller, clock.day) == Totals(20, 20 * DONE_COST, 20 * 40, 20 * 32, 20 * 5)
    assert list((tmp_path / "outbox").iterdir()) == []
    quota.check()


async def test_an_outage_longer_than_a_hold_loses_no_usage(
    quota: Quota, store: Store, new_caller: Any, clock: Any, outage: Any
) -> None:
    caller = await new_caller()
    reservation = await reserved(quota, caller, "r")
    with outage():
        quota.settle(reservation, DONE)
        await quota.flush()
    clock.now_s += module.HOLD_S + 1
    await store.quotas.sweep()
    assert (await balanced(store, caller, clock.day)).micro_neurons == 0
    await quota.replay()
    assert await balanced(store, caller, clock.day) == Totals(1, DONE_COST, 40, 32, 5)


async def test_settlements_stay_in_memory_where_store_and_outbox_fail(
    store: Store, new_caller: Any, clock: Any, outage: Any, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "outbox"
    in_the_way.write_text("a file where the folder should be")
    quota, caller = Quota(store.quotas, in_the_way, clock), await new_caller()
    reservations = [await reserved(quota, caller, f"r{n}") for n in range(3)]
    with outage():
        for reservation in reservations:
            quota.settle(reservation, DONE)
        await quota.flush()
        assert quota.unwritten == 3
    await quota.replay()
    assert quota.unwritten == 0
    assert (await balanced(store, caller, clock.day)).requests == 3


async def test_close_saves_settlements_during_an_outage(
    quota: Quota, store: Store, new_caller: Any, clock: Any, outage: Any, tmp_path: Path
) -> None:
    caller = await new_caller()
    done, running = await reserved(quota, caller, "done"), await reserved(quota, caller, "running")
    quota.settle(done, DONE)
    quota.checkpoint(running, DONE)
    with outage():
        await quota.close()
    after = Quota(store.quotas, tmp_path / "outbox", clock)
    await after.replay()
    assert await balanced(store, caller, clock.day) == Totals(1, DONE_COST, 40, 32, 5, held=running.held, open=1)


async def test_close_writes_the_last_checkpoint_of_open_requests(
    quota: Quota, store: Store, new_caller: Any, clock: Any
) -> None:
    caller = await new_caller()
    quota.checkpoint(await reserved(quota, caller, "r"), DONE)
    await quota.close()
    clock.now_s += module.HOLD_S
    assert await store.quotas.sweep() == 1
    assert (await balanced(store, caller, clock.day)).micro_neurons == DONE_COST


async def test_run_survives_an_outage(
    quota: Quota, store: Store, new_caller: Any, clock: Any, outage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CHECKPOINT_S", "SWEEP_S", "REPLAY_S"):
        monkeypatch.setattr(module, name, 0.02)
    caller = await new_caller()
    running = asyncio.create_task(quota.run())
    settled, still_open = await reserved(quota, caller, "a"), await reserved(quota, caller, "b")
    with outage():
        quota.settle(settled, DONE)
        quota.checkpoint(still_open, DONE)
        await holds(lambda: not running.done(), 0.3)
    await until(lambda: recorded(store, caller, clock.day, 1))
    assert await balanced(store, caller, clock.day) == Totals(1, DONE_COST, 40, 32, 5, held=still_open.held, open=1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await quota.close()


async def test_run_survives_an_outbox_that_cannot_be_read_and_says_so_once(
    quota: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "REPLAY_S", 0.01)
    unreadable = tmp_path / "outbox" / "a.outbox"
    unreadable.mkdir(parents=True)
    running = asyncio.create_task(quota.run())
    with caplog.at_level("INFO"):
        await holds(lambda: not running.done(), 0.2)
        unreadable.rmdir()
        await until(lambda: said(caplog, "quota_goes_on"))
    assert [record.getMessage() for record in caplog.records] == ["quota_waits", "quota_goes_on"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await quota.close()


async def said(caplog: pytest.LogCaptureFixture, event: str) -> bool:
    return event in [record.getMessage() for record in caplog.records]


async def test_run_ends_when_it_is_cancelled_whatever_it_waits_for(
    store: Store, new_caller: Any, clock: Any, outage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py with a socket_timeout lost cancellations here."""
    for name in ("CHECKPOINT_S", "SWEEP_S", "REPLAY_S"):
        monkeypatch.setattr(module, name, 0.005)
    caller, dice = await new_caller(), random.Random(5)
    for turn in range(8):
        quota = Quota(store.quotas, tmp_path / "outbox", clock)
        running = asyncio.create_task(quota.run())
        settled, _ = await reserved(quota, caller, f"a{turn}"), await reserved(quota, caller, f"b{turn}")
        with outage():
            quota.settle(settled, DONE)
            await asyncio.sleep(dice.random() * 0.2)
        await asyncio.sleep(dice.random() * 0.01)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=30)
        assert done, f"turn {turn}"
        await quota.close()


# ---- holds


async def test_an_open_request_keeps_its_hold_however_long_it_runs(
    quota: Quota, store: Store, new_caller: Any, clock: Any
) -> None:
    caller = await new_caller()
    reservation = await reserved(quota, caller, "r")
    for _ in range(30):
        clock.now_s += module.CHECKPOINT_S
        await quota.renew()
        assert await store.quotas.sweep() == 0
    quota.settle(reservation, DONE)
    await quota.flush()
    assert (await balanced(store, caller, clock.day)).requests == 1


async def test_each_open_request_is_renewed_once_per_checkpoint_interval(
    quota: Quota, store: Store, new_caller: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    real = store.quotas.checkpoint

    async def counted(records: Any, lifetime_us: int) -> None:
        written.append(len(records))
        await real(records, lifetime_us)

    monkeypatch.setattr(store.quotas, "checkpoint", counted)
    monkeypatch.setattr(module, "SETTLE_BATCH", 10)
    caller = await new_caller()
    for n in range(25):
        await reserved(quota, caller, f"r{n}")
    await quota.renew()
    assert written == []
    clock.now_s += module.CHECKPOINT_S
    await quota.renew()
    await quota.renew()
    assert written == [10, 10, 5]


async def test_settling_races_the_sweep_of_another_gateway_and_is_charged_once(
    quota: Quota, store: Store, store_url: str, new_caller: Any, clock: Any
) -> None:
    other, caller = open_store(store_url, clock), await new_caller()
    reservations = [await reserved(quota, caller, f"r{n}") for n in range(40)]
    clock.now_s += module.HOLD_S
    for n, reservation in enumerate(reservations):
        quota.settle(reservation, DONE)
        if n % 7 == 0:
            await asyncio.gather(quota.flush(), other.quotas.sweep(), quota.renew())
    await quota.flush()
    assert await balanced(store, caller, clock.day) == Totals(40, 40 * DONE_COST, 40 * 40, 40 * 32, 40 * 5)
    await other.close()


KILLED_GATEWAY = """
import asyncio, signal, sys, time
from pathlib import Path
from tenants.auth.accounts import AccountService
from tenants.limits.quota import CHECKPOINT_S, Quota
from tenants.limits.reservation import CallUsage, NeuronPrice, QuotaRequest
from tenants.open import open_store

async def main(url, outbox, text):
    store = open_store(url)
    caller = await AccountService(store, b"the server's secret, 32 bytes up").verify(text)
    ahead_s = [0.0]
    quota = Quota(store.quotas, Path(outbox), lambda: time.time() + ahead_s[0])
    price = NeuronPrice(1_000, 100, 3_000)
    names = ("silent", "streaming", "settled", "queued")
    ends = [await quota.reserve(caller, name, QuotaRequest("m", price, 40, 10)) for name in names]
    quota.checkpoint(ends[1], CallUsage(40, 0, 4))
    quota.checkpoint(ends[3], CallUsage(40, 0, 6))
    ahead_s[0] = CHECKPOINT_S
    await quota.renew()
    quota.settle(ends[2], CallUsage(40, 0, 7, "done"))
    await quota.flush()
    quota.settle(ends[3], CallUsage(40, 0, 8, "done"))
    quota.checkpoint(ends[1], CallUsage(40, 0, 9))
    print("ready", flush=True)
    signal.alarm(60)
    signal.pause()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_gateway_is_charged_at_its_last_checkpoints(
    store_url: str, accounts: AccountService, store: Store, clock: Any, tmp_path: Path
) -> None:
    """What kill -9 loses: settlements of the last moment and progress since the last checkpoint; never more."""
    clock.now_s = time.time()
    account = await accounts.create("ann")
    _, text = await accounts.mint(account.id, "laptop")
    command = [sys.executable, "-c", KILLED_GATEWAY, store_url, str(tmp_path / "outbox"), text]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    await process.wait()
    days = {clock.day, int(time.time()) // 86_400}
    clock.now_s = time.time() + module.HOLD_S + 1
    assert await store.quotas.sweep() == 3
    charged = {}
    for day in days:
        (await store.quotas.reconcile(account.id, day)).check()
        for record in await store.quotas.records(account.id, day):
            charged[record.request_id] = (record.outcome, record.completion_tokens, record.micro_neurons)
    assert charged == {
        "silent": (EXPIRED, 0, 0),
        "streaming": (EXPIRED, 4, 52_000),
        "settled": ("done", 7, 61_000),
        "queued": (EXPIRED, 6, 58_000),
    }


async def test_the_outbox_of_a_killed_gateway_is_replayed_by_the_next(
    quota: Quota, store: Store, new_caller: Any, clock: Any, tmp_path: Path
) -> None:
    caller = await new_caller()
    reservation = await reserved(quota, caller, "r")
    dead = Outbox(tmp_path / "outbox")
    dead.append([reservation.record(DONE, "done")])
    await quota.replay()
    assert (await balanced(store, caller, clock.day)).requests == 0, "it took the file of a living process"
    dead.close()
    await quota.replay()
    assert await balanced(store, caller, clock.day) == Totals(1, DONE_COST, 40, 32, 5)


async def test_an_outbox_of_any_length_is_read_beside_the_loop(
    quota: Quota, store: Store, new_caller: Any, clock: Any, outage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, read, threads = await new_caller(), Outbox.read, list[int]()

    def read_there(outbox: Outbox, path: Path) -> Any:
        threads.append(threading.get_ident())
        return read(outbox, path)

    monkeypatch.setattr(Outbox, "read", read_there)
    reservation = await reserved(quota, caller, "r")
    with outage():
        quota.settle(reservation, DONE)
        await quota.flush()
    await quota.replay()
    assert (await balanced(store, caller, clock.day)).requests == 1
    assert threads
    assert threading.get_ident() not in threads


# ---- many at once


async def test_200_clients_race_for_one_budget_and_none_overspends(
    store: Store, store_url: str, new_caller: Any, clock: Any, tmp_path: Path
) -> None:
    caller = await new_caller(neurons_per_day=2.6)  # 37 requests of 0.07 neurons
    others = [open_store(store_url, clock) for _ in range(3)]
    quotas = [Quota(one.quotas, tmp_path / "outbox", clock) for one in (store, *others)]

    async def client(n: int) -> Reservation | None:
        try:
            return await reserved(quotas[n % 4], caller, f"r{n}")
        except QuotaExceeded:
            return None

    admitted = [(n, got) for n, got in enumerate(await asyncio.gather(*map(client, range(200)))) if got]
    assert len(admitted) == 37
    totals = await balanced(store, caller, clock.day)
    assert totals.held <= 2_600_000
    for n, reservation in admitted:
        quotas[n % 4].settle(reservation, DONE)
    await asyncio.gather(*(quota.flush() for quota in quotas))
    assert await balanced(store, caller, clock.day) == Totals(37, 37 * DONE_COST, 37 * 40, 37 * 32, 37 * 5)
    for one in others:
        await one.close()


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_each_request_has_one_record_and_the_sums_agree(
    store: Store, new_caller: Any, clock: Any, outage: Any, tmp_path: Path, seed: int
) -> None:
    """Requests begin, stream, end, are cancelled, meet outages and crashed gateways; then all is quiet and adds up."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    caller = await new_caller(neurons_per_day=3.0, requests_per_minute=1_000)
    quota = Quota(store.quotas, tmp_path / "outbox", clock)
    running: dict[str, Reservation] = {}
    final: dict[str, int] = {}
    abandoned: set[str] = set()
    first_day = clock.day

    async def step(n: int, away: bool) -> None:
        nonlocal quota
        kind = dice.choice(
            ["begin", "begin", "begin", "end", "end", "flush", "checkpoint", "time", "renew", "sweep", "crash"]
        )
        if kind == "begin":
            with suppress(QuotaExceeded, StoreUnavailable):
                running[f"r{n}"] = await reserved(quota, caller, f"r{n}", dice.randrange(50), dice.randrange(20))
        elif kind == "end" and running:
            request = dice.choice(list(running))
            spent = CallUsage(dice.randrange(40), 0, dice.randrange(20), "done")
            final[request] = running[request].record(spent, "done").micro_neurons
            quota.settle(running.pop(request), spent)
        elif kind == "checkpoint" and running:
            quota.checkpoint(dice.choice(list(running.values())), CallUsage(1, 0, 1))
        elif kind == "time":
            clock.now_s += dice.choice([0.1, 4, 30, 70])
        elif kind == "crash" and dice.random() < 0.2 and not quota.unwritten:
            quota._outbox.close()
            abandoned.update(running)
            running.clear()
            quota = Quota(store.quotas, tmp_path / "outbox", clock)
        elif not away:
            await {"flush": quota.flush, "renew": quota.renew, "sweep": store.quotas.sweep}.get(kind, quota.replay)()
        elif kind == "flush":
            await quota.flush()
        quota.check()

    for n in range(250):
        if dice.random() < 0.02:
            with outage():
                for m in range(3):
                    await step(1_000 * (n + 1) + m, True)
        else:
            await step(n, False)
            (await store.quotas.reconcile(caller.account.id, clock.day)).check()
    for reservation in running.values():
        final[reservation.unused.request_id] = reservation.record(DONE, "done").micro_neurons
        quota.settle(reservation, DONE)
    await quota.flush()
    await quota.replay()
    clock.now_s += module.HOLD_S
    await store.quotas.sweep()
    charged: dict[str, int] = {}
    for day in range(first_day, clock.day + 1):
        balance = await store.quotas.reconcile(caller.account.id, day)
        balance.check()
        assert (balance.counted.held, balance.counted.open) == (0, 0)
        for record in await store.quotas.records(caller.account.id, day):
            assert record.request_id not in charged
            charged[record.request_id] = record.micro_neurons
    assert {request: cost for request, cost in charged.items() if request in final} == final
    assert abandoned <= charged.keys()
    assert len(final) > 15


def test_the_defaults_let_a_laptop_work() -> None:
    limits = DEFAULT_PLAN.limits
    assert (limits.at_once or 0) == (limits.requests_per_minute or 0) >= 300
    assert (limits.neurons_per_day or 0) >= 10_000


async def test_a_reservation_that_the_store_took_too_late_is_given_back(
    empty_redis_url: str, frozen_redis: Any, tmp_path: Path
) -> None:
    """What was on its way when Redis froze is done when it thaws, long after the caller was told 503."""
    store = open_store(empty_redis_url)
    caller, quota = await caller_of(store), Quota(store.quotas, tmp_path / "outbox")
    day = (await reserved(quota, caller, "before")).unused.day
    with frozen_redis(), pytest.raises(StoreUnavailable):
        await reserved(quota, caller, "late")

    async def held(count: int) -> bool:
        return (await store.quotas.totals(caller.account.id, day)).open == count

    await until(partial(held, 2))
    await quota.replay()
    assert await held(1)
    late = [one for one in await store.quotas.records(caller.account.id, day) if one.request_id == "late"]
    assert [(one.outcome, one.micro_neurons) for one in late] == [("store_unavailable", 0)]
    await balanced(store, caller, day)
    await store.close()


async def test_a_request_that_the_store_never_heard_of_leaves_no_record(
    empty_redis_url: str, frozen_redis: Any, tmp_path: Path
) -> None:
    """An outage must not fill the outbox with those who were refused."""
    store = open_store(empty_redis_url)
    caller, quota = await caller_of(store), Quota(store.quotas, tmp_path / "outbox")
    await reserved(quota, caller, "before")
    with frozen_redis():
        for n in range(5):
            with pytest.raises(StoreUnavailable):
                await reserved(quota, caller, f"r{n}")
    assert quota.unwritten == 1
    await store.close()


@pytest.mark.parametrize("error", [StoreUnavailable("late", unsure=True), asyncio.CancelledError()])
async def test_what_is_made_again_under_its_id_is_charged_though_nobody_heard_that_it_was_granted(
    store: Store, new_caller: Any, clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A request of a batch. Were it settled as unused, its next tries would be refused as recorded, or run for free."""
    caller, quota = await new_caller(), Quota(store.quotas, tmp_path / "outbox", clock)
    demand, reserve = QuotaRequest(MODEL, PRICE, 40, 10), store.quotas.reserve

    async def unheard(hold: Hold) -> None:
        await reserve(hold)
        raise error

    monkeypatch.setattr(store.quotas, "reserve", unheard)
    with pytest.raises(type(error)):
        await quota.reserve(caller, "item", demand, again=True)
    monkeypatch.setattr(store.quotas, "reserve", reserve)
    await quota.flush()
    reservation = await quota.reserve(caller, "item", demand, again=True)
    quota.settle(reservation, DONE)
    await quota.flush()
    assert await balanced(store, caller, clock.day) == Totals(1, DONE_COST, 40, 32, 5)


async def caller_of(store: Store) -> Caller:
    """A new account's, in a store that goes by its own clock."""
    accounts = AccountService(store, SECRET)
    account = await accounts.create("ann")
    _, text = await accounts.mint(account.id, "laptop")
    return await accounts.verify(text)


async def test_a_refusal_that_no_waiting_helps_says_so(accounts: AccountService, store: Store, tmp_path: Path) -> None:
    quota = Quota(store.quotas, tmp_path / "outbox")
    cases: list[tuple[Limits, int, bool]] = [
        (Limits(neurons_per_day=0.001), 100, True),
        (Limits(neurons_per_day=0.5), 100, False),
        (Limits(input_tokens_per_minute=10), 100, True),
        (Limits(requests_per_minute=1), 0, False),
    ]
    for limits, tokens, lasting in cases:
        account = await accounts.create(f"bob {limits.neurons_per_day} {tokens}", limits)
        _, text = await accounts.mint(account.id, "laptop")
        caller, demand = await accounts.verify(text), QuotaRequest("@cf/a/b", NeuronPrice(0, 0, 4000), tokens, tokens)
        if not lasting:
            await quota.reserve(caller, "first", demand)
        with pytest.raises(QuotaExceeded) as refused:
            await quota.reserve(caller, "second", demand)
        assert refused.value.lasting is lasting, limits


async def test_a_forgotten_reservation_is_neither_renewed_nor_settled_here(
    store: Store, quota: Quota, new_caller: Any, clock: Any
) -> None:
    caller = await new_caller()
    reservation = await quota.reserve(caller, "a", QuotaRequest("@cf/a/b", NeuronPrice(0, 0, 4000), 1, 1))
    quota.forget(reservation)
    quota.settle(reservation, CallUsage(outcome="done"))
    await quota.flush()
    assert (quota.open, quota.unwritten) == (0, 0)
    assert (await store.quotas.totals(caller.account.id, clock.day)).open == 1
