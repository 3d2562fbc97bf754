"""How long a request would wait: what is served per second while others wait, and what part of all work is done.

It knows sums, not whose they are. Until something has waited it knows no pace, and says that nobody will wait.
"""

from typing import Final

_STEPS: Final = 256  # that a pace is the mean of, the later ones counting more,
_ENDINGS: Final = 64  # and the sequences that say what part of the work that they asked for was done


class WaitEstimator:
    """Work is in tokens served, each as fairness.py counts it; a caller asks for the most that it may come to."""

    def __init__(self) -> None:
        self._served = self._seconds = 0.0
        self._done = self._asked = 0.0

    def observe(self, served: float, seconds: float) -> None:
        """A step served so much in this time, while something waited."""
        kept = 1 - 1 / _STEPS
        self._served = kept * self._served + served
        self._seconds = kept * self._seconds + seconds

    def ended(self, asked: float, done: float) -> None:
        """A sequence that had started asked for so much, and so much was done: the rest was cached or not needed."""
        kept = 1 - 1 / _ENDINGS
        self._asked = kept * self._asked + asked
        self._done = kept * self._done + done

    @property
    def part(self) -> float:
        """Of the work that is asked for, what will be done."""
        return self._done / self._asked if self._asked else 1.0

    def wait_ms(self, work: float) -> float:
        """Until so much work is done; 0 where the pace is not known."""
        return 1e3 * work * self._seconds / self._served if self._served else 0.0
