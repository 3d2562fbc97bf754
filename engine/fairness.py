"""The waiting queue, fair between accounts. It does not know what waits, why, or what an account is.

Every account has a count of the tokens it was served; the account with the lowest goes next. An account that had
nothing waiting starts from where the queue is now, so that idling saves up nothing and a return is no burst. This is
start-time fair queueing (Goyal, Vin, Cheng 1996) over tokens, as in the virtual token counter of Sheng et al. 2024.
Inside one account it is first come, first served.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
_IDLE_ACCOUNTS_MAX: Final = 4096


class FairQueue(Generic[Item]):
    """Items (hashable by identity) waiting under their account.

    While two accounts both have something waiting, the tokens they were served drift apart by no more than the
    largest charge of each. Costs: O(log accounts that wait) for the next item, and for each that is passed over.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[Item, None]] = {}  # insertion order is arrival order
        self._served: dict[bytes, int] = {}
        self._turns: list[tuple[int, int, bytes]] = []  # a heap of (count when it came in, number, account)
        self._numbers: dict[bytes, int] = {}  # which of its turns is the one of an account that waits
        self._pushed = 0
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
            self._line_up(account)
        assert item not in queue, "pushed twice"
        queue[item] = None
        self._length += 1

    def first(self, fits: Callable[[Item], bool]) -> Item | None:
        """The first item of an account where that fits, the account that is next in turn first.

        `fits` must not change the queue.
        """
        found, passed = None, []
        while found is None and self._turns:
            count, number, account = self._turns[0]
            if self._numbers.get(account) != number:
                heappop(self._turns)
            elif count < self._served[account]:  # counts only grow: what comes first so is the least
                heapreplace(self._turns, (self._served[account], number, account))
            elif fits(head := next(iter(self._waiting[account]))):
                found = head
            else:
                passed.append(heappop(self._turns))
        for turn in passed:
            heappush(self._turns, turn)
        return found

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
            del self._waiting[account], self._numbers[account]

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

    def _line_up(self, account: bytes) -> None:
        self._pushed += 1
        self._numbers[account] = self._pushed
        heappush(self._turns, (self._served[account], self._pushed, account))
        if len(self._turns) > 64 + 2 * len(self._numbers):
            self._turns = [turn for turn in self._turns if self._numbers.get(turn[2]) == turn[1]]
            heapify(self._turns)

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
        turns = [(account, number) for _, number, account in self._turns if self._numbers.get(account) == number]
        assert sorted(turns) == sorted(self._numbers.items()), "an account has no turn, or two"
        assert self._waiting.keys() == self._numbers.keys()
        assert len(self._served) <= len(self._waiting) + _IDLE_ACCOUNTS_MAX + 1
