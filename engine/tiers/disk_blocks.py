"""Blocks of host memory that lie on disk too: which are written there, and read back for whom, and in what order.

What comes into host memory is written behind it, as fast as the disk takes it. A sequence whose prefix goes on there
waits, while others run, until that is in host memory again: its blocks are found there then like any others. Accounts
take turns at the disk. A block that is not what was written is forgotten and computed again; a disk that is full or
fails ends the tier, and nothing else. The module knows no sequences and no files, and no block of zero retention comes
here, since none comes into host memory.
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from engine.log import log
from engine.step.executor import Arrival, BlockFiles, CopyOutcome, FileCopy
from prefixcache.namespace import Namespace, RetentionPolicy
from prefixcache.tier import DepartedBlocks, TierEntry, TierIndex

Reader = TypeVar("Reader", bound=Hashable)
FETCH_S: Final = 2.0  # a sequence waits so long for the disk at most
READING_MAX: Final = 64  # blocks at once, or one prompt
WRITING_MAX: Final = 16  # blocks at once
FRESH_MAX: Final = 1 << 16  # blocks that wait to be written; above it the oldest are not
_SWEEP_MAX: Final = 8  # places erased at a time
_FREE_PLACES_MIN: Final = 64
_KEPT: Final = 0.9  # of what the fetches before count for, when another one ends
_RECOVERY: Final = 1.02  # by which a disk that was too slow is thought faster each time that it is not asked


@dataclass(slots=True, eq=False)
class _Move:
    """A copy under way, with its entries on both sides."""

    copy: FileCopy
    in_host: TierEntry
    on_disk: TierEntry


@dataclass(slots=True, eq=False)
class _Fetch(Generic[Reader]):
    """What one reader waits for: the blocks of these names, some of which are in host memory already."""

    reader: Reader
    namespace: Namespace
    policy: RetentionPolicy
    names: list[bytes]
    wanted: Callable[[], bool]
    deadline_s: float
    began_s: float = 0.0
    moves: list[_Move] = field(default_factory=list)
    left: int = 0


class DiskBlocks(Generic[Reader]):
    """The tier below one host tier. `turn` does all the work, whenever no block is on its way between pool and host.

    index    what lies in which place of the files.
    """

    def __init__(
        self, index: TierIndex, host: TierIndex, files: BlockFiles, copied: Callable[[], Arrival],
        clock: Callable[[], float], block_bytes: int,
    ) -> None:  # fmt: skip
        """`copied`: as BlockTier has it. block_bytes: of a block's KV."""
        self.index = index
        self.counters: Counter[str] = Counter()
        self._host = host
        self._files = files
        self._copied = copied
        self._clock = clock
        self._block_bytes = block_bytes
        self._off = False
        self._fresh: deque[tuple[TierEntry, Namespace, RetentionPolicy]] = deque(maxlen=FRESH_MAX)
        self._queues: OrderedDict[bytes, deque[_Fetch[Reader]]] = OrderedDict()  # by account, the next turn's first
        self._waiting: dict[Reader, _Fetch[Reader]] = {}
        self._ready: list[Reader] = []
        self._moves: dict[FileCopy, tuple[_Move, _Fetch[Reader] | None]] = {}
        self._batches: deque[tuple[Arrival, list[FileCopy], Callable[[FileCopy], None]]] = deque()
        self._reading = self._writing = 0
        self._read = (0.0, 0.0)  # bytes, and seconds of their fetches, of late: large ones count for most
        self._read_bytes_s = 0.0  # as it went of late; 0: not known

    @property
    def open(self) -> bool:
        """Whether anything is found here."""
        return not self._off

    # What readers ask

    def fetch(
        self, reader: Reader, wanted: Callable[[], bool], namespace: Namespace, policy: RetentionPolicy,
        names: list[bytes], compute_s: float,
    ) -> bool:  # fmt: skip
        """Begins to bring to host memory what lies here of these names, the last of which does, unless it would take
        longer than compute_s; math.inf: that is not known. `take_ready` says when it is there, or will not be; nothing
        is read that is not `wanted` when its turn comes."""
        count = sum(self._host.entry(name) is None for name in names)
        ahead = self._reading + sum(len(each.names) for queue in self._queues.values() for each in queue)
        if self._read_bytes_s and (ahead + count) * self._block_bytes > compute_s * self._read_bytes_s:
            self._read_bytes_s *= _RECOVERY
            self.counters["slower_blocks"] += count
            return False
        fetch = _Fetch(reader, namespace, policy, names, wanted, self._clock() + FETCH_S)
        self._waiting[reader] = fetch
        self._queues.setdefault(policy.account, deque()).append(fetch)
        return True

    def take_ready(self) -> list[Reader]:
        """The readers that wait no more since the last call."""
        ready, self._ready = self._ready, []
        return [reader for reader in ready if self._waiting.pop(reader, None) is not None]

    def note(self, departed: DepartedBlocks) -> None:
        """Has what a pool evicted, and host memory took in, written to disk behind that."""
        if self.open:
            for name in departed.names:
                entry = self._host.entry(name)
                if entry is not None and self.index.entry(name) is None:
                    self._fresh.append((entry, departed.namespace, departed.policy))

    def counts(self) -> dict[str, int]:
        """What the index counts and `counters` has: loaded_blocks, corrupt_blocks, slower_blocks that were computed
        instead, late_fetches, whether it ended, and bytes stored and loaded; all grow only."""
        counts = Counter(self.index.counters) + self.counters
        moved = {f"{way}_bytes": counts[f"{way}_blocks"] * self._block_bytes for way in ("stored", "loaded")}
        return {**counts, **moved}

    # The work

    def turn(self) -> bool:
        """Takes in what the disk has done, and gives it more to do. Returns whether it should be called again soon."""
        if self._files.error and not self._off:
            self._end(self._files.error)
        if self.open and not self._host.unerased:  # a slot is zeroed before it is read into
            self._begin_reads()
        for copy in self._files.take_done():
            self._settle(copy)
        self._expire()
        swept = self.open and self.index.sweep(_SWEEP_MAX)
        if self.open:
            if places := self.index.take_unerased():
                self._files.erase(places)
            self._begin_writes()
            self._submit()
            self.index.add_slots(self._files.places - self.index.slots)
            if self.index.slots - self.index.cached < _FREE_PLACES_MIN:
                self._files.grow()
        return swept or bool(self._batches)

    def _begin_reads(self) -> None:
        """Gives accounts their turns while the disk takes more."""
        copies: list[FileCopy] = []
        for account in list(self._queues):
            if self._reading >= READING_MAX:
                break
            queue = self._queues.pop(account)
            while queue and not queue[0].wanted():
                self._ready.append(queue.popleft().reader)
            if queue and not self._arrives(queue[0]):
                copies += self._begin_read(queue.popleft())
            if queue:
                self._queues[account] = queue
        if copies:
            self._batches.append((self._copied(), copies, self._files.read))

    def _arrives(self, fetch: _Fetch[Reader]) -> bool:
        """Whether some of it is on its way for another reader."""
        entries = (self._host.entry(name) for name in fetch.names)
        return any(entry is not None and entry.arriving for entry in entries)

    def _begin_read(self, fetch: _Fetch[Reader]) -> list[FileCopy]:
        """Takes slots for what host memory lacks of these names, as far as it gives any without a gap."""
        host, names, sources = self._host, list[bytes](), list[TierEntry]()
        present: list[TierEntry] = []
        for name in fetch.names:
            if (entry := host.entry(name)) is not None:
                present.append(entry)
            elif found := self.index.find([name]):
                names.append(name)
                sources += found
            else:
                break
        host.hold(present)
        now_s = self._clock()
        host.offer(DepartedBlocks(fetch.namespace, fetch.policy, now_s, names, list(range(len(names)))))
        host.unpin(present)
        targets = [host.entry(name) for name in names]
        count = targets.index(None) if None in targets else len(targets)
        for target in targets[count:]:
            if target is not None:
                host.forget_entry(target)
        for target, source in zip(targets[:count], sources, strict=False):
            assert target is not None
            target.arriving = True
            host.hold([target])
            self.index.pin([source])
            fetch.moves.append(_Move(FileCopy(target.name, target.slot, source.slot), target, source))
        fetch.began_s, fetch.left = now_s, count
        self._reading += count
        self._moves |= {move.copy: (move, fetch) for move in fetch.moves}
        if not count:
            self._ready.append(fetch.reader)
        return [move.copy for move in fetch.moves]

    def _begin_writes(self) -> None:
        """Writes what came into host memory, as far as it is there still and its account may have it on disk."""
        copies: list[FileCopy] = []
        while self._fresh and self._writing < WRITING_MAX and self.index.slots:
            entry, namespace, policy = self._fresh.popleft()
            if self._host.find([entry.name]) != [entry] or self.index.entry(entry.name) is not None:
                continue
            run = DepartedBlocks(namespace, policy, entry.used_s, [entry.name], [entry.slot])
            for slot, place in self.index.offer(run):
                target = self.index.entry(entry.name)
                assert target is not None
                target.arriving = True
                self.index.hold([target])
                self._host.hold([entry])
                copy = FileCopy(entry.name, slot, place)
                self._moves[copy] = _Move(copy, entry, target), None
                self._writing += 1
                copies.append(copy)
        if copies:
            self._batches.append((self._copied(), copies, self._files.write))

    def _submit(self) -> None:
        """Hands copies on once nothing that was queued before touches their slots."""
        while self._batches and self._batches[0][0].passed():
            _, copies, begin = self._batches.popleft()
            for copy in copies:
                begin(copy)

    def _settle(self, copy: FileCopy) -> None:
        """Takes in how a copy ended. What was read is found when all of its fetch is there."""
        move, fetch = self._moves.pop(copy)
        if fetch is None:
            self._writing -= 1
            move.on_disk.arriving = False
            if copy.outcome != CopyOutcome.DONE:
                self.index.forget_entry(move.on_disk)
            self.index.unpin([move.on_disk])
            self._host.unpin([move.in_host])
            return
        self._reading -= 1
        fetch.left -= 1
        if not fetch.left:
            self._finish(fetch)

    def _finish(self, fetch: _Fetch[Reader]) -> None:
        read = 0
        for move in fetch.moves:
            move.in_host.arriving = False
            if move.copy.outcome == CopyOutcome.DONE:
                move.in_host.fetched = True
                read += 1
            else:
                self._host.forget_entry(move.in_host)
            if move.copy.outcome == CopyOutcome.CORRUPT:
                self.index.forget_entry(move.on_disk)
                self.counters["corrupt_blocks"] += 1
                log("disk_block_corrupt", level="warning", place=move.copy.place)
        self.index.unpin([move.on_disk for move in fetch.moves])
        self._host.unpin([move.in_host for move in fetch.moves])
        self.counters["loaded_blocks"] += read
        took_s = self._clock() - fetch.began_s
        if read and took_s > 0:
            self._read = _KEPT * self._read[0] + read * self._block_bytes, _KEPT * self._read[1] + took_s
            self._read_bytes_s = self._read[0] / self._read[1]
        self._ready.append(fetch.reader)

    def _expire(self) -> None:
        """Lets readers go on that have waited for as long as they may."""
        now_s = self._clock()
        for reader, fetch in self._waiting.items():
            if fetch.deadline_s > now_s:
                break  # in the order of their beginning
            self._ready.append(reader)
            self.counters["late_fetches"] += 1
            fetch.deadline_s = math.inf

    def _end(self, error: str) -> None:
        """Nothing is found here from now on, and nobody waits for it."""
        self._off = True
        self.counters["ended"] += 1
        log("disk_tier_off", level="error", error=error, lost_blocks=self.index.cached)
        for _, copies, _ in self._batches:
            for copy in copies:
                self._settle(copy)
        self._batches.clear()
        self._fresh.clear()
        self._ready += [fetch.reader for queue in self._queues.values() for fetch in queue]
        self._queues.clear()

    def check(self) -> None:
        """Raises AssertionError where a block arrives that nobody brings, or a count is wrong."""
        self.index.check()
        reads = [move for move, fetch in self._moves.values() if fetch is not None]
        assert self._reading == len(reads)
        assert self._writing == len(self._moves) - len(reads)
        assert all(move.in_host.arriving for move in reads)
        slots = [move.in_host.slot for move in reads]
        assert len(set(slots)) == len(slots), "two blocks are read into one slot"
        assert all(self._queues.values()), "an account waits for nothing"
