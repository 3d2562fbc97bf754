"""Sequences of the built-in model that move between two replica processes on a CPU: tokens, draws and grammar go on as
they would have, with the KV that the other one computed."""

import random
import sys
from collections.abc import Iterator
from importlib.resources import files

import pytest

from engine.protocol.frames import Submit
from engine.protocol.specs import ModelSpec
from engine.protocol.types import Grammar, GrammarKind, SamplingParams, SchedulingTerms, Scope, ScopeKind
from tests.support.moving_replicas import Journey, MovingReplica, link_to, nothing_held, order_of

OUTPUT = 96
TENANT = Scope(ScopeKind.TENANT, b"t" * 16)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MovingReplica, MovingReplica]]:
    spec = ModelSpec(
        name="ember", folder=str(files("engine") / "builtin_model"), dtype="float32", context_tokens=1024,
        kv_bytes=64 << 20, handover_bytes=64 << 20,
    )  # fmt: skip
    command = [sys.executable, "-m", "engine.replica.server"]
    both = tuple(MovingReplica(command, tmp_path_factory.mktemp("ember"), spec) for _ in range(2))
    yield both[0], both[1]
    for each in both:
        each.stop()


def order(**changes: object) -> Submit:
    prompt = [random.Random(3).randrange(5, 4000) for _ in range(210)]
    sampling = changes.pop("sampling", SamplingParams(ignore_eos=True))
    scope = changes.pop("scope", TENANT)
    assert isinstance(sampling, SamplingParams)
    assert isinstance(scope, Scope)
    return order_of(prompt, OUTPUT, scope, sampling, **changes)


ORDERS = {
    "greedy": order(),
    "drawn": order(sampling=SamplingParams(temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)),
    "penalties": order(sampling=SamplingParams(temperature=0.7, seed=3, frequency_penalty=0.6, ignore_eos=True)),
    "grammar": order(
        sampling=SamplingParams(temperature=1.0, seed=5), grammar=Grammar(GrammarKind.REGEX, "([a-f]{1,3} ){60,80}")
    ),
    "shares nothing": order(scope=Scope()),
    "erased": order(scope=Scope(), terms=SchedulingTerms(erase=True)),
}


@pytest.mark.parametrize("over_tcp", [False, True], ids=["shared memory", "socket"])
@pytest.mark.parametrize("name", ORDERS)
def test_a_text_that_moves_is_the_text_that_does_not(
    pair: tuple[MovingReplica, MovingReplica], name: str, over_tcp: bool
) -> None:
    plain = Journey(ORDERS[name], pair[1])
    plain.begin()
    expected = plain.finish()
    fields = {field: getattr(ORDERS[name], field) for field in Submit.__struct_fields__}
    scope = ORDERS[name].scope
    if scope.id:  # the other replica has none of it
        fields["scope"] = Scope(scope.kind, bytes([65 + len(ORDERS) * over_tcp + list(ORDERS).index(name)]) * 16)
    journey = Journey(Submit(**fields), pair[0])
    journey.begin()
    with link_to(pair[1], 20e6) as there, link_to(pair[0], 20e6) as back:
        for target, link in ((pair[1], there), (pair[0], back)):
            journey.ask(target, link.address if over_tcp else None)
            journey.settle()
            assert journey.moved(), journey.at.peer.failed
            computed = target.peer.counted("computed_tokens")
            journey.follow(target)
            peer = target.peer
            peer.until(lambda peer=peer: len(peer.tokens.get(journey.id, [])) > 4 or peer.ended(journey.id))
        assert journey.finish() == expected
    nothing_held(*pair)
    assert pair[0].peer.counted("computed_tokens") - computed <= OUTPUT + 2 * 16, "what came is not computed again"
