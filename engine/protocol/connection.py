"""A listening socket and its connections: whole frames in, bytes out as fast as the peer reads them, and nothing that
waits. It does not know what the frames mean."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Final

from engine.protocol.address import parse_address
from engine.protocol.frames import Frame, FrameReader

_RECEIVE_BYTES: Final = 1 << 18


class PeerGone(Exception):
    """The peer of a connection has left, or has to."""


class FrameConnection:
    """One peer's socket. At most `max_received` bytes are read from it at once, and PeerGone is raised where it leaves
    more than `max_unsent` unread."""

    def __init__(self, number: int, peer: socket.socket, max_received: int, max_unsent: int) -> None:
        peer.setblocking(False)
        self.number = number
        self.socket = peer
        self._max_received = max_received
        self._max_unsent = max_unsent
        self._reader = FrameReader()
        self._unsent = bytearray()

    @property
    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        return len(self._unsent)

    def frames(self) -> Iterator[Frame]:
        """The frames that have arrived. Raises PeerGone at the end of the stream, FrameError on
        rubbish."""
        total = 0
        while total < self._max_received:
            try:
                received = self.socket.recv(min(_RECEIVE_BYTES, self._max_received - total))
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerGone(str(error)) from error
            if not received:
                raise PeerGone("closed by the peer")
            total += len(received)
            yield from self._reader.feed(received)

    def send(self, encoded: bytes) -> None:
        """Hands the bytes to the peer or keeps them for later. Raises PeerGone where too much is kept already."""
        self._unsent += encoded
        self.flush()
        if len(self._unsent) > self._max_unsent:
            raise PeerGone(f"{len(self._unsent)} bytes unread by the peer")

    def flush(self) -> None:
        """Sends what the peer takes now. Raises PeerGone."""
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise PeerGone(str(error)) from error


def listen(address: str) -> socket.socket:
    """A listening socket that does not block. A unix socket left behind by an earlier process is replaced."""
    target = parse_address(address)
    if isinstance(target, tuple):
        listener = socket.create_server(target, family=socket.AF_INET6 if ":" in target[0] else socket.AF_INET)
    else:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(target).st_mode):
                os.unlink(target)
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
