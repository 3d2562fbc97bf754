"""One long piece of work at a time for each account, so that no account can take all threads.

It does not know what the work is.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from weakref import WeakValueDictionary


class AccountLocks:
    """A lock for each account that has work now; it is forgotten with its last holder."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def take(self, account_id: str) -> AsyncIterator[None]:
        """Waits for the account's earlier work, in order."""
        lock = self._locks.get(account_id)
        if lock is None:
            lock = self._locks[account_id] = asyncio.Lock()
        async with lock:
            yield

    def __len__(self) -> int:
        return len(self._locks)
