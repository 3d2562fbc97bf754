import asyncio
import gc

from gateway.inference.account_lock import AccountLocks
from tests.support.served_gateway import looped


@looped
async def test_one_account_works_in_order_and_holds_up_no_other() -> None:
    turns, done = AccountLocks(), []

    async def work(account: str, name: str) -> None:
        async with turns.lock(account):
            await asyncio.sleep(0.02)
            done.append(name)

    await asyncio.gather(work("a", "a1"), work("a", "a2"), work("b", "b1"), work("a", "a3"))
    assert [name for name in done if name != "b1"] == ["a1", "a2", "a3"]
    assert done.index("b1") < done.index("a2")
    gc.collect()
    assert len(turns) == 0


@looped
async def test_work_that_is_cancelled_gives_its_turn_away() -> None:
    turns = AccountLocks()

    async def work() -> None:
        async with turns.lock("a"):
            await asyncio.sleep(60)

    first = asyncio.create_task(work())
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(10), turns.lock("a"):
        pass
