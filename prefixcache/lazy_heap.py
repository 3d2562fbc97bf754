"""A heap of items whose keys change, put in order when it is looked at. It knows no blocks."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

Item = TypeVar("Item")
_Entry = tuple[float, int, Item]  # the key when it was pushed, tie-breaker, item


class LazyHeap(Generic[Item]):
    """A queue of items (hashable by identity) by a key that a function computes; None: the item is not in the queue.

    A key may grow unnoticed. An item whose key falls, or is no longer None, has to be `put`. Costs O(log items), and
    O(1) where nothing is to be done.
    """

    def __init__(self, key: Callable[[Item], float | None]) -> None:
        self._key = key
        self._heap: list[_Entry[Item]] = []
        self._entries: dict[Item, _Entry[Item]] = {}  # the entry of each item that counts
        self._pushed = 0

    def put(self, item: Item) -> None:
        key = self._key(item)
        entry = self._entries.get(item)
        if key is not None and (entry is None or key < entry[0]):
            heappush(self._heap, self._new_entry(key, item))
            if len(self._heap) > 64 + 2 * len(self._entries):
                self._heap = list(self._entries.values())
                heapify(self._heap)

    def remove(self, item: Item) -> None:
        self._entries.pop(item, None)

    def peek(self) -> Item | None:
        """The item with the least key, which stays in the queue."""
        while self._heap:
            entry = self._heap[0]
            item = entry[2]
            if self._entries.get(item) is not entry:
                heappop(self._heap)
            elif (key := self._key(item)) is None:
                heappop(self._heap)
                del self._entries[item]
            elif key > entry[0]:
                heapreplace(self._heap, self._new_entry(key, item))
            else:
                return item
        return None

    def _new_entry(self, key: float, item: Item) -> _Entry[Item]:
        self._pushed += 1
        self._entries[item] = entry = (key, self._pushed, item)
        return entry

    def check(self, item: Item) -> None:
        """Raises AssertionError where the item could come up too late, or never."""
        key, entry = self._key(item), self._entries.get(item)
        if key is not None:
            assert entry is not None, "an item can never come up"
            assert entry[0] <= key, "an item comes up too late"
            assert any(queued is entry for queued in self._heap), "an entry is lost"
