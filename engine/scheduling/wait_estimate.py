"""How long a request would wait: how much is served per second while others wait, and what share of the requested work
is done in the end.

The estimate knows sums, not whose they are. Until something has waited it knows no pace, and predicts no wait.
"""

from typing import Final

_STEPS: Final = 256  # steps in the mean of the pace, the later ones counting more
_ENDINGS: Final = 64  # ended sequences in the mean of the share that was done


class WaitEstimator:
    """Work is in tokens served, each counted as in fair_queue.py; what is requested is the most that it may become."""

    def __init__(self) -> None:
        self._served = self._seconds = 0.0
        self._done = self._requested = 0.0

    def observe(self, served: float, seconds: float) -> None:
        """Adds a step that served so much in so long, while something waited."""
        decay = 1 - 1 / _STEPS
        self._served = decay * self._served + served
        self._seconds = decay * self._seconds + seconds

    def finished(self, requested: float, done: float) -> None:
        """Adds a sequence that started and ended: the work it requested, and what was done; the rest was cached or not
        needed."""
        decay = 1 - 1 / _ENDINGS
        self._requested = decay * self._requested + requested
        self._done = decay * self._done + done

    @property
    def done_share(self) -> float:
        """The share of the requested work that will be done."""
        return self._done / self._requested if self._requested else 1.0

    def wait_ms(self, work: float) -> float:
        """How long so much work takes; 0 where the pace is not known."""
        return 1e3 * work * self._seconds / self._served if self._served else 0.0
