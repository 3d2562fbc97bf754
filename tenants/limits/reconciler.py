"""Compares counters with records, for each account's day once it is over. It does not repair differences.

The first of many gateways claims an account, so that each day is compared once.
"""

import asyncio
import logging
import time
from typing import Final

from tenants.records.usage import DAY_US, MICRO, day_of
from tenants.store.protocol import Clock, Store, StoreUnavailable

LOOK_S: Final = 300.0
AFTER_US: Final = 3600 * MICRO  # into the next day: holds have ended by then, and outboxes are replayed
CLAIMED_S: Final = 3 * 86_400
COMPARING_S: Final = 600  # after which another gateway compares what this one began with

log = logging.getLogger(__name__)


class Reconciler:
    """One gateway's part. `compared` and `different` are accounts' days since it started."""

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        self._store = store
        self._clock = clock
        self._done: int | None = None
        self.compared = 0
        self.different = 0

    async def run(self) -> None:
        """Compares days that are over, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except StoreUnavailable as problem:
                log.warning("reconciler_waits", extra={"fields": {"for": str(problem)}})

    async def look(self) -> None:
        """Compares the last day that is over, once. Raises StoreUnavailable."""
        day = day_of(int(self._clock() * MICRO) - DAY_US - AFTER_US)
        if day == self._done:
            return
        for account in await self._store.accounts.list():
            if await self._store.claims.claim(account.id, f"reconciled:{day}", b"", COMPARING_S) is None:
                await self._compare(account.id, day)
                await self._store.claims.replace(account.id, f"reconciled:{day}", b"", CLAIMED_S)
        self._done = day

    async def _compare(self, account_id: str, day: int) -> None:
        balance = await self._store.quotas.reconcile(account_id, day)
        self.compared += 1
        if balance.counted != balance.recorded:
            self.different += 1
            sums = {"counted": str(balance.counted), "recorded": str(balance.recorded)}
            log.error("ledger_differs", extra={"fields": {"account": account_id, "day": day, **sums}})
