"""Handovers through windows, memory of a device that both replicas map: here the host's, over the same code, between
two processes that serve the built-in model."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from engine.handover.receiver import LEASE_S
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams, Scope, ScopeKind
from tests.support.moving_replicas import Journey, MovingReplica, nothing_held, order_of
from tests.support.window_replica import Faults

PROGRAM = Path(__file__).parents[2] / "support" / "window_replica.py"
PROMPT = list(range(10, 220))
OUTPUT = 64


def replica(folder: Path, faults: Faults | None = None, **changes: object) -> MovingReplica:
    spec = ModelSpec(
        name="ember", folder=str(files("engine") / "builtin_model"), dtype="float32", context_tokens=4096,
        kv_bytes=64 << 20, handover_bytes=64 << 20,
    )  # fmt: skip
    words = msgspec.json.encode(faults or Faults()).decode()
    return MovingReplica([sys.executable, str(PROGRAM)], folder, msgspec.structs.replace(spec, **changes), words)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MovingReplica, MovingReplica]]:
    both = replica(tmp_path_factory.mktemp("left")), replica(tmp_path_factory.mktemp("right"))
    yield both
    for each in both:
        each.stop()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., MovingReplica]]:
    started: list[MovingReplica] = []

    def start_one(faults: Faults | None = None, **changes: object) -> MovingReplica:
        started.append(replica(tmp_path / str(len(started)), faults, **changes))
        return started[-1]

    yield start_one
    for each in started:
        each.stop()


def journey_of(number: int, source: MovingReplica, prompt: list[int] | None = None, output: int = OUTPUT) -> Journey:
    scope = Scope(ScopeKind.TENANT, bytes([number]) * 16)
    return Journey(order_of(prompt or [number, *PROMPT], output, scope, SamplingParams(ignore_eos=True)), source)


def text(at: MovingReplica, number: int, prompt: list[int] | None = None, output: int = OUTPUT) -> list[int]:
    """What comes where nothing moves, in another scope."""
    journey = journey_of(number, at, prompt, output)
    journey.order = msgspec.structs.replace(journey.order, scope=Scope())
    journey.begin()
    return journey.finish()


def moved(number: int, source: MovingReplica, target: MovingReplica) -> Journey:
    journey, _ = journey_of(number, source), target.peer  # which is there before it begins
    journey.begin()
    journey.ask(target)
    journey.settle()
    assert journey.moved(), source.peer.failed
    journey.follow(target)
    return journey


def test_a_sequence_goes_on_with_blocks_that_came_through_a_window(pair: tuple[MovingReplica, MovingReplica]) -> None:
    source, target = pair
    journey = moved(1, source, target)
    assert journey.finish() == text(target, 1)
    assert target.peer.started[journey.id].cached_tokens >= len(PROMPT) // 16 * 16
    nothing_held(source, target)
    assert source.peer.counted("handover_window_blocks") >= len(PROMPT) // 16
    assert target.peer.counted("handover_corrupt_blocks") == 0


@pytest.mark.parametrize("faults", [Faults(reaches=False), Faults(windows_bytes=0)], ids=["out of reach", "no room"])
def test_where_there_is_no_window_host_memory_carries_them(
    pair: tuple[MovingReplica, MovingReplica], start: Callable[..., MovingReplica], faults: Faults
) -> None:
    source, target = start(faults), pair[1]
    if not faults.windows_bytes:  # windows are the receiver's
        source, target = target, source
    windows = source.peer.counted("handover_window_blocks")
    journey = moved(2 + faults.reaches, source, target)
    assert journey.finish() == text(target, 2 + faults.reaches)
    assert target.peer.started[journey.id].cached_tokens >= len(PROMPT) // 16 * 16
    nothing_held(source, target)
    assert source.peer.counted("handover_window_blocks") == windows


def test_a_corrupted_block_is_counted_and_computed_again(
    pair: tuple[MovingReplica, MovingReplica], start: Callable[..., MovingReplica]
) -> None:
    source, target = start(Faults(corrupt=1)), pair[1]
    journey = moved(4, source, target)
    assert journey.finish() == text(target, 4)
    nothing_held(source, target)
    assert target.peer.counted("handover_corrupt_blocks") > 0
    assert target.peer.started[journey.id].cached_tokens < len(PROMPT) // 16 * 16


def test_another_layout_is_refused_by_name(
    pair: tuple[MovingReplica, MovingReplica], start: Callable[..., MovingReplica]
) -> None:
    source, target = pair[0], start(block_tokens=32)
    journey, _ = journey_of(5, source), target.peer
    journey.begin()
    journey.ask(target)
    journey.settle()
    assert "refused (layout)" in source.peer.failed.pop(journey.id).message
    assert journey.finish() == text(source, 5), "it goes on where it is"
    nothing_held(source, target)


def outlasting(at: MovingReplica) -> int:
    """Tokens of a stream that goes on for three leases, on a machine as fast as this one is now."""
    began = time.monotonic()
    text(at, 99)
    return min(1200, max(OUTPUT, int(3 * LEASE_S * OUTPUT / (time.monotonic() - began))))


@pytest.mark.parametrize("lost", ["source", "target"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("phase", ["moving", "sealed"])
def test_either_side_may_be_lost_in_each_phase(
    pair: tuple[MovingReplica, MovingReplica], start: Callable[..., MovingReplica], lost: str, how: signal.Signals,
    phase: str,
) -> None:  # fmt: skip
    """A long prompt in small steps: its first blocks are in the window long before its last ones are computed."""
    slow = start(step_tokens=16)
    source, target = (slow, pair[1]) if lost == "source" else (pair[0], slow)
    if (lost, phase) == ("target", "moving"):
        source, target = start(step_tokens=16), slow
    number, prompt = 6, [6 + len(lost) + how, *PROMPT * 7]
    frozen_early = (lost, phase, how) == ("target", "moving", signal.SIGSTOP)
    output = outlasting(pair[0]) if frozen_early else OUTPUT
    journey, _ = journey_of(number, source, prompt, output), target.peer
    before = source.peer.counted("handover_window_blocks")
    journey.begin()
    journey.ask(target)
    if phase == "sealed":
        journey.settle()
        assert journey.moved(), source.peer.failed
    else:
        source.peer.until(lambda: source.peer.counted("handover_window_blocks") > before)
    (source if lost == "source" else target).process.send_signal(how)
    goes_on = pair[0] if lost == "target" else target
    if phase == "moving" and lost == "target":
        journey.settle()
        assert journey.id in source.peer.failed
        goes_on = source
    else:
        journey.follow(goes_on)  # with what it had: the gateway knows no more
    assert journey.finish() == text(pair[0], number, prompt, output)
    nothing_held(goes_on)
