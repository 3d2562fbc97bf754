"""A pool whose memory comes and goes under what runs, and a model that sleeps and wakes: over the stamp engine, which
fails where a slot is read that has no memory, or holds something else than its reader believes.
"""

import random
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from engine.protocol.types import FinishReason, RejectReason, SchedulingTerms, Scope, ScopeKind
from engine.sequences.validation import SubmitRejected
from prefixcache.tree import PrefixTree
from tests.engine.scheduling.simulation.replica import GROUPING, SCOPES, Heard, Simulation
from tests.engine.scheduling.simulation.test_replica import install_broken
from tests.engine.scheduling.test_scheduler import words
from tests.prefixcache.history import cached_of

ONE, TWO = b"1" * 16, b"2" * 16
TENANT = Scope(ScopeKind.TENANT, ONE, account=ONE)
OTHER = Scope(ScopeKind.TENANT, TWO, account=TWO)
REQUEST = Scope(account=ONE)
SECRET = SchedulingTerms(erase=True)
PUBLIC = words(8, 77)  # two blocks of four


def pool(**changes: object) -> Simulation:
    """Four extents of 16 blocks of four tokens, one of which always stays."""
    return Simulation(**{"blocks": 64, "extent_blocks": 16, "least": 16, **changes})  # type: ignore[arg-type]


def cached(entry: Heard) -> int:
    assert entry.started is not None
    return entry.started.cached_tokens


def served(
    simulation: Simulation, id: int, tokens: list[int], scope: Scope = TENANT, terms: SchedulingTerms | None = None
) -> int:
    """How many tokens of its prompt a request found."""
    (entry,) = simulation.submit(id, tokens, scope, max_tokens=1, terms=terms or SchedulingTerms())
    simulation.run()
    return cached(entry)


# Growing and shrinking


def scattered(simulation: Simulation) -> Simulation:
    """The simulation, whose blocks are allocated from all extents in turn, as after a long life."""
    simulation.account._free.sort(key=lambda block: (-(block % 16), block))
    return simulation


def test_what_is_cached_moves_to_where_there_is_room_and_is_found_there() -> None:
    simulation = scattered(pool())
    for id in range(1, 6):
        served(simulation, id, words(41, 10 * id))  # ten blocks each
    assert simulation.tree.cached_blocks == 50
    assert simulation.shrink(1) == 1
    assert (simulation.account.mapped_blocks, simulation.account.absent_blocks) == (48, 16)
    assert simulation.tree.cached_blocks == 48, "two blocks more than there was room for"
    assert simulation.moves["copied_blocks"] > 5
    found = [served(simulation, 10 + id, words(41, 10 * id)) for id in (5, 4, 3, 2, 1)]
    assert found[:4] == [40, 40, 40, 40], "what was used last stays"
    assert found[4] < 40
    simulation.assert_all_finished()


@pytest.mark.parametrize("terms", [SchedulingTerms(), SECRET], ids=["", "secret"])
def test_what_runs_moves_and_goes_on_and_a_secret_leaves_nothing_behind(terms: SchedulingTerms) -> None:
    simulation = scattered(pool(depth=2, costs=GROUPING))
    for id, scope in enumerate((TENANT, TENANT, REQUEST)):
        simulation.submit(id, words(9), scope, max_tokens=8, terms=terms)
    while simulation.scheduler.load(draining=False).running < 3:
        simulation.step()
    assert simulation.shrink(3) == 3
    assert simulation.moves["copied_blocks"] > 2
    assert (simulation.moves["copied_secrets"] > 0) == terms.erase
    simulation.run()
    simulation.assert_all_finished()
    assert not simulation.scheduler.load(draining=False).counters.get("preemptions"), "there was room for it"


def test_what_runs_keeps_what_it_holds_and_a_block_more_for_each() -> None:
    simulation = pool()
    simulation.submit(1, words(61), TENANT, max_tokens=3)
    simulation.submit(2, words(61, 5), OTHER, max_tokens=3)
    while simulation.scheduler.load(draining=False).running < 2:
        simulation.step()
    assert simulation.shrink(4) == 1, "of four extents two hold what runs, and a third the next two blocks"
    simulation.run()
    assert simulation.shrink(4) == 2, "one extent stays"
    assert simulation.shrink(4) == 0
    simulation.assert_all_finished()


@pytest.mark.parametrize("over", ["its epoch", "its time"])
def test_what_is_over_is_erased_before_memory_is_given_away(over: str) -> None:
    """It came to be so since the last sweep: moved, it would stay where it was as well."""
    simulation = scattered(pool())
    served(simulation, 1, words(41), TENANT, SchedulingTerms(keep_s=5.0))
    simulation.land()
    if over == "its epoch":
        simulation.tree.raise_epochs({TENANT.id: 1})
    else:
        simulation.seconds += 6
    assert simulation.extents.shrink(1).sources == []
    assert len(simulation.account.take_unerased()) == 10
    assert simulation.tree.cached_blocks == 0


def test_what_can_never_fit_the_least_is_refused_though_there_is_room_now() -> None:
    simulation = pool(public=[PUBLIC])
    simulation.door = replace(simulation.door, max_total_tokens=1000)
    longest = 14 * 4 + 1  # the last one is not computed
    simulation.submit(1, words(longest - 3), TENANT, max_tokens=3)
    with pytest.raises(SubmitRejected) as refused:
        simulation.submit(2, words(longest - 3), TENANT, max_tokens=4)
    assert refused.value.reason == RejectReason.TOO_LONG
    simulation.shrink(4)
    simulation.run()
    simulation.assert_all_finished()


def test_a_sequence_that_waits_for_blocks_starts_where_the_pool_grows_and_is_counted_until_then() -> None:
    simulation = pool()
    simulation.shrink(3)
    for id in (1, 2):
        simulation.submit(id, words(41, id), REQUEST, max_tokens=10)
    simulation.step()
    simulation.step()
    load = simulation.scheduler.load(draining=False)
    assert (load.running, load.waiting, load.blocks) == (1, 1, 16)
    short = load.counters["short_of_blocks"]
    assert short > 0
    simulation.step()
    assert simulation.scheduler.load(draining=False).counters["short_of_blocks"] > short
    simulation.grow(1)
    simulation.step()
    load = simulation.scheduler.load(draining=False)
    assert (load.running, load.waiting, load.blocks) == (2, 0, 32)
    simulation.run()
    assert simulation.scheduler.load(draining=False).counters["short_of_blocks"] == load.counters["short_of_blocks"]


# Sleeping and waking


def test_a_sleep_keeps_what_is_published_and_the_prefixes_that_most_requests_began_with() -> None:
    simulation = pool(public=[PUBLIC])
    system, once = words(24, 1), words(24, 2)
    served(simulation, 1, [*system, *words(6, 11)])
    served(simulation, 2, [*system, *words(6, 12)])
    served(simulation, 3, [*system, *words(6, 13)], OTHER)
    served(simulation, 4, [*once, *words(6, 14)])
    served(simulation, 5, [*PUBLIC, *words(6, 15)])
    kept = simulation.sleep(max_kept_blocks=2 + 6)
    assert len(kept) == 2 + 6
    load = simulation.scheduler.load(draining=False)
    assert (load.blocks, load.free_blocks, load.cached_blocks) == (0, 0, 8)
    simulation.wake()
    assert simulation.account.mapped_blocks == 16, "no more than what it needs"
    assert served(simulation, 6, [*system, *words(6, 16)]) == 24
    assert served(simulation, 7, [*once, *words(6, 17)]) == 0
    assert served(simulation, 8, [*system, *words(6, 18)], OTHER) == 0, "its scope is another one"
    assert served(simulation, 9, [*PUBLIC, *words(6, 19)], OTHER) == 8
    simulation.assert_all_finished()


def test_the_last_used_of_the_prefixes_that_were_read_once_is_kept() -> None:
    simulation = pool()
    for id in (1, 2, 3):
        served(simulation, id, words(17, 20 * id))
    simulation.sleep(max_kept_blocks=6)
    simulation.wake()
    assert [served(simulation, 10 + id, words(17, 20 * id)) for id in (3, 2, 1)] == [16, 8, 0]


def test_nothing_is_kept_that_has_to_be_erased_or_is_over() -> None:
    simulation = pool()
    served(simulation, 1, words(17, 1), TENANT, SECRET)
    served(simulation, 2, words(17, 2), OTHER, SchedulingTerms(keep_s=3.0))
    simulation.seconds += 5
    assert simulation.sleep(max_kept_blocks=64) == []
    assert not simulation.stamps.secret_blocks()


def test_running_sequences_go_on_after_the_sleep_with_what_they_had() -> None:
    simulation = pool(depth=2)
    entries = [
        simulation.submit(id, words(13, id), scope, max_tokens=12)[0] for id, scope in enumerate((TENANT, OTHER))
    ]
    for _ in range(5):
        simulation.step()
    assert all(entry.tokens for entry in entries)
    simulation.sleep(max_kept_blocks=64)
    load = simulation.scheduler.load(draining=False)
    assert (load.running, load.waiting) == (0, 2)
    assert not simulation.step(), "nothing runs while it sleeps"
    (late,) = simulation.submit(9, words(13, 9), TENANT, max_tokens=2, deadline_ms=2000)
    simulation.submit(10, words(13, 9), TENANT, max_tokens=2)
    for _ in range(3):
        assert not simulation.step()
    assert late.reject is not None, "its deadline counts"
    simulation.wake()
    simulation.run()
    simulation.assert_all_finished()
    assert simulation.tree.counters["hit_tokens"] >= 2 * 12


def test_what_is_over_while_it_sleeps_is_erased_where_it_is_kept() -> None:
    simulation = pool()
    served(simulation, 1, words(17, 1), TENANT, SchedulingTerms(keep_s=20.0))
    served(simulation, 2, words(17, 2), OTHER)
    kept = simulation.sleep(max_kept_blocks=64)
    assert len(kept) == 8
    simulation.seconds += 30
    erased = simulation.stamps.zeroed
    simulation.step()
    assert simulation.stamps.zeroed - erased == 4
    assert simulation.scheduler.load(draining=False).cached_blocks == 4
    simulation.wake()
    assert simulation.account.free_blocks == 16 - 4
    assert served(simulation, 3, words(17, 1)) == 0
    assert served(simulation, 4, words(17, 2), OTHER) == 16
    simulation.assert_all_finished()


def test_an_epoch_that_is_raised_during_the_sleep_wipes_what_was_kept() -> None:
    simulation = pool()
    served(simulation, 1, words(17), TENANT)
    simulation.sleep(max_kept_blocks=64)
    raised = msgspec.structs.replace(TENANT, epoch=1)
    (entry,) = simulation.submit(2, words(17), raised)
    simulation.wake()
    erased = simulation.stamps.zeroed
    simulation.run()
    assert cached(entry) == 0
    assert simulation.stamps.zeroed - erased == 4


def test_a_sleep_that_comes_to_nothing_changes_nothing() -> None:
    simulation = pool(public=[PUBLIC])
    served(simulation, 1, words(17))
    mapped = simulation.stamps.mapped
    simulation.sleep(max_kept_blocks=64, fails=True)
    assert not simulation.asleep
    assert simulation.stamps.mapped == mapped
    assert served(simulation, 2, words(17)) == 16
    assert served(simulation, 3, [*PUBLIC, *words(6)]) == 8
    simulation.assert_all_finished()


def test_a_wake_that_fails_may_be_tried_again() -> None:
    simulation = pool()
    served(simulation, 1, words(17))
    simulation.sleep(max_kept_blocks=64)
    simulation.wake(4, fails=True)
    assert simulation.asleep
    simulation.wake(3)
    assert simulation.account.mapped_blocks == 48
    assert served(simulation, 2, words(17)) == 16


def test_floors_and_caps_hold_across_a_sleep() -> None:
    simulation = pool()
    served(simulation, 1, words(17, 1), TENANT, SchedulingTerms(floor_blocks=4))
    simulation.sleep(max_kept_blocks=4)
    simulation.wake()
    for id in range(2, 8):
        served(simulation, id, words(33, 10 * id), OTHER)
    assert served(simulation, 9, words(17, 1), TENANT, SchedulingTerms(floor_blocks=4)) == 16, (
        "a flood took what a floor covers"
    )
    served(simulation, 10, words(33, 3), OTHER, SchedulingTerms(cap_blocks=2))
    assert cached_of(simulation.tree, TWO) <= 2


def test_nothing_starts_that_is_not_to_and_who_runs_goes_on() -> None:
    simulation = pool()
    (running,) = simulation.submit(1, words(9), TENANT, max_tokens=6)
    simulation.step()
    simulation.scheduler.intake.admitting = False
    (waiting,) = simulation.submit(2, words(9), TENANT, max_tokens=6)
    while simulation.step():
        pass
    assert running.finish is not None
    assert running.finish.reason == FinishReason.LENGTH
    assert waiting.started is None
    simulation.scheduler.intake.admitting = True
    simulation.run()
    simulation.assert_all_finished()


# All of it at once


class Flux:
    """A replica that is busy while its memory comes and goes at almost every step."""

    def __init__(self, seed: int) -> None:
        self.pick = pick = random.Random(seed)
        self.simulation = Simulation(
            blocks=46, block_tokens=2, extent_blocks=6, least=24, sequences=6, waiting=200, context_tokens=40,
            depth=pick.choice([1, 2]), costs=pick.choice([None, GROUPING]), public=[words(6, 77)],
        )  # fmt: skip

    def run(self) -> Simulation:
        pick, simulation = self.pick, self.simulation
        for id in range(60):
            start = [*words(6, 77), *words(pick.choice([0, 5]))] if pick.random() < 0.5 else words(pick.randint(0, 9))
            erase = pick.random() < 0.3
            simulation.submit(
                id, [*start, *words(pick.randint(1, 5), id)], pick.choice(SCOPES), max_tokens=pick.randint(1, 9),
                terms=SchedulingTerms(erase=erase, keep_s=pick.choice([None, 15.5])),
            )  # fmt: skip
        while not simulation.loop.idle:
            pick.shuffle(simulation.account._free)
            self._move()
            assert simulation.step() or simulation.asleep or simulation.scheduler.intake.idle
            assert simulation.seconds < 2000
        simulation.assert_all_finished()
        counters = simulation.scheduler.load(draining=False).counters
        assert counters.get("stale_reads", 0) == counters["stale_pages"] == 0, "a page moved and somebody was not told"
        return simulation

    def _move(self) -> None:
        pick, simulation = self.pick, self.simulation
        if simulation.asleep:
            simulation.wake(pick.randint(0, 8), fails=pick.random() < 0.3)
        elif pick.random() < 0.1:
            simulation.sleep(pick.choice([0, 10, 46]), fails=pick.random() < 0.3)
        elif pick.random() < 0.5:
            simulation.grow(pick.choice([1, 2]))
        else:
            simulation.shrink(pick.choice([1, 1, 2]))


def test_a_busy_replica_whose_memory_comes_and_goes_gives_the_texts_of_solo_runs() -> None:
    seen: Counter[str] = Counter()
    for seed in range(10):
        try:
            simulation = Flux(seed).run()
        except BaseException:
            print(f"seed {seed}")
            raise
        seen += simulation.moves + simulation.tree.counters
    for what in (
        *("sleeps", "failed_sleeps", "wakes", "failed_wakes", "kept_blocks", "grown_extents", "shrunk_extents"),
        *("copied_blocks", "copied_secrets", "hit_tokens"),
    ):
        assert seen[what] > 10, f"{what}: {seen[what]}"


# module, what its source says, what the broken build says instead
BREAKS = {
    "a running one's pages are not told": (
        "kv_blocks.kv_manager",
        "sequence.pages[: sequence.block_count] = [renamed",
        "_ = [renamed",
    ),
    "a running one's lease is not told": ("kv_blocks.kv_manager", "sequence.lease.rename(renamed)", "pass"),
    "what an account holds is not told": (
        "kv_blocks.kv_manager",
        "sequence.account_queue.remove_blocks(pages)\n            seq",
        "seq",
    ),
    "the tree is not told": ("kv_blocks.kv_manager", "self.tree.rename(renamed)", "pass"),
    "what is published is not told": ("kv_blocks.kv_manager", "self.public_prefixes.rename(renamed)", "pass"),
    "the pins are not told": (
        "kv_blocks.kv_manager",
        "            lease.rename(renamed)\n        for",
        "            pass\n        for",
    ),
    "secrets are kept": ("kv_blocks.kv_manager", "self.pool.secret_pages()", "set()"),
    "a secret is forgotten as it moves": ("kv_blocks.block_pool", "self._secret[targets] = secret", "pass"),
    "a secret stays where it was": (
        "kv_blocks.block_pool",
        "[block for block in sources if self._secret[block]]",
        "[]",
    ),
    "what was moved counts as free": (
        "kv_blocks.block_pool",
        "if block not in occupied]\n        self.absent_blocks += ",
        "]\n        self.absent_blocks += ",
    ),
    "a woken block is free and restored": (
        "kv_blocks.block_pool",
        "blocks[::-1] if block not in occupied]",
        "blocks[::-1]]",
    ),
    "what was freed asleep is restored": (
        "kv_blocks.block_pool",
        "current = ~self.are_stale(self._kept_pages)",
        "current = self._kept_pages > 0",
    ),
    "more is taken than what runs can spare": (
        "kv_blocks.kv_extents",
        "kv.available(group) - len(kv.holders)",
        "10**6",
    ),
    "it shrinks below the least": (
        "kv_blocks.block_pool",
        "while self.mapped_blocks - self.blocks_in(chosen) < self.min_blocks:",
        "while False:",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_build_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong = BREAKS[name]
    install_broken(module, right, wrong, monkeypatch)
    for seed in range(12):
        try:
            Flux(seed).run()
        except (AssertionError, ArithmeticError, LookupError, ValueError):
            return
    raise AssertionError(f"12 lives did not notice that {name}")


def test_a_tree_that_is_not_renamed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixTree, "rename", lambda tree, renamed: None)
    with pytest.raises(AssertionError):
        Flux(0).run()
