"""A thread of rank 0 that looks at the followers while rank 0 waits for its device, which waits for them."""

import threading
from collections.abc import Callable
from typing import Final

from engine.ranks.group import RankGroup, RankLost

_LOOK_S: Final = 0.05


class RankWatch:
    """Looks from when it is made until it is closed, or a rank is lost; then it calls `on_loss`."""

    def __init__(self, group: RankGroup, on_loss: Callable[[], None]) -> None:
        self._group = group
        self._on_loss = on_loss
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when it looks no more. It may be called again."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            try:
                self._group.look()
            except RankLost:
                self._on_loss()
                return
