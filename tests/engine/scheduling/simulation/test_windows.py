"""Layers that see only near keys, beside those that see all: what sequences hold of them, what is found again, and
memory that goes from one group to another. Every slot that a row sees is checked (windows.py)."""

from collections import Counter
from dataclasses import replace

import pytest

from engine.kv_blocks.block_pool import blocks_of
from engine.protocol.types import FinishReason, SchedulingTerms, Scope, ScopeKind
from engine.scheduling.scheduler import STALE_BLOCKS
from engine.step.key_span import KeySpan
from tests.engine.scheduling.simulation.replica import GROUPING, Heard, Simulation
from tests.engine.scheduling.simulation.test_replica import install_broken
from tests.engine.scheduling.simulation.windowed_life import WindowedLife
from tests.engine.scheduling.simulation.windows import WindowSize
from tests.engine.scheduling.test_scheduler import words

ONE, TWO = b"1" * 16, b"2" * 16
TENANT, OTHER = Scope(ScopeKind.TENANT, ONE, account=ONE), Scope(ScopeKind.TENANT, TWO, account=TWO)
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


@pytest.mark.parametrize("runs", [False, True], ids=["unread", "read"])
def test_a_window_that_was_purged_is_erased_before_anybody_else_has_it(runs: bool) -> None:
    """A window's blocks may go before the tree's, which are read for as long as their sequence runs."""
    small = WindowSize(KeySpan(window=8), 12, 12, 1, 12)
    simulation = Simulation(blocks=128, step_tokens=8, windows=[small])
    kv, group = simulation.scheduler.kv, simulation.scheduler.kv.windowed[0]
    simulation.submit(1, words(40), TENANT, max_tokens=30 if runs else 1)
    for _ in range(6):
        simulation.step()
    unread = [page for _, page in group.cached.unused_items()]
    assert len(unread) >= 4
    erased = list[int]()
    zero = simulation.windows[0].zero
    simulation.windows[0].zero = lambda blocks: (erased.extend(blocks), zero(blocks))[1]  # type: ignore[method-assign]
    kv.tree.raise_epochs({ONE: 1})
    simulation.submit(2, words(40, 500), OTHER, max_tokens=1)
    simulation.run()
    assert {*blocks_of(unread)} <= {*erased}


def test_what_is_public_is_no_secret_of_those_that_read_it() -> None:
    simulation = Simulation(blocks=128, windows=[WINDOW], public=[words(16, 77)])
    simulation.submit(1, [*words(16, 77), *words(9)], TENANT, terms=SchedulingTerms(erase=True))
    simulation.run()
    kv = simulation.scheduler.kv
    beside = {*kv.windowed[0].cached.beside(kv.public_prefixes.pages)}
    assert beside.isdisjoint(kv.windowed[0].pool.secret_pages())


def test_a_page_of_a_window_that_was_freed_under_its_reader_ends_it_before_it_is_read() -> None:
    simulation = Simulation(blocks=128, windows=[WINDOW])
    (victim,) = simulation.submit(1, words(22), Scope(), max_tokens=20)
    simulation.step()
    simulation.step()
    group = simulation.scheduler.kv.windowed[0]
    group.pool.free(victim.sequence.window_tables[0].pages[1:2].tolist())  # the fault
    (other,) = simulation.submit(2, words(6, 2), OTHER, max_tokens=3)
    while not simulation.loop.idle:  # without the group's own check, which has noticed already
        simulation.loop.turn()
        for owner, progress in simulation.scheduler.intake.take_outputs().items():
            simulation._hear(owner, progress)
    assert victim.finish is not None
    assert (victim.finish.reason, victim.finish.message) == (FinishReason.ERROR, STALE_BLOCKS)
    assert other.finish is not None
    assert other.finish.reason == FinishReason.LENGTH


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


SPLITS = [(2, 6), (4, 4), (7, 1)]  # of eight extents of equal bytes: those of the full layers, and the window's


def splits(full: int, window: int) -> Simulation:
    size = WindowSize(KeySpan(window=8), 64, 8, window, 8, block_bytes=128)
    return Simulation(blocks=128, extent_blocks=16, mapped=range(full), least=32, step_tokens=128, sequences=16,
                      windows=[size])  # fmt: skip


@pytest.mark.parametrize("scope", [Scope(), TENANT], ids=["private", "cached"])
@pytest.mark.parametrize(("full", "window"), SPLITS)
def test_a_full_group_gets_room_of_another_within_a_step_and_nobody_is_refused_or_preempted(
    full: int, window: int, scope: Scope
) -> None:
    """Waves of many short contexts, which need windows most, and of few long ones, which need the other layers; all of
    one wave fit into eight extents, however these begin."""
    simulation = splits(full, window)
    waves, id, traded = [(6, 12, 12), (3, 100, 16)] * 3, 0, 0
    for count, prompt_tokens, max_tokens in waves:
        for _ in range(count):
            id += 1
            (entry,) = simulation.submit(id, words(prompt_tokens, 1000 * id), scope, max_tokens=max_tokens)
            running = sum(each.finish is None for each in simulation.heard.values())
            simulation.step()
            load = simulation.scheduler.load(draining=False)
            if entry.started is None:  # what was in flight has landed now, and memory has changed hands
                simulation.step()
            assert entry.started is not None, f"{running} run, {load}"
            assert sum(len(memory.mapped) for memory in simulation.memories) == 8
        while not simulation.loop.idle:
            assert simulation.step()
            assert sum(len(memory.mapped) for memory in simulation.memories) == 8
        counters = simulation.scheduler.load(draining=False).counters
        assert counters.get("preemptions", 0) == 0
        assert counters["traded_extents"] > traded or not traded, "a wave needs more of the other group"
        traded = counters["traded_extents"]
    assert traded >= 8
    simulation.assert_all_finished()


def test_a_prompt_that_lacks_several_extents_gets_them_in_one_trade() -> None:
    simulation = splits(2, 6)
    simulation.submit(1, words(100), Scope(), max_tokens=9)
    simulation.step()
    (entry,) = simulation.submit(2, words(100, 7), Scope(), max_tokens=9)
    simulation.step()
    simulation.step()
    assert entry.started is not None
    assert simulation.scheduler.kv.traded_extents == 2
    simulation.run()
    simulation.assert_all_finished()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("grows", ["full", "window"])
def test_what_runs_gets_room_of_another_group_before_it_lacks_a_block(grows: str, depth: int) -> None:
    """Sequences go on until their group is full: that is no reason to preempt one while the other group has room."""
    full, window, span, least = (2, 6, 8, 8) if grows == "full" else (6, 2, 40, 16)
    size = WindowSize(KeySpan(window=span), 64, 8, window, least, block_bytes=128)
    simulation = Simulation(blocks=128, extent_blocks=16, mapped=range(full), least=32, step_tokens=64, sequences=16,
                            windows=[size], depth=depth)  # fmt: skip
    for id in range(4 if grows == "full" else 3):
        simulation.submit(id, words(6, 100 * id), Scope(), max_tokens=60 if grows == "full" else 40)
    while not simulation.loop.idle:
        assert simulation.step()
    counters = simulation.scheduler.load(draining=False).counters
    assert counters["traded_extents"] > 0
    assert counters.get("preemptions", 0) == 0
    simulation.assert_all_finished()


def test_a_group_that_lacks_blocks_gets_memory_though_another_one_evicts_in_every_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = WindowSize(KeySpan(window=8), 128, 16, 4, 16)
    simulation = Simulation(blocks=128, extent_blocks=16, mapped=range(4), least=16, windows=[size])
    kv = simulation.scheduler.kv
    available = kv.available
    monkeypatch.setattr(kv, "available", lambda group: 0 if group else available(group))
    kv.pressed = kv.windowed[0].pressed = 1
    trade = simulation.extents.next_trade()
    assert trade is not None
    assert (trade.giver, trade.taker) == (0, 1)
    assert kv.take_pressed() == [0, 0]


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_every_life_keeps_in_each_group_what_accounts_were_promised(first: int) -> None:
    seen = Counter[str]()
    for seed in range(first, first + 10):
        try:
            seen += WindowedLife(seed).run().seen
        except BaseException:
            print(f"seed {seed}")
            raise
    happened = ("found", "shortened", "late", "floors", "capped", "kept", "moved_lost", "lost_0", "lost_1")
    assert min(seen[name] for name in (*happened, "space", "cap", "epoch", "age")) > 0, seen


def test_lives_read_prefixes_together_in_windows_and_chunks() -> None:
    segments = Counter[bool]()
    for seed in (5, 11, 12, 16, 35, 38):
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


GROUP, EXPIRED = "kv_blocks.windowed_group", "kv_blocks.expired_blocks"
BREAKS = {
    "a window drops a block too early": (GROUP, "self.span.first(tokens)", "(self.span.first(tokens) + 4)"),
    "a prefix is served without its window": (GROUP, "del pages[group.usable(pages) :]", "pass"),
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
    "a window is evicted before what was purged": (GROUP, "self.pool.free_blocks < count and sweep():", "False:"),
    "what was purged and is read is not erased": (EXPIRED, "for root in wiped - self._marked:", "for root in ():"),
    "what is purged later is not erased": (EXPIRED, "is self._tree.wiped:", "is None:"),
    "what was purged stays beside": (EXPIRED, "group.remove(pages, secret=True)", "group.remove(pages)"),
    "a cap takes what is over": (EXPIRED, "if share.cap is not None and", "if False and"),
    "floors are the tree's alone": (GROUP, "policy.share.floor", "0"),
    "a window of what is public may go": (GROUP, "self.cached.pin(tree_blocks)\n", "pass\n"),
    "a trade takes more than it gives": ("kv_blocks.kv_extents", "given_bytes // self", "2 * given_bytes // self"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_build_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_broken(*BREAKS[name], monkeypatch)
    for seed in range(60):
        try:
            WindowedLife(seed).run()
        except (AssertionError, ArithmeticError, LookupError, ValueError, KeyError):
            return
    raise AssertionError(f"60 lives did not notice that {name}")
