"""The agent's connections: those that gateways open, and those that it opens to its replicas and keeps. Nothing here
waits. It takes what frames say, and decides nothing.
"""

import errno
import selectors
import socket
from collections.abc import Callable
from typing import Final

from engine.host.paths import socket_family
from engine.log import log
from engine.process.supervised import Backoff
from engine.protocol.address import parse_address
from engine.protocol.connection import FrameConnection, PeerGone
from engine.protocol.frames import (
    Frame,
    FrameError,
    Hello,
    PlacementStatus,
    ReplicaLoad,
    SetPlacement,
    encode_frame,
)

_RECEIVED_BYTES_MAX: Final = 1 << 20
_UNSENT_BYTES_MAX: Final = 4 << 20
_IN_PROGRESS: Final = (0, errno.EINPROGRESS)
_BACKOFF_S: Final = 0.05  # before a lost connection is tried again, doubled each further time


class PeerChannel:
    """A socket of frames in the loop's selector, until it is closed or lost; `on_lost` is called in the latter case."""

    def __init__(
        self, selector: selectors.BaseSelector, peer: socket.socket,
        on_frame: Callable[[Frame], None], on_lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`peer` may still be connecting. `on_frame` may raise FrameError, which loses the peer."""
        self.closed = False
        self._selector = selector
        self._connection = FrameConnection(peer.fileno(), peer, _RECEIVED_BYTES_MAX, _UNSENT_BYTES_MAX)
        self._on_frame = on_frame
        self._on_lost = on_lost
        selector.register(peer, selectors.EVENT_READ, self._on_ready)

    def send(self, frame: Frame) -> None:
        self.send_encoded(encode_frame(frame))

    def send_encoded(self, encoded: bytes) -> None:
        """Sends a frame's bytes, or keeps them until the peer reads. Does nothing once the channel is closed."""
        if self.closed:
            return
        try:
            self._connection.send(encoded)
        except PeerGone as gone:
            self._lose(str(gone))
            return
        self._watch()

    def close(self) -> None:
        """Idempotent."""
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._connection.socket)
            self._connection.socket.close()

    def _on_ready(self) -> None:
        if self.closed:  # by what another socket sent in the same round
            return
        try:
            self._connection.flush()
            for frame in self._connection.frames():
                self._on_frame(frame)
                if self.closed:
                    return
        except (PeerGone, FrameError) as error:
            self._lose(str(error))
            return
        self._watch()

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._connection.unsent else 0)
        if self._selector.get_key(self._connection.socket).events != events:
            self._selector.modify(self._connection.socket, events, self._on_ready)

    def _lose(self, reason: str) -> None:
        self.close()
        self._on_lost(reason)


class ReplicaPeer:
    """The connection to one replica's process, opened again after growing pauses while it is lost.

    load    the replica's last load; None until then.
    status  where the replica is, as it reported last on this connection; None: nothing may be moved.
    """

    def __init__(self, selector: selectors.BaseSelector, address: str, connect_s: float) -> None:
        """Each attempt, and each pause between two, takes connect_s at most."""
        self.load: ReplicaLoad | None = None
        self.status: PlacementStatus | None = None
        self._reports: list[PlacementStatus] = []
        self._selector = selector
        self._address = address
        self._connect_s = connect_s
        self._channel: PeerChannel | None = None
        self._greeted = False
        self._backoff = Backoff(_BACKOFF_S, connect_s)
        self._connect_at = 0.0
        self._greet_until = 0.0

    def keep_open(self, first: SetPlacement, now: float) -> None:
        """Opens the connection where it is not open. `first` is the first message of a new one, which the replica
        answers at once."""
        if self._channel is None:
            if now >= self._connect_at:
                self._open(first, now)
        elif not self._greeted and now >= self._greet_until:
            self.close()
            self._pause(now)

    def send(self, message: SetPlacement) -> None:
        """Orders a move, of a replica that has reported where it is."""
        assert self.status is not None
        assert self._channel is not None
        self._channel.send(message)

    def take_reports(self) -> list[PlacementStatus]:
        """The reports since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Forgets what is known through the connection. Idempotent."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self.load = self.status = None
        self._greeted = False
        self._reports.clear()

    def reset(self) -> None:
        """The process has ended: the next one's is another connection."""
        self.close()
        self._connect_at = 0.0
        self._backoff.reset()

    def _open(self, first: SetPlacement, now: float) -> None:
        target = parse_address(self._address)
        peer = socket.socket(socket_family(target))
        peer.setblocking(False)
        if peer.connect_ex(target) not in _IN_PROGRESS:
            peer.close()
            self._pause(now)
            return
        self._greet_until = now + self._connect_s
        self._channel = PeerChannel(self._selector, peer, self._on_frame, lambda reason: self._on_lost(reason, now))
        self._channel.send(first)

    def _on_frame(self, frame: Frame) -> None:
        if isinstance(frame, Hello):
            self._greeted = True
        elif isinstance(frame, ReplicaLoad):
            self.load = frame
        elif isinstance(frame, PlacementStatus):
            self.status = frame
            self._backoff.reset()
            self._reports.append(frame)
        else:
            raise FrameError(f"a {type(frame).__name__} is not for a machine")

    def _on_lost(self, reason: str, opened_at: float) -> None:
        log("link_lost", address=self._address, reason=reason)
        self.close()
        self._pause(opened_at)

    def _pause(self, now: float) -> None:
        self._connect_at = now + self._backoff.fail()
