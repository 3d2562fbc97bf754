"""Which replicas of a model have which prefixes, as they publish it by short keyed names. It chooses nothing, and
whoever asks about a prompt has its tokens and the scope in which it shares."""

from collections.abc import Iterator
from typing import Final

from engine.protocol.cache_frames import HeldPrefixes, RouteKey
from engine.protocol.prefix_names import NAME_BYTES, prefix_names
from engine.protocol.types import PrefixTier
from gateway.cluster.client import ReplicaConnection
from gateway.cluster.replica_entry import ReplicaEntry

WORTH: Final = {PrefixTier.DEVICE: 1.0, PrefixTier.HOST: 0.9, PrefixTier.DISK: 0.5}  # of a token that is computed
HOLDERS_MAX: Final = 8  # that are looked at for one prompt


class PrefixDirectory:
    """What is published goes with its connection. `key` is that of the names; empty: there are none."""

    def __init__(self, key: bytes = b"") -> None:
        self.key = key
        self._holders: dict[bytes, dict[ReplicaEntry, PrefixTier]] = {}
        self._names: dict[ReplicaEntry, set[bytes]] = {}
        self._connections: dict[ReplicaEntry, ReplicaConnection] = {}

    def follow(self, entry: ReplicaEntry) -> None:
        """Asks a replica for what it has, once for each connection; forgets what one had whose connection is gone."""
        connection = entry.connection
        if connection is self._connections.get(entry):
            return
        self.forget(entry)
        if connection is None or connection.hello is None or not connection.hello.names_prefixes or not self.key:
            return
        self._connections[entry] = connection
        connection.on_held = lambda held: self._take(entry, connection, held)
        connection.send(RouteKey(self.key))

    def forget(self, entry: ReplicaEntry) -> None:
        """Forgets what a replica had."""
        self._connections.pop(entry, None)
        for name in self._names.pop(entry, ()):
            self._remove(name, entry)

    def holders(self, scope: tuple[int, bytes, int], tokens: bytes) -> Iterator[tuple[ReplicaEntry, float]]:
        """Replicas that have prefixes of a prompt, those with the longest first, each once with how many tokens it
        spares. `scope`: kind, id and epoch. O(log of the prompt), however many replicas and prefixes there are."""
        if not self._holders:
            return
        seen: set[ReplicaEntry] = set()
        for count, name in reversed(prefix_names(self.key, scope, tokens)):
            for entry, tier in self._holders.get(name, {}).items():
                if entry not in seen:
                    seen.add(entry)
                    yield entry, count * WORTH[tier]
                if len(seen) == HOLDERS_MAX:
                    return

    def _take(self, entry: ReplicaEntry, connection: ReplicaConnection, held: HeldPrefixes) -> None:
        if self._connections.get(entry) is not connection:
            return
        names = self._names.setdefault(entry, set())
        for at, tier in enumerate(held.tiers):
            name = held.names[NAME_BYTES * at : NAME_BYTES * (at + 1)]
            if tier in WORTH:
                names.add(name)
                self._holders.setdefault(name, {})[entry] = PrefixTier(tier)
            elif name in names:
                names.remove(name)
                self._remove(name, entry)

    def _remove(self, name: bytes, entry: ReplicaEntry) -> None:
        holders = self._holders[name]
        del holders[entry]
        if not holders:
            del self._holders[name]
