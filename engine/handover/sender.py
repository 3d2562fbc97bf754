"""Pushes a sequence's KV to another replica while the sequence goes on: a thread for each handover, which waits for the
receiver so that the replica's loop never does.

The loop asks how far it may go, copies blocks into a piece and queues it; the pieces are few, so that a slow receiver
holds up its handover and takes no memory. While nothing is to be sent the thread tells the receiver that it lives.
"""

import enum
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from engine.handover.channel import HandoverLost, MessageChannel
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
    handover_id,
    run_blocks,
)
from engine.handover.receiver import LEASE_S, BlockFormat
from engine.handover.transport import SharedMemoryTransport, SocketTransport, Transport

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
        on_change: Callable[[], None], lease_s: float = LEASE_S,
    ) -> None:  # fmt: skip
        """`connect` may raise OSError; `on_change` is called by the thread when there is more to do or it has ended."""
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
        self._transport: Transport | None = None
        self._queue: queue.SimpleQueue[tuple[BlockRun, memoryview] | HandoverSeal | None] = queue.SimpleQueue()
        self._channel: MessageChannel | None = None
        self._sealing = False
        threading.Thread(target=self._run, name="handover", daemon=True).start()

    @property
    def max_run(self) -> int:
        """How many blocks a piece holds."""
        return run_blocks(self._format.block_bytes)

    @property
    def ended(self) -> bool:
        return self.state >= HandoverState.SEALED

    def piece(self, count: int) -> memoryview | None:
        """Memory for the next so many blocks, None while the receiver is behind or has not answered."""
        if self.state != HandoverState.MOVING or self._sealing or self._transport is None:
            return None
        return self._transport.piece(self.pushed, count)

    def push(self, names: list[bytes], piece: memoryview) -> None:
        """Queues the blocks of these names, which lie in the piece."""
        self._queue.put((BlockRun(self.pushed, b"".join(names), []), piece))
        self.pushed += len(names)

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
            if self._transport is not None:
                self._transport.close()
            if self.state != HandoverState.FAILED:
                self.problem = problem
                self.state = state
            self._on_change()

    def _open(self, channel: MessageChannel) -> Transport:
        """Raises HandoverLost, and HandoverError where it is refused."""
        plan, own = self.plan, self._format
        shares = plan.address.startswith("unix:")
        channel.send(
            HandoverOffer(
                HANDOVER_VERSION, handover_id(plan.key), plan.boot, own.model, own.revision, own.layout,
                own.block_bytes, plan.blocks, shares, list(plan.regions),
            )
        )  # fmt: skip
        answer = channel.receive(HandoverGrant, HandoverRefusal)
        if isinstance(answer, HandoverRefusal):
            raise HandoverError(f"refused ({answer.fault}): {answer.message}")
        self._lease_s = min(self._lease_s, answer.lease_ms / 1e3)
        if answer.shared:
            return SharedMemoryTransport(channel, own.block_bytes, plan.blocks, channel.receive_descriptor())
        return SocketTransport(channel, own.block_bytes)

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
            size = self._format.block_bytes
            checksums = [xxhash.xxh3_64_intdigest(piece[at : at + size]) for at in range(0, len(piece), size)]
            transport.send(BlockRun(run.first, run.names, checksums), piece)
            self._on_change()
