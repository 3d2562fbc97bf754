"""Pushes a sequence's KV to another replica while the sequence goes on: a thread for each handover, which waits for the
receiver so that the replica's loop never does.

The loop asks how far it may go, begins to copy blocks into a piece and queues it; the pieces are few, so that a slow
receiver holds up its handover and takes no memory. While nothing is to be sent the thread tells the receiver that it
lives.
"""

import enum
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from engine.handover.channel import HandoverLost, MessageChannel
from engine.handover.fabric import FabricEndpoints
from engine.handover.fabric_transport import FabricTransport
from engine.handover.messages import (
    HANDOVER_VERSION,
    BlockRun,
    BlocksTaken,
    HandoverBeat,
    HandoverError,
    HandoverGrant,
    HandoverOffer,
    HandoverRefusal,
    HandoverSeal,
    HandoverSealed,
    WindowAnswer,
    handover_id,
    run_blocks,
)
from engine.handover.receiver import LEASE_S, BlockFormat
from engine.handover.transport import Piece, SharedMemoryTransport, SocketTransport, Transport, WindowTransport
from engine.log import log
from engine.step.exchange import BlockWindows, WindowUnreachable

_BEATS: Final = 4  # in a lease


class HandoverState(enum.IntEnum):
    """A handover asks for memory, moves blocks, and ends in one of the last two."""

    ASKING = 0
    MOVING = 1
    SEALED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class HandoverPlan:
    """Where a sequence is to go on: `boot` is the start of the replica at `address` that is meant, `key` names the
    blocks, of which there are at most so many; they may go to `regions` alone, where there are any."""

    address: str
    boot: str
    key: bytes
    blocks: int
    regions: Sequence[str] = ()


class OutgoingHandover:
    """One handover. `piece`, `push`, `seal` and `abort` are the loop's; they never wait.

    state     and, where it FAILED, why: `problem`.
    pushed    blocks that the loop has queued.
    whole     blocks that the receiver holds, and
    bytes_s   how fast they came to it, once SEALED; 0: too fast to tell.
    """

    def __init__(
        self, plan: HandoverPlan, format: BlockFormat, connect: Callable[[str], socket.socket],
        on_change: Callable[[], None], lease_s: float = LEASE_S, windows: BlockWindows | None = None,
        fabric: FabricEndpoints | None = None,
    ) -> None:  # fmt: skip
        """`connect` may raise OSError; `on_change` is called by the thread when there is more to do or it has ended.
        With `windows` blocks go into memory of the receiver's device, where this one reaches it; with a `fabric` they
        are written to memory of another host that declares the same one."""
        self.state = HandoverState.ASKING
        self.problem = ""
        self.pushed = 0
        self.whole = 0
        self.bytes_s = 0.0
        self.plan = plan
        self._format = format
        self._connect = connect
        self._on_change = on_change
        self._lease_s = lease_s
        self._windows = windows
        self._shares = plan.address.startswith("unix:")
        self._fabric = None if self._shares else fabric
        self._transport: Transport | None = None
        self._queue: queue.SimpleQueue[tuple[BlockRun, Piece] | HandoverSeal | None] = queue.SimpleQueue()
        self._channel: MessageChannel | None = None
        self._sealing = False
        self._finished = False  # the thread takes nothing more
        self._thread = threading.Thread(target=self._run, name="handover", daemon=True)
        self._thread.start()

    @property
    def max_run(self) -> int:
        """How many blocks a piece holds."""
        return run_blocks(self._format.block_bytes) if self._transport is None else self._transport.max_run

    @property
    def in_window(self) -> bool:
        """Whether the device copies blocks to the receiver by itself: the loop begins that, and does none of it."""
        return self._transport is not None and self._transport.in_window

    @property
    def over_fabric(self) -> int:
        """How many blocks an endpoint wrote."""
        return 0 if self._transport is None else self._transport.over_fabric

    @property
    def off_fabric(self) -> bool:
        """Whether blocks of it go over the socket though this host declares a fabric."""
        transport = self._transport
        if self._fabric is None or transport is None:
            return False
        return transport.left if isinstance(transport, FabricTransport) else True

    @property
    def ended(self) -> bool:
        return self.state >= HandoverState.SEALED

    def piece(self, count: int) -> Piece | None:
        """A place for the next so many blocks, None while the receiver is behind or has not answered."""
        if self.state != HandoverState.MOVING or self._sealing or self._transport is None:
            return None
        return self._transport.piece(self.pushed, count)

    def push(self, names: list[bytes], piece: Piece) -> None:
        """Queues the blocks of these names, with which the piece is filled."""
        self._queue.put((BlockRun(self.pushed, b"".join(names), []), piece))
        self.pushed += len(names)
        if self._finished:  # what is copied now may take as long as the one that copies it
            self._thread = threading.Thread(target=self._drop_late, args=(self._thread,), name="handover", daemon=True)
            self._thread.start()

    def seal(self) -> None:
        """What was pushed is all."""
        if not self._sealing and self.state == HandoverState.MOVING:
            self._sealing = True
            self._queue.put(HandoverSeal(self.pushed))

    def abort(self) -> None:
        """Ends the handover; the receiver lets go of its blocks. Idempotent."""
        if not self.ended:
            self.state, self.problem = HandoverState.FAILED, "given up"
        self._queue.put(None)
        if self._channel is not None:
            self._channel.close()

    def wait_ended(self, limit_s: float) -> None:
        """Waits until a handover that ended has let go of all it had."""
        self._thread.join(limit_s)

    def _run(self) -> None:
        state, problem = HandoverState.FAILED, ""
        try:
            with MessageChannel(self._connect(self.plan.address), self._lease_s) as channel:
                self._channel = channel
                self._transport = self._open(channel)
                if self.state == HandoverState.ASKING:
                    self.state = HandoverState.MOVING
                self._on_change()
                if self._move(channel, self._transport):
                    state = HandoverState.SEALED
        except (OSError, ValueError, HandoverLost) as error:  # a HandoverError is a ValueError
            problem = str(error) or type(error).__name__
        finally:
            self._finished = True
            self._drop_queued()
            if self._transport is not None:
                self._transport.close()
            if self.state != HandoverState.FAILED:
                self.problem = problem
                self.state = state
            self._on_change()

    def _drop_queued(self) -> None:
        """Waits for what was copied and goes nowhere: nothing of it is left in memory that others get."""
        with suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, tuple):
                    with suppress(HandoverLost):
                        item[1].checksums()

    def _drop_late(self, before: threading.Thread) -> None:
        before.join()
        self._drop_queued()

    def _open(self, channel: MessageChannel) -> Transport:
        """Raises HandoverLost, and HandoverError where it is refused."""
        plan, own, fabric = self.plan, self._format, self._fabric
        channel.send(
            HandoverOffer(
                HANDOVER_VERSION, handover_id(plan.key), plan.boot, own.model, own.revision, own.layout,
                own.block_bytes, plan.blocks, self._shares, list(plan.regions),
                self._windows.kind if self._windows is not None and self._shares else "",
                fabric.fabric if fabric is not None and not fabric.problem else "",
            )
        )  # fmt: skip
        grant = self._granted(channel)
        self._lease_s = min(self._lease_s, grant.lease_ms / 1e3)
        if grant.window:
            if (transport := self._open_window(channel)) is not None:
                return transport
            grant = self._granted(channel)
        if grant.shared:
            return SharedMemoryTransport(channel, own.block_bytes, plan.blocks, channel.receive_descriptor())
        if fabric is not None and grant.endpoint:
            return FabricTransport(channel, own.block_bytes, grant, fabric, self._lease_s)
        if fabric is not None:
            fabric.say(fabric.problem or f"{plan.address} granted none: its log says why")
        return SocketTransport(channel, own.block_bytes)

    def _granted(self, channel: MessageChannel) -> HandoverGrant:
        """Raises HandoverLost, and HandoverError where it is refused."""
        answer = channel.receive(HandoverGrant, HandoverRefusal)
        if isinstance(answer, HandoverRefusal):
            raise HandoverError(f"refused ({answer.fault}): {answer.message}")
        return answer

    def _open_window(self, channel: MessageChannel) -> Transport | None:
        """The receiver's window, None where this device does not reach it; the receiver is told. Raises HandoverLost
        and HandoverError."""
        descriptor = channel.receive_descriptor()
        if self._windows is None:
            os.close(descriptor)
            raise HandoverError("a window that nobody asked for")
        try:
            window = self._windows.open(descriptor, self.plan.blocks)
        except WindowUnreachable as error:
            log("handover_window_out_of_reach", level="warning", problem=str(error))
            channel.send(WindowAnswer(False))
            return None
        try:
            channel.send(WindowAnswer(True))
        except HandoverLost:
            window.close()
            raise
        return WindowTransport(channel, self._format.block_bytes, window)

    def _move(self, channel: MessageChannel, transport: Transport) -> bool:
        """Sends what is queued, up to the seal. False where it was given up."""
        while True:
            try:
                item = self._queue.get(timeout=self._lease_s / _BEATS)
            except queue.Empty:
                channel.send(HandoverBeat())
                continue
            if item is None:
                return False
            if isinstance(item, HandoverSeal):
                transport.seal()
                channel.send(item)
                took_us = transport.took_us
                answer: BlocksTaken | HandoverSealed = channel.receive(BlocksTaken, HandoverSealed)
                while not isinstance(answer, HandoverSealed):
                    took_us += answer.took_us
                    answer = channel.receive(BlocksTaken, HandoverSealed)
                self.whole = answer.whole
                self.bytes_s = 1e6 * self.pushed * self._format.block_bytes / took_us if took_us else 0.0
                return True
            run, piece = item
            transport.send(BlockRun(run.first, run.names, piece.checksums()), piece)
            self._on_change()
