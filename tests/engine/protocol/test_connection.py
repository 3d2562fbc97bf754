"""engine/protocol/connection.py: frames in, bytes out, over real sockets, and no wait anywhere."""

import os
import selectors
import socket
import stat
from pathlib import Path

import pytest

from engine.protocol.connection import FrameConnection, PeerChannel, PeerGone, listen
from engine.protocol.frames import Cancel, FrameError, encode_frame


@pytest.fixture
def ends() -> tuple[FrameConnection, socket.socket]:
    """A connection that takes and leaves 64 KiB at most, and its peer."""
    ours, peer = socket.socketpair()
    return FrameConnection(ours, 1 << 16, 1 << 16), peer


def test_frames_come_whole_whatever_the_pieces(ends: tuple[FrameConnection, socket.socket]) -> None:
    connection, peer = ends
    sent = encode_frame(Cancel([1, 2])) + encode_frame(Cancel([3]))
    peer.sendall(sent[:-1])
    assert list(connection.frames()) == [Cancel([1, 2])]
    assert list(connection.frames()) == []
    peer.sendall(sent[-1:])
    assert list(connection.frames()) == [Cancel([3])]


def test_what_is_taken_at_once_is_bounded() -> None:
    ours, peer = socket.socketpair()
    frame = encode_frame(Cancel([1]))
    connection = FrameConnection(ours, 3 * len(frame), 1 << 16)
    peer.sendall(7 * frame)
    assert [len(list(connection.frames())) for _ in range(3)] == [3, 3, 1]


def test_the_end_of_the_stream_and_rubbish_are_told_apart(ends: tuple[FrameConnection, socket.socket]) -> None:
    connection, peer = ends
    peer.sendall(b"\xff" * 8)
    with pytest.raises(FrameError):
        list(connection.frames())
    peer.close()
    with pytest.raises(PeerGone):
        list(connection.frames())


def test_a_peer_that_does_not_read_is_gone_when_too_much_is_unread(ends: tuple[FrameConnection, socket.socket]) -> None:
    connection, peer = ends
    sent = b"x" * 1_000_000
    with pytest.raises(PeerGone, match="unread"):
        connection.send(sent)
    assert connection.unsent > 1 << 16
    peer.setblocking(False)
    got = b""
    while connection.unsent:
        got += peer.recv(1 << 20)
        connection.flush()
    got += peer.recv(1 << 20)
    assert got == sent


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
    ours, its = socket.socketpair()
    ours.setblocking(False)
    lost: list[str] = []
    selector = selectors.DefaultSelector()
    channel = PeerChannel(selector, ours, 1 << 20, 4 << 20, lambda frame: None, lost.append)
    sent = 0
    while not channel.closed and sent < 64 << 20:
        channel.send_encoded(bytes(1 << 20))
        sent += 1 << 20
    assert channel.closed
    assert "unread" in lost[0]
    assert not selector.get_map()
    channel.send_encoded(b"late")
    its.close()
