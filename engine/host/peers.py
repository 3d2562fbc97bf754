"""The machine's connections: those that gateways open, and those that it opens to its replicas and keeps. Nothing here
waits. It takes what frames say, and decides nothing.
"""

import errno
import selectors
import socket
from collections.abc import Callable
from typing import Final

from engine.host.paths import socket_family
from engine.log import log
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
_UNDER_WAY: Final = (0, errno.EINPROGRESS)
_BACKOFF_S: Final = 0.05  # before a lost link is tried again, doubled each further time


class PeerChannel:
    """A socket of frames in the loop's selector, until it is closed or lost; `lost` is called in the latter case."""

    def __init__(
        self, selector: selectors.BaseSelector, peer: socket.socket,
        take: Callable[[Frame], None], lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`peer` may still be connecting. `take` may raise FrameError, which loses the peer."""
        self.closed = False
        self._selector = selector
        self._connection = FrameConnection(peer.fileno(), peer, _RECEIVED_BYTES_MAX, _UNSENT_BYTES_MAX)
        self._take = take
        self._lost = lost
        selector.register(peer, selectors.EVENT_READ, self._ready)

    def send(self, frame: Frame) -> None:
        self.pass_on(encode_frame(frame))

    def pass_on(self, encoded: bytes) -> None:
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

    def _ready(self) -> None:
        if self.closed:  # by what another socket said in the same round
            return
        try:
            self._connection.flush()
            for frame in self._connection.frames():
                self._take(frame)
                if self.closed:
                    return
        except (PeerGone, FrameError) as error:
            self._lose(str(error))
            return
        self._watch()

    def _watch(self) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._connection.unsent else 0)
        if self._selector.get_key(self._connection.socket).events != wanted:
            self._selector.modify(self._connection.socket, wanted, self._ready)

    def _lose(self, why: str) -> None:
        self.close()
        self._lost(why)


class ReplicaPeer:
    """The connection to one replica's process, opened again after growing pauses while it is lost.

    load     the last that it said of itself, None until then.
    placed   where it is, as it said last on this connection; None: nothing may be moved.
    """

    def __init__(self, selector: selectors.BaseSelector, address: str, connect_s: float) -> None:
        """Each attempt, and each pause between two, takes connect_s at most."""
        self.load: ReplicaLoad | None = None
        self.placed: PlacementStatus | None = None
        self._answers: list[PlacementStatus] = []
        self._selector = selector
        self._address = address
        self._connect_s = connect_s
        self._channel: PeerChannel | None = None
        self._greeted = False
        self._try_at = 0.0
        self._give_up_at = 0.0
        self._pause_s = _BACKOFF_S

    def keep(self, place: SetPlacement, now: float) -> None:
        """Opens it where it is not open. `place` is what a new connection says first, to be answered at once."""
        if self._channel is None:
            if now >= self._try_at:
                self._open(place, now)
        elif not self._greeted and now >= self._give_up_at:
            self.close()
            self._wait(now)

    def send(self, place: SetPlacement) -> None:
        assert self.placed is not None
        assert self._channel is not None
        self._channel.send(place)

    def taken(self) -> list[PlacementStatus]:
        """What it answered since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """What is known through it is forgotten. Idempotent."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self.load = self.placed = None
        self._greeted = False
        self._answers.clear()

    def forget(self) -> None:
        """The process has ended: the next one's is another connection."""
        self.close()
        self._try_at, self._pause_s = 0.0, _BACKOFF_S

    def _open(self, place: SetPlacement, now: float) -> None:
        target = parse_address(self._address)
        peer = socket.socket(socket_family(target))
        peer.setblocking(False)
        if peer.connect_ex(target) not in _UNDER_WAY:
            peer.close()
            self._wait(now)
            return
        self._give_up_at = now + self._connect_s
        self._channel = PeerChannel(self._selector, peer, self._take, lambda why: self._lost(why, now))
        self._channel.send(place)

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, Hello):
            self._greeted = True
        elif isinstance(frame, ReplicaLoad):
            self.load = frame
        elif isinstance(frame, PlacementStatus):
            self.placed, self._pause_s = frame, _BACKOFF_S
            self._answers.append(frame)
        else:
            raise FrameError(f"a {type(frame).__name__} is not for a machine")

    def _lost(self, why: str, opened_at: float) -> None:
        log("link_lost", address=self._address, reason=why)
        self.close()
        self._wait(opened_at)

    def _wait(self, now: float) -> None:
        self._try_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, self._connect_s)
