"""What sequences hold of the KV pool: leased prefixes and private blocks, and which of them become cached. It does not
know who runs next, nor what steps compute.

A block is free, cached in the prefix tree, private to one sequence, or deferred: a duplicate of what the tree had
already, which a step in flight still reads. What a sequence holds counts for its account. Where contents move to other
blocks, as extents come and go, all that names them is renamed here, at once, while nothing is in flight.
"""

import weakref
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine.protocol.types import RejectReason
from engine.scheduling.block_pool import BlockPool, ShrinkPlan, WakeExtents
from engine.scheduling.fair_queue import AccountQueue
from engine.scheduling.public_prefixes import PublicPrefixes, common_prefix_length
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.validation import SubmitRejected
from prefixcache.namespace import Namespace
from prefixcache.tree import Lease, PrefixTree

SWEEP_MAX: Final = 128  # blocks given back beside one step: erasing so many takes a fraction of it


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What a sequence is to begin with: the pages that are cached, `public_blocks` of them public, and how many blocks
    are missing."""

    pages: list[int]
    public_blocks: int
    missing_blocks: int


class KVManager:
    """Everything that takes blocks of a pool and gives them back.

    holders  the sequences that have blocks, in the order in which they got them.
    """

    def __init__(self, tree: PrefixTree, pool: BlockPool) -> None:
        self.tree = tree
        self.pool = pool
        self.block_tokens = tree.block_tokens
        self.holders: dict[Sequence, None] = {}
        self.public_prefixes = PublicPrefixes(tree.block_tokens)
        self._public_leases: list[Lease] = []
        self._deferred: list[int] = []  # pages to be freed when a step has landed
        self._erased_blocks = 0
        self._cancelled: Counter[str] = Counter()  # what lookups that started nothing take off the tree's counters
        self._compared_version = -1  # of the pool, when pages were compared last; −1: they have to be
        self._short: tuple[weakref.ref[Sequence], int] | None = None  # found too few blocks, and how many there were

    @property
    def available_blocks(self) -> int:
        """Blocks that can be had at once: free ones, and cached ones that nobody reads."""
        return self.pool.free_blocks + self.tree.unused_blocks

    @property
    def max_sequence_blocks(self) -> int:
        """Blocks that one sequence may have: of those that always have memory, so that it can end alone whatever
        shrinks."""
        return self.pool.min_blocks - len(self.public_prefixes.pages)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def counters(self) -> dict[str, int]:
        """The tree's counters, without lookups that started nothing, and erased_blocks and stale_pages."""
        counters = Counter(self.tree.counters)
        counters.update(self._cancelled)
        return {**counters, "erased_blocks": self._erased_blocks, "stale_pages": self.pool.stale_pages}

    # From a sequence's start to its end

    def refuse_too_long(self, sequence: Sequence) -> None:
        """Raises SubmitRejected for a sequence that can never run here."""
        tokens, size, cap = sequence.max_total_tokens, self.block_tokens, sequence.terms.blocks
        blocks, max_blocks = self.blocks_for(tokens - 1), self.max_sequence_blocks
        if blocks > max_blocks:
            raise SubmitRejected(RejectReason.TOO_LONG, f"{tokens} tokens can never fit a pool of {max_blocks * size}")
        if cap is not None and blocks > cap:
            raise SubmitRejected(
                RejectReason.TOO_LONG,
                f"{tokens} tokens can never fit the {cap * size} that this account may have at once; "
                "send a shorter prompt, or ask for fewer tokens",
            )

    def still_short(self, sequence: Sequence) -> bool:
        """Whether this sequence was the last that found too few blocks, and no more can be had since."""
        return self._short is not None and self._short[0]() is sequence and self.available_blocks <= self._short[1]

    def lease_prefix(self, sequence: Sequence) -> PrefixMatch:
        """Leases the longest cached prefix of a sequence that holds nothing: `allocate` or `cancel_lease` follows."""
        public = self.public_prefixes.find(sequence.tokens[:-1])
        pages = [*public]
        if sequence.namespace is not None:
            tokens = sequence.tokens[len(public) * self.block_tokens : -1]
            namespace = self._behind(public, sequence.namespace)
            sequence.lease = lease = self.tree.match(namespace, tokens, sequence.retention)
            if sequence.terms.erase:
                self.pool.mark_secret(lease.blocks)
            pages += lease.blocks
        return PrefixMatch(pages, len(public), self.blocks_for(len(sequence.tokens)) - len(pages))

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many tokens `lease_prefix` would find for a sequence that holds nothing. It changes nothing."""
        tokens = memoryview(sequence.tokens)[:-1]
        public = self.public_prefixes.find(tokens)
        found = len(public) * self.block_tokens
        if sequence.namespace is None:
            return found
        return found + self.tree.matched_tokens(self._behind(public, sequence.namespace), tokens[found:])

    def cancel_lease(self, sequence: Sequence, match: PrefixMatch, short: bool) -> None:
        """Gives a lease back: the sequence does not start. `short`: because the pool has too few blocks."""
        if sequence.lease is not None:
            lookup_tokens = len(sequence.tokens) - 1 - match.public_blocks * self.block_tokens
            self._cancelled.update(lookups=-1, lookup_tokens=-lookup_tokens, hit_tokens=-sequence.lease.tokens)
        self.release(sequence)
        if short:
            self._short = (weakref.ref(sequence), self.available_blocks)

    def allocate(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Gives a sequence the pages that were found, which count as computed, and blocks for the rest, which are
        available."""
        pages = match.pages
        self.holders[sequence] = None
        sequence.append_pages(pages)
        sequence.public_blocks, sequence.shared_blocks = match.public_blocks, len(pages)
        self._compared_version = -1
        self._short = None
        sequence.computed = sequence.launched = len(pages) * self.block_tokens
        sequence.append_pages(self._take(match.missing_blocks, sequence.terms.erase))
        if sequence.lease is not None and sequence.start_order < 0 and sequence.id == sequence.first_id:
            self.tree.count_read(sequence.lease)
        sequence.account_queue.add_blocks(sequence.held_pages())

    def append_block(self, sequence: Sequence) -> None:
        """Gives a sequence one more block, which is available."""
        pages = self._take(1, sequence.terms.erase)
        sequence.append_pages(pages)
        sequence.account_queue.add_blocks(pages)

    def cache_full_blocks(self, sequence: Sequence, in_flight: bool) -> bool:
        """Puts the blocks that became full into the tree. Where the tree has the same already, the sequence reads the
        tree's from now on, and its own are freed once no step in flight reads them. Returns whether that is so."""
        if sequence.namespace is None:
            return False
        size, shared, full = self.block_tokens, sequence.shared_blocks, sequence.computed // self.block_tokens
        assert sequence.lease is not None
        pages = sequence.pages[shared:full].tolist()
        sequence.lease, spare = self.tree.insert(sequence.lease, sequence.tokens[shared * size : full * size], pages)
        if spare:
            if in_flight:
                self._deferred += spare
            else:
                self.pool.free(spare)
            sequence.account_queue.remove_blocks(sequence.pages[sequence.public_blocks : full].tolist())
            sequence.pages[sequence.public_blocks : full] = sequence.lease.blocks
            sequence.account_queue.add_blocks(sequence.lease.blocks)
            self._compared_version = -1
            if sequence.terms.erase:
                self.pool.mark_secret(sequence.lease.blocks)
            sequence.finite_samples = -sequence.inflight_steps  # steps in flight still read its own blocks
        sequence.shared_blocks = full
        return bool(spare)

    def free_deferred(self) -> None:
        """Frees the pages that only the step read that has landed."""
        self.pool.free(self._deferred)
        self._deferred.clear()

    def release(self, sequence: Sequence) -> None:
        """Gives back a sequence's lease and its private blocks; cached ones stay in the tree."""
        self.pool.free(sequence.private_pages())
        if sequence.lease is not None:
            self.pool.free(self.tree.release(sequence.lease))
        self.holders.pop(sequence, None)
        sequence.rewind()

    def with_stale_pages(self, sequences: Items[Sequence]) -> list[Sequence]:
        """The running sequences that would read a block which is no longer what they were given.

        Pages are compared where blocks were freed or came from the tree since the last time: 160 µs for 256 sequences
        of 64 blocks.
        """
        if self._compared_version == self.pool.version or not sequences:
            return []
        self._compared_version = self.pool.version
        pages = [sequence.pages[: sequence.block_count] for sequence in sequences]
        stale = self.pool.are_stale(np.concatenate(pages))
        if not stale.any():
            return []
        ends = np.cumsum([len(part) for part in pages])
        parts = np.split(stale, ends[:-1])
        return [sequence for sequence, part in zip(sequences, parts, strict=True) if part.any()]

    def forget_suspect(self, suspect: Sequence, running: Items[Sequence]) -> None:
        """Makes the blocks that a sequence read unfindable, from the first on that no other running sequence reads
        whose tokens were sampled from finite numbers."""
        if suspect.lease is None:
            return
        blocks = suspect.table[: suspect.shared_blocks]
        verified = (
            common_prefix_length(blocks, sequence.table[: sequence.shared_blocks])
            for sequence in running
            if sequence.finite_samples > 0 and sequence.namespace == suspect.namespace
        )
        self.tree.forget(suspect.lease, max(0, max(verified, default=0) - suspect.public_blocks))

    # What stays cached

    def publish(self, sequence: Sequence) -> bool:
        """Lets everybody read the prompt of a sequence that has ended, for good. False where it was not computed."""
        assert sequence.namespace is not None
        assert sequence.state == SequenceState.ENDED
        lease = self.tree.match(sequence.namespace, sequence.tokens[: sequence.prompt_tokens], sequence.retention)
        self._public_leases.append(lease)
        if lease.tokens < sequence.prompt_tokens:
            return False
        self.public_prefixes.add(sequence.tokens[: sequence.prompt_tokens], lease.blocks)
        return True

    def sweep(self) -> bool:
        """Frees cached blocks that are found no more, to be erased. Returns whether there may be more of them."""
        pages = self.tree.sweep(SWEEP_MAX)
        self.pool.mark_secret(pages)
        self.pool.free(pages)
        return len(pages) == SWEEP_MAX

    def take_unerased(self) -> list[int]:
        """Blocks that have to be erased before anything is launched; they count as erased now."""
        blocks = self.pool.take_unerased()
        self._erased_blocks += len(blocks)
        return blocks

    # Extents

    def grow(self, extents: Items[int]) -> None:
        """Adds the blocks of newly mapped extents, and lets a sequence that found too few blocks try again."""
        self.pool.grow(extents)
        self._short = None

    def shrink(self, count: int) -> ShrinkPlan:
        """Takes up to so many extents out of use, those in which least is held. What fits nowhere else is evicted as
        where blocks are short, but nothing that sequences hold, nor the block that each of them may need next.

        To be done next, in this order: erase the blocks of `take_unerased`, copy the plan's sources to its targets,
        erase what is `secret` of the sources, and unmap the extents.
        """
        self._short = None
        extents = self.pool.cheapest_extents(count)
        while extents and self.pool.blocks_in(extents) > self.available_blocks - len(self.holders):
            extents.pop()
        self._free_up(self.pool.blocks_in(extents))
        plan, renamed = self.pool.shrink(extents)
        self._rename(renamed)
        return plan

    def sleep(self, max_kept_blocks: int) -> list[int]:
        """Takes all memory off the pool, while nothing runs. Returns the blocks that are kept, in the order in which
        they are to be restored: public prefixes, always, and with them up to so many blocks of what is wanted soonest;
        never a secret, nor what is found no more. `take_unerased` is to be erased before the memory is unmapped.

        Asleep, `take_unerased` names blocks that were kept and then freed as they were returned here.
        """
        while self.sweep():
            pass
        room = max(0, max_kept_blocks - len(self.public_prefixes.pages))
        self.pool.free(self.tree.keep_hottest(room, self.pool.secret_pages()))
        return self.pool.sleep()

    def finish_wake(self, plan: WakeExtents) -> None:
        """Wakes the pool as planned. A sleep that failed is taken back by the extents that had memory before, and the
        blocks that `sleep` returned."""
        self._short = None
        self._rename(self.pool.finish_wake(plan))

    def _rename(self, renamed: Mapping[int, int]) -> None:
        """Renames pages that moved, wherever they are named."""
        self.tree.rename(renamed)
        self.public_prefixes.rename(renamed)
        for lease in self._public_leases:
            lease.rename(renamed)
        for sequence in self.holders:
            pages = sequence.held_pages()
            if renamed.keys().isdisjoint(pages):
                continue
            sequence.account_queue.remove_blocks(pages)
            sequence.pages[: sequence.block_count] = [renamed.get(page, page) for page in pages]
            sequence.account_queue.add_blocks(sequence.held_pages())
            if sequence.lease is not None:
                sequence.lease.rename(renamed)
        self._compared_version = -1

    # Inside

    def _behind(self, public: Items[int], namespace: Namespace) -> Namespace:
        """The namespace of what follows these public pages: it was only ever read behind them."""
        return namespace._replace(behind=self.public_prefixes.pages[public[-1]]) if public else namespace

    def _take(self, count: int, secret: bool) -> list[int]:
        """So many pages, evicting from the tree what is missing. Only after asking `available_blocks`."""
        self._free_up(count)
        return self.pool.allocate(count, secret)

    def _free_up(self, count: int) -> None:
        """Frees blocks until there are so many, at the cost of the tree. Only after asking `available_blocks`."""
        while self.pool.free_blocks < count and self.sweep():
            pass
        if self.pool.free_blocks < count:
            self.pool.free(self.tree.evict(count - self.pool.free_blocks))

    def check(self, in_flight: bool) -> None:
        """Every block is free, cached, private to one holder or deferred, and leases match tables."""
        private = [page for sequence in self.holders for page in sequence.private_pages()]
        cached = self.tree.check()
        public = self.public_prefixes.pages.keys()
        self.pool.check([*cached, *private, *self._deferred])
        assert public == {page for lease in self._public_leases for page in lease.blocks} <= cached
        assert in_flight or not self._deferred, "blocks are kept for no step in flight"
        for sequence in self.holders:
            if sequence.lease is not None:
                own = sequence.pages[sequence.public_blocks : sequence.shared_blocks].tolist()
                assert sequence.lease.blocks == own
            assert public >= set(sequence.held_pages()[: sequence.public_blocks])


def exceeds_cap(account: "AccountQueue[Sequence]", match: PrefixMatch) -> bool:
    """Whether the missing blocks and the cached ones, and one more for each that runs, pass an account's cap."""
    cap = account.terms.blocks
    if cap is None or not account.running:
        return False
    more = match.missing_blocks + sum(page not in account.readers for page in match.pages)
    return account.blocks + more + account.running > cap
