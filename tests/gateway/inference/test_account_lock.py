import asyncio
import gc
import threading

import pytest

from gateway.inference.account_lock import LARGE_BODY_BYTES, AccountLocks
from tests.support.served_gateway import looped
from tests.support.waiting import forever, holds, turns


@looped
async def test_one_account_works_in_order_and_holds_up_no_other() -> None:
    locks, done = AccountLocks(), []

    async def work(account: str, name: str) -> None:
        async with locks.lock(account):
            await turns(5)
            done.append(name)

    await asyncio.gather(work("a", "a1"), work("a", "a2"), work("b", "b1"), work("a", "a3"))
    assert [name for name in done if name != "b1"] == ["a1", "a2", "a3"]
    assert done.index("b1") < done.index("a2")
    gc.collect()
    assert len(locks._locks) == 0


@looped
async def test_work_that_is_cancelled_gives_its_turn_away() -> None:
    locks = AccountLocks()

    async def work() -> None:
        async with locks.lock("a"):
            await forever()

    first = asyncio.create_task(work())
    await turns()
    first.cancel()
    async with asyncio.timeout(10), locks.lock("a"):
        pass


@looped
@pytest.mark.parametrize("fresh", [True, False])
async def test_a_thread_whose_caller_has_left_holds_the_lock_until_it_ends(fresh: bool) -> None:
    """An account whose calls come and go would else have all threads."""
    locks, began, go = AccountLocks(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go.wait(10)

    async with asyncio.timeout(10):
        left = asyncio.create_task(locks.run_in_thread("a", work, fresh=fresh))
        await asyncio.to_thread(began.wait, 10)
        left.cancel()
        await asyncio.wait([left])
        assert left.cancelled()
        assert locks.lock("a").locked()
        next_one = asyncio.create_task(locks.parse("a", LARGE_BODY_BYTES + 1, threading.get_ident))
        await turns(20)
        assert not next_one.done()
        go.set()
        assert await next_one != threading.get_ident()
        assert not locks.lock("a").locked()


@looped
async def test_a_fresh_thread_ends_with_its_work_and_holds_the_lock_until_then() -> None:
    locks, began, go = AccountLocks(), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def work() -> int:
        threads.append(threading.current_thread())
        began.set()
        go.wait(10)
        return len(threads)

    async with asyncio.timeout(10):
        first = asyncio.create_task(locks.run_in_thread("a", work, fresh=True))
        await asyncio.to_thread(began.wait, 10)
        second = asyncio.create_task(locks.run_in_thread("a", work, fresh=True))
        await holds(lambda: len(threads) == 1, 0.05)  # one piece of work at a time for an account
        go.set()
        assert [await first, await second] == [1, 2]
        assert threads[0] is not threads[1]
        for thread in threads:
            await asyncio.to_thread(thread.join, 10)
        assert not any(thread.is_alive() for thread in threads)
