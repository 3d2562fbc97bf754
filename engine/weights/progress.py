"""How far a long run over many bytes is: a bar where stderr is a terminal, else a line of the log every second."""

import sys
import time
from typing import Final

from tqdm import tqdm

from engine.log import log

_LOG_S: Final = 1.0


class ProgressBar:
    """`activity` is what the bar and the log say, like `compressing`."""

    def __init__(self, activity: str, total: int) -> None:
        self._activity = activity
        self._total = total
        self._done = 0
        self._drawn_at = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, desc=activity, unit="B", unit_scale=True) if is_terminal else None

    def advance(self, count: int) -> None:
        self.advance_to(self._done + count)

    def advance_to(self, count: int) -> None:
        """`count` bytes so far."""
        self._done = count
        if self._bar is not None:
            self._bar.update(count - self._bar.n)
        elif time.monotonic() - self._drawn_at >= _LOG_S:
            self._drawn_at = time.monotonic()
            log(self._activity, percent=100 * self._done // max(1, self._total))

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
