"""A seeded life of a replica whose layers see only near keys beside those that see all, with accounts that have floors,
caps, times to live and epochs, and what it must be in every group after every step.

The oracle is slow and knows the definitions alone: which keys a window or a chunk shows, who wrote each slot, what an
account was promised. It looks into tree and groups for nothing but which blocks are there.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from engine.kv_blocks.block_pool import BlockPool, ShrinkPlan, blocks_of
from engine.kv_blocks.prefix_match import PrefixMatch
from engine.kv_blocks.windowed_group import WindowedGroup
from engine.protocol.types import SchedulingTerms, Scope, ScopeKind
from engine.sequences.sequence import Sequence
from engine.sequences.validation import SubmitRejected
from engine.step.key_span import KeySpan
from prefixcache.radix import NamespaceRoot, RadixNode
from tests.engine.scheduling.simulation.replica import GROUPING, Heard, Simulation
from tests.engine.scheduling.simulation.windows import WindowSize
from tests.engine.scheduling.test_scheduler import words

ACCOUNTS = [b"1" * 16, b"2" * 16, b"3" * 16]
SCOPES = [
    *(Scope(ScopeKind.TENANT, account, account=account) for account in ACCOUNTS),
    Scope(ScopeKind.USER, b"u" * 16, account=ACCOUNTS[0]),
    Scope(),
]
PUBLIC = words(20, 77)


class WindowedLife:
    """One seeded life: requests of all scopes under their accounts' terms, purges, time that passes, preemptions,
    sleeps, extents and trades, with windows and chunks. `seen` counts what happened."""

    def __init__(self, seed: int) -> None:
        pick = self.pick = random.Random(seed)
        extent = pick.choice([4, 8])
        spans = [KeySpan(window=pick.choice([1, 5, 9, 30])), KeySpan(chunk=pick.choice([4, 8, 32]))]
        public = pick.choice([[], [PUBLIC[:8]], [PUBLIC[:8], PUBLIC]])
        least = 12 + max(map(len, public), default=0) // 4  # as memory_plan has it
        sizes = [
            WindowSize(
                span, 64, extent, pick.randrange(-(-least // extent), 64 // extent), least, pick.choice([16, 64])
            )
            for span in pick.sample(spans, pick.choice([1, 2]))
        ]
        grouping = replace(GROUPING, windows=tuple((size.span.tokens or 0, 0.3) for size in sizes))
        self.simulation = simulation = Simulation(
            blocks=96, extent_blocks=extent, mapped=range(pick.randrange(48 // extent, 96 // extent)), least=32,
            step_tokens=pick.choice([4, 16]), sequences=6, depth=pick.choice([1, 2]), windows=sizes,
            public=public, costs=pick.choice([None, grouping, grouping]),
        )  # fmt: skip
        self.terms = {
            account: SchedulingTerms(
                floor_blocks=pick.choice([None, None, 6, 12]),
                cap_blocks=pick.choice([None, None, 4, 16]),
                blocks=pick.choice([None, None, 26]),
                keep_s=pick.choice([None, None, 3.5, 30.5]),
            )
            for account in [*ACCOUNTS, b""]
        }
        self.epochs = Counter[bytes]()
        self.seen = Counter[str]()
        self.ids = 0
        self.text = [pick.randrange(1000) for _ in range(64)]
        self.entries: list[Heard] = []
        self.unfindable: list[set[int]] = [set() for _ in simulation.memories]  # pages, of each group
        self._watch()

    # What happens

    def run(self, acts: int = 100) -> "WindowedLife":
        for _ in range(acts):
            self.act()
            self.check()
        if self.simulation.asleep:
            self.simulation.wake()
        for _ in range(3000):
            if self.simulation.loop.idle:
                break
            self.step()
            self.check()
        self.simulation.assert_all_finished()
        counters = self.simulation.scheduler.load(draining=False).counters
        assert counters.get("stale_reads", 0) == counters["stale_pages"] == 0, (
            "a page changed and somebody was not told"
        )
        self.seen.update({name: counters.get(f"evicted_{name}_blocks", 0) for name in ("space", "cap", "epoch", "age")})
        return self

    def act(self) -> None:
        simulation, pick = self.simulation, self.pick
        act = pick.random()
        if act < 0.03:
            self.purge()
        elif act < 0.06:
            simulation.seconds += pick.choice([3, 20, 40])
        elif simulation.asleep:
            simulation.wake(pick.randrange(4), fails=act < 0.2)
        elif act < 0.32:
            self.submit()
        elif act < 0.36 and simulation.scheduler.running.sequences:
            sequence = pick.choice(simulation.scheduler.running.sequences)
            simulation.land()
            if sequence in simulation.scheduler.running.sequences:
                simulation.scheduler.preempt(sequence)
        elif act < 0.4:
            simulation.shrink(1, pick.randrange(len(simulation.memories)))
        elif act < 0.44:
            simulation.grow(1, pick.randrange(len(simulation.memories)))
        elif act < 0.47:
            self.sleep()
        else:
            self.step()

    def submit(self) -> None:
        pick = self.pick
        scope = pick.choice(SCOPES)
        late = pick.random() < 0.1
        scope = msgspec.structs.replace(scope, epoch=max(0, self.epochs[scope.account] - late))
        tokens = self.text[: pick.randrange(1, 64)] + [pick.randrange(1000) for _ in range(pick.randrange(8))]
        terms = msgspec.structs.replace(
            self.terms[scope.account], erase=pick.random() < 0.3, background=pick.random() < 0.2
        )
        try:
            self.entries += self.simulation.submit(
                self.ids + 1, PUBLIC[: pick.choice([0, 0, 8, 20])] + tokens, scope,
                max_tokens=pick.randrange(1, 20), terms=terms,
            )  # fmt: skip
        except SubmitRejected:
            self.seen["refused"] += 1
        else:
            self.ids += 1

    def step(self) -> None:
        """A turn, in which memory may change hands and none is added."""
        before = self.mapped_bytes()
        self.simulation.step()
        assert self.mapped_bytes() <= before, "a trade took more than it gave"
        load = self.simulation.scheduler.load(draining=False)
        assert load.free_blocks + load.cached_blocks <= load.blocks, "blocks of several groups are counted together"

    def purge(self) -> None:
        """What an account has from before is found no more, though nobody asks for it."""
        account = self.pick.choice(ACCOUNTS)
        self.epochs[account] += 1
        tree = self.simulation.scheduler.kv.tree
        tree.raise_epochs({account: self.epochs[account]})
        epochs = [root.namespace.epoch for root in tree._roots.values() if root.account.name == account]
        assert min(epochs, default=self.epochs[account]) >= self.epochs[account], "what was purged can be found"
        self.seen["purges"] += 1

    def sleep(self) -> None:
        simulation, kv = self.simulation, self.simulation.scheduler.kv
        most, fails = self.pick.randrange(8), self.pick.random() < 0.3
        simulation.sleep(most, fails)
        public = len(kv.public_prefixes.pages)
        kept = kv.tree.check()
        assert len(kept) <= max(most, public)
        assert self.secret_pages(0).isdisjoint(kept), "a secret is kept"
        for group in kv.windowed:
            beside = {*group.cached.beside(kept)}
            assert len(beside) <= max(most, public)
            assert self.secret_pages(group.index + 1).isdisjoint(beside), "a secret of a window is kept"
            self.seen["kept"] += not fails and len(beside) > public

    def mapped_bytes(self) -> int:
        return sum(len(memory.mapped) * memory.layout.extent_bytes for memory in self.simulation.memories)

    # What has to be so after every step

    def check(self) -> None:
        simulation, kv = self.simulation, self.simulation.scheduler.kv
        self.note_unfindable()
        for group, window in zip(kv.windowed, simulation.windows, strict=True):
            assert group.cached._blocks.keys() >= kv.public_prefixes.pages.keys(), "a window of what is public is gone"
            if not simulation.asleep:
                secret = {block for block, slots in enumerate(window.slots) if _secret(slots)}
                secret.difference_update(group.pool._unerased)  # before the next launch
                assert secret.isdisjoint(group.pool._free), "a block of a window is free and was not erased"
                self._assert_same_tokens(group)
                self._assert_caps(group)

    def _assert_same_tokens(self, group: WindowedGroup) -> None:
        """What lies beside a block of the tree is of the same scope, and holds the same tokens."""
        simulation, size = self.simulation, self.simulation.block_tokens
        stamps, window = simulation.stamps, simulation.windows[group.index]
        positions, tokens, scopes = stamps.position_GK[0].tolist(), stamps.token_GK[0].tolist(), stamps.scope_GK[0]
        for page, beside in group.cached._blocks.items():
            (block,), (other,) = blocks_of([page]), blocks_of([beside])
            for at, slot in enumerate(window.slots[other], block * size):
                assert slot is not None, "nobody wrote it"
                writer, position = slot
                assert (position, writer.tokens[position]) == (positions[at], tokens[at]), "other tokens"
            assert simulation._claim(writer).scope == scopes[at], "it lies beside a block of another scope"

    def _assert_caps(self, group: WindowedGroup) -> None:
        held = {sequence.account for sequence in self.simulation.scheduler.kv.holders}
        pages = [page for beside, page in group.cached._blocks.items() if beside not in self.unfindable[0]]
        counts = Counter(writer.retention.account for writer in self._writers(group, pages))
        for account, count in counts.items():
            cap = self.terms[account].cap_blocks if account else None
            if cap is not None and account not in held:
                assert count <= cap, "unused windows are kept above the cap"
                self.seen["capped"] += count == cap

    def counts(self, group: WindowedGroup) -> Counter[bytes]:
        """How many cached blocks of the group each account has, by who wrote them."""
        return Counter(writer.retention.account for writer in self._writers(group, [*group.cached._blocks.values()]))

    def _writers(self, group: WindowedGroup, pages: list[int]) -> Iterator[Sequence]:
        for block in blocks_of(pages):
            slot = self.simulation.windows[group.index].slots[block][0]
            assert slot is not None
            yield slot[0]

    def secret_pages(self, group: int) -> set[int]:
        return self.simulation.scheduler.kv.pools[group].secret_pages()

    def note_unfindable(self) -> None:
        """Notes the pages that are found no more: those of old epochs, and those whose time is over."""
        kv, now_s = self.simulation.scheduler.kv, self.simulation.seconds
        pages: set[int] = set()
        for root in [*kv.tree._roots.values(), *kv.tree.wiped.roots]:
            wiped = root in kv.tree.wiped.roots
            keep_s = self.terms[root.account.name].keep_s if root.account.name else None
            for node in _below(root):
                expired = keep_s is not None and not node.pins and node.used_s <= now_s - keep_s
                pages.update(node.blocks if wiped or expired else ())
        self.unfindable[0] = pages
        for group in kv.windowed:
            self.unfindable[group.index + 1] = {*group.cached.beside(pages)}

    # What is watched as it happens

    def _watch(self) -> None:
        kv = self.simulation.scheduler.kv
        kv.lease_prefix = self._watched_lease(kv.lease_prefix)  # type: ignore[method-assign]
        for index, pool in enumerate(kv.pools):
            self._watch_pool(index, pool)
        for group in kv.windowed:
            group.cached.evict = self._watched_evict(group, group.cached.evict)  # type: ignore[method-assign]

    def _watch_pool(self, index: int, pool: BlockPool) -> None:
        """What is found no more is erased as it is freed, and where it moved from."""
        free, shrink = pool.free, pool.shrink

        def watched_free(pages: list[int]) -> None:
            lost = self.unfindable[index].intersection(pages)
            assert len(pool.secret_of([*lost])) == len(lost), f"group {index} frees what is lost, and does not erase it"
            self.seen[f"lost_{min(index, 1)}"] += len(lost)
            free(pages)

        def watched_shrink(extents: list[int]) -> tuple[ShrinkPlan, dict[int, int]]:
            plan, renamed = shrink(extents)
            lost = blocks_of([page for page in renamed if page in self.unfindable[index]])
            assert {*lost} <= {*plan.secret}, "memory is given away with what is lost in it"
            self.seen["moved_lost"] += len(lost)
            self.unfindable[index] = {renamed.get(page, page) for page in self.unfindable[index]}
            return plan, renamed

        pool.free, pool.shrink = watched_free, watched_shrink  # type: ignore[method-assign, assignment]

    def _watched_lease(self, lease_prefix: Callable[[Sequence], PrefixMatch]) -> Callable[[Sequence], PrefixMatch]:
        """A prefix is found as far as the tree has it, and every group has what its next token sees, and no further."""
        kv = self.simulation.scheduler.kv

        def watched(sequence: Sequence) -> PrefixMatch:
            public, known = kv.public_prefixes.find(sequence.tokens[:-1]), kv.cached_tokens(sequence)
            pages, size = [*public], self.simulation.block_tokens
            if sequence.namespace is not None:
                root = kv.tree._roots.get(kv.namespace_behind(public, sequence.namespace))
                rest = sequence.tokens[len(pages) * size :].tobytes()
                pages += [] if root is None else _path(root, rest)
                pages = pages[: known // size]
            best = max(
                count
                for count in range(len(public), len(pages) + 1)
                if all({pages[at] for at in _seen(group.span, count * size, size)} <= group.cached._blocks.keys()
                       for group in kv.windowed)
            )  # fmt: skip
            match = lease_prefix(sequence)
            assert match.pages == pages[:best], "not the longest prefix whose next token sees all"
            assert self.unfindable[0].isdisjoint(match.pages), "what was purged was found, or what was over"
            late = sequence.namespace is not None and sequence.namespace.epoch < self.epochs[sequence.account]
            self.seen.update(found=best > len(public), shortened=best < len(pages), late=late)
            self.note_unfindable()
            return match

        return watched

    def _watched_evict(self, group: WindowedGroup, evict: Callable[[int], list[int]]) -> Callable[[int], list[int]]:
        """An account goes below its floor only where no other has unused blocks above its own."""

        def watched(count: int) -> list[int]:
            before = self.counts(group)
            pages = evict(count)
            after = self.counts(group)
            writers = self._writers(group, [page for _, page in group.cached.unused_items()])
            above = {
                account
                for account in {writer.retention.account for writer in writers}
                if after[account] > self._floor(account)
            }
            for account, had in before.items():
                lost = had - after[account]
                assert not lost or after[account] >= self._floor(account) or above <= {account}, "a floor was not kept"
                self.seen["floors"] += not lost and 0 < had <= self._floor(account) and len(pages) > 0
            return pages

        return watched

    def _floor(self, account: bytes) -> int:
        return self.terms[account].floor_blocks or 0 if account else 0


def _secret(slots: list[tuple[Sequence, int] | None]) -> bool:
    return any(slot is not None and slot[0].terms.erase for slot in slots)


def _seen(span: KeySpan, position: int, size: int) -> set[int]:
    """The blocks of the keys before it that a token at this position sees."""
    if span.chunk is not None:
        return {key // size for key in range(position) if key // span.chunk == position // span.chunk}
    assert span.window is not None
    return {key // size for key in range(position) if position - key < span.window}


def _below(root: NamespaceRoot) -> Iterator[RadixNode]:
    nodes = [*root.children.values()]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += node.children.values()


def _path(root: NamespaceRoot, packed: bytes) -> list[int]:
    """The blocks that hold these tokens from the root on."""
    node: RadixNode = root
    blocks: list[int] = []
    while True:
        for child in root.visible_children(node):
            size = len(child.label) // len(child.blocks)
            common = next(
                (at for at in range(len(child.blocks))
                 if child.label[at * size : (at + 1) * size] != packed[at * size : (at + 1) * size]),
                len(child.blocks),
            )  # fmt: skip
            if common:
                break
        else:
            return blocks
        blocks += child.blocks[:common]
        if common < len(child.blocks):
            return blocks
        node, packed = child, packed[len(child.label) :]
