"""What sequences hold of the KV pool: leased prefixes and private blocks, and which of them become cached. It does not
know who runs next, nor what steps compute.

A block is free, cached in the prefix tree, private to one sequence, or spare: a duplicate of what the tree had already,
which a flight in the air still reads. What a sequence holds is counted where its account stands. Where contents move to
other blocks, as extents come and go, all who name them learn it here, at once, while nothing is in the air.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine.scheduling.block_pool import BlockPool, ShrinkPlan, WakeExtents
from engine.scheduling.fair_queue import AccountQueue
from engine.scheduling.public_prefixes import PublicPrefixes
from engine.scheduling.sequence import Sequence, SequenceState
from prefixcache.tree import Lease, PrefixTree

SWEEP_MAX: Final = 128  # blocks given back beside one step: erasing so many takes a fraction of it


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Of what a sequence is to begin with, the pages that are there, `public` of them published, and how many blocks
    are missing."""

    cached: list[int]
    public: int
    missing: int


class KVManager:
    """Everything that takes blocks of a pool and gives them back.

    counters   erased_blocks, and what lookups that started nothing take off the tree's.
    """

    def __init__(self, tree: PrefixTree, blocks: BlockPool) -> None:
        self.tree = tree
        self.blocks = blocks
        self.published = PublicPrefixes(tree.block_tokens)
        self.counters: Counter[str] = Counter()
        self._block_tokens = tree.block_tokens
        self._pins: list[Lease] = []  # of what is published
        self._spare: list[int] = []
        self._frees = -1  # of blocks, when pages were compared last; −1: they have to be

    @property
    def available(self) -> int:
        """Blocks that can be had at once: free ones, and cached ones that nobody reads."""
        return self.blocks.free + self.tree.unused

    @property
    def total(self) -> int:
        """Blocks that one sequence may have at most: of those that always have memory, so that who runs can end alone
        whatever shrinks."""
        return self.blocks.least - len(self.published.pages)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    # From a sequence's start to its end

    def lease(self, sequence: Sequence) -> PrefixMatch:
        """Leases the longest cached prefix of a sequence that holds nothing: to be taken or given up next."""
        public = self.published.find(sequence.tokens[:-1])
        cached = [*public, *self._lease(sequence, public)]
        return PrefixMatch(cached, len(public), self.blocks_for(len(sequence.tokens)) - len(cached))

    def give_up(self, sequence: Sequence, found: PrefixMatch) -> None:
        """It cannot have what is missing, and does not start."""
        if sequence.lease is not None:
            lookup_tokens = len(sequence.tokens) - 1 - found.public * self._block_tokens
            self.counters.update(lookups=-1, lookup_tokens=-lookup_tokens, hit_tokens=-sequence.lease.tokens)
        self.release(sequence)

    def take(self, sequence: Sequence, found: PrefixMatch) -> None:
        """It holds what was found, which counts as computed, and blocks for the rest, which are available."""
        cached = found.cached
        sequence.grow(cached)
        sequence.public, sequence.shared = found.public, len(cached)
        self._frees = -1
        sequence.computed = sequence.launched = len(cached) * self._block_tokens
        sequence.grow(self._take(found.missing, sequence.terms.erase))
        if sequence.lease is not None and sequence.ticket < 0 and sequence.id == sequence.first:
            self.tree.read(sequence.lease)
        sequence.standing.hold(sequence.held())

    def grow(self, sequence: Sequence) -> None:
        """One more block, which is available."""
        taken = self._take(1, sequence.terms.erase)
        sequence.grow(taken)
        sequence.standing.hold(taken)

    def cache(self, sequence: Sequence, in_the_air: bool) -> bool:
        """Puts the blocks that became full into the tree. Where it has them already, its own are read from now on, and
        ours are free when nothing in the air reads them: whether that is so."""
        if sequence.namespace is None:
            return False
        size, shared, full = self._block_tokens, sequence.shared, sequence.computed // self._block_tokens
        assert sequence.lease is not None
        pages = sequence.pages[shared:full].tolist()
        sequence.lease, spare = self.tree.insert(sequence.lease, sequence.tokens[shared * size : full * size], pages)
        if spare:
            if in_the_air:
                self._spare += spare
            else:
                self.blocks.give(spare)
            sequence.standing.let_go(sequence.pages[sequence.public : full].tolist())
            sequence.pages[sequence.public : full] = sequence.lease.blocks
            sequence.standing.hold(sequence.lease.blocks)
            self._frees = -1
            if sequence.terms.erase:
                self.blocks.hide(sequence.lease.blocks)
            sequence.sound = -sequence.flying  # what is in the air still reads ours
        sequence.shared = full
        return bool(spare)

    def landed(self) -> None:
        """Nobody reads what was spare when the flight was launched that has landed."""
        self.blocks.give(self._spare)
        self._spare.clear()

    def release(self, sequence: Sequence) -> None:
        """Gives back its lease and its private blocks. The tree keeps what was cached for as long as it likes."""
        self.blocks.give(sequence.private())
        if sequence.lease is not None:
            self.blocks.give(self.tree.release(sequence.lease))
        sequence.rewind()

    def outdated(self, sequences: Items[Sequence]) -> list[Sequence]:
        """Those of all who run who would read a block that is no longer what they were given.

        Pages are compared where blocks were freed or came from the tree since the last time: 160 µs for 256 sequences
        of 64 blocks.
        """
        if self._frees == self.blocks.frees or not sequences:
            return []
        self._frees = self.blocks.frees
        pages = [sequence.pages[: sequence.blocks] for sequence in sequences]
        outdated = self.blocks.outdated(np.concatenate(pages))
        if not outdated.any():
            return []
        ends = np.cumsum([len(each) for each in pages])
        found = np.split(outdated, ends[:-1])
        return [sequence for sequence, its in zip(sequences, found, strict=True) if its.any()]

    # What is kept

    def publish(self, sequence: Sequence) -> bool:
        """Lets everybody read the prompt of a sequence that has ended, for good. False where it was not computed."""
        assert sequence.namespace is not None
        assert sequence.stage == SequenceState.ENDED
        lease = self.tree.match(sequence.namespace, sequence.tokens[: sequence.prompt_tokens], sequence.keep)
        self._pins.append(lease)
        if lease.tokens < sequence.prompt_tokens:
            return False
        self.published.add(sequence.tokens[: sequence.prompt_tokens], lease.blocks)
        return True

    def sweep(self) -> bool:
        """Gives back cached blocks that are found no more, to be erased; whether there may be more of them."""
        swept = self.tree.sweep(SWEEP_MAX)
        self.blocks.hide(swept)
        self.blocks.give(swept)
        return len(swept) == SWEEP_MAX

    def unerased(self) -> list[int]:
        """Blocks that have to be erased before anything is launched; they count as erased now."""
        blocks = self.blocks.unerased()
        self.counters["erased_blocks"] += len(blocks)
        return blocks

    # Extents

    def shrink(self, count: int, running: Items[Sequence]) -> ShrinkPlan:
        """Takes up to so many extents out of use, those in which least is held. What fits nowhere else is evicted as
        where blocks are short; of what these sequences hold, who are all that do, nothing, nor the block that each of
        them may need next."""
        extents = self.blocks.cheapest(count)
        while extents and self.blocks.size(extents) > self.available - len(running):
            extents.pop()
        self._free_up(self.blocks.size(extents))
        shrinking, renamed = self.blocks.shrink(extents)
        self._rename(renamed, running)
        return shrinking

    def sleep(self, kept_most: int) -> list[int]:
        """Nobody runs. Evicts all but what is published and, up to so many blocks with that, what is wanted soonest, of
        which nothing has to be erased or is over. Gives the blocks of what is kept."""
        while self.sweep():
            pass
        room = max(0, kept_most - len(self.published.pages))
        self.blocks.give(self.tree.keep_hottest(room, self.blocks.secrets()))
        return self.blocks.sleep()

    def woken(self, waking: WakeExtents) -> None:
        """What is kept is where it was planned to be."""
        self._rename(self.blocks.woken(waking), ())

    def _rename(self, renamed: Mapping[int, int], running: Items[Sequence]) -> None:
        """All who name pages that moved name them anew."""
        self.tree.rename(renamed)
        self.published.rename(renamed)
        for lease in self._pins:
            lease.rename(renamed)
        for sequence in running:
            held = sequence.held()
            if renamed.keys().isdisjoint(held):
                continue
            sequence.standing.let_go(held)
            sequence.pages[: sequence.blocks] = [renamed.get(page, page) for page in held]
            sequence.standing.hold(sequence.held())
            if sequence.lease is not None:
                sequence.lease.rename(renamed)
        self._frees = -1

    # Inside

    def _lease(self, sequence: Sequence, public: list[int]) -> list[int]:
        """The longest cached prefix of its own behind the published blocks; only behind these it was ever read."""
        if sequence.namespace is None:
            return []
        namespace = sequence.namespace
        if public:
            namespace = namespace._replace(behind=self.published.pages[public[-1]])
        tokens = sequence.tokens[len(public) * self._block_tokens : -1]
        sequence.lease = lease = self.tree.match(namespace, tokens, sequence.keep)
        if sequence.terms.erase:
            self.blocks.hide(lease.blocks)
        return lease.blocks

    def _take(self, count: int, secret: bool) -> list[int]:
        """So many pages, evicting from the tree what is missing. Only after asking `available`."""
        self._free_up(count)
        return self.blocks.take(count, secret)

    def _free_up(self, count: int) -> None:
        """So many blocks are free, at the cost of the tree. Only after asking `available`."""
        while self.blocks.free < count and self.sweep():
            pass
        if self.blocks.free < count:
            self.blocks.give(self.tree.evict(count - self.blocks.free))

    def check(self, holding: Items[Sequence], in_the_air: bool) -> None:
        """Every block is free, cached, private to one of these sequences or spare, and accounts hold what those do."""
        private = [page for sequence in holding for page in sequence.private()]
        cached = self.tree.check()
        self.blocks.check([*cached, *private, *self._spare])
        assert self.published.pages.keys() == {page for lease in self._pins for page in lease.blocks} <= cached
        assert in_the_air or not self._spare, "blocks are kept for nothing in the air"
        for sequence in holding:
            if sequence.lease is not None:
                assert sequence.lease.blocks == sequence.pages[sequence.public : sequence.shared].tolist()
            assert self.published.pages.keys() >= set(sequence.held()[: sequence.public])


def exceeds_cap(standing: AccountQueue[Sequence], missing: int, cached: Iterable[int]) -> bool:
    """Whether so many new blocks and these cached ones, and one more for each that runs, pass an account's cap."""
    cap = standing.terms.blocks
    if cap is None or not standing.running:
        return False
    more = missing + sum(block not in standing.readers for block in cached)
    return standing.blocks + more + standing.running > cap
