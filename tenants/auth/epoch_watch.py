"""Which accounts' epochs were raised, by whomever: those whose calls this process has verified are looked at again and
again. It does not know what is cached for them, nor where."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from tenants.records.accounts import Account
from tenants.store.protocol import Store, StoreUnavailable

ACCOUNTS_MAX: Final = 10_000  # those that called last
_READ_MAX: Final = 256  # accounts at once
_ENDED: Final = 1 << 62  # the epoch of an account that is gone

OnRaised = Callable[[Mapping[bytes, int]], None]
"""Gets the new epochs by opaque ids: of accounts, and of scopes that they share."""


class EpochWatch:
    """An account that is seen for the first time counts as raised too: what it was before is not known here.

    on_raised   hears of what was raised, each time once.
    """

    def __init__(self, store: Store) -> None:
        self.on_raised: OnRaised = lambda epochs: None
        self._store = store
        self._seen: OrderedDict[str, tuple[int, Mapping[bytes, int]]] = OrderedDict()

    def saw(self, account: Account, epochs: Mapping[bytes, int]) -> None:
        """Takes in an account, with the epochs of the ids under which replicas know it."""
        self._take(account.id, account.epoch, epochs)
        self._seen.move_to_end(account.id)
        if len(self._seen) > ACCOUNTS_MAX:
            self._seen.popitem(last=False)

    async def run(self, interval_s: float) -> None:
        """Looks at all that were seen, each time the interval is over, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            ids = list(self._seen)
            for first in range(0, len(ids), _READ_MAX):
                try:
                    await self._look(ids[first : first + _READ_MAX])
                except StoreUnavailable:
                    break  # the next round looks at them all

    async def _look(self, ids: list[str]) -> None:
        accounts = {account.id: account for account in await self._store.accounts.of_ids(ids)}
        for account_id in ids:
            account = accounts.get(account_id)
            if account_id in self._seen:
                self._take(account_id, _ENDED if account is None else account.epoch, {})
            if account is None:
                self._seen.pop(account_id, None)

    def _take(self, account_id: str, epoch: int, epochs: Mapping[bytes, int]) -> None:
        """Whatever the account is known by rises with its own epoch."""
        before, known = self._seen.get(account_id, (epoch, {}))
        now = {id: each + max(epoch - before, 0) for id, each in known.items()}
        now |= {id: max(each, now.get(id, 0)) for id, each in epochs.items()}
        self._seen[account_id] = max(epoch, before), now
        if raised := {id: each for id, each in now.items() if each > known.get(id, 0)}:
            self.on_raised(raised)
