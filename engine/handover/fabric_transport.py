"""Blocks that a sender's endpoint writes to memory of another host, and that go over the socket once it fails."""

import mmap
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from engine.handover.channel import MessageChannel
from engine.handover.fabric import FabricEndpoint, FabricEndpoints, FabricError
from engine.handover.messages import BlockRun, BlocksTaken, FabricLeft, HandoverGrant, run_blocks
from engine.handover.transport import PIECES, HostPiece, Piece, UnansweredRuns

_WRITES: Final = 4  # under way at once: the other pieces are filled meanwhile
_LOOK_S: Final = 50e-6  # for a write that is not there yet
_LEASE_PART: Final = 0.5  # that a write may take, so that the receiver still waits for the socket after it


@dataclass(frozen=True, slots=True)
class _Write:
    """A run of blocks that an endpoint writes."""

    run: BlockRun
    piece: HostPiece
    number: int
    began_s: float


class FabricTransport:
    """Blocks from pieces that the endpoint reads to where the receiver reads them; a run is sent once its blocks are
    there.

    left  blocks go over the socket.
    """

    in_window = False

    def __init__(
        self,
        channel: MessageChannel,
        block_bytes: int,
        grant: HandoverGrant,
        endpoints: FabricEndpoints,
        lease_s: float,
    ) -> None:
        """Where the granted endpoint is not reached, the receiver is told. Raises HandoverLost."""
        self.whole = self.took_us = self.over_fabric = 0
        self.max_run = run_blocks(block_bytes)
        self._channel = channel
        self._runs = UnansweredRuns(channel)
        self._block_bytes = block_bytes
        self._address = grant.address
        self._write_s = lease_s * _LEASE_PART
        self._endpoints = endpoints
        self._piece_bytes = self.max_run * block_bytes
        self._memory = mmap.mmap(-1, PIECES * self._piece_bytes)
        self._free = list(range(PIECES))
        self._places: dict[HostPiece, int] = {}
        self._lock = threading.Lock()
        self._writes: deque[_Write] = deque()
        self._busy_until_s = 0.0
        self._sealed = self.left = False
        self._endpoint: FabricEndpoint | None = None
        try:
            self._endpoint = endpoints.take()
            self._endpoint.reach(grant.endpoint, self._memory)
        except FabricError as error:
            self._leave(error)

    def piece(self, first: int, count: int) -> HostPiece | None:
        with self._lock:
            if not self._free:
                return None
            place = self._free.pop()
            start = place * self._piece_bytes
            piece = HostPiece(memoryview(self._memory)[start : start + count * self._block_bytes], self._block_bytes)
            self._places[piece] = place
            return piece

    def send(self, run: BlockRun, piece: Piece) -> None:
        assert isinstance(piece, HostPiece)
        if self._endpoint is not None:
            address = self._address + run.first * self._block_bytes
            try:
                number = self._endpoint.write(self._places[piece] * self._piece_bytes, address, len(piece.view))
            except FabricError as error:
                self._leave(error)
            else:
                self._writes.append(_Write(run, piece, number, time.monotonic()))
                self._announce(_WRITES - 1)
                return
        self._send_behind(run, piece)

    def seal(self) -> None:
        """As in Transport."""
        self._announce(0)
        self._sealed = True

    def close(self) -> None:
        """Where all that was begun is written, the endpoint is for the next handover."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            return
        if self._sealed:
            self._endpoints.give_back(endpoint)
        else:
            endpoint.close()
        self._writes.clear()

    def _announce(self, under_way: int) -> None:
        """Sends the runs whose blocks are there, and waits until no more than so many are under way. Raises
        HandoverLost and HandoverError."""
        while self._endpoint is not None and self._writes:
            write = self._writes[0]
            try:
                there = self._endpoint.written(write.number)
                if not there and len(self._writes) > under_way and time.monotonic() > write.began_s + self._write_s:
                    raise FabricError(f"{len(write.piece.view)} bytes were not there after {self._write_s:.1f} s")
            except FabricError as error:
                self._leave(error)
                return
            if there:
                self._writes.popleft()
                now = time.monotonic()
                self.took_us += int(1e6 * (now - max(write.began_s, self._busy_until_s)))
                self._busy_until_s = now
                self.over_fabric += len(write.run.checksums)
                self._note(self._runs.send(write.run, None), write.piece)
            elif len(self._writes) > under_way:
                time.sleep(_LOOK_S)
            else:
                return

    def _leave(self, problem: FabricError) -> None:
        """Ends the endpoint, and sends what it had begun to write over the socket. Raises HandoverLost and
        HandoverError."""
        endpoint, self._endpoint, self.left = self._endpoint, None, True
        if endpoint is not None:
            endpoint.close()
        self._endpoints.say(str(problem))
        self._channel.send(FabricLeft())
        while self._writes:
            write = self._writes.popleft()
            self._send_behind(write.run, write.piece)

    def _send_behind(self, run: BlockRun, piece: HostPiece) -> None:
        self._note(self._runs.send(run, piece.view), piece)

    def _note(self, taken: BlocksTaken, piece: HostPiece) -> None:
        """Takes in what the receiver says, and has the piece used again."""
        self.whole, self.took_us = max(self.whole, taken.whole), self.took_us + taken.took_us
        piece.view.release()
        with self._lock:
            self._free.append(self._places.pop(piece))
