"""The waiting queue, fair between accounts. It does not know what waits, why, or what an account is.

Every account has a count of the tokens it was served; the account with the lowest goes next. An account that had
nothing waiting starts from where the queue is now, so that idling saves up nothing and a return is no burst. This is
start-time fair queueing (Goyal, Vin, Cheng 1996) over tokens, as in the virtual token counter of Sheng et al. 2024.
Inside one account it is first come, first served.
"""

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
_IDLE_ACCOUNTS_MAX: Final = 4096


class FairQueue(Generic[Item]):
    """Items (hashable by identity) waiting under their account.

    While two accounts both have something waiting, the tokens they were served drift apart by no more than the
    largest charge of each. Costs: push and remove O(1), the next item O(accounts that wait).
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[Item, None]] = {}  # insertion order is arrival order
        self._served: dict[bytes, int] = {}
        self._clock = 0  # the count of the account that was last taken from; never goes back
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, account: bytes, item: Item) -> None:
        queue = self._waiting.get(account)
        if queue is None:
            queue = self._waiting[account] = {}
            self._served[account] = max(self._served.get(account, 0), self._clock)
            self._forget_idle()
        assert item not in queue, "pushed twice"
        queue[item] = None
        self._length += 1

    def heads(self) -> Iterator[Item]:
        """The first item of every account, that of the next in turn first. Do not change the queue meanwhile."""
        for account in sorted(self._waiting, key=self._served.__getitem__):
            yield next(iter(self._waiting[account]))

    def take(self, account: bytes, item: Item) -> None:
        """Removes an item because its turn has come: the queue's clock moves to its account's count."""
        self.remove(account, item)
        self._clock = max(self._clock, self._served[account])

    def remove(self, account: bytes, item: Item) -> None:
        """Removes an item that no longer wants its turn. KeyError where it is not waiting."""
        queue = self._waiting[account]
        del queue[item]
        self._length -= 1
        if not queue:
            del self._waiting[account]

    def charge(self, account: bytes, tokens: int) -> None:
        """`tokens` were served, or are certain to be, to this account."""
        if account in self._served:
            self._served[account] += tokens
        else:
            self._served[account] = self._clock + tokens
            self._forget_idle()

    def served(self, account: bytes) -> int:
        """The account's count: comparable between accounts, not a sum since the start."""
        return self._served.get(account, self._clock)

    def _forget_idle(self) -> None:
        """Keeps the counts of accounts with nothing waiting bounded. A count at or below the clock says nothing."""
        if len(self._served) <= len(self._waiting) + _IDLE_ACCOUNTS_MAX:
            return
        idle = sorted((count, account) for account, count in self._served.items() if account not in self._waiting)
        behind = sum(count <= self._clock for count, _ in idle)
        for _, account in idle[: max(behind, len(idle) // 2)]:
            del self._served[account]

    def check(self) -> None:
        assert self._length == sum(len(queue) for queue in self._waiting.values())
        assert all(self._waiting.values()), "an account without items is kept"
        assert self._waiting.keys() <= self._served.keys()
        assert len(self._served) <= len(self._waiting) + _IDLE_ACCOUNTS_MAX + 1
