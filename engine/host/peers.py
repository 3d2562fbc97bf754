"""The agent's connections to its replicas, which it opens and keeps. Nothing here waits. It takes what frames say, and
decides nothing.
"""

import errno
import selectors
import socket
from collections.abc import Callable
from typing import Final

from engine.log import log
from engine.process.supervised import Backoff
from engine.protocol.address import parse_address
from engine.protocol.connection import PeerChannel, socket_family
from engine.protocol.frames import Frame, FrameError, Hello, PlacementStatus, ReplicaLoad, SetPlacement

RECEIVED_BYTES_MAX: Final = 1 << 20
UNSENT_BYTES_MAX: Final = 4 << 20
_IN_PROGRESS: Final = (0, errno.EINPROGRESS)
_BACKOFF_S: Final = 0.05  # before a lost connection is tried again, doubled each further time


class ReplicaPeer:
    """The connection to one replica's process, opened again after growing pauses while it is lost.

    load    the replica's last load; None until then.
    status  where the replica is, as it reported last on this connection; None: nothing may be moved.
    """

    def __init__(
        self, selector: selectors.BaseSelector, address: str, connect_s: float,
        asked_to_end: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Each attempt, and each pause between two, takes connect_s at most. The loss of the connection to a process
        that was asked to end is no warning."""
        self.load: ReplicaLoad | None = None
        self.status: PlacementStatus | None = None
        self._reports: list[PlacementStatus] = []
        self._selector = selector
        self._address = address
        self._connect_s = connect_s
        self._asked_to_end = asked_to_end
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
        self._channel = PeerChannel(
            self._selector, peer, RECEIVED_BYTES_MAX, UNSENT_BYTES_MAX,
            self._on_frame, lambda reason: self._on_lost(reason, now),
        )  # fmt: skip
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
        log("link_lost", level="info" if self._asked_to_end() else "warning", address=self._address, reason=reason)
        self.close()
        self._pause(opened_at)

    def _pause(self, now: float) -> None:
        self._connect_at = now + self._backoff.fail()
