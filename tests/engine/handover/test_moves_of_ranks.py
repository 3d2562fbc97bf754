"""Sequences that move between replicas of one model whose ranks differ: tokens and draws go on as they would have, with
the KV that the other ranks computed, and nothing is held on either side afterwards."""

import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.protocol.frames import Submit
from engine.protocol.types import SamplingParams, Scope, ScopeKind
from tests.support.moving_replicas import Journey, MovingReplica, link_to, nothing_held, order_of
from tests.support.small_models import reference_model, saved, spec
from tests.support.waiting import wait_for

PROGRAM = Path(__file__).parents[2] / "support" / "parts_replica.py"
SIZE = 16
OUTPUT = 40
PROMPT = 200
GREEDY = SamplingParams(ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)
MOVES = [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)]
Start = Callable[..., MovingReplica]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = reference_model("llama 2", num_key_value_heads=4, intermediate_size=128)
    return saved(model, tmp_path_factory.mktemp("model"))


def replica(folder: Path, home: Path, gpus: int, **changes: int) -> MovingReplica:
    sizes = {"context_tokens": 1024, "handover_bytes": 16 << 20, "kv_bytes": 24 << 20}
    model = spec(folder, gpus=gpus, **(sizes | changes))
    return MovingReplica([sys.executable, str(PROGRAM)], home, model, "4")


@pytest.fixture(scope="module")
def replicas(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, MovingReplica]]:
    """By their ranks; "2'" is another one of two."""
    with ExitStack() as ends:
        started = {}
        for name in ("1", "2", "2'", "4"):
            started[name] = replica(folder, tmp_path_factory.mktemp("replica"), int(name[0]))
            ends.callback(started[name].stop)
        for each in started.values():
            assert each.takes_at
        yield started


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as ends:

        def start_one(name: str, gpus: int, **changes: int) -> MovingReplica:
            started = replica(folder, tmp_path / name, gpus, **changes)
            ends.callback(started.stop)
            return started

        yield start_one


def order(number: int, sampling: SamplingParams = GREEDY, length: int = PROMPT, output: int = OUTPUT) -> Submit:
    """A prompt and a scope of this number's own."""
    rng = random.Random(number)
    prompt = [rng.randrange(2, 160) for _ in range(length)]
    return order_of(prompt, output, Scope(ScopeKind.TENANT, number.to_bytes(16, "big")), sampling)


def text(at: MovingReplica, asked: Submit) -> list[int]:
    """What comes where nothing moves, in another scope."""
    stays = Scope(ScopeKind.TENANT, b"stays" + asked.scope.id[5:])
    journey = Journey(msgspec.structs.replace(asked, scope=stays), at)
    journey.begin()
    return journey.finish()


def begun(source: MovingReplica, asked: Submit, tokens: int = 3) -> Journey:
    journey = Journey(asked, source)
    journey.begin()
    peer = source.peer
    peer.until(lambda: len(peer.tokens[journey.id]) >= tokens or peer.ended(journey.id))
    return journey


@pytest.mark.parametrize(
    ("sampling", "over_tcp"), [(GREEDY, False), (DRAWN, True)], ids=["greedy by shared memory", "drawn by a socket"]
)
@pytest.mark.parametrize(("ranks", "other_ranks"), MOVES)
def test_a_text_that_moves_to_other_ranks_is_the_text_that_does_not(
    replicas: dict[str, MovingReplica], ranks: int, other_ranks: int, sampling: SamplingParams, over_tcp: bool
) -> None:
    source, target = replicas[str(ranks)], replicas["2'" if ranks == other_ranks else str(other_ranks)]
    number = 1000 * ranks + 100 * other_ranks + 10 * over_tcp + (sampling is DRAWN)
    asked = order(number, sampling)
    expected = text(replicas["1"], asked)
    journey = begun(source, asked)
    with link_to(target) as link:
        journey.ask(target, link.address if over_tcp else None)
        journey.settle()
        assert journey.moved(), source.peer.failed
        assert bool(link.carried) == over_tcp
    journey.follow(target)
    assert journey.finish() == expected
    nothing_held(source, target)
    cached = target.peer.started[journey.id].cached_tokens
    assert cached >= PROMPT // SIZE * SIZE, "the prompt is not computed again"
    again = Journey(asked, target)
    again.begin()
    assert again.finish() == expected
    assert target.peer.started[again.id].cached_tokens >= PROMPT // SIZE * SIZE, "the prefix is found afterwards"
    assert target.peer.counted("handover_corrupt_blocks") == 0


def test_sequences_move_at_random_under_load(replicas: dict[str, MovingReplica]) -> None:
    rng = random.Random(21)
    names = ["1", "2", "2'"]
    journeys = []
    for number in range(6):
        sampling = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=number, ignore_eos=True)
        asked = order(20_000 + number, sampling, rng.randrange(20, 300), 100)
        journeys.append((asked, Journey(asked, replicas[rng.choice(names)])))
    for _, journey in journeys:
        journey.begin()
    for _ in range(4):
        targets = {}
        for index, (_, journey) in enumerate(journeys):
            target = replicas[rng.choice(names)]
            if target is not journey.at and not journey.at.peer.ended(journey.id):
                targets[index] = target
                journey.ask(target)
        for index, target in targets.items():
            journeys[index][1].settle()
            if journeys[index][1].moved():
                journeys[index][1].follow(target)
    texts = [journey.finish() for _, journey in journeys]
    assert sum(journey.moves for _, journey in journeys) >= 6
    nothing_held(*replicas.values())
    assert texts == [text(replicas["1"], asked) for asked, _ in journeys]


@pytest.mark.parametrize("lost", ["source", "target"])
def test_a_rank_that_is_lost_in_the_midst_ends_its_replica_and_the_other_side_lets_go(
    replicas: dict[str, MovingReplica], start: Start, lost: str
) -> None:
    own, other, third = start("own", 2), replicas["2"], replicas["1"]
    _ = own.peer
    source, target = (own, other) if lost == "source" else (other, own)
    asked = order(30_000 + (lost == "source"), output=150)
    expected = text(third, asked)
    busy = begun(target, order(31_000 + (lost == "source"), output=400))  # whoever computes nothing misses no rank
    journey = begun(source, asked)
    with link_to(target, rate=100e3) as link:
        journey.ask(target, link.address)
        wait_for(lambda: link.carried > 1000, 20.0, "blocks are on their way")
        (follower,) = psutil.Process(own.process.pid).children()
        follower.send_signal(signal.SIGKILL)
        if lost == "source":
            source.peer.until(lambda: source.peer.closed)
            journey.follow(third)
        else:
            journey.settle()
            assert journey.id in source.peer.failed
        assert journey.finish() == expected
    own.process.wait(20)
    target.peer.cancel(busy.id)
    nothing_held(other, third)


def test_blocks_of_another_layout_are_refused_by_name(replicas: dict[str, MovingReplica], start: Start) -> None:
    source, target = replicas["2"], start("unlike", 2, block_tokens=32)
    asked = order(40_000)
    expected = text(replicas["1"], asked)
    _ = target.takes_at
    journey = begun(source, asked)
    journey.ask(target)
    journey.settle()
    assert "refused (layout)" in source.peer.failed.pop(journey.id).message
    assert journey.finish() == expected, "it goes on where it is"
    nothing_held(source, target)


def test_a_model_in_stages_says_that_it_hands_over_nothing(start: Start) -> None:
    staged = start("staged", 1, stages=2)
    assert not staged.takes_at
    assert "handovers_unavailable" in staged.log.read_text()
