"""How many queued requests a gateway runs at once: as many as take LOOP_SHARE_MAX of its loop's time, since live
streams use the same loop. It does not know what requests do.
"""

import time
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, Final

LOOP_SHARE_MAX: Final = 0.05
CONCURRENCY_MAX: Final = 128
_FIRST: Final = 8.0
_RISE, _FALL = 1.0, 0.8


class ConcurrencyController:
    """At most `limit` requests at once. Call `adjust` every so often."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._limit = _FIRST
        self._taken_s = 0.0
        self._since = clock()

    @property
    def limit(self) -> int:
        return int(self._limit)

    def adjust(self) -> None:
        """Adapts the limit to the share of the loop's time since the last call: slowly up, quickly down."""
        now = self._clock()
        share, self._taken_s, self._since = self._taken_s / max(now - self._since, 1e-9), 0.0, now
        self._limit = (
            max(1.0, self._limit * _FALL) if share > LOOP_SHARE_MAX else min(CONCURRENCY_MAX, self._limit + _RISE)
        )

    @coroutine
    def timed(self, work: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        """Awaits the work, and counts the time for which it runs between its waits."""
        thrown: BaseException | None = None
        while True:
            began = self._clock()
            try:
                waits_for = work.send(None) if thrown is None else work.throw(thrown)
            except StopIteration:
                return
            finally:
                self._taken_s += self._clock() - began
            thrown = None
            try:
                yield waits_for
            except BaseException as error:  # a cancellation, after which the work may still wait for something
                thrown = error
