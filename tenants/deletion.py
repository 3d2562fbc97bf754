"""Accounts that are to be removed: marked for some time, in which they are suspended and can be restored, then removed.
It asks nobody whether it may, and knows no files.
"""

import asyncio
import logging
from typing import Final

from msgspec import structs

from tenants.audit import SYSTEM, AuditLog
from tenants.auth.accounts import AccountService
from tenants.auth.errors import Conflict
from tenants.records.accounts import Account, Deletion
from tenants.records.usage import MICRO, day_of
from tenants.store.protocol import Clock, Store, StoreUnavailable

GRACE_S: Final = 7 * 86_400.0
GRACE_MAX_S: Final = 400 * 86_400.0  # a ledger is kept no longer
LOOK_S: Final = 60.0
CLAIMED_S: Final = 300  # a gateway that dies as it removes an account leaves it to another one then
REMOVED: Final = "account.remove"  # the action in the system's audit log
ACTOR: Final = "sweep"

log = logging.getLogger(__name__)


async def delete(
    accounts: AccountService, account_id: str, now_s: float, grace_s: float = GRACE_S, *, keep_usage: bool = True
) -> Account:
    """Suspends an account, which the sweep removes after `grace_s`. Raises NotFound, Conflict where it is being removed
    already, and ValueError for too long a grace."""
    if not 0 <= grace_s <= GRACE_MAX_S:
        raise ValueError(f"an account can be restored for at most {GRACE_MAX_S / 86_400:.0f} days")
    asked_at = int(now_s)
    deletion = Deletion(asked_at, int(now_s + grace_s), keep_usage)

    def marked(account: Account) -> Account:
        if account.deletion is not None:
            raise Conflict(f"account {account.id} is to be removed already: `hearth accounts restore` takes that back")
        return structs.replace(account, deletion=deletion, suspended_at=account.suspended_at or asked_at)

    return await accounts.update(account_id, marked)


async def restore(accounts: AccountService, account_id: str, now_s: float) -> Account:
    """Takes a deletion back; an account that was suspended before it stays so. Raises NotFound, and Conflict where
    there is nothing to take back, or it is too late."""

    def unmarked(account: Account) -> Account:
        if account.deletion is None:
            raise Conflict(f"account {account.id} is not to be removed")
        if now_s >= account.deletion.due_at:
            raise Conflict(
                f"account {account.id} is being removed by now: `hearth accounts import` of an export adds it"
            )
        by_deletion = account.suspended_at == account.deletion.asked_at
        return structs.replace(account, deletion=None, suspended_at=None if by_deletion else account.suspended_at)

    return await accounts.update(account_id, unmarked)


class DeletionSweep:
    """One gateway's part in removing accounts whose time is over."""

    def __init__(self, store: Store, audit: AuditLog, clock: Clock) -> None:
        self._store = store
        self._audit = audit
        self._clock = clock

    async def run(self) -> None:
        """Looks every LOOK_S, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except StoreUnavailable as problem:
                log.warning("deletions_wait", extra={"fields": {"for": str(problem)}})

    async def look(self) -> list[str]:
        """Removes what is due, once; returns the ids. Raises StoreUnavailable; a second look completes the first."""
        removed = []
        for account in await self._store.accounts.due_deletions(int(self._clock())):
            # An earlier version, which knows no deletions, may have written the account since, without its own.
            if account.deletion is None or await self._running(account.id):
                continue
            if await self._store.claims.claim(account.id, "removal", b"", CLAIMED_S) is not None:
                continue
            if await self._store.accounts.get(account.id) == account:  # no other gateway was first
                await self._remove(account)
                removed.append(account.id)
        return removed

    async def _running(self, account_id: str) -> bool:
        """Whether requests of the account have not ended yet."""
        today = day_of(int(self._clock() * MICRO))
        days = [await self._store.quotas.totals(account_id, day) for day in (today - 1, today)]
        return any(totals.open for totals in days)

    async def _remove(self, account: Account) -> None:
        assert account.deletion is not None
        keep_usage = account.deletion.keep_usage
        await self._store.batches.discard(account.id)
        await self._audit.write(SYSTEM, ACTOR, REMOVED, account.id, name=account.name, keep_usage=keep_usage)
        await self._store.quotas.remove(account.id, keep_usage=keep_usage)
        await self._store.accounts.remove(account.id)
        log.info("account_removed", extra={"fields": {"account": account.id, "keep_usage": keep_usage}})
