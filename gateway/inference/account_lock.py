"""Threads for work whose time grows with what a caller sends: one piece at a time for each account, so that no account
can take all threads. It does not know what the work is.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final, TypeVar
from weakref import WeakValueDictionary

# Up to that, reading a body takes 2.4 ms of the loop's time at most, and most often less than the 0.1 ms of a thread.
LARGE_BODY_BYTES: Final = 32 << 10
PARSERS_MAX: Final = 2  # at once: they take turns with the loop at Python's lock, so that more gain nothing

T = TypeVar("T")


class AccountLocks:
    """A lock for each account that has work now; it is forgotten with its last holder."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._parsers = asyncio.Semaphore(PARSERS_MAX)

    def lock(self, account_id: str) -> asyncio.Lock:
        """The account's lock, which its work takes in the order of arrival."""
        return self._locks.setdefault(account_id, asyncio.Lock())

    async def parse(self, account_id: str, size_bytes: int, work: Callable[[], T]) -> T:
        """Runs work on so many bytes of an account's body: at once where it is small, else in one of PARSERS_MAX
        threads."""
        if size_bytes <= LARGE_BODY_BYTES:
            return work()
        return await _run([self.lock(account_id), self._parsers], work, None)

    async def run_in_thread(self, account_id: str, work: Callable[[], T], *, fresh: bool) -> T:
        """Runs blocking work in a thread while it holds the account's lock. `fresh` takes a new thread that ends with
        the work: tokenizers keep the words of a thread until it ends."""
        thread = ThreadPoolExecutor(1) if fresh else None
        try:
            return await _run([self.lock(account_id)], work, thread)
        finally:
            if thread is not None:
                thread.shutdown(wait=False)


async def _run(turns: Sequence[asyncio.Lock | asyncio.Semaphore], work: Callable[[], T], thread: Executor | None) -> T:
    """Runs work in a thread, which holds these until it ends, also where its caller leaves: else an account whose calls
    come and go would have all threads."""
    taken: list[asyncio.Lock | asyncio.Semaphore] = []

    def release(_: object = None) -> None:
        for turn in taken:
            turn.release()

    try:
        for turn in turns:
            await turn.acquire()
            taken.append(turn)
        running = asyncio.get_running_loop().run_in_executor(thread, work)
    except BaseException:
        release()
        raise
    running.add_done_callback(release)
    return await asyncio.shield(running)
