"""Blocks that leave for host memory and come back, over the stamp engine, which asserts every slot that is read.

The gates of the cache again, one tier below: exact, eviction, time to live, erasing, epochs; sleeps; and lives at
random in which loads take their time. Where a gate could pass for the wrong reason, it is seen to fail on a broken
build.
"""

import random
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from engine.protocol.frames import Submit
from engine.protocol.types import FinishReason, SamplingParams, SchedulingTerms, Scope, ScopeKind
from engine.tiers import host_blocks
from prefixcache import radix
from prefixcache.names import BlockNames, next_name
from prefixcache.tier import KEEP_S_MAX, TierIndex
from tests.engine.scheduling.simulation.replica import SCOPES, Chaos, Fault, Simulation
from tests.engine.scheduling.simulation.test_extents import served
from tests.engine.scheduling.simulation.test_isolation import KINDS, OTHER, REQUEST, STRANGERS, TENANT, TWO, flood
from tests.engine.scheduling.simulation.test_replica import install_broken
from tests.engine.scheduling.test_scheduler import words

SECRET = SchedulingTerms(erase=True)
PUBLIC = words(8, 77)  # two blocks of four
put_to_sleep = Simulation.sleep


def tiered(slots: int = 256, **changes: object) -> Simulation:
    """Sixteen blocks of four tokens, and many more in the host."""
    return Simulation(**{"blocks": 16, "step_tokens": 64, "host_slots": slots, **changes})  # type: ignore[arg-type]


def displace(simulation: Simulation, id: int = 900) -> None:
    """Has another account fill the pool, so that what was cached is in the host alone."""
    tokens = words(simulation.door.max_total_tokens - 1, id)
    simulation.submit(id, tokens, Scope(ScopeKind.TENANT, b"d" * 16, account=b"d" * 16), max_tokens=1)
    simulation.run()


def counted(simulation: Simulation, name: str) -> int:
    return simulation.scheduler.load(draining=False).counters.get(name, 0)


# The exact gate


@pytest.mark.parametrize("stranger", STRANGERS, ids=str)
@pytest.mark.parametrize("scope", KINDS, ids=str)
def test_others_find_nothing_in_the_host_and_ones_own_exactly_what_is_there(scope: Scope, stranger: Scope) -> None:
    if (scope.kind, scope.id, scope.epoch) == (stranger.kind, stranger.id, stranger.epoch):
        return
    simulation = tiered(public=[PUBLIC])
    prompt = [*PUBLIC, *words(22)]
    assert served(simulation, 1, prompt, scope) == 8
    displace(simulation)
    assert served(simulation, 2, prompt, stranger) == 8
    assert counted(simulation, "host_hit_tokens") == 0
    wiped = scope.kind == stranger.kind and scope.id == stranger.id and scope.epoch < stranger.epoch
    displace(simulation, 901)
    assert served(simulation, 3, prompt, scope) == (8 if wiped else 28)
    assert counted(simulation, "host_hit_tokens") == (0 if wiped else 20)
    simulation.assert_all_finished()


@pytest.mark.parametrize("field", ["scope_id", "scope_kind", "epoch"])
def test_the_exact_gate_fails_where_a_name_leaves_a_field_out(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = BlockNames.root
    alike: dict[str, object] = {"scope_id": b"x" * 16, "scope_kind": 1, "epoch": 0}
    monkeypatch.setattr(BlockNames, "root", lambda self, space: root(self, space._replace(**{field: alike[field]})))
    monkeypatch.setattr(TierIndex, "has_scope", lambda index, namespace, policy: True)
    other = {
        "scope_id": OTHER,
        "scope_kind": Scope(ScopeKind.USER, TENANT.id, account=TENANT.account),
        "epoch": msgspec.structs.replace(TENANT, epoch=1),
    }[field]
    with pytest.raises(AssertionError):
        test_others_find_nothing_in_the_host_and_ones_own_exactly_what_is_there(TENANT, other)


def test_a_prompt_goes_on_behind_what_the_tree_has_with_what_the_host_has() -> None:
    simulation = tiered()
    prompt = words(42)
    served(simulation, 1, prompt)
    served(simulation, 2, words(33, 5), OTHER)  # which takes the prompt's end
    kept = simulation.tree.matched_tokens(simulation.heard[1, 1].sequence.namespace, memoryview(array("I", prompt)))
    assert 0 < kept < 40
    assert served(simulation, 3, prompt) == 40
    assert counted(simulation, "host_hit_tokens") == 40 - kept
    assert served(simulation, 4, prompt) == 40
    assert counted(simulation, "host_hit_tokens") == 40 - kept, "it is on the device again"
    simulation.assert_all_finished()


# The timing gate


def test_a_lookup_does_the_same_work_for_what_others_have_in_the_host_as_for_what_nobody_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its work is names, which are counted instead of timed: no other tenant and no other process is in that. The
    lookups of one's own are the control."""
    simulation, named = tiered(1000, vocabulary=50_000), Counter[str]()
    kinds = {"cold": None, "cross": OTHER, "same": TENANT}
    work = {kind: list[int]() for kind in kinds}

    def counting(name: bytes, packed: bytes) -> bytes:
        named["names"] += 1
        return next_name(name, packed)

    for turn in range(20):
        prompts = {kind: words(33, 10 * turn + at) for at, kind in enumerate(kinds)}
        for at, (kind, scope) in enumerate(kinds.items()):
            if scope is not None:
                served(simulation, 10 * turn + at, prompts[kind], scope)
        displace(simulation, 5000 + turn)
        for kind in random.Random(turn).sample(sorted(kinds), 3):
            submit = Submit(1, array("I", prompts[kind]).tobytes(), TENANT, SamplingParams(), 1)
            (sequence,) = simulation.door.sequences(submit, 1, simulation.seconds)
            before = named["names"]
            with monkeypatch.context() as patched:
                patched.setattr(host_blocks, "next_name", counting)
                patched.setattr(radix, "next_name", counting)
                match = simulation.scheduler.kv.lease_prefix(sequence)
            work[kind].append(named["names"] - before)
            simulation.scheduler.kv.cancel_lease(sequence, match, short=False)
    assert work["cross"] == work["cold"] == [1] * 20
    assert work["same"] == [8] * 20


# The eviction gate


def test_a_flood_of_ten_tiers_leaves_a_quiet_tenant_its_floor_and_takes_nothing_it_would_not_have() -> None:
    terms, hits = SchedulingTerms(floor_blocks=6), []
    for flooded in (False, True):
        simulation = tiered(32)
        served(simulation, 1, words(25), TENANT, terms)
        displace(simulation)
        if flooded:
            flood(simulation, TWO, 320)
            assert counted(simulation, "host_evicted_blocks") > 200
        hits.append(served(simulation, 2, words(25), TENANT, terms))
        simulation.assert_all_finished()
    assert hits == [24, 24]


def test_an_account_has_no_more_in_the_host_than_its_cap() -> None:
    simulation = tiered()
    for id in range(10):
        served(simulation, id, words(25, id), TENANT, SchedulingTerms(cap_blocks=8))
    displace(simulation)
    assert simulation.host is not None
    assert 0 < simulation.host.index.cached <= 8 + 15


# Time to live, epochs, erasing


@pytest.mark.parametrize("keep_s", [None, 500.0])
def test_nothing_is_found_in_the_host_past_its_time_and_its_slots_are_erased(keep_s: float | None) -> None:
    simulation = tiered()
    terms = SchedulingTerms(keep_s=keep_s)
    served(simulation, 1, words(25), TENANT, terms)
    displace(simulation)
    assert simulation.host is not None
    slots = [entry.slot for entry in simulation.host.index._entries.values()]
    assert len(slots) >= 6
    simulation.seconds += min(keep_s or KEEP_S_MAX, KEEP_S_MAX)
    while simulation.loop.sweep():
        pass
    assert [simulation.tier.positions(slot) for slot in slots] == [[]] * len(slots)
    assert served(simulation, 2, words(25), TENANT, terms) == 0


def test_a_raised_epoch_erases_in_the_host_too_and_a_late_lookup_brings_nothing_back() -> None:
    simulation = tiered()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    assert simulation.host is not None
    own = [entry.slot for entry in simulation.host.index._entries.values() if entry.account.name == TENANT.account]
    assert len(own) == 6
    raised = msgspec.structs.replace(TENANT, epoch=1)
    assert served(simulation, 2, words(25), raised) == 0
    simulation.loop.sweep()
    assert not {*own} & {entry.slot for entry in simulation.host.index._entries.values()}
    assert simulation.tier.zeroed == 6
    assert served(simulation, 3, words(25), TENANT) == 0
    displace(simulation, 901)
    assert served(simulation, 4, words(25), TENANT) == 0, "a late lookup left something"
    assert served(simulation, 5, words(25), raised) == 24


def test_what_is_to_be_erased_never_leaves_for_the_host_and_reads_nothing_there() -> None:
    simulation = tiered()
    served(simulation, 1, words(25), TENANT, SECRET)
    displace(simulation)
    assert counted(simulation, "host_stored_blocks") == 0
    displace(simulation, 901)
    served(simulation, 2, words(25), TENANT)
    displace(simulation, 902)
    hits = counted(simulation, "host_hit_tokens")
    assert served(simulation, 3, words(25), TENANT, SECRET) == 0
    assert counted(simulation, "host_hit_tokens") == hits
    assert served(simulation, 4, words(25), REQUEST) == 0
    simulation.assert_all_finished()


@pytest.mark.parametrize(
    ("scope", "terms"),
    [(msgspec.structs.replace(TENANT, epoch=1), SECRET), (TENANT, SchedulingTerms(erase=True, keep_s=0.0))],
    ids=["epoch", "time to live"],
)
def test_a_request_that_is_to_be_erased_tells_the_host_of_its_epoch_and_time_to_live(
    scope: Scope, terms: SchedulingTerms
) -> None:
    """As those of an account do that turned zero retention on."""
    simulation = tiered()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    assert simulation.host is not None
    served(simulation, 2, words(9, 3), scope, terms)
    while simulation.loop.sweep():
        pass
    assert TENANT.account not in {entry.account.name for entry in simulation.host.index._entries.values()}
    assert simulation.tier.zeroed == 6


def test_what_is_not_finite_is_not_found_in_the_host_either() -> None:
    simulation = tiered()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    faults = iter([0, None])
    simulation.misfortune = lambda: Fault(glitch=next(faults, None))
    (entry,) = simulation.submit(2, words(25), TENANT, max_tokens=2)
    simulation.run()
    assert entry.finish is not None
    assert entry.finish.reason == FinishReason.ERROR
    simulation.misfortune = Fault
    simulation.run()
    assert served(simulation, 3, words(25), TENANT) == 0
    simulation.assert_all_finished()


# Loads under way


def test_others_run_on_while_blocks_come_back_and_whoever_leaves_meanwhile_frees_them_then() -> None:
    simulation = tiered(loading_looks=lambda: 5, blocks=64, depth=2)
    served(simulation, 1, words(25), TENANT)
    for number in range(4):
        displace(simulation, 900 + number)
    (runs,) = simulation.submit(2, words(9, 3), OTHER, max_tokens=30)
    simulation.step()
    (first,) = simulation.submit(3, words(25), TENANT, max_tokens=4)
    (second,) = simulation.submit(4, words(25), TENANT, max_tokens=4)
    simulation.step()
    assert first.sequence.loading_blocks == 6
    assert second.started is None, "it waits for the same blocks"
    written = len(runs.tokens)
    simulation.step()
    simulation.step()
    assert len(runs.tokens) >= written + 2
    assert first.sequence.loading_blocks == 6
    simulation.scheduler.intake.cancel(1, [3])
    assert first.sequence in simulation.scheduler.kv.holders, "its blocks are still written"
    simulation.run()
    assert second.started is not None
    assert second.started.cached_tokens == 24
    simulation.assert_all_finished()


def test_a_load_alone_is_waited_for() -> None:
    simulation = tiered(loading_looks=lambda: 10**6)
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    assert served(simulation, 2, words(25), TENANT) == 24
    simulation.submit(3, words(25, 4), OTHER, max_tokens=1)
    displace(simulation, 901)
    simulation.submit(4, words(25), TENANT)
    simulation.step()
    simulation.drop(1)
    while not simulation.loop.idle:
        simulation.step()
    assert not simulation.scheduler.kv.holders


def test_what_came_back_is_charged_to_nobody_as_computed() -> None:
    simulation = tiered()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    (entry,) = simulation.submit(2, words(25), TENANT, max_tokens=1)
    simulation.run()
    assert entry.sequence.charged_tokens == 25
    assert counted(simulation, "computed_tokens") == 25 + 63 + 1


# Sleeping


def test_a_sleep_leaves_what_most_requests_began_with_in_the_host_and_it_is_found_after_it() -> None:
    simulation = tiered(6, blocks=64, extent_blocks=16, least=16, public=[PUBLIC])
    system, once = words(24, 1), words(24, 2)
    for id in (1, 2, 3):
        served(simulation, id, [*system, *words(6, 10 + id)])
    served(simulation, 4, [*once, *words(6, 14)])
    assert len(put_to_sleep(simulation, max_kept_blocks=64)) == 2, "the published ones alone"
    simulation.wake()
    assert served(simulation, 6, [*system, *words(6, 16)]) == 24
    assert served(simulation, 7, [*once, *words(6, 17)]) == 0
    assert served(simulation, 8, [*system, *words(6, 18)], OTHER) == 0, "its scope is another one"
    simulation.assert_all_finished()


def test_what_is_over_while_it_sleeps_is_erased_in_the_host() -> None:
    simulation = tiered(blocks=64)
    served(simulation, 1, words(25), TENANT, SchedulingTerms(keep_s=50.0))
    put_to_sleep(simulation, max_kept_blocks=64)
    assert simulation.host is not None
    assert simulation.host.index.cached == 6
    simulation.seconds += 50
    simulation.loop.sweep()
    assert simulation.tier.zeroed == 6
    simulation.wake()
    assert served(simulation, 2, words(25), TENANT) == 0


# All of it at once


def chaos(seed: int) -> Simulation:
    """A life with a host of any size, whose loads take any time."""
    pick = random.Random(seed)
    slots, looks = pick.choice([0, 2, 8, 64]), pick.choice([0, 0, 1, 3])
    return Chaos(seed, host_slots=slots, loading_looks=lambda: pick.randint(0, looks)).run()


def crowd(seed: int) -> Simulation:
    """A small pool, and many who say what was said before: most of it is in the host, and on its way from there."""
    pick = random.Random(seed)
    looks = pick.choice([0, 1, 4])
    simulation = Simulation(
        blocks=14, block_tokens=2, step_tokens=16, sequences=3, waiting=200, context_tokens=28,
        depth=pick.choice([1, 2]), host_slots=pick.choice([6, 20, 200]), loading_looks=lambda: pick.randint(0, looks),
        public=[words(2, 77)],
    )  # fmt: skip
    prefixes, epochs = [words(2 * pick.randint(1, 7), number) for number in range(4)], Counter[bytes]()
    share = {scope.account or scope.id: pick.choice([(None, None), (3, None), (None, 5)]) for scope in SCOPES}
    for id in range(20):
        scope = pick.choice(SCOPES)
        epochs[scope.id] += pick.random() < 0.05
        scope = msgspec.structs.replace(scope, epoch=scope.epoch + epochs[scope.id])
        floor, cap = share[scope.account or scope.id]
        terms = SchedulingTerms(
            floor_blocks=floor, cap_blocks=cap, keep_s=pick.choice([None, 25.5]), erase=pick.random() < 0.2
        )
        start = words(2, 77) if pick.random() < 0.3 else []
        prompt = [*start, *pick.choice(prefixes), *words(pick.randint(1, 3), 50 + id)]
        simulation.submit(id, prompt, scope, max_tokens=pick.randint(1, 5), terms=terms)
        for _ in range(pick.choice([0, 2, 6])):
            simulation.step()
        if pick.random() < 0.1:
            simulation.scheduler.intake.cancel(1, [pick.randrange(id + 1)])
        if pick.random() < 0.05:
            put_to_sleep(simulation, max_kept_blocks=64, fails=pick.random() < 0.3)
            if simulation.asleep:
                simulation.step()
                simulation.wake()
    simulation.run()
    simulation.assert_all_finished()
    return simulation


@pytest.mark.parametrize("life", [chaos, crowd])
def test_lives_with_a_host_give_the_texts_of_solo_runs(life: Callable[[int], Simulation]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        try:
            simulation = life(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
        seen += simulation.moves + Counter(simulation.scheduler.load(draining=False).counters)
        seen["zeroed_slots"] += simulation.tier.zeroed
    wanted = ("stored", "loaded", "evicted", "swept", "refused") if life is crowd else ("stored", "loaded")
    for what in (*(f"host_{name}_blocks" for name in wanted), "sleeps", "wakes"):
        assert seen[what] > 5, f"{what}: {seen[what]}"


# module, what its source says, what the broken build says instead
BREAKS = {
    "a load is not waited for": ("scheduling.running", " and not each.loading_blocks", ""),
    "what is evicted is stored after it was overwritten": (
        "scheduling.step_loop",
        "                self._tier.store(blocks_of(pages), slots)\n",
        "                self._late = getattr(self, '_late', []); self._late.append((blocks_of(pages), slots))\n"
        "                [self._tier.store(*each) for each in self._late[:-1]]; self._late = self._late[-1:]\n",
    ),
    "secrets leave for the host": ("kv_blocks.kv_manager", "self.pool.secret_of(pages)", "set()"),
    "what is to be erased is read there": (
        "kv_blocks.kv_manager",
        "                in_host = []",
        "                pass",
    ),
    "a slot that is read is given on": ("kv_blocks.kv_manager", "self.host.index.pin(match.in_host)", "pass"),
    "blocks of a cancelled load are freed at once": (
        "scheduling.running",
        "            sequence.inflight_steps += 1\n",
        "",
    ),
    "nothing is swept in the host": ("scheduling.step_loop", "self._host.sweep(_HOST_SWEEP_MAX)", "False"),
    "swept slots are not erased": (
        "scheduling.step_loop",
        "                self._tier.zero(slots)\n",
        "                pass\n",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_build_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong = BREAKS[name]
    install_broken(module, right, wrong, monkeypatch)
    gates: tuple[Callable[[], object], ...] = (
        test_what_is_to_be_erased_never_leaves_for_the_host_and_reads_nothing_there,
        test_a_raised_epoch_erases_in_the_host_too_and_a_late_lookup_brings_nothing_back,
        test_a_flood_of_ten_tiers_leaves_a_quiet_tenant_its_floor_and_takes_nothing_it_would_not_have,
        test_others_run_on_while_blocks_come_back_and_whoever_leaves_meanwhile_frees_them_then,
        *(partial(crowd, seed) for seed in range(40)),
    )
    for gate in gates:
        try:
            gate()
        except (AssertionError, ArithmeticError, LookupError, ValueError):
            return
    raise AssertionError(f"no gate noticed that {name}")
