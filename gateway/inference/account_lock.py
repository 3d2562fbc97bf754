"""One long piece of work at a time for each account, so that no account can take all threads.

It does not know what the work is.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class AccountLocks:
    """A lock for each account that has work now; it is forgotten with its last holder."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def lock(self, account_id: str) -> asyncio.Lock:
        """The account's lock, which its work takes in the order of arrival."""
        return self._locks.setdefault(account_id, asyncio.Lock())

    async def run_in_thread(self, account_id: str, work: Callable[[], T], *, fresh: bool) -> T:
        """Runs blocking work in a thread while it holds the account's lock. `fresh` takes a new thread that ends with
        the work: tokenizers keep the words of a thread until it ends."""
        async with self.lock(account_id):
            if not fresh:
                return await asyncio.to_thread(work)
            thread = ThreadPoolExecutor(1)
            try:
                return await asyncio.get_running_loop().run_in_executor(thread, work)
            finally:
                thread.shutdown(wait=False)
