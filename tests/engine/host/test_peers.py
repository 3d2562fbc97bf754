"""engine/host/peers.py over real sockets."""

import json
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.host.peers import ReplicaPeer
from engine.protocol.frames import (
    PROTOCOL_VERSION,
    Frame,
    FrameReader,
    Hello,
    ModelDemand,
    PlacementStatus,
    ReplicaLoad,
    SetPlacement,
    encode_frame,
)
from engine.protocol.types import Residency
from tests.support.machine import short_folder

STAY = SetPlacement(Residency.DEVICE)


class Loop:
    """A selector, a link to an address, and the replica's end of it, on a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.path = str(folder / "r.sock")
        self.selector = selectors.DefaultSelector()
        self.asked_to_end = False
        self.link = ReplicaPeer(self.selector, f"unix:{self.path}", 2.0, lambda: self.asked_to_end)

    def listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen()
        listener.settimeout(5)
        return listener

    def turn(self, first: SetPlacement = STAY) -> None:
        self.link.keep_open(first, self.now)
        for key, _ in self.selector.select(0.05):
            key.data()


@pytest.fixture
def loop() -> Iterator[Loop]:
    with short_folder() as folder:
        yield Loop(folder)


def frames(peer: socket.socket) -> list[Frame]:
    peer.settimeout(5)
    return list(FrameReader().feed(peer.recv(1 << 16)))


def hello(protocol: int = PROTOCOL_VERSION) -> Hello:
    return Hello(protocol, "m", "", "1", 1, 1, 1, 1, 1)


def test_a_peer_is_first_sent_its_placement_and_its_reports_are_kept(loop: Loop) -> None:
    with loop.listen() as listener:
        loop.turn()
        peer, _ = listener.accept()
        with peer:
            assert frames(peer) == [STAY]
            load = ReplicaLoad(1, 2, 3, 4, 5, 6)
            answer = PlacementStatus(Residency.DEVICE, device_bytes=7)
            peer.sendall(encode_frame(hello()) + encode_frame(load))
            loop.turn()
            assert (loop.link.load, loop.link.status) == (load, None)
            peer.sendall(encode_frame(answer))
            loop.turn()
            assert loop.link.status == answer
            assert (loop.link.take_reports(), loop.link.take_reports()) == ([answer], [])
            loop.link.send(SetPlacement(Residency.MEMORY))
            assert frames(peer) == [SetPlacement(Residency.MEMORY)]
    loop.link.close()


def test_a_lost_connection_forgets_what_it_knew_and_is_opened_again_after_growing_pauses(loop: Loop) -> None:
    with loop.listen() as listener:
        loop.turn()
        peer, _ = listener.accept()
        peer.sendall(encode_frame(hello()) + encode_frame(PlacementStatus(Residency.DEVICE)))
        loop.turn()
        assert loop.link.status is not None
        peer.close()
        loop.turn()
        assert loop.link.load is None
        assert loop.link.status is None
        assert loop.link.take_reports() == []
        loop.now = 0.04
        loop.turn()
        listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listener.accept()
        loop.now = 0.06
        loop.turn(SetPlacement(Residency.MEMORY))
        again, _ = listener.accept()
        assert frames(again) == [SetPlacement(Residency.MEMORY)]
        again.close()
    loop.link.close()


@pytest.mark.parametrize(("asked_to_end", "level"), [(False, "warning"), (True, "info")])
def test_the_end_of_a_process_that_was_asked_to_end_is_no_warning(
    loop: Loop, capfd: pytest.CaptureFixture[str], asked_to_end: bool, level: str
) -> None:
    with loop.listen() as listener:
        loop.turn()
        peer, _ = listener.accept()
        loop.asked_to_end = asked_to_end
        peer.close()
        loop.turn()
    (line,) = [json.loads(each) for each in capfd.readouterr().err.splitlines() if "link_lost" in each]
    assert line["level"] == level


def test_a_connection_that_nobody_accepts_is_tried_again(loop: Loop) -> None:
    loop.turn()
    with loop.listen() as listener:
        loop.now = 1.0
        loop.turn()
        listener.accept()[0].close()
    loop.link.close()


@pytest.mark.parametrize(
    ("rubbish", "reason"),
    [
        (b"\xff" * 64, "over the limit"),
        (encode_frame(hello(PROTOCOL_VERSION + 1)), f"a Hello of protocol {PROTOCOL_VERSION + 1}"),
        (encode_frame(ModelDemand("m", 1)), "a ModelDemand is not for a machine"),
    ],
)
def test_a_frame_that_no_replica_sends_loses_the_connection(
    loop: Loop, rubbish: bytes, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with loop.listen() as listener:
        loop.turn()
        peer, _ = listener.accept()
        frames(peer)
        peer.sendall(rubbish)
        loop.turn()
        assert peer.recv(1) == b""
        assert reason in capfd.readouterr().err
        peer.close()
    loop.link.close()


def test_a_replica_that_accepts_and_never_greets_is_given_up(loop: Loop) -> None:
    with loop.listen() as listener:
        loop.turn()
        peer, _ = listener.accept()
        frames(peer)
        loop.now = 2.1
        loop.turn()
        assert peer.recv(1) == b""
        peer.close()
    loop.link.close()
