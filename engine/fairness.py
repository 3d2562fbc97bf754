"""The waiting queue, fair between scopes. It does not know what waits, why, or what a scope is.

Every scope has a count of the tokens it was served; the scope with the lowest goes next. A scope that had nothing
waiting starts from where the queue is now, so that idling saves up nothing and a return is no burst. This is start-time
fair queueing (Goyal, Vin, Cheng 1996) over tokens, as in the virtual token counter of Sheng et al. 2024. Inside one
scope it is first come, first served.
"""

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
_IDLE_SCOPES_MAX: Final = 4096


class FairQueue(Generic[Item]):
    """Items (hashable by identity) waiting under their scope.

    While two scopes both have something waiting, the tokens they were served drift apart by no more than the
    largest charge of each. Costs: push and remove O(1), the next item O(scopes that wait).
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[Item, None]] = {}  # insertion order is arrival order
        self._served: dict[bytes, int] = {}
        self._clock = 0  # the count of the scope that was last taken from; never goes back
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, scope: bytes, item: Item) -> None:
        queue = self._waiting.get(scope)
        if queue is None:
            queue = self._waiting[scope] = {}
            self._served[scope] = max(self._served.get(scope, 0), self._clock)
            self._forget_idle()
        assert item not in queue, "pushed twice"
        queue[item] = None
        self._length += 1

    def heads(self) -> Iterator[Item]:
        """The first item of every scope, the scope that is next in turn first. Do not change the queue meanwhile."""
        for scope in sorted(self._waiting, key=self._served.__getitem__):
            yield next(iter(self._waiting[scope]))

    def take(self, scope: bytes, item: Item) -> None:
        """Removes an item because its turn has come: the queue's clock moves to its scope's count."""
        self.remove(scope, item)
        self._clock = max(self._clock, self._served[scope])

    def remove(self, scope: bytes, item: Item) -> None:
        """Removes an item that no longer wants its turn. KeyError where it is not waiting."""
        queue = self._waiting[scope]
        del queue[item]
        self._length -= 1
        if not queue:
            del self._waiting[scope]

    def charge(self, scope: bytes, tokens: int) -> None:
        """`tokens` were served, or are certain to be, to this scope."""
        if scope in self._served:
            self._served[scope] += tokens
        else:
            self._served[scope] = self._clock + tokens
            self._forget_idle()

    def served(self, scope: bytes) -> int:
        """The scope's count: comparable between scopes, not a sum since the start."""
        return self._served.get(scope, self._clock)

    def _forget_idle(self) -> None:
        """Keeps the counts of scopes with nothing waiting bounded. A count at or below the clock says nothing."""
        if len(self._served) <= len(self._waiting) + _IDLE_SCOPES_MAX:
            return
        idle = sorted((count, scope) for scope, count in self._served.items() if scope not in self._waiting)
        behind = sum(count <= self._clock for count, _ in idle)
        for _, scope in idle[: max(behind, len(idle) // 2)]:
            del self._served[scope]

    def check(self) -> None:
        assert self._length == sum(len(queue) for queue in self._waiting.values())
        assert all(self._waiting.values()), "a scope without items is kept"
        assert self._waiting.keys() <= self._served.keys()
        assert len(self._served) <= len(self._waiting) + _IDLE_SCOPES_MAX + 1
