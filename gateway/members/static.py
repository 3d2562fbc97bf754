"""The machines that hearth.toml names, which never change."""

import asyncio
from collections.abc import Callable, Iterable

from engine.protocol.address import require_address
from gateway.members.protocol import Membership


class StaticMembers:
    """See Members. Raises AddressError."""

    def __init__(self, addresses: Iterable[str]) -> None:
        addresses = list(addresses)
        for address in addresses:
            require_address(address)
        self._membership = Membership(frozenset(addresses))

    async def follow(self, on_change: Callable[[Membership], None]) -> None:
        on_change(self._membership)
        await asyncio.get_running_loop().create_future()
