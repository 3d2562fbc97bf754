"""This host's own machine beside those of its cluster: known from the moment that one has run here."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.members.protocol import Membership

LOCK: Final = "machine.lock"  # which every agent makes in its folder, and leaves there
_LOOK_S: Final = 1.0


class OwnMachine:
    """See Members. A host that never had a machine has none that could be missed."""

    def __init__(self, address: str, folder: Path) -> None:
        self._membership = Membership(frozenset([address]))
        self._lock = folder / LOCK

    async def follow(self, on_change: Callable[[Membership], None]) -> None:
        while not self._lock.exists():  # noqa: ASYNC110 (another process makes it)
            await asyncio.sleep(_LOOK_S)
        on_change(self._membership)
        await asyncio.get_running_loop().create_future()
