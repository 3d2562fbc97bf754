"""Replica processes between which sequences move, a gateway's part in that, and a link between them that is slow,
breaks or corrupts what it carries. What moves is held against the text that a sequence has which never moves."""

import contextlib
import os
import secrets
import socket
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.protocol.cache_frames import HandOver, HandOverFailed
from engine.protocol.frames import (
    Cancel,
    Frame,
    FrameReader,
    Hello,
    Reject,
    ReplicaLoad,
    SequenceFinished,
    SequenceStarted,
    StepOutputs,
    Submit,
    encode_frame,
)
from engine.protocol.specs import ModelSpec, ReplicaSpec
from engine.protocol.types import FinishReason, GivenTokens, SamplingParams, Scope
from tests.support.waiting import wait_for

LIMIT_S = 60.0


class MovingPeer:
    """A gateway's connection to a replica, and what came over it by sequence."""

    def __init__(self, address: str, start_s: float = LIMIT_S) -> None:
        def connect() -> socket.socket | None:
            peer = socket.socket(socket.AF_UNIX)
            try:
                peer.connect(address.removeprefix("unix:"))
            except OSError:
                peer.close()
                return None
            return peer

        self.socket: socket.socket = wait_for(connect, start_s, f"{address} takes connections")
        self._reader = FrameReader()
        self.tokens: dict[int, list[int]] = {}
        self.started: dict[int, SequenceStarted] = {}
        self.finished: dict[int, SequenceFinished] = {}
        self.rejected: dict[int, Reject] = {}
        self.failed: dict[int, HandOverFailed] = {}
        self.load = ReplicaLoad(-1, -1, -1, -1, -1, -1)
        self.hello: Hello | None = None
        self.closed = False
        self.next_id = 1
        self.until(lambda: self.hello is not None)

    def send(self, frame: Frame) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(encode_frame(frame))

    def cancel(self, id: int) -> None:
        self.send(Cancel([id]))

    def submit(self, order: Submit) -> int:
        id, self.next_id = self.next_id, self.next_id + 1
        self.tokens[id] = []
        self.send(msgspec.structs.replace(order, id=id))
        return id

    def ended(self, id: int) -> bool:
        return id in self.finished or id in self.rejected or self.closed

    def until(self, done: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            left = deadline - time.monotonic()
            assert left > 0, f"not in {limit_s} s"
            self.read(left)

    def read(self, limit_s: float) -> None:
        self.socket.settimeout(max(limit_s, 0.001))
        try:
            received = self.socket.recv(1 << 16)
        except TimeoutError:
            return
        except ConnectionError:
            received = b""
        if not received:
            assert not self.closed, "waiting for frames on a closed connection"
            self.closed = True
        for frame in self._reader.feed(received):
            self._take(frame)

    def counted(self, name: str) -> int:
        """A counter of the last load."""
        return self.load.counters.get(name, 0)

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, Hello):
            self.hello = frame
        elif isinstance(frame, ReplicaLoad):
            self.load = frame
        elif isinstance(frame, HandOverFailed):
            self.failed[frame.id] = frame
        elif isinstance(frame, Reject):
            self.rejected[frame.id] = frame
        elif isinstance(frame, StepOutputs):
            tokens, at = array("I", frame.tokens), 0
            for started in frame.started:
                self.started[started.id] = started
            for id, count in zip(frame.ids, frame.counts, strict=True):
                self.tokens.setdefault(id, []).extend(tokens[at : at + count])
                at += count
            for finished in frame.finished:
                self.finished[finished.id] = finished


class MovingReplica:
    """A replica process that takes in handovers, and a gateway's connection to it once it is asked for."""

    def __init__(
        self, command: Sequence[str], folder: Path, model: ModelSpec, *more: str, boot: int = 7, device: str = "cpu",
        environment: Mapping[str, str] | None = None, start_s: float = LIMIT_S, fabric: str = "",
    ) -> None:  # fmt: skip
        """It is to take connections within start_s; `environment` is beside the one of this process."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.address = f"unix:{folder / 'r.sock'}"
        self.spec = ReplicaSpec(
            model=model, address=self.address, pulse=str(folder / "pulse"), boot=boot, device=device,
            threads=1 if device == "cpu" else None, fabric=fabric,
        )  # fmt: skip
        arguments = [*command, msgspec.json.encode(self.spec).decode(), *more]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(arguments, stderr=log, env={**os.environ, **(environment or {})})
        self._start_s = start_s
        self._peer: MovingPeer | None = None

    @property
    def peer(self) -> MovingPeer:
        if self._peer is None:
            self._peer = MovingPeer(self.address, self._start_s)
        return self._peer

    @property
    def takes_at(self) -> str:
        assert self.peer.hello is not None
        return self.peer.hello.handover

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        if self._peer is not None:
            self._peer.socket.close()


def order_of(
    prompt: Sequence[int], max_tokens: int, scope: Scope, sampling: SamplingParams | None = None, **fields: object
) -> Submit:
    order = Submit(0, array("I", prompt).tobytes(), scope, sampling or SamplingParams(), max_tokens)
    return msgspec.structs.replace(order, **fields)


@dataclass
class Journey:
    """One request on its way: where it runs, what came of it so far, and how often it moved."""

    order: Submit
    at: MovingReplica
    id: int = 0
    tokens: list[int] = field(default_factory=list)
    moves: int = 0
    key: bytes = b""
    reason: FinishReason | None = None

    def begin(self) -> None:
        self.id = self.at.peer.submit(self.order)

    def ask(self, target: MovingReplica, address: str | None = None, boot: str = "7") -> None:
        """Has it move to the target."""
        self.key = secrets.token_bytes(32)
        self.at.peer.send(HandOver(self.id, address or target.takes_at, boot, self.key))

    def settle(self) -> None:
        """Waits until it has moved away, failed to, or ended."""
        peer = self.at.peer
        peer.until(lambda: peer.ended(self.id) or self.id in peer.failed)

    def follow(self, target: MovingReplica, scope: Scope | None = None) -> None:
        """Goes on at the target with what came so far."""
        self.tokens += self.at.peer.tokens.pop(self.id)
        given = [GivenTokens(0, array("I", self.tokens).tobytes(), self.key)]
        order = msgspec.structs.replace(self.order, given=given)
        self.at, self.moves = target, self.moves + 1
        self.id = target.peer.submit(order if scope is None else msgspec.structs.replace(order, scope=scope))

    def moved(self) -> bool:
        finished = self.at.peer.finished.get(self.id)
        return finished is not None and finished.reason is FinishReason.MOVED

    def finish(self) -> list[int]:
        """All of its tokens, once it has ended where it is."""
        peer = self.at.peer
        peer.until(lambda: peer.ended(self.id))
        self.tokens += peer.tokens.pop(self.id)
        self.reason = peer.finished[self.id].reason
        return self.tokens


class SlowLink:
    """A TCP port of this host that carries bytes to a unix socket and back, at most `rate` bytes a second that way, and
    none where it is `stuck`. The byte at `corrupt_at` is another one when it arrives."""

    def __init__(self, target: str, rate: float = 1e12, corrupt_at: int = -1) -> None:
        self._target = target.removeprefix("unix:")
        self.rate = rate
        self.corrupt_at = corrupt_at
        self.carried = 0
        self.stuck = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            self._pairs.append((near, far))
            for pump in ((near, far, True), (far, near, False)):
                self._threads.append(threading.Thread(target=self._pump, args=pump, daemon=True))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, forth: bool) -> None:
        pause = threading.Event()
        with contextlib.suppress(OSError):
            while received := source.recv(1 << 15):
                if forth:
                    at = self.corrupt_at - self.carried
                    if 0 <= at < len(received):
                        received = received[:at] + bytes([received[at] ^ 1]) + received[at + 1 :]
                    self.carried += len(received)
                    pause.wait(len(received) / self.rate)
                    while self.stuck:
                        pause.wait(0.01)
                target.sendall(received)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stuck = False
        self._listener.close()
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


def nothing_held(*replicas: MovingReplica) -> None:
    """Waits until the replicas hold nothing for handovers, and no sequence has blocks."""
    for replica in replicas:
        peer = replica.peer
        total = peer.hello.blocks if peer.hello is not None else 0
        peer.until(
            lambda peer=peer, total=total: (
                peer.counted("handover_held") == 0
                and peer.load.running == peer.load.waiting == 0
                and peer.load.free_blocks + peer.load.cached_blocks == total
            ),
            20.0,
        )


@contextlib.contextmanager
def link_to(replica: MovingReplica, rate: float = 1e12, corrupt_at: int = -1) -> Iterator[SlowLink]:
    link = SlowLink(replica.takes_at, rate, corrupt_at)
    try:
        yield link
    finally:
        link.close()
