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

from engine.kv_blocks.block_pool import BlockPool, blocks_of
from engine.kv_blocks.expired_blocks import ExpiredBlocks
from engine.kv_blocks.prefix_match import PrefixMatch, StagedLoads
from engine.kv_blocks.public_prefixes import PublicPrefixes, common_prefix_length
from engine.kv_blocks.published_prefixes import PublishedPrefixes
from engine.kv_blocks.windowed_group import WindowedGroup, usable_behind
from engine.protocol.types import RejectReason
from engine.sequences.sequence import Sequence, SequenceState
from engine.sequences.validation import SubmitRejected
from engine.step.key_span import FULL
from engine.tiers.host_blocks import HostBlocks
from prefixcache.lease import Lease
from prefixcache.namespace import Namespace
from prefixcache.tier import TierEntry
from prefixcache.tree import PrefixTree


class KVManager:
    """Everything that takes blocks of pools and gives them back.

    pool      of the tree's blocks, which are those of the layers that see everything.
    windowed  the groups of the other layers, each with blocks of its own for what sequences see.
    pools     of all groups, the tree's first.
    spans     what the layers of each see; nothing has blocks of the tree where no layer sees everything.
    holders   the sequences that have blocks, in the order in which they got them.
    expired   which of the cached blocks are found no more.
    published  which of the tree's prefixes are told to those who choose replicas.
    host      where blocks are that the tree evicted, None: they are lost. The tree has names for them then.
    staged    how blocks come that another replica computed.
    """

    def __init__(
        self, tree: PrefixTree, pool: BlockPool, windowed: Items[WindowedGroup] = (),
        host: HostBlocks[Sequence] | None = None,
    ) -> None:  # fmt: skip
        assert host is None or not windowed, "what lies beside the tree's blocks would be lost"
        self.tree, self.pool, self.host, self.windowed = tree, pool, host, windowed
        self.expired = ExpiredBlocks(tree, pool, windowed)
        self.published = PublishedPrefixes(tree, pool, host)
        self.staged = StagedLoads()
        self.pools = [pool, *(group.pool for group in windowed)]
        self.spans = (FULL, *(group.span for group in windowed))
        self.pressed = 0  # see take_pressed
        self.traded_extents = 0
        self.block_tokens = tree.block_tokens
        self.holders: dict[Sequence, None] = {}
        self.public_prefixes = PublicPrefixes(tree.block_tokens)
        self._public_leases: list[Lease] = []
        self._deferred: list[int] = []  # pages to be freed when a step has landed
        self._erased_blocks = 0
        self._cancelled: Counter[str] = Counter()  # what lookups that started nothing take off the tree's counters
        self._compared_versions: list[int] = []  # of the pools, when pages were compared last; none: they have to be
        self._short: tuple[weakref.ref[Sequence], list[int]] | None = None  # found too few blocks: how many there were

    @property
    def available_blocks(self) -> int:
        """Blocks that can be had at once: free ones, and cached ones that nobody reads."""
        return self.pool.free_blocks + self.tree.unused_blocks

    @property
    def max_sequence_blocks(self) -> int:
        """Blocks that one sequence may have: of those that always have memory, so that it can end alone whatever
        shrinks."""
        return self.pool.min_blocks - len(self.public_prefixes.pages)

    def all_available(self) -> list[int]:
        """`available` of every group."""
        return [self.available(group) for group in range(len(self.pools))]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def counters(self) -> dict[str, int]:
        """The tree's counters, without lookups that started nothing, and erased_blocks, stale_pages and
        traded_extents."""
        counters = Counter(self.tree.counters)
        counters.update(self._cancelled)
        return {
            **counters,
            **({} if self.host is None else self.host.counters()),
            "erased_blocks": self._erased_blocks,
            "stale_pages": sum(pool.stale_pages for pool in self.pools),
            "traded_extents": self.traded_extents,
        }

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
        if self._short is None or self._short[0]() is not sequence:
            return False
        return all(now <= before for now, before in zip(self.all_available(), self._short[1], strict=True))

    def lease_prefix(self, sequence: Sequence) -> PrefixMatch:
        """Leases the longest cached prefix of a sequence that holds nothing: `allocate` or `cancel_lease` follows."""
        public = self.public_prefixes.find(sequence.tokens[:-1])
        pages, in_host = [*public], list[TierEntry]()
        if sequence.namespace is not None:
            tokens = sequence.tokens[len(public) * self.block_tokens : -1]
            namespace = self.namespace_behind(public, sequence.namespace)
            usable = usable_behind(public, self.windowed) if self.windowed else len
            sequence.lease = lease = self.tree.match(namespace, tokens, sequence.retention, usable)
            if self.host is not None:  # which learns of a newer epoch and of another time to live
                in_host = self.host.find(self.tree, lease, namespace, sequence.retention, tokens)
            if sequence.terms.erase:
                self.pool.mark_secret(lease.blocks)
                in_host = []  # it leaves nothing there, and takes nothing
            pages += lease.blocks
        if self.staged.blocks_of(sequence) > len(pages) + len(in_host):
            in_host = []
        return PrefixMatch(pages, len(public), self.blocks_for(len(sequence.tokens)) - len(pages), in_host)

    def fits(self, sequence: Sequence, match: PrefixMatch, spare: int) -> bool:
        """Whether there are blocks for what was not found, and `spare` more of each group."""
        lacking = match.missing_blocks + spare - self.available_blocks
        if lacking > 0:
            self.pressed = max(self.pressed, 1 + lacking)
        fits = [group.fits(len(sequence.tokens), match.pages, spare) for group in self.windowed]  # each notes its lack
        return lacking <= 0 and all(fits)

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many tokens the tree has of a sequence that holds nothing, as `lease_prefix` would find them were all of
        its windowed blocks there. It changes nothing."""
        tokens = memoryview(sequence.tokens)[:-1]
        public = self.public_prefixes.find(tokens)
        found = len(public) * self.block_tokens
        if sequence.namespace is None:
            return found
        return found + self.tree.matched_tokens(self.namespace_behind(public, sequence.namespace), tokens[found:])

    def cancel_lease(self, sequence: Sequence, match: PrefixMatch, short: bool) -> None:
        """Gives a lease back: the sequence does not start. `short`: because the pool has too few blocks."""
        if sequence.lease is not None:
            lookup_tokens = len(sequence.tokens) - 1 - match.public_blocks * self.block_tokens
            self._cancelled.update(lookups=-1, lookup_tokens=-lookup_tokens, hit_tokens=-sequence.lease.tokens)
        self.release(sequence)
        if short:
            self._short = (weakref.ref(sequence), self.all_available())

    def allocate(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Gives a sequence the pages that were found, which count as computed, and blocks for the rest, which are
        available."""
        pages = match.pages
        self.holders[sequence] = None
        sequence.append_pages(pages)
        sequence.public_blocks, sequence.shared_blocks = match.public_blocks, len(pages)
        self._compared_versions = []
        self._short = None
        sequence.computed = sequence.launched = len(pages) * self.block_tokens
        if self.host is not None:
            self.host.index.pin(match.in_host)
        missing = self._take(match.missing_blocks, sequence.terms.erase)
        sequence.append_pages(missing)
        if self.host is not None and match.in_host:
            sequence.loading_blocks = self.host.load(sequence, match.in_host, blocks_of(missing))
        else:
            sequence.loading_blocks = self.staged.load(sequence, len(pages), blocks_of(missing))
        for group in self.windowed:
            group.begin(sequence)
        self.cover(sequence, sequence.launched + 1)
        if sequence.lease is not None and sequence.start_order < 0 and sequence.id == sequence.first_id:
            self.tree.count_read(sequence.lease)
        sequence.account_queue.add_blocks(sequence.held_pages())

    def take_arrived(self) -> list[Sequence]:
        """The sequences whose blocks came, from the host or from another replica. Each is returned once."""
        return self.staged.take_arrived() + ([] if self.host is None else self.host.take_arrived())

    def arrive(self, sequence: Sequence, in_flight: bool) -> bool:
        """Caches what a sequence began with, and is there by now. Returns as `cache_full_blocks` does."""
        sequence.computed += sequence.loading_blocks * self.block_tokens
        sequence.launched, sequence.loading_blocks = sequence.computed, 0
        return self.cache_full_blocks(sequence, in_flight)

    def append_block(self, sequence: Sequence) -> None:
        """Gives a sequence one more block, which is available."""
        pages = self._take(1, sequence.terms.erase)
        sequence.append_pages(pages)
        sequence.account_queue.add_blocks(pages)

    def cover(self, sequence: Sequence, tokens: int, spare: int = 0) -> int:
        """Takes windowed blocks for a sequence's positions below `tokens`, as many as leave `spare` ones available.
        Returns how many of these tokens have blocks then."""
        sweep = self.expired.sweep
        return min((group.cover(sequence, tokens, spare, sweep) for group in self.windowed), default=tokens)

    def advance(self, sequence: Sequence) -> None:
        """Gives back the windowed blocks that no row of the sequence sees that has yet to land."""
        self.expired.mark_held(sequence)
        for group in self.windowed:
            group.advance(sequence)

    def cache_full_blocks(self, sequence: Sequence, in_flight: bool) -> bool:
        """Puts the blocks that became full into the tree. Where the tree has the same already, the sequence reads the
        tree's from now on, and its own are freed once no step in flight reads them. Returns whether that is so."""
        if sequence.namespace is None:
            return False
        size, shared, full = self.block_tokens, sequence.shared_blocks, sequence.computed // self.block_tokens
        assert sequence.lease is not None
        pages = sequence.pages[shared:full].tolist()
        self.expired.mark_held(sequence)
        self.expired.before_cap(sequence.lease, len(pages))
        sequence.lease, spare = self.tree.insert(sequence.lease, sequence.tokens[shared * size : full * size], pages)
        if spare:
            self._remove_windowed(spare)
            if in_flight:
                self._deferred += spare
            else:
                self.pool.free(spare)
            sequence.account_queue.remove_blocks(sequence.pages[sequence.public_blocks : full].tolist())
            sequence.pages[sequence.public_blocks : full] = sequence.lease.blocks
            sequence.account_queue.add_blocks(sequence.lease.blocks)
            self._compared_versions = []
            if sequence.terms.erase:
                self.pool.mark_secret(sequence.lease.blocks)
            sequence.finite_samples = -sequence.inflight_steps  # steps in flight still read its own blocks
        for group in self.windowed:
            group.cache(sequence, shared, full)
        sequence.shared_blocks = full
        return bool(spare)

    def free_deferred(self) -> None:
        """Frees the pages that only the step read that has landed."""
        self.pool.free(self._deferred)
        self._deferred.clear()

    def release(self, sequence: Sequence) -> None:
        """Gives back a sequence's lease and its private blocks; cached ones stay in the tree."""
        self.expired.mark_held(sequence)
        for group in self.windowed:
            group.release(sequence)
        self.pool.free(sequence.private_pages())
        if sequence.lease is not None:
            self.expired.before_cap(sequence.lease, 0)
            self._free_of_tree(self.tree.release(sequence.lease))
        self.holders.pop(sequence, None)
        sequence.rewind()

    def with_stale_pages(self, sequences: Items[Sequence]) -> list[Sequence]:
        """The running sequences that would read a block which is no longer what they were given.

        Pages are compared where blocks were freed or came from the tree since the last time: 160 µs for 256 sequences
        of 64 blocks.
        """
        versions = [pool.version for pool in self.pools]
        if self._compared_versions == versions or not sequences:
            return []
        self._compared_versions = versions
        stale = self.pool.stale_runs([sequence.pages[: sequence.block_count] for sequence in sequences])
        for index, group in enumerate(self.windowed):
            stale |= group.pool.stale_runs([sequence.window_tables[index].pages for sequence in sequences])
        return [sequence for sequence, wrong in zip(sequences, stale.tolist(), strict=True) if wrong]

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
        first = max(0, max(verified, default=0) - suspect.public_blocks)
        if self.host is not None:
            self.host.forget(self.tree.names(suspect.lease)[1 + first :])
        self.tree.forget(suspect.lease, first)

    # What stays cached

    def publish(self, sequence: Sequence) -> bool:
        """Lets everybody read the prompt of a sequence that has ended, for good. False where it was not computed."""
        assert sequence.namespace is not None
        assert sequence.state == SequenceState.ENDED
        lease = self.tree.match(sequence.namespace, sequence.tokens[: sequence.prompt_tokens], sequence.retention)
        self._public_leases.append(lease)
        if lease.tokens < sequence.prompt_tokens or not all(group.pin_all(lease.blocks) for group in self.windowed):
            return False
        self.public_prefixes.add(sequence.tokens[: sequence.prompt_tokens], lease.blocks)
        return True

    def take_unerased(self, group: int = 0) -> list[int]:
        """Blocks of a group that have to be erased before anything is launched; they count as erased now."""
        blocks = self.pools[group].take_unerased()
        self._erased_blocks += len(blocks)
        return blocks

    def available(self, group: int) -> int:
        """Blocks of a group that can be had at once."""
        return self.windowed[group - 1].available_blocks if group else self.available_blocks

    def cached(self, group: int) -> int:
        """Blocks of a group that others may find."""
        return self.windowed[group - 1].cached.cached if group else self.tree.cached_blocks

    def free_up(self, group: int, count: int) -> None:
        """Frees blocks of a group until there are so many, at the cost of what is cached. Only after asking
        `available`."""
        if group:
            self.windowed[group - 1].free_up(count, self.expired.sweep)
        else:
            self._free_up(count)

    def unused_s(self, group: int) -> float | None:
        """For how long nobody used what the group would evict next; None where there is nothing."""
        return self.windowed[group - 1].cached.unused_s() if group else self.tree.unused_s()

    def take_pressed(self) -> list[int]:
        """For each group: 1 where it had to evict since the last time, and as many more as a prompt lacked."""
        pressed = [self.pressed, *(group.pressed for group in self.windowed)]
        self.pressed = 0
        for group in self.windowed:
            group.pressed = 0
        return pressed

    def retry_short(self) -> None:
        """Lets a sequence that found too few blocks try again."""
        self._short = None

    def forget_all_but(self, max_blocks: int) -> None:
        """Frees what is cached but public prefixes and, with them, up to so many blocks of each group that are wanted
        soonest, or, where there is a host, what it has no room for; nothing runs."""
        self.expired.free_all()
        room = max(0, max_blocks - len(self.public_prefixes.pages)) if self.host is None else self.host.index.slots
        self._free_of_tree(self.tree.keep_hottest(room, self.pool.secret_pages()))
        if self.host is not None:
            self.tree.take_departed()  # there is no room for that
            self._free_of_tree(self._evict(self.tree.unused_blocks))
        for group in self.windowed:
            group.keep(room)

    def rename(self, group: int, renamed: Mapping[int, int]) -> None:
        """Renames pages of a group that moved, wherever they are named."""
        if group:
            self.windowed[group - 1].rename(renamed, self.holders)
        else:
            self._rename(renamed)
        self._compared_versions = []

    def _rename(self, renamed: Mapping[int, int]) -> None:
        self.tree.rename(renamed)
        self.public_prefixes.rename(renamed)
        for windowed in self.windowed:
            windowed.rename_tree(renamed)
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

    # Inside

    def namespace_behind(self, public: Items[int], namespace: Namespace) -> Namespace:
        """The namespace of what follows these public pages: it was only ever read behind them."""
        return namespace._replace(behind=self.public_prefixes.pages[public[-1]]) if public else namespace

    def _free_of_tree(self, pages: list[int]) -> None:
        """Frees blocks that have left the tree, with what lies beside them."""
        self._remove_windowed(pages)
        self.pool.free(pages)

    def _remove_windowed(self, pages: list[int]) -> None:
        for group in self.windowed:
            group.remove(pages)

    def _take(self, count: int, secret: bool) -> list[int]:
        """So many pages, evicting from the tree what is missing. Only after asking `available_blocks`."""
        self._free_up(count)
        return self.pool.allocate(count, secret)

    def _free_up(self, count: int) -> None:
        """Frees blocks until there are so many, at the cost of the tree. Only after asking `available_blocks`."""
        while self.pool.free_blocks < count and self.expired.sweep():
            pass
        if self.pool.free_blocks < count:
            self.pressed = max(self.pressed, 1)
            self._free_of_tree(self._evict(count - self.pool.free_blocks))

    def _evict(self, count: int) -> list[int]:
        """Takes so many blocks off the tree, and stores in the host what may be kept there. The caller frees them."""
        pages = self.tree.evict(count)
        if self.host is not None:
            self.host.store(self.tree.take_departed(), self.pool.secret_of(pages))
        return pages

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
        for group in self.windowed:
            group.check(self.holders, cached)
