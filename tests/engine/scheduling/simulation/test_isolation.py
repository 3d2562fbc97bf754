"""What keeps tenants apart in a replica, over the stamp engine, which asserts every slot that attention reads.

The gates of the cache: exact (others find nothing, one's own find exactly what they should), eviction (a flood takes
nothing that a floor covers), rank (nobody's order depends on what others have cached or compute); then time to live,
erasing, epochs, published prefixes, pages. Where a gate could pass for the wrong reason, it is seen to fail on a broken
build.
"""

from array import array

import msgspec
import pytest

from engine.kv_blocks.block_pool import blocks_of
from engine.kv_blocks.expired_blocks import SWEEP_MAX
from engine.kv_blocks.public_prefixes import InvalidPublicPrefix, whole_blocks
from engine.protocol.frames import Submit
from engine.protocol.types import FinishReason, SamplingParams, SchedulingTerms, Scope, ScopeKind
from engine.scheduling.scheduler import STALE_BLOCKS
from engine.step.key_span import KeySpan
from tests.engine.scheduling.simulation.replica import GROUPING, Heard, Simulation
from tests.engine.scheduling.simulation.test_replica import install_broken
from tests.engine.scheduling.simulation.windows import WindowSize
from tests.engine.scheduling.test_scheduler import words
from tests.prefixcache.history import cached_of

ONE, TWO = b"1" * 16, b"2" * 16
TENANT = Scope(ScopeKind.TENANT, ONE, account=ONE)
OTHER = Scope(ScopeKind.TENANT, TWO, account=TWO)
USER = Scope(ScopeKind.USER, b"u" * 16, account=ONE)
REQUEST = Scope(account=ONE)
PUBLIC = words(16, 77)  # four blocks
KINDS = [TENANT, USER, Scope(ScopeKind.PUBLIC, b"g" * 16, account=ONE), msgspec.structs.replace(TENANT, epoch=3)]
STRANGERS = [
    OTHER,
    Scope(ScopeKind.USER, b"v" * 16, account=ONE),
    Scope(ScopeKind.USER, b"u" * 16, epoch=1, account=ONE),
    Scope(ScopeKind.PUBLIC, b"h" * 16, account=ONE),
    Scope(ScopeKind.TENANT, ONE, epoch=9, account=ONE),
    REQUEST,
]


SPANS = [KeySpan(window=10), KeySpan(chunk=16)]
WINDOWS = [(), *((WindowSize(span, 64, 64, 1, 64),) for span in SPANS)]  # beside the tree's blocks
NAMES = ["", "window", "chunk"]


def cached(entry: Heard) -> int:
    assert entry.started is not None
    return entry.started.cached_tokens


def held(simulation: Simulation) -> dict[int, set[int]]:
    """The blocks that each sequence ever had, as the simulation runs to its end."""
    tables: dict[int, set[int]] = {}
    while not simulation.loop.idle:
        assert simulation.step()
        for sequence in simulation.scheduler.running.sequences:
            own = sequence.table[sequence.public_blocks : sequence.block_count]
            tables.setdefault(sequence.id, set()).update(own.tolist())
    return tables


def secrets(simulation: Simulation) -> int:
    return len(simulation.stamps.secret_blocks())


# The exact gate


@pytest.mark.parametrize("windows", WINDOWS, ids=NAMES)
@pytest.mark.parametrize("public", [(), (PUBLIC,)], ids=["", "published"])
@pytest.mark.parametrize("way", ["fresh", "together", "evicted", "preempted"])
@pytest.mark.parametrize("stranger", STRANGERS, ids=str)
@pytest.mark.parametrize("scope", KINDS, ids=str)
def test_others_find_nothing_and_ones_own_exactly_what_is_there(
    scope: Scope, stranger: Scope, way: str, public: tuple[list[int], ...], windows: tuple[WindowSize, ...]
) -> None:
    if (scope.kind, scope.id, scope.epoch) == (stranger.kind, stranger.id, stranger.epoch):
        return
    simulation = Simulation(blocks=64, block_tokens=4, public=public, windows=windows)
    prompt = [*PUBLIC, *words(22)] if public else words(38)
    everybodys = 16 if public else 0
    (cold,) = simulation.submit(1, prompt, scope)
    if way == "preempted":
        simulation.step()
        simulation.scheduler.preempt(cold.sequence)
    tables = held(simulation) if way != "together" else {}
    if way == "evicted":
        simulation.submit(90, words(180, 5), OTHER, max_tokens=1)
        tables |= held(simulation)
    (cross,) = simulation.submit(2, prompt, stranger)
    if way != "together":
        tables |= held(simulation)
    (same,) = simulation.submit(3, prompt, scope)
    for id, found in held(simulation).items():
        tables.setdefault(id, set()).update(found)
    assert cached(cold) == everybodys
    assert cached(cross) == everybodys
    late = scope.kind == stranger.kind and scope.id == stranger.id and scope.epoch < stranger.epoch
    if way != "evicted":  # where it is, less is left
        assert cached(same) == (everybodys if late else 36)
    assert tables[1].isdisjoint(tables[2]) or way == "evicted"
    assert tables[3].isdisjoint(tables[2]) or way == "evicted"
    simulation.assert_all_finished()


@pytest.mark.parametrize("windows", WINDOWS, ids=NAMES)
@pytest.mark.parametrize(
    ("right", "wrong", "stranger"),
    [
        ("scope_id=scope.id", 'scope_id=b"x" * 16', OTHER),
        ("scope_kind=int(scope.kind)", "scope_kind=1", Scope(ScopeKind.USER, ONE)),
        ("epoch=scope.epoch", "epoch=0", STRANGERS[4]),
    ],
)
def test_the_exact_gate_fails_where_scopes_share(
    right: str, wrong: str, stranger: Scope, windows: tuple[WindowSize, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_broken("sequences.validation", right, wrong, monkeypatch)
    with pytest.raises(AssertionError):
        test_others_find_nothing_and_ones_own_exactly_what_is_there(TENANT, stranger, "fresh", (), windows)


def test_the_blocks_of_a_duplicate_stay_in_their_scope() -> None:
    simulation = Simulation(blocks=64, step_tokens=64)
    entries = [simulation.submit(id, words(22), scope)[0] for id, scope in enumerate((TENANT, OTHER, TENANT, REQUEST))]
    simulation.run()
    assert [cached(entry) for entry in entries] == [0, 0, 20, 0]
    simulation.assert_all_finished()


# The eviction gate


def flood(simulation: Simulation, account: bytes, blocks: int) -> None:
    """So many blocks, by one account, each request as another of its users."""
    for number in range(blocks // 8):
        scope = Scope(ScopeKind.USER, number.to_bytes(16, "big"), account=account)
        simulation.submit(1000 + number, words(31, 1000 + number), scope, max_tokens=1)
        simulation.run()


@pytest.mark.parametrize("windows", WINDOWS, ids=NAMES)
def test_a_flood_of_ten_pools_leaves_a_quiet_tenant_its_hits(windows: tuple[WindowSize, ...]) -> None:
    terms = SchedulingTerms(floor_blocks=12)
    hits = []
    for flooded in (False, True):
        simulation = Simulation(blocks=64, step_tokens=64, windows=windows)
        for id in (1, 2):
            simulation.submit(id, words(25, id), TENANT, terms=terms)
            simulation.run()
        if flooded:
            flood(simulation, TWO, 640)
            assert simulation.tree.counters["evicted_space_blocks"] > 500
        again = [simulation.submit(10 + id, words(25, id), TENANT, terms=terms)[0] for id in (1, 2)]
        simulation.run()
        hits.append([cached(entry) for entry in again])
        simulation.assert_all_finished()
    assert hits == [[24, 24], [24, 24]]


def test_the_eviction_gate_fails_where_each_scope_counts_for_itself_and_floors_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = "RetentionPolicy(scope.account or scope.id, CacheShare(floor, cap), terms.keep_s)"
    install_broken(
        "sequences.validation",
        right,
        "RetentionPolicy(scope.id, CacheShare(0, cap), terms.keep_s)",
        monkeypatch,
    )
    with pytest.raises(AssertionError):
        test_a_flood_of_ten_pools_leaves_a_quiet_tenant_its_hits(())


@pytest.mark.parametrize("windows", WINDOWS, ids=NAMES)
def test_an_account_cannot_flood_by_its_users(windows: tuple[WindowSize, ...]) -> None:
    simulation = Simulation(blocks=64, step_tokens=64, windows=windows)
    for number in range(20):
        scope = Scope(ScopeKind.USER, bytes([number]) * 16, account=ONE)
        simulation.submit(number, words(31, number), scope, max_tokens=1, terms=SchedulingTerms(cap_blocks=10))
        simulation.run()
    assert cached_of(simulation.tree, ONE) == 10


def test_terms_that_say_nothing_mean_what_the_replica_says() -> None:
    simulation = Simulation()
    submit = Submit(1, array("I", [1]).tobytes(), TENANT, SamplingParams(), 1)
    (said,) = simulation.door.sequences(submit, 1, 0.0)
    assert (said.retention.account, said.retention.share, said.retention.keep_s) == (ONE, simulation.door.share, None)
    terms = SchedulingTerms(floor_blocks=1, cap_blocks=2, keep_s=3.0)
    (said,) = simulation.door.sequences(msgspec.structs.replace(submit, terms=terms), 1, 0.0)
    assert (said.retention.share.floor, said.retention.share.cap, said.retention.keep_s) == (1, 2, 3.0)


# The rank gate


def order_of_starts(scope: Scope, way: str, *, same: bool) -> list[int]:
    """In which order four prompts of TENANT start, where `scope` has had the third's cached, or the first's is being
    computed for it; or, not the `same`, another prompt of that length."""
    simulation = Simulation(blocks=256, sequences=2 if way == "cached" else 3)
    known = 2 if way == "cached" else 0
    simulation.submit(1, words(25, 9), Scope(account=b"3" * 16), max_tokens=40)  # takes a place for long
    simulation.step()
    simulation.submit(2, words(60, 20 + known if same else 50), scope, max_tokens=1)
    simulation.step()
    if way == "cached":
        while simulation.heard[1, 2].finish is None:
            simulation.step()
    asked = [simulation.submit(10 + id, words(60, 20 + id), TENANT, max_tokens=1)[0] for id in range(4)]
    simulation.run()
    simulation.assert_all_finished()
    return sorted(range(4), key=lambda id: asked[id].sequence.start_order)


@pytest.mark.parametrize("way", ["cached", "computed"])
@pytest.mark.parametrize("stranger", STRANGERS, ids=str)
def test_an_accounts_order_does_not_tell_what_others_have_cached_or_compute(stranger: Scope, way: str) -> None:
    assert order_of_starts(stranger, way, same=True) == order_of_starts(stranger, way, same=False)


def test_an_accounts_order_does_follow_what_it_computes_itself() -> None:
    """The control: its first prompt steps aside until its blocks are cached."""
    assert order_of_starts(TENANT, "computed", same=True) == [1, 0, 2, 3]
    assert order_of_starts(TENANT, "computed", same=False) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("module", "right", "wrong"),
    [
        ("sequences.validation", "scope_id=scope.id", 'scope_id=b"x" * 16'),
        (
            "scheduling.admission",
            "self._namespaces.get(sequence.namespace, [])",
            "[other for namespace in self._namespaces.values() for other in namespace]",
        ),
    ],
)
def test_the_rank_gate_fails_where_sequences_wait_for_prefixes_of_others(
    module: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_broken(module, right, wrong, monkeypatch)
    with pytest.raises(AssertionError):
        test_an_accounts_order_does_not_tell_what_others_have_cached_or_compute(OTHER, "computed")


# Time to live


def test_cached_blocks_are_found_until_their_time_is_over_and_a_hit_refreshes_it() -> None:
    simulation = Simulation()
    terms, found = SchedulingTerms(keep_s=30.0), []
    for id, pause_s in enumerate((0, 20, 20, 40)):
        simulation.seconds += pause_s
        (entry,) = simulation.submit(id, words(22), TENANT, max_tokens=1, terms=terms)
        simulation.run()
        found.append(cached(entry))
    assert found == [0, 20, 20, 0]
    simulation.seconds += 40
    simulation.loop.sweep()
    assert simulation.tree.cached_blocks == 0
    assert secrets(simulation) == 0
    assert simulation.stamps.zeroed >= 10  # what time took is erased, whatever the terms say


def test_what_is_over_is_swept_in_idle_time_a_bounded_part_at_once() -> None:
    simulation = Simulation(blocks=400, step_tokens=2000)
    simulation.submit(1, words(1400), TENANT, max_tokens=1, terms=SchedulingTerms(keep_s=5.0))
    simulation.run()
    simulation.seconds += 10
    left = []
    while simulation.loop.sweep():
        left.append(simulation.tree.cached_blocks)
    assert left == [350 - SWEEP_MAX, 350 - 2 * SWEEP_MAX]
    assert simulation.tree.cached_blocks == 0


# Erasing


@pytest.mark.parametrize("scope", [REQUEST, TENANT])
def test_what_asked_for_it_is_erased_however_it_ends(scope: Scope) -> None:
    terms = SchedulingTerms(erase=True, keep_s=0.0)
    simulation = Simulation(blocks=64, depth=2)
    simulation.submit(1, words(22), scope, terms=terms)  # to its end, a part of a block included
    simulation.run()
    assert secrets(simulation) == 0
    for id, leave in ((2, "cancel"), (3, "preempt"), (4, "fail")):
        (entry,) = simulation.submit(id, words(22, id), scope, max_tokens=20, terms=terms)
        for _ in range(4):
            simulation.step()
        assert secrets(simulation) > 0, "the control: it is there while it runs"
        simulation.land()
        if leave == "cancel":
            simulation.scheduler.intake.cancel(1, [id])
        elif leave == "preempt":
            simulation.scheduler.preempt(entry.sequence)
        else:
            simulation.scheduler.intake.end_all("told to")
        simulation.loop.sweep()
        simulation.listen()
        if leave == "preempt":
            assert secrets(simulation) == 0 or scope is TENANT
            simulation.run()
        assert secrets(simulation) == 0
    simulation.assert_all_finished()


def test_what_is_evicted_is_erased_before_it_is_anybody_elses() -> None:
    simulation = Simulation(blocks=16, step_tokens=64)
    simulation.submit(1, words(40), TENANT, max_tokens=1, terms=SchedulingTerms(erase=True))
    simulation.run()
    assert secrets(simulation) == 10
    simulation.submit(2, words(60), OTHER, max_tokens=1)
    simulation.run()  # where the stamps see to it
    assert secrets(simulation) <= 1
    simulation.assert_all_finished()


def test_what_such_a_request_only_read_is_erased_as_well() -> None:
    simulation = Simulation()
    simulation.submit(1, words(22), TENANT, max_tokens=1)
    simulation.run()
    simulation.submit(2, words(22), TENANT, max_tokens=1, terms=SchedulingTerms(erase=True))
    simulation.run()
    simulation.account.free(simulation.tree.evict(64))
    assert len(simulation.account.take_unerased()) == 5


# Epochs


def test_a_raised_epoch_erases_and_a_late_lookup_brings_nothing_back() -> None:
    simulation = Simulation()
    found = []
    for id, epoch in enumerate((0, 1, 0, 0, 1)):
        scope = msgspec.structs.replace(TENANT, epoch=epoch)
        (entry,) = simulation.submit(id, words(22), scope, max_tokens=1)
        simulation.run()
        simulation.step()
        found.append(cached(entry))
        assert simulation.tree.cached_blocks == 5, "what an old epoch left is still there"
    assert found == [0, 0, 0, 0, 20]
    assert simulation.stamps.zeroed == 15 + 2, "and what each of an old epoch alone had held"
    simulation.assert_all_finished()


# Published prefixes


def test_everybody_reads_what_is_published_and_nobody_what_lies_behind_it() -> None:
    simulation = Simulation(blocks=64, public=[PUBLIC])
    prompt = [*PUBLIC, *words(10)]
    scopes = [TENANT, OTHER, USER, REQUEST, TENANT, OTHER, USER, REQUEST]
    entries = []
    for id, scope in enumerate(scopes):
        entries += simulation.submit(id, prompt, scope, max_tokens=1)
        simulation.run()
    assert [cached(entry) for entry in entries] == [16, 16, 16, 16, 24, 24, 24, 16]
    simulation.assert_all_finished()


def test_what_lies_behind_one_published_prefix_is_not_found_behind_another() -> None:
    first, second = words(8, 1), words(8, 2)
    simulation = Simulation(blocks=64, public=[first, second])
    found = []
    for id, prefix in enumerate((first, second, [], first, second, [])):
        (entry,) = simulation.submit(id, [*prefix, *words(10, 3)], TENANT, max_tokens=1)
        simulation.run()
        found.append(cached(entry))
    assert found == [8, 8, 0, 16, 16, 8]
    simulation.assert_all_finished()


def test_what_lies_behind_published_prefixes_is_seen_to_mix_where_it_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_broken("kv_blocks.kv_manager", "behind=self.public_prefixes.pages[public[-1]]", "behind=1", monkeypatch)
    with pytest.raises(AssertionError):
        test_what_lies_behind_one_published_prefix_is_not_found_behind_another()


@pytest.mark.parametrize("length", [3, 4, 9, 15, 16, 17])
def test_a_part_of_what_is_published_is_read_in_whole_blocks(length: int) -> None:
    simulation = Simulation(blocks=64, public=[PUBLIC])
    (entry,) = simulation.submit(1, [*PUBLIC[:length], 5, 6], REQUEST, max_tokens=1)
    simulation.run()
    assert cached(entry) == length // 4 * 4
    simulation.assert_all_finished()


def test_a_published_prefix_is_there_for_good() -> None:
    simulation = Simulation(blocks=16, step_tokens=64, public=[PUBLIC])
    flood(simulation, TWO, 160)
    (entry,) = simulation.submit(1, [*PUBLIC, 1], OTHER, max_tokens=1)
    simulation.run()
    assert cached(entry) == 16
    assert simulation.door.max_total_tokens == 12 * 4
    simulation.assert_all_finished()


def test_strangers_read_a_published_prefix_as_one_group() -> None:
    simulation = Simulation(blocks=64, step_tokens=64, public=[PUBLIC], costs=GROUPING)
    for id, scope in enumerate((TENANT, OTHER, REQUEST)):
        simulation.submit(id, [*PUBLIC, *words(5, id)], scope, max_tokens=10)
    simulation.run()
    assert simulation.scheduler.load(draining=False).counters["spared_keys"] > 0
    simulation.assert_all_finished()


@pytest.mark.parametrize(
    ("prefixes", "said"),
    [([[1, 2, 3]], "has 3 tokens"), ([[1, 2, 3, 1000]], "is not below 1000"), ([words(400)], "take 100 of 64")],
)
def test_prefixes_that_cannot_be_published_are_named(prefixes: list[list[int]], said: str) -> None:
    with pytest.raises(InvalidPublicPrefix, match=said):
        whole_blocks(prefixes, blocks=64, block_tokens=4, vocabulary=1000)


def test_only_whole_blocks_are_published() -> None:
    assert [len(prefix) for prefix in whole_blocks([words(9), words(4)], 64, 4, 1000)] == [8, 4]


# Pages


def test_a_block_that_was_freed_under_its_reader_ends_it_before_it_is_read() -> None:
    simulation = Simulation()
    (victim,) = simulation.submit(1, words(22), REQUEST, max_tokens=20)
    simulation.step()
    simulation.step()
    simulation.step()
    page = victim.sequence.held_pages()[2]
    simulation.account.free([page])  # the fault
    (other,) = simulation.submit(2, words(6, 2), OTHER, max_tokens=3)
    while not simulation.loop.idle:  # without the account's own check, which has noticed already
        simulation.loop.turn()
        for owner, progress in simulation.scheduler.intake.take_outputs().items():
            simulation._hear(owner, progress)
    assert victim.finish is not None
    assert (victim.finish.reason, victim.finish.message) == (FinishReason.ERROR, STALE_BLOCKS)
    assert other.finish is not None
    assert other.finish.reason == FinishReason.LENGTH
    counters = simulation.scheduler.load(draining=False).counters
    assert counters["stale_reads"] == 1
    assert counters["stale_pages"] == 1, "its other blocks came back, this one stays with whom it is given to"
    assert simulation.account.free_blocks + simulation.tree.cached_blocks == simulation.account.total


def test_a_stale_block_of_the_tree_is_read_by_nobody() -> None:
    simulation = Simulation()
    simulation.submit(1, words(22), TENANT, max_tokens=1)
    simulation.run()
    lease = simulation.tree.match(*_lookup(simulation))
    simulation.account.free(lease.blocks[:1])  # the fault
    simulation.tree.release(lease)
    taken = simulation.account.allocate(64 - 5 + 1)
    assert blocks_of(lease.blocks[:1])[0] in blocks_of(taken)
    simulation.account.free(taken[1:])
    (victim,) = simulation.submit(2, words(22), TENANT, max_tokens=3)
    while not simulation.loop.idle:
        simulation.loop.turn()
        for owner, progress in simulation.scheduler.intake.take_outputs().items():
            simulation._hear(owner, progress)
    assert victim.finish is not None
    assert victim.finish.message == STALE_BLOCKS
    assert simulation.tree.match(*_lookup(simulation)).tokens == 0


def _lookup(simulation: Simulation) -> tuple[object, ...]:
    sequence = simulation.heard[1, 1].sequence
    return sequence.namespace, array("I", words(22)[:-1]), sequence.retention


def test_a_stale_read_is_seen_where_pages_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    install_broken("scheduling.scheduler", "        self._end_stale()\n", "", monkeypatch)
    with pytest.raises(AssertionError):
        test_a_block_that_was_freed_under_its_reader_ends_it_before_it_is_read()
