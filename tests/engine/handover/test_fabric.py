"""Blocks that real endpoints of NIXL write from one process into another one's memory, as between hosts of one fabric.
Where an endpoint, a side or a block fails, whole blocks go over the socket, and nothing is held."""

import mmap
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from random import Random

import pytest

from engine.handover.dial import dial
from engine.handover.fabric import FabricEndpoint, FabricEndpoints, FabricError
from engine.handover.sender import HandoverPlan, HandoverState, OutgoingHandover
from engine.handover.transport import HostPiece
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams, Scope
from tests.support.fabric_receiver import (
    BLOCK_BYTES,
    FORMAT,
    LEASE_S,
    LOOPBACK,
    FabricReceiver,
    require_nixl,
)
from tests.support.moving_replicas import Journey, MovingReplica, link_to, nothing_held, order_of
from tests.support.waiting import wait_for

require_nixl()
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("nixl")]

BLOCKS = 64
FABRIC = "rack-1"


@pytest.fixture(scope="module", autouse=True)
def loopback() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def endpoints(loopback: None) -> Iterator[FabricEndpoints]:
    endpoints = FabricEndpoints(FABRIC)
    assert not endpoints.problem
    yield endpoints
    endpoints.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., FabricReceiver]]:
    started: list[FabricReceiver] = []

    def start_one(fabric: str = FABRIC, lease_s: float = LEASE_S) -> FabricReceiver:
        started.append(FabricReceiver(fabric, tmp_path, lease_s))
        return started[-1]

    yield start_one
    for each in started:
        each.stop()


class Push:
    """A handover of some random blocks."""

    def __init__(self, address: str, endpoints: FabricEndpoints | None, blocks: int = BLOCKS) -> None:
        self.blocks = blocks
        self.content = secrets.token_bytes(BLOCK_BYTES)
        plan = HandoverPlan(address, "7", secrets.token_bytes(32), blocks)
        self.sender = OutgoingHandover(plan, FORMAT, dial, lambda: None, LEASE_S, fabric=endpoints)

    def block(self, index: int) -> bytes:
        """That one begins with its own number, none with zero."""
        return bytes([index % 255 + 1]) * 16 + self.content[16:]

    def push(self, until: int | None = None) -> "Push":
        sender, end = self.sender, self.blocks if until is None else until
        while sender.pushed < end and not sender.ended:
            count = min(sender.max_run, end - sender.pushed)
            piece = wait_for(lambda count=count: sender.piece(count) or sender.ended)
            if not isinstance(piece, HostPiece):
                break
            piece.view[:] = b"".join(self.block(sender.pushed + at) for at in range(count))
            sender.push([b"n" * 32] * count, piece)
        return self

    def seal(self) -> OutgoingHandover:
        self.sender.seal()
        wait_for(lambda: self.sender.ended)
        return self.sender

    @property
    def expected(self) -> list[str]:
        whole = b"".join(map(self.block, range(self.blocks)))
        return [whole[at : at + 16].hex() for at in range(0, len(whole), 16 * 1024)]

    def arrived(self, receiver: FabricReceiver, over_fabric: int, off_fabric: bool) -> None:
        """Holds that every byte is there, that so many blocks an endpoint wrote, and that nothing is kept of it."""
        sender = self.seal()
        assert (sender.state, sender.problem, sender.whole) == (HandoverState.SEALED, "", self.blocks)
        assert (sender.over_fabric, sender.off_fabric) == (over_fabric, off_fabric)
        assert receiver.ask("blocks") == self.expected
        assert receiver.ask("let_go")


def unused(captured: str) -> int:
    return captured.count("handover_fabric_unused")


def test_an_endpoint_writes_every_block_and_serves_the_next_handover(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints, capfd: pytest.CaptureFixture[str]
) -> None:
    receiver = start()
    for blocks in (BLOCKS, 3, BLOCKS + 7):  # from memory that is used again, and is registered anew
        Push(receiver.address, endpoints, blocks).push().arrived(receiver, blocks, False)
        assert len(endpoints._spare) == 1
    assert not unused(capfd.readouterr().err)
    assert receiver.ask("counters") == {"staged": 3}


def test_many_handovers_at_once_have_an_endpoint_each(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints
) -> None:
    receiver = start()
    pushes = [Push(receiver.address, endpoints, 24).push(12) for _ in range(4)]
    for push in pushes:
        push.push()
        assert (push.seal().whole, push.sender.over_fabric) == (24, 24)
    assert receiver.ask("held") == 4
    assert receiver.ask("let_go")


def test_hosts_of_unlike_fabrics_use_the_socket_and_say_so_once(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints, capfd: pytest.CaptureFixture[str]
) -> None:
    receiver = start("rack-2")
    for _ in range(2):
        Push(receiver.address, endpoints).push().arrived(receiver, 0, True)
    assert unused(capfd.readouterr().err) == 1
    assert receiver.log.read_text().count("handover_fabric_unused") == 1
    assert "a sender is in 'rack-1'" in receiver.log.read_text()


def test_a_sender_without_a_fabric_uses_the_socket(start: Callable[..., FabricReceiver]) -> None:
    receiver = start()
    Push(receiver.address, None).push().arrived(receiver, 0, False)


def test_memory_that_no_endpoint_registered_is_not_written_to(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints, capfd: pytest.CaptureFixture[str]
) -> None:
    receiver = start()
    assert receiver.ask("unregister")
    Push(receiver.address, endpoints).push().arrived(receiver, 0, True)
    assert unused(capfd.readouterr().err) == 1


@pytest.mark.parametrize("metadata", [b"x", b"nixlSerDes|", secrets.token_bytes(300)])
def test_metadata_that_is_none_is_refused_by_name(endpoints: FabricEndpoints, metadata: bytes) -> None:
    endpoint = endpoints.take()
    with pytest.raises(FabricError, match="NIXL"):
        endpoint.reach(metadata, mmap.mmap(-1, 4096))
    endpoints.give_back(endpoint)


def test_an_endpoint_that_fails_in_the_midst_leaves_the_rest_to_the_socket(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, writes, write = start(), [0], FabricEndpoint.write

    def fails(endpoint: FabricEndpoint, *words: int) -> int:
        writes[0] += 1
        if writes[0] > 7:
            raise FabricError("the link is down")
        return write(endpoint, *words)

    monkeypatch.setattr(FabricEndpoint, "write", fails)
    push = Push(receiver.address, endpoints).push()
    sender = push.seal()
    assert 0 < sender.over_fabric <= 7 * sender.max_run
    push.arrived(receiver, sender.over_fabric, True)


def test_a_write_that_takes_longer_than_half_a_lease_is_given_up(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = start()
    monkeypatch.setattr("engine.handover.fabric_transport._LEASE_PART", 0.02)
    monkeypatch.setattr(FabricEndpoint, "written", lambda *_: False)
    Push(receiver.address, endpoints).push().arrived(receiver, 0, True)


def test_a_receiver_whose_endpoint_is_lost_takes_the_rest_over_the_socket(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints
) -> None:
    receiver = start()
    push = Push(receiver.address, endpoints).push(BLOCKS // 2)
    wait_for(lambda: push.sender.over_fabric > 8)
    assert receiver.ask("lose_endpoint")
    sender = push.push().seal()
    assert 8 < sender.over_fabric < BLOCKS
    push.arrived(receiver, sender.over_fabric, True)


def test_a_block_that_came_otherwise_is_not_whole(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, write = start(), FabricEndpoint.write
    monkeypatch.setattr(
        FabricEndpoint, "write", lambda endpoint, at, to, size: write(endpoint, at, to + BLOCK_BYTES, size)
    )
    sender = Push(receiver.address, endpoints, 8).push(4).seal()  # each block lies where the next one belongs
    assert (sender.state, sender.whole) == (HandoverState.SEALED, 0)
    assert receiver.ask("counters")["corrupt_blocks"] == 4
    assert receiver.ask("let_go"), "and what was written there is zeroed all the same"


def test_a_receiver_that_drops_ends_the_handover_and_zeroes_what_came(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints
) -> None:
    receiver = start()
    push = Push(receiver.address, endpoints).push(BLOCKS // 2)
    wait_for(lambda: receiver.ask("written") > 8)
    assert receiver.ask("drop")
    wait_for(lambda: push.push().sender.ended)
    assert push.sender.state is HandoverState.FAILED
    wait_for(lambda: not receiver.ask("held"))
    assert receiver.ask("let_go")


def test_a_receiver_that_is_killed_ends_the_handover_and_no_more(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints
) -> None:
    doomed, other = start(), start()
    push = Push(doomed.address, endpoints).push(BLOCKS // 2)
    wait_for(lambda: push.sender.over_fabric > 8)
    doomed.process.send_signal(signal.SIGKILL)
    wait_for(lambda: push.push().sender.ended)
    assert push.sender.state is HandoverState.FAILED
    push.sender.wait_ended(20.0)
    Push(other.address, endpoints).push().arrived(other, BLOCKS, False)


def test_a_receiver_that_freezes_ends_the_handover(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = start()
    push = Push(receiver.address, endpoints)
    push.sender._lease_s = 0.5
    push.push(BLOCKS // 2)
    wait_for(lambda: push.sender.over_fabric)
    receiver.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: push.push().sender.ended)
    assert push.sender.state is HandoverState.FAILED
    receiver.process.send_signal(signal.SIGCONT)
    wait_for(lambda: not receiver.ask("held"))
    assert receiver.ask("let_go")
    Push(receiver.address, endpoints).push().arrived(receiver, BLOCKS, False)


def sender_of(receiver: FabricReceiver) -> "subprocess.Popen[bytes]":
    """A process that pushes many blocks to a receiver, some of which are there."""
    command = [sys.executable, "-c", f"import {__name__} as test; test.push_many({receiver.address!r})"]
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    sender = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    wait_for(lambda: receiver.ask("written") > 8)
    return sender


def push_many(address: str) -> None:
    """What that process does, and goes on with while it lives."""
    endpoints = FabricEndpoints(FABRIC)
    while True:
        Push(address, endpoints, 2048).push().sender.wait_ended(60.0)


def test_a_sender_that_is_killed_leaves_nothing_behind(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints
) -> None:
    receiver = start()
    with sender_of(receiver) as sender:
        sender.kill()
    wait_for(lambda: not receiver.ask("held"))
    assert receiver.ask("let_go")
    Push(receiver.address, endpoints).push().arrived(receiver, BLOCKS, False)


def test_what_a_frozen_sender_had_begun_never_comes_once_its_lease_is_over(
    start: Callable[..., FabricReceiver], endpoints: FabricEndpoints
) -> None:
    receiver = start(lease_s=1.0)
    with sender_of(receiver) as sender:
        sender.send_signal(signal.SIGSTOP)
        wait_for(lambda: not receiver.ask("held"))
        push = Push(receiver.address, endpoints, 1024).push()  # into the memory that it had
        push.seal()
        receiver.ask("refuse")
        sender.send_signal(signal.SIGCONT)
        wait_for(lambda: "handover_refused" in receiver.log.read_text(), what="it goes on, and asks anew")
        sender.kill()
    push.arrived(receiver, 1024, False)


@pytest.fixture(scope="module")
def replicas(loopback: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MovingReplica, ...]]:
    """Two of the built-in model whose hosts have this fabric, and one without."""
    spec = ModelSpec(
        name="ember", folder=str(files("engine") / "builtin_model"), dtype="float32", context_tokens=1024,
        kv_bytes=64 << 20, handover_bytes=64 << 20,
    )  # fmt: skip
    command = [sys.executable, "-m", "engine.replica.server"]
    each = (FABRIC, FABRIC, "")
    started = tuple(MovingReplica(command, tmp_path_factory.mktemp("ember"), spec, fabric=fabric) for fabric in each)
    yield started
    for replica in started:
        replica.stop()


def counted(replica: MovingReplica) -> tuple[int, int]:
    return replica.peer.counted("handover_fabric_blocks"), replica.peer.counted("handover_off_fabric")


def test_a_text_that_moves_over_a_fabric_is_the_text_that_does_not(replicas: tuple[MovingReplica, ...]) -> None:
    one, other, apart = replicas
    prompt = [Random(3).randrange(5, 4000) for _ in range(210)]
    order = order_of(prompt, 96, Scope(), SamplingParams(temperature=1.0, top_p=0.95, seed=11, ignore_eos=True))
    plain = Journey(order, other)
    plain.begin()
    expected = plain.finish()
    journey = Journey(order, one)
    journey.begin()
    for source, target, written in ((one, other, True), (other, one, True), (one, apart, False)):
        with link_to(target) as link:
            before = counted(source)
            journey.ask(target, link.address)
            journey.settle()
            assert journey.moved(), journey.at.peer.failed
            journey.follow(target)
            source.peer.until(lambda source=source, before=before: counted(source) != before)
            blocks, off = counted(source)
            assert (blocks - before[0] >= len(prompt) // 16, off - before[1]) == (written, not written)
            peer = target.peer
            peer.until(lambda peer=peer: len(peer.tokens.get(journey.id, [])) > 4 or peer.ended(journey.id))
    assert journey.finish() == expected
    nothing_held(*replicas)
