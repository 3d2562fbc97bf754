"""Sequences that move between two replica processes with the stamp engine: nothing of their text changes, and nothing
is held on either side afterwards, whatever breaks on the way."""

import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from engine.protocol.frames import RaiseEpochs
from engine.protocol.specs import ModelSpec
from engine.protocol.types import FinishReason, SamplingParams, SchedulingTerms, Scope, ScopeKind
from tests.support.moving_replicas import Journey, MovingReplica, link_to, nothing_held, order_of
from tests.support.stamp_engine import Temper, solo

STAMP = Path(__file__).parents[2] / "support" / "stamp_engine.py"
A, B = (Scope(ScopeKind.TENANT, letter * 16) for letter in (b"a", b"b"))
PROMPT = list(range(1, 200))
SIZE = 16
LONG = 400  # tokens: longer than a move takes on a busy machine


def replica(folder: Path, temper: Temper | None = None, boot: int = 7, **model: object) -> MovingReplica:
    spec = ModelSpec(name="@cf/test/stamp", folder=str(folder), handover_bytes=8 << 20)
    spec = msgspec.structs.replace(spec, **model)
    words = msgspec.json.encode(temper or Temper(step_ms=1.0)).decode()
    return MovingReplica([sys.executable, str(STAMP)], folder, spec, words, boot=boot)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., MovingReplica]]:
    started: list[MovingReplica] = []

    def start_one(temper: Temper | None = None, boot: int = 7, **model: object) -> MovingReplica:
        started.append(replica(tmp_path / str(len(started)), temper, boot, **model))
        return started[-1]

    yield start_one
    for each in started:
        each.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MovingReplica, MovingReplica]]:
    """Two replicas for the tests that leave them as they were."""
    both = replica(tmp_path_factory.mktemp("left")), replica(tmp_path_factory.mktemp("right"))
    yield both
    for each in both:
        each.stop()


def text(order_prompt: list[int], max_tokens: int, sampling: SamplingParams | None = None) -> list[int]:
    return solo(order_prompt, sampling or SamplingParams(), len(order_prompt) + max_tokens, [], 1000)[0]


def mid_stream(journey: Journey, tokens: int = 3) -> None:
    """Waits until it has given some tokens where it is."""
    peer = journey.at.peer
    peer.until(lambda: len(peer.tokens[journey.id]) >= tokens or journey.id in peer.rejected, 20.0)
    assert journey.id not in peer.rejected, peer.rejected[journey.id].message


def moved(
    source: MovingReplica, target: MovingReplica, prompt: list[int], max_tokens: int = LONG, scope: Scope = A,
    sampling: SamplingParams | None = None, address: str | None = None, **fields: object,
) -> Journey:  # fmt: skip
    """A sequence that moves once, at the target."""
    journey = Journey(order_of(prompt, max_tokens, scope, sampling, **fields), source)
    journey.begin()
    mid_stream(journey)
    journey.ask(target, address)
    journey.settle()
    assert journey.moved(), source.peer.failed
    journey.follow(target)
    return journey


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("scope", [A, Scope()], ids=["tenant", "alone"])
@pytest.mark.parametrize("over_tcp", [False, True], ids=["shared memory", "socket"])
def test_a_sequence_goes_on_elsewhere_with_its_kv(
    pair: tuple[MovingReplica, MovingReplica], temperature: float, scope: Scope, over_tcp: bool
) -> None:
    source, target = pair
    number = 500 + int(10 * temperature) + 10 * len(scope.id) + 7 * over_tcp
    prompt, sampling = [number, *PROMPT], SamplingParams(temperature=temperature, seed=5)
    before = target.peer.counted("computed_tokens")
    with link_to(target) as link:
        journey = moved(source, target, prompt, LONG, scope, sampling, link.address if over_tcp else None)
        assert journey.finish() == text(prompt, LONG, sampling)
        assert bool(link.carried) == over_tcp
    assert journey.reason is FinishReason.LENGTH
    nothing_held(source, target)
    computed = target.peer.counted("computed_tokens") - before
    assert computed <= LONG + 2 * SIZE, "the prompt is not computed again"
    assert target.peer.started[journey.id].cached_tokens >= len(prompt) // SIZE * SIZE


def test_a_sequence_that_is_asked_to_move_at_once_moves_behind_its_prompt(
    pair: tuple[MovingReplica, MovingReplica],
) -> None:
    source, target = pair
    prompt = [900, *PROMPT, *PROMPT, *PROMPT, *PROMPT, *PROMPT]
    journey = Journey(order_of(prompt, LONG, A), source)
    journey.begin()
    journey.ask(target)
    journey.settle()
    assert journey.moved()
    assert journey.at.peer.tokens[journey.id], "the first token is the prompt's"
    journey.follow(target)
    assert journey.finish() == text(prompt, LONG)
    nothing_held(source, target)


def test_what_is_erased_moves_and_is_erased(pair: tuple[MovingReplica, MovingReplica]) -> None:
    source, target = pair
    prompt = [901, *PROMPT]
    before = target.peer.counted("erased_blocks")
    journey = moved(source, target, prompt, scope=Scope(), terms=SchedulingTerms(erase=True))
    assert journey.finish() == text(prompt, LONG)
    nothing_held(source, target)
    assert target.peer.counted("erased_blocks") - before >= len(prompt) // SIZE


def test_whoever_has_the_key_and_another_scope_gets_nothing(pair: tuple[MovingReplica, MovingReplica]) -> None:
    source, target = pair
    prompt = [902, *PROMPT]
    journey = Journey(order_of(prompt, LONG, A), source)
    journey.begin()
    mid_stream(journey)
    journey.ask(target)
    journey.settle()
    thief = Journey(order_of(prompt, LONG, B), source, journey.id, key=journey.key)
    source.peer.tokens[journey.id], given = [*source.peer.tokens[journey.id]], source.peer.tokens[journey.id]
    thief.follow(target)
    assert thief.finish() == text(prompt, LONG)
    assert target.peer.started[thief.id].cached_tokens == 0
    newer = Journey(msgspec.structs.replace(journey.order, scope=msgspec.structs.replace(A, epoch=1)), source)
    newer.id, newer.key, source.peer.tokens[journey.id] = journey.id, journey.key, [*given]
    newer.follow(target)
    assert newer.finish() == text(prompt, LONG)
    assert target.peer.started[newer.id].cached_tokens == 0, "the epoch was raised"
    nothing_held(source, target)


def test_a_purge_of_its_account_takes_what_waits_for_a_sequence(
    pair: tuple[MovingReplica, MovingReplica],
) -> None:
    source, target = pair
    prompt = [906, *PROMPT]
    for epoch, found in ((3, 0), (3, len(prompt) // SIZE * SIZE)):  # what is known already takes nothing
        journey = Journey(order_of(prompt, LONG, Scope()), source)
        journey.begin()
        mid_stream(journey)
        journey.ask(target)
        journey.settle()
        assert journey.moved()
        target.peer.send(RaiseEpochs([b"p" * 16], [epoch]))
        journey.follow(target)
        assert journey.finish() == text(prompt, LONG)
        cached = target.peer.started[journey.id].cached_tokens
        assert cached >= found
        assert bool(cached) == bool(found)
    nothing_held(source, target)


@pytest.mark.parametrize(
    ("changes", "boot", "fault"),
    [
        ({"block_tokens": 32}, "7", "layout"),
        ({"name": "@cf/test/other"}, "7", "model"),
        ({}, "8", "boot"),
        ({"handover_bytes": 2048}, "7", "full"),
    ],
)
def test_a_receiver_of_another_kind_refuses_by_name(
    pair: tuple[MovingReplica, MovingReplica], start: Callable[..., MovingReplica], changes: dict[str, object],
    boot: str, fault: str,
) -> None:  # fmt: skip
    source, target = pair[0], start(**changes)
    _ = target.peer
    prompt = [903, *PROMPT]
    journey = Journey(order_of(prompt, LONG, A), source)
    journey.begin()
    mid_stream(journey)
    journey.ask(target, boot=boot)
    journey.settle()
    assert f"refused ({fault})" in source.peer.failed.pop(journey.id).message
    assert journey.finish() == text(prompt, LONG), "it goes on where it is"
    nothing_held(source, target)


def test_a_corrupted_block_is_counted_and_computed_again(pair: tuple[MovingReplica, MovingReplica]) -> None:
    source, target = pair
    prompt, before = [904, *PROMPT], target.peer.counted("handover_corrupt_blocks")
    with link_to(target, corrupt_at=2000) as link:
        journey = moved(source, target, prompt, address=link.address)
        assert journey.finish() == text(prompt, LONG)
    nothing_held(source, target)
    assert target.peer.counted("handover_corrupt_blocks") > before
    assert target.peer.started[journey.id].cached_tokens < len(prompt) // SIZE * SIZE


@pytest.mark.parametrize("lost", ["source", "target"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("phase", ["moving", "sealed"])
def test_either_side_may_be_lost_in_each_phase(
    start: Callable[..., MovingReplica], lost: str, how: signal.Signals, phase: str
) -> None:
    source, target, third = start(Temper(step_ms=3.0)), start(), start()
    prompt, count = [905, *PROMPT], 1200 if (lost, phase) == ("target", "moving") else 200  # it outlasts the lease
    journey = Journey(order_of(prompt, count, A), source)
    journey.begin()
    mid_stream(journey)
    _ = target.peer, third.peer
    with link_to(target, rate=1e12 if phase == "sealed" else 3000.0) as link:
        journey.ask(target, link.address)
        if phase == "sealed":
            journey.settle()
        else:
            source.peer.until(lambda: source.peer.read(0.01) or link.carried > 1000)
        (source if lost == "source" else target).process.send_signal(how)
        if lost == "source" or phase == "sealed":
            # The gateway has the tokens so far, and goes on with another replica; the key is of no use there.
            journey.follow(third if lost == "target" else target)
        else:
            journey.settle()
            assert journey.id in source.peer.failed
        tokens = journey.finish()
    assert tokens == text(prompt, count)
    nothing_held(*[each for each in (source, target, third) if each is not (source if lost == "source" else target)])


def test_sequences_move_back_and_forth_under_load(pair: tuple[MovingReplica, MovingReplica]) -> None:
    """The quick slice of benchmarks/engine/handovers.py."""
    rng = random.Random(21)
    journeys = []
    for number in range(12):
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(20, 150))]
        sampling = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=number)
        journeys.append((prompt, sampling, Journey(order_of(prompt, LONG, A, sampling), pair[number % 2])))
    for _, _, journey in journeys:
        journey.begin()
    for _ in range(5):
        for _, _, journey in journeys:
            if not journey.at.peer.ended(journey.id):
                journey.ask(pair[journey.at is pair[0]])
        for _, _, journey in journeys:
            journey.settle()
            if journey.moved():
                journey.follow(pair[journey.at is pair[0]])
    for prompt, sampling, journey in journeys:
        assert journey.finish() == text(prompt, LONG, sampling)
    assert sum(journey.moves for _, _, journey in journeys) >= 12
    nothing_held(*pair)
