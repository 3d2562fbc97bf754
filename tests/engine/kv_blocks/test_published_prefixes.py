"""What a replica publishes of its tiers, over the stamp engine: what is named is there, and what left is said so."""

import random
from array import array

import msgspec
import pytest

from engine.kv_blocks import published_prefixes
from engine.protocol.prefix_names import prefix_names
from engine.protocol.types import PrefixTier, SchedulingTerms, Scope
from prefixcache.namespace import Namespace
from tests.engine.scheduling.simulation.replica import SCOPES, Simulation
from tests.engine.scheduling.simulation.test_extents import served
from tests.engine.scheduling.simulation.test_host_tier import displace as displace_pool
from tests.engine.scheduling.simulation.test_isolation import OTHER, REQUEST, TENANT
from tests.engine.scheduling.test_scheduler import words

KEY = b"k" * 32
DEVICE, HOST, DISK, NONE = PrefixTier.DEVICE, PrefixTier.HOST, PrefixTier.DISK, PrefixTier.NONE


def named(tokens: list[int], scope: Scope = TENANT) -> list[bytes]:
    packed = array("I", tokens).tobytes()
    return [name for _, name in prefix_names(KEY, (scope.kind, scope.id, scope.epoch), packed)]


def wide(**changes: object) -> Simulation:
    """Forty blocks of four tokens, so that a prefix of 64 and one of 128 fit."""
    simulation = Simulation(**{"blocks": 40, "step_tokens": 160, "context_tokens": 160, **changes})  # type: ignore[arg-type]
    simulation.scheduler.kv.published.use_key(KEY)
    return simulation


def changed(simulation: Simulation) -> dict[bytes, PrefixTier]:
    return simulation.scheduler.kv.published.take_changed()


def test_what_a_sequence_leaves_is_published_once_and_what_is_evicted_said_to_be_gone() -> None:
    simulation, prompt = wide(), words(140)
    served(simulation, 1, prompt, TENANT)
    assert changed(simulation) == dict.fromkeys(named(prompt), DEVICE)
    assert len(named(prompt)) == 2
    served(simulation, 2, prompt, TENANT)
    assert changed(simulation) == {}
    displace_pool(simulation)
    theirs = named(words(159, 900), Scope(TENANT.kind, b"d" * 16))
    assert changed(simulation) == dict.fromkeys(named(prompt), NONE) | dict.fromkeys(theirs, DEVICE)
    assert changed(simulation) == {}


def test_a_prefix_is_published_where_it_is_in_each_tier() -> None:
    simulation, prompt = wide(host_slots=80, disk_places=400), words(140)
    for _ in range(60):
        simulation.loop.sweep()  # which makes files
    served(simulation, 1, prompt, TENANT)
    assert set(changed(simulation).values()) == {DEVICE}
    displace_pool(simulation)
    for _ in range(60):
        simulation.loop.sweep()
    seen = changed(simulation)
    assert [seen[name] for name in named(prompt)] == [HOST, HOST]
    assert simulation.host is not None
    simulation.host.index.forget([*simulation.host.index._entries])
    simulation.loop.sweep()
    assert [changed(simulation)[name] for name in named(prompt)[:1]] == [DISK]
    served(simulation, 2, prompt, TENANT)
    seen = changed(simulation)
    assert [seen[name] for name in named(prompt)] == [DEVICE, DEVICE]


@pytest.mark.parametrize(
    ("scope", "terms"), [(TENANT, SchedulingTerms(erase=True)), (REQUEST, SchedulingTerms())], ids=["erased", "alone"]
)
def test_what_is_to_be_erased_or_shares_with_nobody_is_not_published(scope: Scope, terms: SchedulingTerms) -> None:
    simulation = wide()
    served(simulation, 1, words(140), scope, terms)
    assert changed(simulation) == {}
    served(simulation, 2, words(140), OTHER)
    assert changed(simulation) == dict.fromkeys(named(words(140), OTHER), DEVICE), "the control"


def test_a_purge_is_said_to_have_taken_what_was_published() -> None:
    simulation = wide(host_slots=80)
    served(simulation, 1, words(140), TENANT)
    changed(simulation)
    simulation.tree.raise_epochs({TENANT.id: 1})
    simulation.loop.sweep()
    assert changed(simulation) == dict.fromkeys(named(words(140)), NONE)


def test_another_key_ends_the_names_of_the_one_before_and_the_same_gives_them_all_again() -> None:
    simulation = wide()
    published = simulation.scheduler.kv.published
    served(simulation, 1, words(140), TENANT)
    assert published.use_key(KEY) == dict.fromkeys(named(words(140)), DEVICE)
    assert published.use_key(b"x" * 32) == {}
    assert changed(simulation) == {}


def test_no_more_is_published_than_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_prefixes, "PUBLISHED_MAX", 3)
    simulation = wide(blocks=160)
    for id in range(4):
        served(simulation, id, words(70, id), TENANT)
    seen = changed(simulation)
    assert [seen[named(words(70, id))[0]] for id in range(4)] == [NONE, DEVICE, DEVICE, DEVICE]


@pytest.mark.parametrize("seed", range(4))
def test_whoever_listens_knows_at_any_time_what_is_there(seed: int) -> None:
    """The oracle is the tree, and the indexes below it: each name that a listener holds is in the tier that it says."""
    pick = random.Random(seed)
    simulation = wide(host_slots=pick.choice([20, 60]), disk_places=pick.choice([40, 400]))
    prompts = [words(64 * pick.randint(1, 2) + pick.randint(1, 20), number) for number in range(6)]
    scopes = [scope for scope in SCOPES if scope.id][:3]
    known: dict[bytes, PrefixTier] = {}
    owners: dict[bytes, tuple[Namespace, list[int], int]] = {}
    moved = 0
    for id in range(40):
        scope = pick.choice(scopes)
        scope = msgspec.structs.replace(scope, epoch=scope.epoch + (pick.random() < 0.05))
        prompt = pick.choice(prompts)
        (entry,) = simulation.submit(id, prompt, scope, max_tokens=1)
        simulation.run()
        for _ in range(pick.choice([0, 20])):
            simulation.loop.sweep()
        assert entry.sequence.namespace is not None
        for at, name in enumerate(named(prompt, scope)):
            owners[name] = entry.sequence.namespace, prompt, 64 << at
        for name, tier in changed(simulation).items():
            moved += 1
            known[name] = tier
            if tier == NONE:
                del known[name]
        for name, tier in known.items():
            namespace, tokens, count = owners[name]
            there = simulation.tree.matched_tokens(namespace, memoryview(array("I", tokens)))
            assert (there >= count) == (tier == DEVICE), f"{tier} of {count}, and {there} are on the device"
    assert moved > 30
