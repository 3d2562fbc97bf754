"""How many TLS handshakes with other hosts are under way at once. One costs a gateway a millisecond of computing: begun
all together, thousands end at their deadline together, and none is done.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

PLACES: Final = 64  # at 150 ms to a host still 400 a second, more than one core computes
PLACE_S: Final = 1.0  # a host that takes connections and says nothing keeps a place no longer


class HandshakePlaces:
    """Places, which are given in the order in which they were asked for."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(PLACES)

    @property
    def crowded(self) -> bool:
        """Whether whoever asks now has to wait."""
        return self._free.locked()

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Waits for a place, and has it for as long as the block lasts, or for PLACE_S."""
        await self._free.acquire()
        with contextlib.ExitStack() as kept:
            kept.callback(self._free.release)
            given_up = asyncio.get_running_loop().call_later(PLACE_S, kept.close)
            try:
                yield
            finally:
                given_up.cancel()
