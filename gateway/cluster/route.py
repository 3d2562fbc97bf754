"""The choice of a replica for a request: by cache affinity, bounded by load. And of the machines that should hold a
model. It opens no connection."""

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

import xxhash

KEY_TOKENS = 64
BALANCE = 1.25
LOAD_TOKENS = 128  # of a prompt: what a sequence that runs there costs one that joins it
LIGHT_LOAD = 4  # sequences that a replica runs together at little cost; below it the cache counts for more
WINDOW: Final = 32  # candidates among which a key's replica is chosen, however many there are
_HASHES: Final = 1 << 64

T = TypeVar("T")


class ReplicaRing(Generic[T]):
    """Replicas in the order of their names' hashes. A key's candidates are the WINDOW next to its own place, so that a
    look-up costs the same among ten and among ten thousand, and one that comes or goes is seen by few keys."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._names: list[bytes] = []
        self._items: list[T] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, name: str, item: T) -> None:
        """Costs O(log n), and moving pointers. The name is not there yet."""
        encoded = name.encode()
        place = xxhash.xxh3_64_intdigest(encoded)
        at = bisect_left(self._places, place)
        self._places.insert(at, place)
        self._names.insert(at, encoded)
        self._items.insert(at, item)

    def remove(self, name: str, item: T) -> None:
        """Removes what was added. Costs as `add`."""
        at = bisect_left(self._places, xxhash.xxh3_64_intdigest(name.encode()))
        while self._items[at] is not item:
            at += 1  # another name with the same hash
        del self._places[at], self._names[at], self._items[at]

    def candidates(self, key: int) -> tuple[list[bytes], list[T]]:
        """Names and items of the key's candidates."""
        count = len(self._items)
        if count <= WINDOW:
            return self._names, self._items
        at = bisect_left(self._places, key)
        end = at + WINDOW
        if end <= count:
            return self._names[at:end], self._items[at:end]
        return self._names[at:] + self._names[: end - count], self._items[at:] + self._items[: end - count]


def pick(
    ring: ReplicaRing[T], load: Callable[[T], int], scope: bytes, tokens: bytes, session: bytes = b"",
    holders: Sequence[tuple[T, float]] = (), capacity: Callable[[T], int] = lambda item: sys.maxsize,
) -> T:  # fmt: skip
    """The replica for a prompt of this scope; `tokens` is packed u32, `load` the number of a replica's running and
    waiting sequences, `capacity` of those that it runs at once.

    A `session` named by the caller takes the place of the tokens, within its scope.

    Rendezvous hashing on (scope, first tokens) among the key's candidates sends equal system prompts of one tenant to
    one replica, and moves only the keys of a replica that goes. A replica whose load would pass BALANCE × the
    candidates' mean, and LIGHT_LOAD, is passed over for the next in the key's own order (consistent hashing with
    bounded loads, Mirrokni et al. 2016). So is one that is full, while another candidate is not. Deterministic. xxhash
    only spreads here: a collision costs time and nothing else.

    `holders` have prefixes of the prompt, each with how many tokens it spares: one of them goes before the hash's
    choice where it spares more than its load costs, LOAD_TOKENS a sequence, within the same bounds of load.
    """
    assert len(ring), "the caller waits until there is one"
    key = xxhash.xxh3_64_intdigest(session or _key(tokens), seed=xxhash.xxh3_64_intdigest(scope))
    names, items = ring.candidates(key)
    if len(items) == 1:
        return items[0]
    loads = [load(item) for item in items]
    bound = max(math.ceil(BALANCE * (sum(loads) + 1) / len(loads)), LIGHT_LOAD)
    digest = xxhash.xxh3_64_intdigest
    scores = [digest(name, key) if load < bound else -1 for name, load in zip(names, loads, strict=True)]
    while (best := max(scores)) >= 0 and loads[index := scores.index(best)] >= capacity(items[index]):
        scores[index] = -1
    if best < 0:
        excess = [max(0, load + 1 - capacity(item)) for item, load in zip(items, loads, strict=True)]
        index = min(range(len(items)), key=lambda index: (excess[index], loads[index]))
    chosen = items[index]
    if holders:
        free = [(item, spares, held) for item, spares in holders if (held := load(item)) < min(bound, capacity(item))]
        spared = {item: spares - LOAD_TOKENS * held for item, spares, held in free}
        spared.setdefault(chosen, -LOAD_TOKENS * load(chosen))
        chosen = max(spared, key=lambda item: (spared[item], item is chosen))
    return chosen


def _key(tokens: bytes) -> bytes:
    """The first tokens, cut down to a power of two below KEY_TOKENS, so that short prompts that grow keep their key
    from 64 tokens on."""
    count = len(tokens) // 4
    return tokens[: 4 * KEY_TOKENS] if count >= KEY_TOKENS else tokens[: 4 << max(count.bit_length() - 1, 0)]


def preference(machine: str, weight: float, model: str) -> float:
    """How much a machine should hold a model, by weighted rendezvous hashing (Schindelhauer and Schomaker 2005): over
    many models a machine is first as often as its weight is large, and one that goes moves only what it held."""
    digest = xxhash.xxh3_64_intdigest(machine.encode(), xxhash.xxh3_64_intdigest(model.encode()))
    return -weight / math.log((digest + 1) / (_HASHES + 1))
