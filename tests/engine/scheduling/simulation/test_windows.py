"""Layers that see only near keys, beside those that see all: what sequences hold of them, what is found again, and
memory that goes from one group to another. Every slot that a row sees is checked (windows.py)."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from engine.protocol.types import SchedulingTerms, Scope, ScopeKind
from engine.step.key_span import KeySpan
from tests.engine.scheduling.simulation.replica import GROUPING, Heard, Simulation
from tests.engine.scheduling.simulation.test_replica import install_broken
from tests.engine.scheduling.simulation.windows import WindowSize
from tests.engine.scheduling.test_scheduler import words

ONE, TWO, THREE = b"1" * 16, b"2" * 16, b"3" * 16
TENANT = Scope(ScopeKind.TENANT, ONE, account=ONE)
SCOPES = [TENANT, Scope(ScopeKind.TENANT, TWO, account=TWO), Scope(ScopeKind.TENANT, THREE, account=THREE), Scope()]
WINDOW = WindowSize(KeySpan(window=10), 32, 32, 1, 32)
CHUNK = WindowSize(KeySpan(chunk=16), 32, 32, 1, 32)


def served(simulation: Simulation, id: int, tokens: list[int], max_tokens: int = 1) -> int:
    """How many tokens of its prompt a request found."""
    (entry,) = simulation.submit(id, tokens, TENANT, max_tokens=max_tokens)
    simulation.run()
    return found(entry)


def found(entry: Heard) -> int:
    assert entry.started is not None
    return entry.started.cached_tokens


@pytest.mark.parametrize("size", [WINDOW, CHUNK], ids=["window", "chunk"])
def test_a_long_context_holds_no_more_than_its_span(size: WindowSize) -> None:
    simulation = Simulation(blocks=128, step_tokens=8, windows=[size])
    simulation.submit(1, words(200), Scope(), max_tokens=100)
    group, most = simulation.scheduler.kv.windowed[0], 0
    while not simulation.loop.idle:
        simulation.step()
        most = max(most, group.pool.mapped_blocks - group.pool.free_blocks)
    assert most <= size.span.held_blocks(300, 4) + 8 // 4, "of some 75 blocks"
    assert group.pool.free_blocks == group.pool.mapped_blocks


@pytest.mark.parametrize("size", [WINDOW, CHUNK], ids=["window", "chunk"])
@pytest.mark.parametrize("shared", range(4, 49, 4))
def test_a_prefix_is_found_at_any_block_before_at_and_behind_an_edge(size: WindowSize, shared: int) -> None:
    simulation = Simulation(blocks=128, windows=[size])
    served(simulation, 1, words(48), max_tokens=4)
    assert served(simulation, 2, words(48)[:shared] + words(20, 500)) == shared


def test_what_a_window_lost_alone_is_computed_again_and_found_afterwards() -> None:
    simulation = Simulation(blocks=128, windows=[WINDOW])
    served(simulation, 1, words(40))
    group = simulation.scheduler.kv.windowed[0]
    group.pool.free(group.cached.evict(3))  # the oldest: those that only early tokens see
    assert served(simulation, 2, words(40)[:12] + words(4, 500)) == 0, "three blocks of full layers, none of the window"
    assert served(simulation, 3, words(40)) == 36, "which the last token does not see"
    assert served(simulation, 4, words(40)[:12] + words(4, 600)) == 12, "computed anew by the second request"
    group.pool.free(group.cached.evict(1000))
    assert served(simulation, 5, words(40)) == 0
    assert served(simulation, 6, words(40)) == 36


def test_two_groups_serve_what_both_have() -> None:
    simulation = Simulation(blocks=128, windows=[WINDOW, CHUNK])
    served(simulation, 1, words(48))
    window, chunk = simulation.scheduler.kv.windowed
    chunk.pool.free(chunk.cached.remove([next(iter(chunk.cached._blocks))]))  # block 0: tokens 0 … 3 of the first chunk
    assert served(simulation, 2, words(48)[:12] + words(4, 500)) == 0
    assert served(simulation, 3, words(48)[:20] + words(4, 600)) == 20, "in the second chunk"
    window.pool.free(window.cached.evict(1000))
    assert served(simulation, 4, words(48)[:20] + words(4, 700)) == 0


def test_a_secret_behind_a_window_is_erased_before_anybody_has_its_block() -> None:
    small = WindowSize(KeySpan(window=4), 8, 8, 1, 8)
    simulation = Simulation(blocks=256, step_tokens=8, windows=[small])
    secret = SchedulingTerms(erase=True)
    for id in range(1, 9):
        terms = secret if id % 2 else SchedulingTerms()
        simulation.submit(id, words(30, 100 * id), Scope(), max_tokens=20, terms=terms)
    simulation.run()
    assert simulation.windows[0].reads > 1000


def test_memory_goes_to_the_group_that_lacks_it_within_a_step() -> None:
    """Eight extents of equal bytes, half of them each; long contexts need the full group's, many short ones the
    other's."""
    size = WindowSize(KeySpan(window=8), 128, 16, 4, 16, block_bytes=64)
    simulation = Simulation(blocks=128, extent_blocks=16, mapped=range(4), least=64, sequences=40, windows=[size])
    for id in range(1, 41):
        simulation.submit(id, words(9, 20 * id), Scope(), max_tokens=3)
    simulation.step()
    simulation.run()
    before = len(simulation.windows[0].mapped), len(simulation.stamps.mapped)
    assert sum(before) == 8
    simulation.submit(90, words(250), Scope(), max_tokens=4)
    simulation.submit(91, words(200, 7), Scope(), max_tokens=4)
    simulation.run()
    assert sum((len(simulation.windows[0].mapped), len(simulation.stamps.mapped))) == 8
    assert len(simulation.stamps.mapped) > 4, "the full group has grown"
    assert len(simulation.windows[0].mapped) >= 1


def test_a_group_that_lacks_blocks_gets_memory_though_another_one_evicts_in_every_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = WindowSize(KeySpan(window=8), 128, 16, 4, 16)
    simulation = Simulation(blocks=128, extent_blocks=16, mapped=range(4), least=16, windows=[size])
    kv = simulation.scheduler.kv
    available = kv.available
    monkeypatch.setattr(kv, "available", lambda group: 0 if group else available(group))
    kv.pressed = kv.windowed[0].pressed = True
    trade = simulation.extents.next_trade()
    assert trade is not None
    assert (trade.giver, trade.taker) == (0, 1)
    assert kv.take_pressed() == []


class WindowedLife:
    """One seeded life: requests of all scopes, preemptions, sleeps, extents and trades, with windows and chunks."""

    def __init__(self, seed: int) -> None:
        pick = self.pick = random.Random(seed)
        extent = pick.choice([4, 8])
        spans = [KeySpan(window=pick.choice([1, 5, 9, 30])), KeySpan(chunk=pick.choice([4, 8, 32]))]
        sizes = [
            WindowSize(span, 64, extent, pick.randrange(3, 64 // extent), 12, pick.choice([16, 64]))
            for span in pick.sample(spans, pick.choice([1, 2]))
        ]
        grouping = replace(GROUPING, windows=tuple((size.span.tokens or 0, 0.3) for size in sizes))
        self.simulation = Simulation(
            blocks=96, extent_blocks=extent, mapped=range(pick.randrange(48 // extent, 96 // extent)), least=32,
            step_tokens=pick.choice([4, 16]), sequences=6, depth=pick.choice([1, 2]), windows=sizes,
            public=[words(8, 77)] * pick.choice([0, 1]), costs=pick.choice([None, grouping, grouping]),
        )  # fmt: skip
        self.ids = 0
        self.text = [pick.randrange(1000) for _ in range(64)]

    def submit(self) -> None:
        pick = self.pick
        self.ids += 1
        tokens = self.text[: pick.randrange(1, 64)] + [pick.randrange(1000) for _ in range(pick.randrange(8))]
        terms = SchedulingTerms(
            erase=pick.random() < 0.3, background=pick.random() < 0.2, keep_s=pick.choice([None, None, 30])
        )
        self.simulation.submit(
            self.ids, words(8, 77) * (pick.random() < 0.3) + tokens, pick.choice(SCOPES),
            max_tokens=pick.randrange(1, 30), terms=terms,
        )  # fmt: skip

    def run(self, acts: int = 120) -> None:
        simulation, pick = self.simulation, self.pick
        fall_asleep = simulation.sleep
        for _ in range(acts):
            act = pick.random()
            if simulation.asleep:
                simulation.wake(pick.randrange(4), fails=act < 0.2)
            elif act < 0.35:
                self.submit()
            elif act < 0.4 and simulation.scheduler.running.sequences:
                sequence = pick.choice(simulation.scheduler.running.sequences)
                simulation.land()
                if sequence in simulation.scheduler.running.sequences:
                    simulation.scheduler.preempt(sequence)
            elif act < 0.43:
                simulation.shrink(1, pick.randrange(len(simulation.memories)))
            elif act < 0.46:
                simulation.grow(1, pick.randrange(len(simulation.memories)))
            elif act < 0.48:
                fall_asleep(pick.randrange(8), fails=pick.random() < 0.3)
            else:
                self.step()
        if simulation.asleep:
            simulation.wake()
        while not simulation.loop.idle:
            self.step()

    def step(self) -> None:
        """A turn, in which memory may change hands and none is added."""
        before = self.mapped_bytes()
        self.simulation.step()
        assert self.mapped_bytes() <= before, "a trade took more than it gave"
        load = self.simulation.scheduler.load(draining=False)
        assert load.free_blocks + load.cached_blocks <= load.blocks, "blocks of several groups are counted together"

    def mapped_bytes(self) -> int:
        return sum(len(memory.mapped) * memory.layout.extent_bytes for memory in self.simulation.memories)


@pytest.mark.parametrize("seed", range(30))
def test_a_life_of_windows(seed: int) -> None:
    WindowedLife(seed).run()


def test_lives_read_prefixes_together_in_windows_and_chunks() -> None:
    segments = Counter[bool]()
    for seed in (10, 11, 12, 19, 38, 48):
        life = WindowedLife(seed)
        life.run()
        for window in life.simulation.windows:
            segments[window.size.span.chunk is not None] += window.segments
    assert min(segments.values()) > 20


@pytest.mark.parametrize(("span", "seen"), [(KeySpan(window=40), 63), (KeySpan(chunk=16), 32)], ids=["window", "chunk"])
def test_a_prefix_is_read_together_for_as_long_as_several_see_it(span: KeySpan, seen: int) -> None:
    """24 tokens that four texts begin with: nobody sees them from position `seen` on."""
    costs = replace(GROUPING, windows=((span.tokens or 0, 0.5),))
    size = WindowSize(span, 512, 512, 1, 512)
    simulation = Simulation(blocks=512, step_tokens=64, windows=[size], costs=costs)
    served(simulation, 1, words(24))
    for id in range(2, 6):
        simulation.submit(id, words(24) + words(2, 100 * id), TENANT, max_tokens=150)
    simulation.step()
    group, counters = simulation.windows[0], simulation.scheduler.intake.counters
    together, spared = [], []
    while not simulation.loop.idle:
        positions = {sequence.launched for sequence in simulation.scheduler.running.sequences}
        before = group.segments, counters["spared_keys"]
        simulation.step()
        together += [position for position in positions if group.segments > before[0]]
        spared.append(counters["spared_keys"] - before[1])
    assert together
    assert (min(together), max(together)) == (26, seen - 1)
    assert spared[0] > spared[-1] == 3 * 24 // 2, "in the end only the layers that see all read it together"


GROUP = "kv_blocks.windowed_group"
BREAKS = {
    "a window drops a block too early": (GROUP, "self.span.first(tokens)", "(self.span.first(tokens) + 4)"),
    "a prefix is served without its window": ("kv_blocks.kv_manager", "del pages[group.usable(pages) :]", "pass"),
    "what is evicted stays beside the tree": (
        "kv_blocks.kv_manager",
        "        for group in self.windowed:\n            group.remove(pages)\n",
        "        pass\n",
    ),
    "a secret window is not erased": (GROUP, "allocate(count, sequence.terms.erase)", "allocate(count)"),
    "what moved is not told to tables": (GROUP, "table.pages = np.array([renamed", "_ = np.array([renamed"),
    "what moved is not told to the tree's side": (GROUP, "self.cached.rename_tree(renamed)", "pass"),
    "blocks that were dropped are lost": (GROUP, "self.pool.free(table.pages[shared_end", "len(table.pages[shared_end"),
    "pins outlive their sequences": (GROUP, "self.cached.unpin(", "len("),
    "a prompt's rows have no blocks": ("scheduling.running", "if chunk == 1 or not self._kv.windowed:", "if True:"),
    "a windowed group reads together what only the tree has in common": (
        "scheduling.prefix_groups",
        "node.keys, group)",
        "node.keys + 4 * (group > 0), group)",
    ),
    "a trade takes more than it gives": ("kv_blocks.kv_extents", "given_bytes // self", "2 * given_bytes // self"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_build_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_broken(*BREAKS[name], monkeypatch)
    for seed in range(200):
        try:
            WindowedLife(seed).run()
        except (AssertionError, ArithmeticError, LookupError, ValueError, KeyError):
            return
    raise AssertionError(f"200 lives did not notice that {name}")
