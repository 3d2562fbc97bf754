"""Blocks that a KV pool evicts and finds again in host memory: which are copied there and back, and what that saves.

It decides; whoever runs steps carries out the copies, in the order erase, store, load, before anything else is written
to the pool. A block that comes back is its reader's alone until it is there. The module knows no sequences and no
tensors, and nothing that is to be erased comes here.
"""

import math
import secrets
from array import array
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from engine.protocol.types import TierLoad
from engine.step.executor import BlockTier
from engine.tiers.disk_blocks import DiskBlocks
from prefixcache.lease import Lease
from prefixcache.names import NAME_BYTES, BlockNames, next_name
from prefixcache.namespace import Namespace, RetentionPolicy
from prefixcache.radix import TOKEN_BYTES
from prefixcache.tier import DepartedBlocks, TierEntry, TierIndex
from prefixcache.tree import PrefixTree

Reader = TypeVar("Reader", bound=Hashable)
_PROMPT_ROWS: Final = 16  # in a chunk
_KEPT: Final = 0.9  # of what the steps before count for, when another one lands


@dataclass(frozen=True, slots=True)
class BlockLoad(Generic[Reader]):
    """The contents of `slots` are copied into `blocks`, which `reader` alone holds."""

    reader: Reader
    slots: list[int]
    blocks: list[int]


class HostBlocks(Generic[Reader]):
    """The tier of one pool. What `store` and `load` queue is taken by whoever copies, once.

    index    what lies in which slot.
    disk     the tier below, None: there is none.
    arrived  readers whose blocks came back since they were last taken.
    """

    def __init__(self, index: TierIndex, block_tokens: int, kv_bytes: int) -> None:
        """kv_bytes: of a block."""
        self.index = index
        self.disk: DiskBlocks[Reader] | None = None
        self._kv_bytes = kv_bytes
        self.arrived: list[Reader] = []
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._block_tokens = block_tokens
        self._stores: list[tuple[int, int]] = []  # block and slot
        self._loads: deque[tuple[BlockLoad[Reader], list[TierEntry]]] = deque()
        self._counters: Counter[str] = Counter()
        self._rows = self._took_us = 0.0  # of the last steps that computed prompts
        self._saved_us = self._disk_saved_us = 0.0

    def counters(self) -> dict[str, int]:
        """Blocks stored, loaded, refused, evicted and swept, bytes stored and loaded, tokens that need not be computed
        (host_hit_tokens; disk_hit_tokens of them came from disk before), and about how long that would have taken; they
        only grow."""
        counts = Counter({f"host_{name}": count for name, count in self.index.counters.items()}) + self._counters
        moved = {f"host_{way}_bytes": counts[f"host_{way}_blocks"] * self._kv_bytes for way in ("stored", "loaded")}
        counts |= moved
        if self.disk is not None:
            counts |= {f"disk_{name}": count for name, count in self.disk.counts().items()}
        return {**counts, "host_saved_ms": int(self._saved_us / 1e3), "disk_saved_ms": int(self._disk_saved_us / 1e3)}

    def loads(self, tier: BlockTier) -> tuple[TierLoad, TierLoad | None]:
        """How full host memory is, and the disk below it where there is one."""
        in_host = self._load_of(self.index, tier.max_slots)
        if self.disk is None or tier.files is None:
            return in_host, None
        return in_host, self._load_of(self.disk.index, tier.files.max_places) if self.disk.open else TierLoad(0, 0)

    def _load_of(self, index: TierIndex, max_slots: int) -> TierLoad:
        return TierLoad(index.cached * self._kv_bytes, max_slots * self._kv_bytes)

    def find(
        self, tree: PrefixTree, lease: Lease, namespace: Namespace, policy: RetentionPolicy, tokens: "array[int]"
    ) -> list[TierEntry]:
        """What lies here of the whole blocks of `tokens` behind a lease's end. Where the scope has nothing here, that
        is seen without a name."""
        if self.disk is not None:
            self.disk.index.has_scope(namespace, policy)  # which learns of a newer epoch and of another time to live
        if not self.index.has_scope(namespace, policy):
            return []
        return self.index.find(self._names(tree.last_name(lease), tokens, len(lease.blocks)))

    def fetch(
        self, reader: Reader, wanted: Callable[[], bool], tree: PrefixTree, lease: Lease, namespace: Namespace,
        policy: RetentionPolicy, tokens: "array[int]",
    ) -> bool:  # fmt: skip
        """Begins to read what lies on disk of the whole blocks of `tokens` behind a lease's end, and here not. The
        reader is told by `disk.take_ready`. False: nothing does, or it is computed sooner."""
        disk = self.disk
        if disk is None or not disk.open or not disk.index.has_scope(namespace, policy):
            return False
        names, lacking = list[bytes](), 0
        for name in self._names(tree.last_name(lease), tokens, len(lease.blocks)):
            if not self.index.find([name]):
                if not disk.index.find([name]):
                    break
                lacking = len(names) + 1
            names.append(name)
        if not lacking:
            return False
        compute_s = lacking * self._block_tokens * self._token_us / 1e6 if self._rows else math.inf
        return disk.fetch(reader, wanted, namespace, policy, names[:lacking], compute_s)

    def store(self, departed: Items[DepartedBlocks], secret: set[int]) -> None:
        """Takes in what a tree evicted, but for the pages that are secret."""
        for run in departed:
            if not secret.isdisjoint(run.blocks):
                pairs = [pair for pair in zip(run.names, run.blocks, strict=True) if pair[1] not in secret]
                run = run._replace(names=[name for name, _ in pairs], blocks=[block for _, block in pairs])
            self._stores += self.index.offer(run)
            if self.disk is not None:
                self.disk.note(run)

    def load(self, reader: Reader, entries: list[TierEntry], blocks: list[int]) -> int:
        """Queues the way back into the first of these blocks, as many as there are entries, which is returned. The
        entries are pinned already, and no longer once the load is taken."""
        count = len(entries)
        self._loads.append((BlockLoad(reader, [entry.slot for entry in entries], blocks[:count]), entries))
        self._counters["host_loaded_blocks"] += count
        self._counters["host_hit_tokens"] += count * self._block_tokens
        self._saved_us += count * self._block_tokens * self._token_us
        fetched = sum(entry.fetched for entry in entries)
        self._counters["disk_hit_tokens"] += fetched * self._block_tokens
        self._disk_saved_us += fetched * self._block_tokens * self._token_us
        for entry in entries:
            entry.fetched = False
        return count

    def forget(self, names: Items[bytes]) -> None:
        """Makes blocks unfindable that may be wrong."""
        assert not self._stores, "what is on its way could not be erased"
        self.index.forget(names)
        if self.disk is not None:
            self.disk.index.forget(names)

    def raise_epochs(self, epochs: Mapping[bytes, int]) -> None:
        """As TierIndex.raise_epochs, on disk too."""
        self.index.raise_epochs(epochs)
        if self.disk is not None:
            self.disk.index.raise_epochs(epochs)

    def sweep(self, count: int) -> bool:
        """As TierIndex.sweep, where nothing is on its way."""
        assert not self._stores, "what is on its way could not be erased"
        return self.index.sweep(count)

    def observe(self, chunk: int, rows: int, took_us: float) -> None:
        """Notes how long a step of so many rows took, `chunk` of which at most were of one sequence: it tells what a
        prompt's tokens cost where it computed many."""
        if chunk >= _PROMPT_ROWS:
            self._rows, self._took_us = _KEPT * self._rows + rows, _KEPT * self._took_us + took_us

    def take_stores(self) -> tuple[list[int], list[int]]:
        """Pages to be copied, and the slots that they are copied to: before their blocks are written or erased."""
        stores = dict((slot, block) for block, slot in self._stores)  # a slot that changed hands again: the last one
        self._stores = []
        return [*stores.values()], [*stores]

    def take_loads(self) -> Iterator[BlockLoad[Reader]]:
        """Loads that begin now, behind all stores taken before, and before any later one."""
        while self._loads:
            load, entries = self._loads.popleft()
            self.index.unpin(entries)
            yield load

    def take_arrived(self) -> list[Reader]:
        """The readers whose loads are done. Each is returned once."""
        arrived, self.arrived = self.arrived, []
        return arrived

    def check(self) -> None:
        """Raises AssertionError where an index does, or a block is on its way that nobody brings."""
        self.index.check()
        if self.disk is not None:
            self.disk.check()

    @property
    def _token_us(self) -> float:
        """About what a prompt's token costs to compute; 0: that is not known."""
        return self._took_us / self._rows if self._rows else 0.0

    def _names(self, name: bytes, tokens: "array[int]", first: int) -> Iterator[bytes]:
        """The names of the whole blocks of `tokens` from block `first` on, which follow this one."""
        packed, size = memoryview(tokens).cast("B"), self._block_bytes
        for start in range(first * size, len(packed) // size * size, size):
            name = next_name(name, packed[start : start + size])
            yield name


def open_tree(
    blocks: int, block_tokens: int, kv_bytes: int, clock: Callable[[], float], tier: BlockTier | None
) -> tuple[PrefixTree, HostBlocks[Reader] | None]:
    """A tree for a pool whose blocks have kv_bytes each, and where they are once it evicted them, without slots as yet.
    Nobody else has the key of their names, which goes with the process."""
    if tier is None:
        return PrefixTree(blocks, block_tokens, clock), None
    names = BlockNames(secrets.token_bytes(NAME_BYTES))
    host = HostBlocks[Reader](TierIndex(0, clock), block_tokens, kv_bytes)
    if tier.files is not None:
        host.disk = DiskBlocks(TierIndex(0, clock), host.index, tier.files, tier.copied, clock, kv_bytes)
    return PrefixTree(blocks, block_tokens, clock, names), host
