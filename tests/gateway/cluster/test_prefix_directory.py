"""Routing by what replicas publish: the longest prefix goes first, within the bound of load, and only for its own
scope."""

import random
from array import array
from pathlib import Path

import pytest

from engine.protocol.cache_frames import HeldPrefixes
from engine.protocol.prefix_names import NAME_BYTES, TOKENS_MAX, prefix_names
from engine.protocol.types import PrefixTier, ScopeKind
from gateway.cluster import route
from gateway.cluster.fleet import ReplicaFleet
from gateway.cluster.model_pool import ModelPool
from gateway.cluster.route import LIGHT_LOAD, LOAD_TOKENS, ReplicaRing
from tests.support.linked_fleet import connected
from tests.support.served_gateway import looped
from tests.support.stub_replica import MODEL, StubFleet
from tests.support.waiting import until

KEY = b"k" * 32
SCOPE = (int(ScopeKind.TENANT), b"s" * 16, 0)


def tokens_of(count: int, seed: int = 1) -> bytes:
    pick = random.Random(seed)
    return array("I", (pick.randrange(50_000) for _ in range(count))).tobytes()


# Names


def test_names_are_those_of_whole_prefixes_at_lengths_that_double() -> None:
    tokens = tokens_of(300)
    names = prefix_names(KEY, SCOPE, tokens)
    assert [count for count, _ in names] == [64, 128, 256]
    assert names == [prefix_names(KEY, SCOPE, tokens[: 4 * count])[-1] for count, _ in names]
    assert prefix_names(KEY, SCOPE, memoryview(tokens)) == names
    assert prefix_names(KEY, SCOPE, tokens[: 4 * 63]) == []
    assert prefix_names(KEY, SCOPE, tokens_of(10_000))[-1][0] == TOKENS_MAX


@pytest.mark.parametrize("field", ["key", "kind", "id", "epoch", "a token"])
def test_whatever_differs_gives_another_name(field: str) -> None:
    tokens = tokens_of(64)
    other = {
        "key": (b"x" * 32, SCOPE, tokens),
        "kind": (KEY, (1, *SCOPE[1:]), tokens),
        "id": (KEY, (SCOPE[0], b"t" * 16, 0), tokens),
        "epoch": (KEY, (*SCOPE[:2], 1), tokens),
        "a token": (KEY, SCOPE, tokens[:-1] + b"\1"),
    }[field]
    (name,), (another,) = prefix_names(KEY, SCOPE, tokens), prefix_names(*other)
    assert name != another
    assert len(name[1]) == NAME_BYTES


# The choice


def choose(loads: list[int], holders: list[tuple[int, float]], prompt: bytes) -> int:
    ring = ReplicaRing[int]()
    for index in range(len(loads)):
        ring.add(f"unix:/run/{index}.sock", index)
    return route.pick(ring, loads.__getitem__, b"s" * 16, prompt, holders=holders)


def test_a_holder_goes_before_the_hashs_choice_and_the_one_that_spares_most_first() -> None:
    prompt = tokens_of(2000)
    by_hash = choose([0] * 5, [], prompt)
    some, more = [index for index in range(5) if index != by_hash][:2]
    assert choose([0] * 5, [(some, 1024.0)], prompt) == some
    assert choose([0] * 5, [(some, 1024.0), (more, 1843.0)], prompt) == more
    assert choose([0] * 5, [(some, 1024.0), (by_hash, 1024.0)], prompt) == by_hash, "it is where it was"


def test_a_holder_with_more_load_than_it_spares_is_passed_over() -> None:
    prompt = tokens_of(2000)
    by_hash = choose([0] * 5, [], prompt)
    holder = (by_hash + 1) % 5
    loads = [0] * 5
    loads[holder] = LIGHT_LOAD - 1
    assert choose(loads, [(holder, LOAD_TOKENS * 2.0)], prompt) == by_hash
    assert choose(loads, [(holder, LOAD_TOKENS * 4.0)], prompt) == holder
    loads[holder] = 40
    assert choose(loads, [(holder, 1e6)], prompt) == by_hash, "the bound of load holds"


def test_without_holders_it_is_as_ever() -> None:
    for seed in range(200):
        prompt, loads = tokens_of(100, seed), [random.Random(seed + at).randrange(6) for at in range(5)]
        assert choose(loads, [], prompt) == choose(loads, [(0, -1e9)], prompt)


# What is published


def held_of(tokens: bytes, tier: PrefixTier, scope: tuple[int, bytes, int] = SCOPE, key: bytes = KEY) -> HeldPrefixes:
    names = [name for _, name in prefix_names(key, scope, tokens)]
    return HeldPrefixes(b"".join(names), bytes([tier]) * len(names))


def pool_of(fleet: ReplicaFleet) -> ModelPool:
    return fleet._pools[MODEL]


async def chosen_by(fleet: ReplicaFleet, tokens: bytes, scope: tuple[int, bytes, int] | None = SCOPE) -> str:
    client = await fleet.acquire(MODEL, SCOPE[1], tokens, 0.0, shared=scope)
    return client.replica.address


def addresses(stub: StubFleet) -> list[str]:
    return [replica.state.address for replica in stub.replicas]


@looped
async def test_calls_follow_what_replicas_publish_and_the_hash_where_they_publish_nothing(tmp_path: Path) -> None:
    prompt = tokens_of(500)
    async with connected(tmp_path, 4, route_key=KEY) as (stub, fleet):
        await until(lambda: all(replica.route_key == KEY for replica in stub.replicas))
        by_hash = await chosen_by(fleet, prompt)
        other = next(index for index, address in enumerate(addresses(stub)) if address != by_hash)
        held = stub.replicas[other]
        held.publish(held_of(prompt[: 4 * 256], PrefixTier.DEVICE))
        await until(lambda: len(pool_of(fleet).directory._holders) == 3)
        assert await chosen_by(fleet, prompt) == addresses(stub)[other]
        assert await chosen_by(fleet, tokens_of(500, 2)) == await chosen_by(fleet, tokens_of(500, 2), None)
        assert await chosen_by(fleet, prompt, (SCOPE[0], SCOPE[1], 1)) == by_hash, "another epoch's are not its own"
        assert await chosen_by(fleet, prompt, (SCOPE[0], b"t" * 16, 0)) == by_hash, "another tenant's are not its own"
        assert await chosen_by(fleet, prompt, None) == by_hash, "it shares with nobody"
        held.publish(held_of(prompt[: 4 * 256], PrefixTier.NONE))
        await until(lambda: not pool_of(fleet).directory._holders)
        assert await chosen_by(fleet, prompt) == by_hash


@looped
async def test_a_longer_prefix_on_disk_is_worth_less_than_one_on_a_device(tmp_path: Path) -> None:
    prompt = tokens_of(1024)
    async with connected(tmp_path, 4, route_key=KEY) as (stub, fleet):
        await until(lambda: all(replica.route_key == KEY for replica in stub.replicas))
        stub.replicas[0].publish(held_of(prompt[: 4 * 512], PrefixTier.DISK))
        stub.replicas[1].publish(held_of(prompt[: 4 * 512], PrefixTier.DEVICE))
        await until(lambda: sum(map(len, pool_of(fleet).directory._holders.values())) == 8)
        assert await chosen_by(fleet, prompt) == addresses(stub)[1]
        stub.replicas[0].publish(held_of(prompt[: 4 * 1024], PrefixTier.HOST))
        await until(lambda: sum(map(len, pool_of(fleet).directory._holders.values())) == 9)
        assert await chosen_by(fleet, prompt) == addresses(stub)[0]


@looped
async def test_what_a_replica_published_goes_with_its_connection(tmp_path: Path) -> None:
    prompt = tokens_of(500)
    async with connected(tmp_path, 2, route_key=KEY) as (stub, fleet):
        await until(lambda: all(replica.route_key == KEY for replica in stub.replicas))
        stub.replicas[0].publish(held_of(prompt, PrefixTier.DEVICE))
        await until(lambda: bool(pool_of(fleet).directory._holders))
        stub.replicas[0].route_key = b""
        stub.replicas[0].die()
        await until(lambda: not pool_of(fleet).directory._holders)
        await until(lambda: stub.replicas[0].route_key == KEY)


@looped
async def test_a_replica_of_a_version_before_is_not_asked(tmp_path: Path) -> None:
    async with connected(tmp_path, 2, route_key=KEY, names_prefixes=False) as (stub, fleet):
        assert not any(replica.route_key for replica in stub.replicas)
        assert await chosen_by(fleet, tokens_of(500)) in addresses(stub)


@pytest.mark.parametrize("tokens", [100, 2000, 8192])
def test_a_choice_among_a_thousand_with_holders_does_work_that_does_not_grow(tokens: int) -> None:
    """Counted, not timed: names of a prompt, and looks at loads."""
    prompt = tokens_of(tokens)
    looks: list[int] = []
    for replicas in (40, 1000):
        ring, looked = ReplicaRing[int](), [0]
        for index in range(replicas):
            ring.add(f"unix:/run/{index}.sock", index)

        def load(index: int, looked: list[int] = looked) -> int:
            looked[0] += 1
            return 0

        route.pick(ring, load, b"s" * 16, prompt, holders=[(index, 64.0) for index in range(8)])
        looks.append(looked[0])
    assert looks[0] == looks[1] <= 41
    assert len(prefix_names(KEY, SCOPE, prompt)) <= 7
