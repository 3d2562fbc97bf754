"""Where models are, as machines tell it to whoever connects: no gateway and no token are needed for it."""

import socket
import time
from collections.abc import Iterable, Iterator, Sequence

from engine.protocol import frames
from engine.protocol.address import parse_address
from engine.protocol.types import Residency
from gateway.config import Config

_ASK_S = 1.0
_LOOK_S = 0.01


class MachineWatcher:
    """A watcher of one machine's word about its replicas. Never blocks for long."""

    def __init__(self, address: str) -> None:
        self._target = parse_address(address)
        self._socket: socket.socket | None = None
        self._frames = frames.FrameReader()
        self._said: frames.MachineState | None = None

    def look(self) -> frames.MachineState | None:
        """What it said last; None while it cannot be reached."""
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            received = self._socket.recv(1 << 16)
            for frame in self._frames.feed(received):
                if isinstance(frame, frames.MachineState):
                    self._said = frame
            if not received:
                self.close()
        except BlockingIOError:
            pass
        except (OSError, frames.FrameError):
            self.close()
        return self._said

    def _connect(self) -> None:
        self._frames = frames.FrameReader()
        kind = socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET
        self._socket = socket.socket(kind)
        self._socket.settimeout(0.5)
        self._socket.connect(self._target)
        self._socket.setblocking(False)

    @property
    def away(self) -> bool:
        return self._socket is None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._said = None


def machine_reports(config: Config) -> list[frames.MachineState]:
    """What those of the configured machines say that answer within a second in all."""
    sides = [MachineWatcher(address) for address in config.machine_addresses]
    try:
        said = [side.look() for side in sides]
        until = time.monotonic() + _ASK_S
        while any(fleet is None and not side.away for fleet, side in zip(said, sides, strict=True)):
            if time.monotonic() >= until:
                break
            time.sleep(_LOOK_S)
            said = [None if side.away else side.look() for side in sides]
        return [fleet for fleet in said if fleet is not None]
    finally:
        for side in sides:
            side.close()


def replicas_of(model: str, said: Iterable[frames.MachineState]) -> Iterator[frames.ReplicaState]:
    for fleet in said:
        yield from (replica for replica in fleet.replicas if replica.model == model)


def on_device(replica: frames.ReplicaState) -> bool:
    return replica.residency is Residency.DEVICE


def at_rest(replica: frames.ReplicaState) -> bool:
    """Whether it sleeps and would wake for a call; not while it moves, nor where it cannot be started."""
    asleep = replica.residency is not Residency.DEVICE and replica.toward is replica.residency
    return asleep and not replica.problem and replica.ready_ms >= 0 and not replica.quarantined


def residency_text(replicas: Sequence[frames.ReplicaState]) -> str:
    """`2 × device`, `memory → device`, …; `-` where there are none."""
    told = [_words(replica) for replica in replicas]
    counted = [f"{told.count(word)} × {word}" if told.count(word) > 1 else word for word in dict.fromkeys(told)]
    return ", ".join(counted) or "-"


def _words(replica: frames.ReplicaState) -> str:
    where = replica.residency.name.lower()
    moving = "" if replica.toward is replica.residency else f" → {replica.toward.name.lower()}"
    return f"{where}{moving}{', quarantined' if replica.quarantined else ''}"
