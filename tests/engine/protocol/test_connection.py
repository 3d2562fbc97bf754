"""engine/protocol/connection.py: frames in, bytes out, over real sockets, and no wait anywhere."""

import os
import selectors
import socket
import stat
from pathlib import Path

import pytest

from engine.protocol.connection import PeerChannel, listen
from engine.protocol.frames import Cancel, Frame, FrameError, encode_frame


class Ends:
    """A channel that takes and leaves so many bytes at most, and its peer."""

    def __init__(self, max_received: int = 1 << 16, max_unsent: int = 1 << 16) -> None:
        near, self.peer = socket.socketpair()
        self.frames: list[Frame] = []
        self.lost: list[str] = []
        self.selector = selectors.DefaultSelector()
        self.channel = PeerChannel(self.selector, near, max_received, max_unsent, self.frames.append, self.lost.append)

    def turn(self) -> list[Frame]:
        """The frames that one round of the loop gives."""
        self.frames.clear()
        for key, _ in self.selector.select(0):
            key.data()
        return self.frames


def test_frames_come_whole_whatever_the_pieces() -> None:
    ends = Ends()
    encoded = encode_frame(Cancel([1, 2])) + encode_frame(Cancel([3]))
    ends.peer.sendall(encoded[:-1])
    assert ends.turn() == [Cancel([1, 2])]
    assert ends.turn() == []
    ends.peer.sendall(encoded[-1:])
    assert ends.turn() == [Cancel([3])]


def test_what_is_taken_at_once_is_bounded() -> None:
    frame = encode_frame(Cancel([1]))
    ends = Ends(max_received=3 * len(frame))
    ends.peer.sendall(7 * frame)
    assert [len(ends.turn()) for _ in range(3)] == [3, 3, 1]


def test_the_end_of_the_stream_and_rubbish_are_told_apart() -> None:
    rubbish, ended = Ends(), Ends()
    rubbish.peer.sendall(b"\xff" * 8)
    ended.peer.close()
    assert [*rubbish.turn(), *ended.turn()] == []
    assert ended.lost == ["closed by the peer"]
    assert rubbish.lost != ended.lost
    assert len(rubbish.lost) == 1
    assert rubbish.channel.closed
    assert ended.channel.closed


def test_a_peer_that_reads_late_gets_all() -> None:
    ends = Ends(max_unsent=1 << 20)
    encoded, received = bytes(range(250)) * 4000, b""
    ends.channel.send_encoded(encoded)
    assert ends.channel.unsent
    ends.peer.setblocking(False)
    while ends.channel.unsent:
        received += ends.peer.recv(1 << 20)
        ends.turn()
    received += ends.peer.recv(1 << 20)
    assert received == encoded
    assert not ends.lost


def test_a_socket_left_behind_is_replaced_and_for_its_user_alone(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    listen(address).close()
    listener = listen(address)
    assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) & 0o077 == 0
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(OSError, match="in use"):
        listen(f"unix:{tmp_path / 's'}")
    assert (tmp_path / "s").read_text() == "mine"


def test_a_peer_that_does_not_read_is_lost_once_too_much_is_kept_for_it() -> None:
    ends = Ends(max_unsent=4 << 20)
    sent = 0
    while not ends.channel.closed and sent < 64 << 20:
        ends.channel.send_encoded(bytes(1 << 20))
        sent += 1 << 20
    assert ends.channel.closed
    assert "unread" in ends.lost[0]
    assert not ends.selector.get_map()
    ends.channel.send_encoded(b"late")


def test_a_peer_that_is_lost_while_it_is_answered_is_lost_once() -> None:
    ours, peer = socket.socketpair()
    selector, lost = selectors.DefaultSelector(), list[str]()

    def refuse(frame: Frame) -> None:
        channel.lose("answered")
        raise FrameError("and refused")

    channel = PeerChannel(selector, ours, 1 << 16, 1 << 16, refuse, lost.append)
    peer.sendall(encode_frame(Cancel([1])))
    for key, _ in selector.select(5):
        key.data()
    assert (lost, channel.closed) == (["answered"], True)
