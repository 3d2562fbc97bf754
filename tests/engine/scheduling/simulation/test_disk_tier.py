"""Blocks that leave host memory for disk and come back, over the stamp engine, which asserts every slot that is read.

The gates of the cache again, two tiers below: exact, eviction, time to live, erasing, epochs; a disk that is corrupt,
lost or slow; and lives at random beside an oracle, which gives the texts of solo runs. Where a gate could pass for the
wrong reason, it is seen to fail on a broken build.
"""

import random
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from engine.handover.staging import StagingArea
from engine.protocol.frames import Submit
from engine.protocol.types import SamplingParams, SchedulingTerms, Scope, ScopeKind
from engine.step.executor import CopyOutcome
from engine.tiers.disk_blocks import FETCH_S, DiskBlocks
from prefixcache.tier import KEEP_S_MAX
from tests.engine.scheduling.simulation.replica import SCOPES, Chaos, Simulation
from tests.engine.scheduling.simulation.test_extents import served
from tests.engine.scheduling.simulation.test_host_tier import PUBLIC, SECRET, counted, put_to_sleep
from tests.engine.scheduling.simulation.test_host_tier import displace as displace_pool
from tests.engine.scheduling.simulation.test_isolation import KINDS, OTHER, STRANGERS, TENANT, TWO, flood
from tests.engine.scheduling.simulation.test_replica import install_broken
from tests.engine.scheduling.test_scheduler import words
from tests.support.stamp_tier import StampFiles


def with_disk(places: int = 4096, slots: int = 24, **changes: object) -> Simulation:
    """Sixteen blocks of four tokens, half as many more in the host, and many on disk."""
    sizes = {"blocks": 16, "step_tokens": 64, "host_slots": slots, "disk_places": places}
    return Simulation(**{**sizes, **changes})  # type: ignore[arg-type]


def disk_of(simulation: Simulation) -> DiskBlocks[object]:
    assert simulation.host is not None
    assert simulation.host.disk is not None
    return simulation.host.disk  # type: ignore[return-value]


def files_of(simulation: Simulation) -> StampFiles:
    assert simulation.tier.files is not None
    return simulation.tier.files


def rest(simulation: Simulation, sweeps: int = 40) -> None:
    """Lets the disk take what it is given."""
    for _ in range(sweeps):
        simulation.loop.sweep()
    simulation.listen()


def displace(simulation: Simulation, id: int = 900) -> None:
    """Has another account fill the pool, and host memory lose what it has, so that what was cached is on disk alone."""
    tokens = words(simulation.door.max_total_tokens - 1, id)
    simulation.submit(id, tokens, Scope(ScopeKind.TENANT, b"d" * 16, account=b"d" * 16), max_tokens=1)
    simulation.run()
    rest(simulation)
    assert simulation.host is not None
    simulation.host.index.forget([*simulation.host.index._entries])
    rest(simulation)


def in_host(simulation: Simulation, account: bytes) -> int:
    assert simulation.host is not None
    return sum(entry.account.name == account for entry in simulation.host.index._entries.values())


# The exact gate


def test_a_prompt_comes_back_from_disk_and_is_told_apart_from_what_host_memory_had() -> None:
    simulation = with_disk()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    assert in_host(simulation, TENANT.account) == 0, "the control: it is on disk alone"
    assert served(simulation, 2, words(25), TENANT) == 24
    assert counted(simulation, "disk_hit_tokens") == counted(simulation, "host_hit_tokens") == 24
    assert counted(simulation, "disk_loaded_blocks") == 6
    assert counted(simulation, "disk_loaded_bytes") == 600
    assert in_host(simulation, TENANT.account) == 6, "the control: it is in host memory now"
    displace_pool(simulation, 910)
    assert served(simulation, 3, words(25), TENANT) == 24
    assert counted(simulation, "disk_hit_tokens") == 24
    assert counted(simulation, "host_hit_tokens") == 48
    simulation.assert_all_finished()


@pytest.mark.parametrize("handed_over", [False, True])
def test_what_another_replica_handed_over_waits_for_no_disk(handed_over: bool) -> None:
    simulation = with_disk()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    submit = Submit(2, array("I", words(25)).tobytes(), TENANT, SamplingParams(), 4)
    (sequence,) = simulation.door.sequences(submit, 1, 0.0)
    if handed_over:
        sequence.staged = StagingArea(4096, lambda: 0.0).open(b"i" * 16, 16, 6, shared=False)
    assert simulation.scheduler.running.disk_reads.begin(sequence) == (not handed_over)


@pytest.mark.parametrize("stranger", STRANGERS, ids=str)
@pytest.mark.parametrize("scope", KINDS, ids=str)
def test_others_find_nothing_on_disk_and_ones_own_exactly_what_is_there(scope: Scope, stranger: Scope) -> None:
    if (scope.kind, scope.id, scope.epoch) == (stranger.kind, stranger.id, stranger.epoch):
        return
    simulation = with_disk(public=[PUBLIC])
    prompt = [*PUBLIC, *words(22)]
    assert served(simulation, 1, prompt, scope) == 8
    displace(simulation)
    assert served(simulation, 2, prompt, stranger) == 8
    assert counted(simulation, "disk_loaded_blocks") == counted(simulation, "host_hit_tokens") == 0
    wiped = scope.kind == stranger.kind and scope.id == stranger.id and scope.epoch < stranger.epoch
    displace(simulation, 903)
    assert served(simulation, 3, prompt, scope) == (8 if wiped else 28)
    assert counted(simulation, "disk_hit_tokens") == (0 if wiped else 20)
    simulation.assert_all_finished()


def test_a_stranger_never_waits_for_the_disk_and_asks_it_for_nothing() -> None:
    """The timing gate: whoever has no block there does not learn by waiting that another one has."""
    simulation = with_disk(loading_looks=lambda: 3)
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    waits: dict[str, int] = {}
    for id, (name, scope) in enumerate([("stranger", OTHER), ("own", TENANT)], 2):
        (entry,) = simulation.submit(id, words(25), scope, max_tokens=1)
        steps = 0
        while entry.started is None:
            simulation.step()
            steps += 1
        waits[name] = steps
        simulation.run()
    assert waits["stranger"] == 1
    assert waits["own"] >= 3, "the control: its own does wait"


# The eviction gate


def test_a_flood_of_the_disk_leaves_a_quiet_tenant_its_floor_there() -> None:
    terms, hits = SchedulingTerms(floor_blocks=6), []
    for flooded in (False, True):
        simulation = with_disk(48)
        served(simulation, 1, words(25), TENANT, terms)
        displace(simulation)
        if flooded:
            flood(simulation, TWO, 320)
            rest(simulation)
            assert counted(simulation, "disk_evicted_blocks") > 100
            displace(simulation, 903)
        hits.append(served(simulation, 2, words(25), TENANT, terms))
        simulation.assert_all_finished()
    assert hits == [24, 24]


def test_an_account_has_no_more_on_disk_than_its_cap() -> None:
    simulation = with_disk()
    for id in range(10):
        served(simulation, id, words(25, id), TENANT, SchedulingTerms(cap_blocks=8))
        displace(simulation, 900 + id)
    index = disk_of(simulation).index
    assert 0 < sum(entry.account.name == TENANT.account for entry in index._entries.values()) <= 8


# Time to live, epochs, erasing


@pytest.mark.parametrize("keep_s", [None, 900.0])
def test_nothing_is_found_on_disk_past_its_time_and_its_places_are_erased(keep_s: float | None) -> None:
    simulation = with_disk()
    terms = SchedulingTerms(keep_s=keep_s)
    served(simulation, 1, words(25), TENANT, terms)
    displace(simulation)
    own = [e.slot for e in disk_of(simulation).index._entries.values() if e.account.name == TENANT.account]
    assert len(own) == 6
    simulation.seconds += keep_s or KEEP_S_MAX
    rest(simulation)
    assert not {*own} & files_of(simulation).written.keys()
    assert served(simulation, 2, words(25), TENANT, terms) == 0


def test_a_raised_epoch_erases_on_disk_too_and_a_late_lookup_brings_nothing_back() -> None:
    simulation = with_disk()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    own = [e.slot for e in disk_of(simulation).index._entries.values() if e.account.name == TENANT.account]
    raised = msgspec.structs.replace(TENANT, epoch=1)
    assert served(simulation, 2, words(25), raised) == 0
    rest(simulation)
    assert len(own) == 6
    assert files_of(simulation).erased == 6
    assert served(simulation, 3, words(25), TENANT) == 0
    displace(simulation, 903)
    assert served(simulation, 4, words(25), TENANT) == 0, "a late lookup left something"
    assert served(simulation, 5, words(25), raised) == 24


def test_what_is_to_be_erased_never_comes_to_disk_and_reads_nothing_there() -> None:
    simulation = with_disk()
    served(simulation, 1, words(25), TENANT, SECRET)
    displace(simulation)
    index = disk_of(simulation).index
    assert TENANT.account not in {entry.account.name for entry in index._entries.values()}
    served(simulation, 2, words(25), TENANT)
    displace(simulation, 903)
    assert served(simulation, 3, words(25), TENANT, SECRET) == 0
    assert counted(simulation, "disk_loaded_blocks") == 0
    simulation.assert_all_finished()


@pytest.mark.parametrize(
    ("scope", "terms"),
    [(msgspec.structs.replace(TENANT, epoch=1), SECRET), (TENANT, SchedulingTerms(erase=True, keep_s=0.0))],
    ids=["epoch", "time to live"],
)
def test_a_request_that_is_to_be_erased_tells_the_disk_of_its_epoch_and_time_to_live(
    scope: Scope, terms: SchedulingTerms
) -> None:
    """As those of an account do that turned zero retention on."""
    simulation = with_disk()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    served(simulation, 2, words(9, 3), scope, terms)
    rest(simulation)
    assert TENANT.account not in {entry.account.name for entry in disk_of(simulation).index._entries.values()}
    assert files_of(simulation).erased == 6


@pytest.mark.parametrize("named", [TENANT.id, TENANT.account], ids=["scope", "account"])
def test_raised_epochs_erase_on_every_tier_without_a_call(named: bytes) -> None:
    simulation = with_disk(slots=64, blocks=64)
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    assert served(simulation, 2, words(25), TENANT) == 24
    served(simulation, 3, words(25, 3), OTHER)
    assert simulation.host is not None
    tiers = [simulation.host.index, disk_of(simulation).index]
    assert in_host(simulation, TENANT.account) == 6, "the control: it is on each tier"
    simulation.tree.raise_epochs({named: 1})
    simulation.host.raise_epochs({named: 1})
    rest(simulation)
    assert not any(entry.account.name == TENANT.account for index in tiers for entry in index._entries.values())
    assert files_of(simulation).erased == 6
    assert simulation.tree.counters["evicted_epoch_blocks"] == 6
    assert served(simulation, 4, words(25, 3), OTHER) == 24, "another's stays"
    assert served(simulation, 5, words(25), TENANT) == 0
    simulation.assert_all_finished()


def test_an_epoch_that_is_raised_while_its_blocks_are_read_leaves_none_of_them() -> None:
    simulation = with_disk(loading_looks=lambda: 4)
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    simulation.submit(2, words(25), TENANT, max_tokens=1)
    simulation.step()
    simulation.step()
    assert disk_of(simulation)._reading == 6
    simulation.submit(3, words(9, 5), msgspec.structs.replace(TENANT, epoch=1), max_tokens=1)
    simulation.run()
    rest(simulation)
    assert in_host(simulation, TENANT.account) == 0
    assert served(simulation, 4, words(25), TENANT) == 0
    simulation.assert_all_finished()


# Faults


def test_a_corrupt_block_is_computed_again_with_all_behind_it_and_forgotten() -> None:
    outcomes = iter([None] * 2 + [CopyOutcome.CORRUPT])
    simulation = with_disk()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    files_of(simulation)._fault = lambda: next(outcomes, None)
    assert served(simulation, 2, words(25), TENANT) == 8
    assert counted(simulation, "disk_corrupt_blocks") == 1
    assert disk_of(simulation).open
    rest(simulation)
    assert served(simulation, 3, words(25), TENANT) == 24
    simulation.assert_all_finished()


def test_a_failing_disk_ends_the_tier_and_no_call() -> None:
    simulation = with_disk()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    files_of(simulation)._fault = lambda: CopyOutcome.LOST
    assert served(simulation, 2, words(25), TENANT) == 0
    rest(simulation)
    assert counted(simulation, "disk_ended") == 1
    assert not disk_of(simulation).open
    displace(simulation, 903)
    assert served(simulation, 3, words(25), TENANT) == 0
    assert served(simulation, 4, words(25), TENANT) == 24, "the pool is as it was"
    simulation.assert_all_finished()


def test_a_disk_that_fills_up_while_blocks_wait_for_it_lets_everybody_go_on() -> None:
    simulation = with_disk(loading_looks=lambda: 3)
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    simulation.submit(2, words(25), TENANT)
    simulation.submit(3, [*words(16), *words(9, 4)], TENANT)
    simulation.step()
    files_of(simulation).error = "disk_full: told to"
    simulation.run()
    rest(simulation)
    assert counted(simulation, "disk_ended") == 1
    simulation.assert_all_finished()


def test_nobody_waits_longer_for_a_disk_than_so_long() -> None:
    simulation = with_disk()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    files_of(simulation)._looks = lambda: 10**6
    began_s = simulation.seconds
    assert served(simulation, 2, words(25), TENANT) == 0
    assert simulation.seconds - began_s < FETCH_S + 12
    assert counted(simulation, "disk_late_fetches") == 1
    simulation.assert_all_finished()


def test_what_is_computed_sooner_than_read_is_computed_and_the_disk_asked_again_later() -> None:
    simulation = with_disk()
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    disk = disk_of(simulation)
    disk._read_bytes_s = 1e-3
    assert simulation.host is not None
    simulation.host.observe(16, 100, 1e6)
    assert served(simulation, 2, words(25), TENANT) == 0
    assert counted(simulation, "disk_slower_blocks") == 6
    assert disk._read_bytes_s > 1e-3, "it would never be asked again"


# Beside others


def test_others_run_while_one_waits_for_the_disk_and_whoever_leaves_meanwhile_holds_nothing() -> None:
    simulation = with_disk(loading_looks=lambda: 6, blocks=64, slots=64, depth=2)
    served(simulation, 1, words(25), TENANT)
    displace(simulation)
    (runs,) = simulation.submit(2, words(9, 3), OTHER, max_tokens=40)
    simulation.step()
    (first,) = simulation.submit(3, words(25), TENANT, max_tokens=4)
    (second,) = simulation.submit(4, words(9, 7), TENANT, max_tokens=4)
    written = len(runs.tokens)
    simulation.step()
    simulation.step()
    assert first.started is None, "it waits for the disk"
    assert second.started is not None, "one of its account passes it"
    assert len(runs.tokens) > written
    simulation.scheduler.intake.cancel(1, [3])
    simulation.run()
    rest(simulation)
    assert not disk_of(simulation)._moves
    simulation.assert_all_finished()


def test_accounts_take_turns_at_the_disk() -> None:
    simulation = with_disk(loading_looks=int, blocks=16, slots=64)
    prompts = [[*words(8), *words(9, number)] for number in range(6)]
    for id, prompt in enumerate(prompts):
        served(simulation, id, prompt, TENANT)
    served(simulation, 50, words(25, 9), OTHER)
    displace(simulation)
    order: list[bytes] = []
    disk = disk_of(simulation)
    begin = disk._begin_read
    disk._begin_read = lambda fetch: order.append(fetch.policy.account) or begin(fetch)  # type: ignore[method-assign, func-returns-value]
    for id, prompt in enumerate(prompts, 100):
        simulation.submit(id, prompt, TENANT, max_tokens=1)
    simulation.submit(150, words(25, 9), OTHER, max_tokens=1)
    simulation.run()
    assert OTHER.account in order[:2], "it waited for all of another account's"
    simulation.assert_all_finished()


# All of it at once


def chaos(seed: int) -> Simulation:
    """A life with host and disk of any size, whose copies take any time, and a disk that fails."""
    pick = random.Random(seed)
    slots, places, looks = pick.choice([2, 8, 64]), pick.choice([0, 4, 40, 400]), pick.choice([0, 0, 1, 3])
    faults = pick.choice([[None], [None], [None] * 9 + [CopyOutcome.CORRUPT], [None] * 30 + [CopyOutcome.LOST]])
    return Chaos(
        seed, host_slots=slots, disk_places=places, loading_looks=lambda: pick.randint(0, looks),
        disk_fault=lambda: pick.choice(faults),
    ).run()  # fmt: skip


def crowd(seed: int) -> Simulation:
    """A small pool and host memory, and many who say what was said before: most of it is on disk, or on its way."""
    pick = random.Random(seed)
    looks = pick.choice([0, 1, 4])
    faults = pick.choice([[None], [None], [None] * 3 + [CopyOutcome.CORRUPT], [None] * 60 + [CopyOutcome.LOST]])
    scopes = pick.sample(SCOPES, 3)
    simulation = Simulation(
        blocks=14, block_tokens=2, step_tokens=16, sequences=3, waiting=200, context_tokens=28,
        depth=pick.choice([1, 2]), host_slots=pick.choice([4, 9, 16]), loading_looks=lambda: pick.randint(0, looks),
        public=[words(2, 77)], disk_places=pick.choice([8, 30, 300]), disk_fault=lambda: pick.choice(faults),
    )  # fmt: skip
    prefixes, epochs = [words(2 * pick.randint(1, 7), number) for number in range(4)], Counter[bytes]()
    share = {scope.account or scope.id: pick.choice([(None, None), (3, None), (None, 5)]) for scope in SCOPES}
    for id in range(32):
        scope = pick.choice(scopes)
        epochs[scope.id] += pick.random() < 0.05
        scope = msgspec.structs.replace(scope, epoch=scope.epoch + epochs[scope.id])
        floor, cap = share[scope.account or scope.id]
        terms = SchedulingTerms(
            floor_blocks=floor, cap_blocks=cap, keep_s=pick.choice([None, None, 25.5]), erase=pick.random() < 0.1
        )
        start = words(2, 77) if pick.random() < 0.3 else []
        prompt = [*start, *pick.choice(prefixes), *words(pick.randint(1, 3), 50 + id)]
        simulation.submit(id, prompt, scope, max_tokens=pick.randint(1, 5), terms=terms)
        for _ in range(pick.choice([0, 2, 6])):
            simulation.step()
        if pick.random() < 0.1:
            simulation.scheduler.intake.cancel(1, [pick.randrange(id + 1)])
        if pick.random() < 0.3 and simulation.host is not None:
            simulation.host.index.forget([*simulation.host.index._entries])  # host memory is short
            simulation.loop.sweep()
        if pick.random() < 0.05:
            put_to_sleep(simulation, max_kept_blocks=64, fails=pick.random() < 0.3)
            if simulation.asleep:
                simulation.step()
                simulation.wake()
    simulation.run()
    simulation.assert_all_finished()
    return simulation


@pytest.mark.parametrize("life", [chaos, crowd])
def test_lives_with_a_disk_give_the_texts_of_solo_runs(life: Callable[[int], Simulation]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        try:
            simulation = life(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
        seen += Counter(simulation.scheduler.load(draining=False).counters)
        seen["erased_places"] += files_of(simulation).erased
    wanted = (
        "stored_blocks",
        "loaded_blocks",
        "evicted_blocks",
        "swept_blocks",
        "hit_tokens",
        "corrupt_blocks",
        "ended",
    )
    for what in wanted if life is crowd else ("stored_blocks",):
        assert seen[f"disk_{what}"] > 2, f"{what}: {seen[f'disk_{what}']}"


# module, what its source says, what the broken build says instead
BREAKS = {
    "a slot is read into before copies from it are done": (
        "tiers.disk_blocks",
        "while self._batches and self._batches[0][0].passed():",
        "while self._batches:",
    ),
    "what is read is found before it is there": (
        "tiers.disk_blocks",
        "            target.arriving = True\n            host.hold([target])",
        "            host.hold([target])",
    ),
    "a slot that is read into is given on": ("tiers.disk_blocks", "            host.hold([target])\n", ""),
    "a slot that is written from is given on": (
        "tiers.disk_blocks",
        "                self._host.hold([entry])\n",
        "                entry.pins += 1\n",
    ),
    "what is corrupt is found": (
        "tiers.disk_blocks",
        "            if move.copy.outcome == CopyOutcome.DONE:",
        "            if True:",
    ),
    "places are not erased": ("tiers.disk_blocks", "                self._files.erase(places)", "                pass"),
    "an epoch is not told to the disk": (
        "tiers.host_blocks",
        "            self.disk.index.has_scope(namespace, policy)  # which",
        "            pass  # which",
    ),
    "what is to be erased asks the disk": ("scheduling.disk_reads", " or sequence.terms.erase or", " or"),
    "nobody is let go by a slow disk": ("tiers.disk_blocks", "        self._expire()\n", ""),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_build_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong = BREAKS[name]
    install_broken(module, right, wrong, monkeypatch)
    gates: tuple[Callable[[], object], ...] = (
        test_what_is_to_be_erased_never_comes_to_disk_and_reads_nothing_there,
        test_a_raised_epoch_erases_on_disk_too_and_a_late_lookup_brings_nothing_back,
        lambda: test_a_request_that_is_to_be_erased_tells_the_disk_of_its_epoch_and_time_to_live(
            msgspec.structs.replace(TENANT, epoch=1), SECRET
        ),
        test_a_corrupt_block_is_computed_again_with_all_behind_it_and_forgotten,
        test_nobody_waits_longer_for_a_disk_than_so_long,
        *(partial(crowd, seed) for seed in range(40)),
    )
    for gate in gates:
        try:
            gate()
        except (AssertionError, ArithmeticError, LookupError, ValueError):
            return
    raise AssertionError(f"no gate noticed that {name}")
