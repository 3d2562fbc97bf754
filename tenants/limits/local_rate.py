"""A rate for each key, such as an address or an account, counted in this process alone. It knows no store."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

KEYS_MAX: Final = 65_536  # a key costs some 150 bytes
_ROUNDING_S: Final = 1e-6  # sums of seconds are so exact, and more


class LocalRate:
    """At most `per_s` of something a second for each key, and `room` of it at once.

    `clock` is monotonic seconds. Above KEYS_MAX keys the one that took something longest ago is forgotten.
    """

    def __init__(self, per_s: float, room: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._room_s = room / per_s
        self._clock = clock
        self._used_until: OrderedDict[str, float] = OrderedDict()  # when a key has all its room again

    def __len__(self) -> int:
        return len(self._used_until)

    def take(self, key: str, amount: float = 1) -> float:
        """Takes so much and returns 0.0; where there is no room, takes nothing and returns in how many seconds there
        is."""
        now = self._clock()
        until = max(self._used_until.get(key, now), now) + amount / self._per_s
        if until - now > self._room_s + _ROUNDING_S:
            return until - now - self._room_s
        self._used_until[key] = until
        self._used_until.move_to_end(key)
        if len(self._used_until) > KEYS_MAX:
            self._used_until.popitem(last=False)
        return 0.0
