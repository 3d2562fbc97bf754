"""Which prefixes a replica has in which of its tiers, by short keyed names, for those who choose replicas. It knows no
tokens but those of a sequence that ends, and publishes nothing that is to be erased."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine.kv_blocks.block_pool import BlockPool
from engine.protocol.prefix_names import TOKENS_MIN, prefix_names
from engine.protocol.types import PrefixTier
from engine.sequences.sequence import Sequence
from engine.tiers.host_blocks import HostBlocks
from prefixcache.tree import PrefixTree

PUBLISHED_MAX: Final = 8192  # prefixes; above it the one that was used least recently is published no more


@dataclass(slots=True)
class _Published:
    """A prefix by its last block: the page that it was on the device, and its name in the tiers below."""

    page: int
    name: bytes | None
    tier: PrefixTier


class PublishedPrefixes:
    """Nothing is published before there is a key.

    A prefix counts as lost when its block moved on the device; it is published anew when it is used again.
    """

    def __init__(self, tree: PrefixTree, pool: BlockPool, host: HostBlocks[Sequence] | None) -> None:
        self._tree = tree
        self._pool = pool
        self._host = host
        self._key = b""
        self._prefixes: OrderedDict[bytes, _Published] = OrderedDict()
        self._changed: dict[bytes, PrefixTier] = {}

    def use_key(self, key: bytes) -> dict[bytes, PrefixTier]:
        """Names prefixes by this key from now on. Returns those published, none where the key is a new one."""
        if key != self._key:
            self._key = key
            self._prefixes.clear()
            self._changed.clear()
        return {name: each.tier for name, each in self._prefixes.items()}

    def note(self, sequence: Sequence, cached_tokens: Callable[[Sequence], int]) -> None:
        """Publishes what a sequence that ends leaves in the tree, as far as it is found there; it holds its lease."""
        size, space, lease = self._tree.block_tokens, sequence.namespace, sequence.lease
        if not self._key or space is None or lease is None or sequence.terms.erase:
            return
        tokens = min(sequence.shared_blocks * size, cached_tokens(sequence))
        if tokens < TOKENS_MIN:
            return
        below = [] if self._host is None else self._tree.names(lease)[1:]
        scope = space.scope_kind, space.scope_id, space.epoch
        for count, name in prefix_names(self._key, scope, memoryview(sequence.tokens)[:tokens].cast("B")):
            at = count // size - 1
            if at < sequence.public_blocks or count % size:
                continue
            page = int(sequence.pages[at])
            chained = below[at - sequence.public_blocks] if below else None
            if name not in self._prefixes or self._prefixes[name].tier != PrefixTier.DEVICE:
                self._changed[name] = PrefixTier.DEVICE
            self._prefixes[name] = _Published(page, chained, PrefixTier.DEVICE)
            self._prefixes.move_to_end(name)
        while len(self._prefixes) > PUBLISHED_MAX:
            self._changed[self._prefixes.popitem(last=False)[0]] = PrefixTier.NONE

    def take_changed(self) -> dict[bytes, PrefixTier]:
        """The prefixes that came, left, or are in another tier since the last call."""
        if self._prefixes:
            pages = np.array([each.page for each in self._prefixes.values()], np.int64)
            stale = self._pool.are_stale(pages).tolist()
            for (name, each), is_stale in zip(list(self._prefixes.items()), stale, strict=True):
                if is_stale and (tier := self._tier_below(each)) != each.tier:
                    each.tier = self._changed[name] = tier
                    if tier == PrefixTier.NONE:
                        del self._prefixes[name]
        changed, self._changed = self._changed, {}
        return changed

    def _tier_below(self, each: _Published) -> PrefixTier:
        host = self._host
        if host is None or each.name is None:
            return PrefixTier.NONE
        if host.index.find([each.name]):
            return PrefixTier.HOST
        on_disk = host.disk is not None and host.disk.open and bool(host.disk.index.find([each.name]))
        return PrefixTier.DISK if on_disk else PrefixTier.NONE
