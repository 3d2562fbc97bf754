"""A listening socket and its connections: whole frames in, bytes out as fast as the peer reads them, and nothing that
waits. It does not know what the frames mean."""

import contextlib
import os
import selectors
import socket
import stat
from collections.abc import Callable, Iterator
from typing import Final

from engine.protocol.address import parse_address
from engine.protocol.frames import Frame, FrameError, FrameReader, encode_frame

_RECEIVE_BYTES: Final = 1 << 17  # less than what lies apart from the heap (engine/process/allocator.py)
_VANISHED_MS: Final = 3000  # a peer that acknowledges nothing for so long is gone


class _PeerGone(Exception):
    """The peer has left."""


class PeerChannel:
    """A peer's socket in the loop's selector, until it is closed or lost; `on_lost` is called in the latter case."""

    def __init__(
        self, selector: selectors.BaseSelector, peer: socket.socket, max_received: int, max_unsent: int,
        on_frame: Callable[[Frame], None], on_lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`peer` may still be connecting. At most `max_received` bytes are read from it at once, and it is lost where
        it leaves more than `max_unsent` unread. The selector's data is what to call when the peer is ready. `on_frame`
        may raise FrameError, which loses the peer."""
        peer.setblocking(False)
        notice_vanished(peer)
        self.closed = False
        self._selector = selector
        self._socket = peer
        self._max_received = max_received
        self._max_unsent = max_unsent
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._on_frame = on_frame
        self._on_lost = on_lost
        selector.register(peer, selectors.EVENT_READ, self._on_ready)

    @property
    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        return len(self._unsent)

    def send(self, frame: Frame) -> None:
        self.send_encoded(encode_frame(frame))

    def send_encoded(self, encoded: bytes) -> None:
        """Sends a frame's bytes, or keeps them until the peer reads. Does nothing once the channel is closed."""
        if self.closed:
            return
        self._unsent += encoded
        try:
            self._flush()
            if len(self._unsent) > self._max_unsent:
                raise _PeerGone(f"{len(self._unsent)} bytes unread by the peer")
        except _PeerGone as gone:
            self.lose(str(gone))
            return
        self._watch()

    def lose(self, reason: str) -> None:
        """Closes the channel and tells its owner, once."""
        if not self.closed:
            self.close()
            self._on_lost(reason)

    def close(self) -> None:
        """Idempotent."""
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._socket)
            self._socket.close()

    def _on_ready(self) -> None:
        if self.closed:  # by what another socket sent in the same round
            return
        try:
            self._flush()
            for frame in self._frames():
                self._on_frame(frame)
                if self.closed:
                    return
        except (_PeerGone, FrameError) as error:
            self.lose(str(error))
            return
        self._watch()

    def _frames(self) -> Iterator[Frame]:
        """The frames that have arrived. Raises _PeerGone at the end of the stream, FrameError on rubbish."""
        total = 0
        while total < self._max_received:
            try:
                received = self._socket.recv(min(_RECEIVE_BYTES, self._max_received - total))
            except BlockingIOError:
                return
            except OSError as error:
                raise _PeerGone(str(error)) from error
            if not received:
                raise _PeerGone("closed by the peer")
            total += len(received)
            yield from self._reader.feed(received)

    def _flush(self) -> None:
        """Sends what the peer takes now. Raises _PeerGone."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise _PeerGone(str(error)) from error

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if self._selector.get_key(self._socket).events != events:
            self._selector.modify(self._socket, events, self._on_ready)


def notice_vanished(peer: socket.socket, idle_s: int = 1) -> None:
    """Has the kernel end a connection over TCP whose peer's host answers nothing for some 3 s: what was sent, or what
    the kernel itself asks once nothing came for idle_s. On systems that cannot, silence is noticed above alone."""
    if peer.family == socket.AF_UNIX:
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        *(("TCP_KEEPIDLE", idle_s), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2)),
        ("TCP_USER_TIMEOUT", _VANISHED_MS),
    ):
        if option := getattr(socket, name, 0):
            peer.setsockopt(socket.IPPROTO_TCP, option, value)


def listen(address: str) -> socket.socket:
    """A listening socket that does not block. A unix socket left behind by an earlier process is replaced."""
    target = parse_address(address)
    if isinstance(target, tuple):
        listener = socket.create_server(target, family=socket_family(target))
    else:
        remove_socket(address)
        listener = socket.socket(socket.AF_UNIX)
        umask = os.umask(0o077)  # prompts travel here: for this user alone
        try:
            listener.bind(target)
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(umask)
        listener.listen()
    listener.setblocking(False)
    return listener


def socket_family(target: str | tuple[str, int]) -> socket.AddressFamily:
    """The family of a socket for what `parse_address` gave."""
    if isinstance(target, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in target[0] else socket.AF_INET


def remove_socket(address: str) -> None:
    """Removes the file of a unix socket, where there is one."""
    target = parse_address(address)
    if isinstance(target, str):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(target).st_mode):
                os.unlink(target)
