"""Where models are, as machines report it to every client: this needs no gateway and no token."""

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from engine.protocol import frames
from engine.protocol.address import parse_address, parse_tls_address
from engine.protocol.types import Residency
from gateway.settings.config import Config

REPORT_S: Final = 1.0
_LOOK_S: Final = 0.01
_RECEIVE_BYTES: Final = 1 << 16


class MachineWatcher:
    """Watches what one machine reports of its replicas. No call blocks for long."""

    def __init__(self, address: str) -> None:
        self._target = parse_address(address)
        self._socket: socket.socket | None = None
        self._frames = frames.FrameReader()
        self._received = bytearray(_RECEIVE_BYTES)  # one for all looks: else each leaves a hole in the heap
        self._report: frames.MachineState | None = None

    def look(self) -> frames.MachineState | None:
        """The last report; None while the machine cannot be reached."""
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            count = self._socket.recv_into(self._received)
            for frame in self._frames.feed(bytes(self._received[:count])):
                if isinstance(frame, frames.MachineState):
                    self._report = frame
            if not count:
                self.close()
        except BlockingIOError:
            pass
        except (OSError, frames.FrameError):
            self.close()
        return self._report

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
        self._report = None


def machine_reports(config: Config) -> list[frames.MachineState]:
    """The reports of the configured machines of this host that answer within REPORT_S in all."""
    deadline = time.monotonic() + REPORT_S
    addresses = [address for address in config.machine_addresses if parse_tls_address(address) is None]
    watchers = [MachineWatcher(address) for address in addresses]
    try:
        reports = [watcher.look() for watcher in watchers]
        while any(report is None and not one.away for report, one in zip(reports, watchers, strict=True)):
            if time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_S)
            reports = [None if watcher.away else watcher.look() for watcher in watchers]
        return [report for report in reports if report is not None]
    finally:
        for watcher in watchers:
            watcher.close()


def replicas_of(model: str, machines: Iterable[frames.MachineState]) -> Iterator[frames.ReplicaState]:
    for machine in machines:
        yield from (replica for replica in machine.replicas if replica.model == model)


def at_rest(replica: frames.ReplicaState) -> bool:
    """Whether a replica sleeps and would wake for a call; not while it moves, nor if it cannot be started."""
    asleep = replica.residency is not Residency.DEVICE and replica.toward is replica.residency
    return asleep and not replica.problem and replica.ready_ms >= 0 and not replica.quarantined


def residency_text(replicas: Sequence[frames.ReplicaState]) -> str:
    """`2 × device`, `memory → device`, …; `-` without any."""
    texts = [_text(replica) for replica in replicas]
    counted = [f"{texts.count(text)} × {text}" if texts.count(text) > 1 else text for text in dict.fromkeys(texts)]
    return ", ".join(counted) or "-"


def _text(replica: frames.ReplicaState) -> str:
    where = replica.residency.name.lower()
    moving = "" if replica.toward is replica.residency else f" → {replica.toward.name.lower()}"
    return f"{where}{moving}{', quarantined' if replica.quarantined else ''}"
