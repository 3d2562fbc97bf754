"""The machines that joined through the store, and who was removed. An emptied store counts as one that does not
answer."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from engine.protocol.address import machine_address
from gateway.identity.authority import SKEW_S
from gateway.identity.host_identity import HostRole
from gateway.members.protocol import Membership
from tenants.records.cluster import ClusterMember
from tenants.store.protocol import ClusterStore, StoreUnavailable

LOOK_S: Final = 1.0

log = logging.getLogger(__name__)


class RegistryMembers:
    """See Members. `members` and `removed_keys` are of the last look that the store answered."""

    def __init__(self, store: ClusterStore, look_s: float = LOOK_S, clock: Callable[[], float] = time.time) -> None:
        self.members: Sequence[ClusterMember] = ()
        self.removed_keys: Sequence[str] = ()
        self._store = store
        self._look_s = look_s
        self._clock = clock
        self._answers = True

    async def follow(self, on_change: Callable[[Membership], None]) -> None:
        before: Membership | None = None
        while True:
            known = self._machines()
            if await self._look():
                # A store that failed over may have lost a member; only whose key is listed was removed.
                removed = [member for member in known if self.is_removed(member.key)]
                membership = Membership(_addresses(self._machines()), _addresses(removed))
                if membership != before:
                    on_change(membership)
                    before = membership
            await asyncio.sleep(self._look_s)

    def is_removed(self, key: str) -> bool:
        return key in self.removed_keys

    def _machines(self) -> list[ClusterMember]:
        return [member for member in self.members if member.role == HostRole.MACHINE]

    async def _look(self) -> bool:
        """Whether the store answered."""
        try:
            if await self._store.authority() is None:
                raise StoreUnavailable("it has no cluster: it was emptied, or is another one")
            members = await self._store.members()
            removed_keys = await self._store.removed_keys(int(self._clock()) - SKEW_S)
        except StoreUnavailable as error:
            if self._answers:
                log.warning("the members of the cluster stay as they are: %s", error)
            self._answers = False
            return False
        self._answers = True
        self.members, self.removed_keys = members, removed_keys
        return True


def _addresses(machines: Iterable[ClusterMember]) -> frozenset[str]:
    return frozenset(machine_address(member.name, member.address) for member in machines)
