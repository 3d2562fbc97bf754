"""Takes in the KV that other replicas push: a thread that listens, and one for each connection, which fills memory of
the staging area and tells the sender how far it is. The replica's loop is never waited for.

A sender that is silent for longer than the lease, is killed, or sends what does not belong loses its handover; what
came of it is let go.
"""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine.handover.channel import HandoverLost, MessageChannel
from engine.handover.fabric import FabricEndpoints, FabricError
from engine.handover.messages import (
    HANDOVER_VERSION,
    ID_BYTES,
    BlockRun,
    BlocksTaken,
    FabricLeft,
    HandoverBeat,
    HandoverError,
    HandoverFault,
    HandoverGrant,
    HandoverOffer,
    HandoverRefusal,
    HandoverSeal,
    HandoverSealed,
    WindowAnswer,
)
from engine.handover.staged_memory import HostMemory
from engine.handover.staging import StagedPrefix, StagingArea, StagingRefused
from engine.log import log
from engine.memory.errors import OutOfDeviceMemory
from engine.step.exchange import WindowClosed
from prefixcache.names import NAME_BYTES, split_names

LEASE_S: Final = 3.0
CONNECTIONS_MAX: Final = 32
_ACCEPT_AGAIN_S: Final = 0.5  # once there was no descriptor for a sender


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What a replica's blocks are of, how many bytes each has, and the region of its host."""

    boot: str
    model: str
    revision: str
    layout: str
    block_bytes: int
    region: str = ""


class HandoverReceiver:
    """Listens until `close`. `on_sealed` is called, by one of its threads, whenever a handover is whole."""

    def __init__(
        self, listener: socket.socket, area: StagingArea, format: BlockFormat, lease_s: float = LEASE_S,
        on_sealed: Callable[[], None] = lambda: None, fabric: FabricEndpoints | None = None,
    ) -> None:  # fmt: skip
        """It closes the listener. With a `fabric` senders that declare the same one write to the memory that they are
        granted."""
        self._listener = listener
        self._area = area
        self._format = format
        self._lease_s = lease_s
        self._on_sealed = on_sealed
        self._fabric = fabric
        self._lock = threading.Lock()
        self._channels: dict[MessageChannel, threading.Thread] = {}
        self._closed = False
        listener.setblocking(True)
        self._thread = threading.Thread(target=self._listen, name="handovers", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        return len(self._channels)

    def close(self) -> None:
        """Ends all connections and threads."""
        self._closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            self._listener.close()
        self._thread.join(self._lease_s)
        with self._lock:
            open_channels = dict(self._channels)
        for channel, thread in open_channels.items():
            channel.close()
            thread.join(self._lease_s)

    def _listen(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    peer, _ = self._listener.accept()
                except OSError as error:
                    if not self._closed:
                        log("handovers_wait", level="error", error=str(error))
                        time.sleep(_ACCEPT_AGAIN_S)
                    continue
                if len(self._channels) >= CONNECTIONS_MAX:
                    peer.close()
                    continue
                channel = MessageChannel(peer, self._lease_s)
                thread = threading.Thread(target=self._serve, args=(channel,), name="handover", daemon=True)
                with self._lock:
                    self._channels[channel] = thread
                    thread.start()

    def _serve(self, channel: MessageChannel) -> None:
        with channel:
            try:
                self._receive(channel)
            except (HandoverLost, HandoverError) as error:
                log("handover_not_received", level="warning", problem=str(error))
            finally:
                with self._lock:
                    del self._channels[channel]

    def _receive(self, channel: MessageChannel) -> None:
        """One handover, to its end. Raises HandoverLost and HandoverError; nothing of it is held then."""
        offer = channel.receive(HandoverOffer)
        staged, sealed = None, False
        try:
            self._check(offer)
            staged = self._area.open(offer.id, offer.block_bytes, offer.blocks, offer.shares_memory, offer.windows)
            self._grant(channel, staged, offer)
            kinds = BlockRun, HandoverBeat, FabricLeft, HandoverSeal
            while not isinstance(message := channel.receive(*kinds), HandoverSeal):
                staged.require()
                if isinstance(message, BlockRun):
                    self._take(channel, staged, message)
                elif isinstance(message, FabricLeft):
                    _leave_fabric(staged, complete=False)
            staged.require()
            if message.blocks != len(staged.names):
                raise HandoverError(f"{message.blocks} blocks are sealed, and {len(staged.names)} came")
            _leave_fabric(staged, complete=True)
            self._area.seal(staged)
            sealed = True
        except StagingRefused as refused:
            channel.send(HandoverRefusal(refused.fault, str(refused)))
            log("handover_refused", level="warning", fault=refused.fault, problem=str(refused))
            return
        except (WindowClosed, OutOfDeviceMemory) as error:
            raise HandoverLost(str(error)) from error
        finally:
            if staged is not None and not sealed:
                staged.release()
        self._on_sealed()
        channel.send(HandoverSealed(staged.whole))

    def _grant(self, channel: MessageChannel, staged: StagedPrefix, offer: HandoverOffer) -> None:
        """Grants the memory that was staged; a window that the sender does not reach becomes memory of the host. Raises
        HandoverLost, HandoverError and StagingRefused."""
        lease_ms = int(self._lease_s * 1e3)
        if staged.memory.in_window:
            self._send_grant(channel, HandoverGrant(lease_ms, True, True), staged)
            if channel.receive(WindowAnswer).mapped:
                return
            log("handover_window_out_of_reach", level="warning")
            self._area.to_host(staged, offer.shares_memory)
        endpoint, address = self._open_to_fabric(staged, offer.fabric)
        shared = staged.memory.descriptor is not None
        self._send_grant(channel, HandoverGrant(lease_ms, shared, False, endpoint, address), staged)

    def _open_to_fabric(self, staged: StagedPrefix, fabric: str) -> tuple[bytes, int]:
        """What the sender of this fabric wants in order to write to the memory, nothing where it is not to."""
        memory, own = staged.memory, self._fabric
        if not fabric or own is None or not isinstance(memory, HostMemory) or memory.descriptor is not None:
            return b"", 0
        try:
            if fabric != own.fabric:
                raise FabricError(f"a sender is in {fabric[:64]!r}")
            return memory.open_to_fabric(own, staged.max_blocks)
        except FabricError as error:
            memory.leave_fabric(complete=False)
            own.say(str(error))
            return b"", 0

    def _send_grant(self, channel: MessageChannel, grant: HandoverGrant, staged: StagedPrefix) -> None:
        channel.send(grant)
        if staged.memory.descriptor is not None:
            channel.send_descriptor(staged.memory.descriptor)

    def _take(self, channel: MessageChannel, staged: StagedPrefix, run: BlockRun) -> None:
        """Takes in a run of blocks, and compares them with their checksums. Raises WindowClosed too."""
        names, count = split_names(run.names), len(run.checksums)
        if run.first != len(staged.names) or run.first + count > staged.max_blocks:
            raise HandoverError(f"{count} blocks from {run.first} on are not those awaited")
        if len(names) != count or len(run.names) % NAME_BYTES or not 0 < count <= staged.memory.run_blocks:
            raise HandoverError(f"{len(run.names)} bytes of names, and {count} checksums")
        began_s = time.monotonic()
        whole = staged.memory.compare(run.first, run.checksums, channel.receive_into)
        if whole < count:
            self._area.count_corrupt(count - whole)
            log("handover_corrupt", level="error", block=run.first + whole, blocks=count)
        staged.add(names, whole)
        channel.send(BlocksTaken(len(staged.names), staged.whole, int(1e6 * (time.monotonic() - began_s))))

    def _check(self, offer: HandoverOffer) -> None:
        """Raises StagingRefused where these blocks are of no use here."""
        own = self._format
        for fault, theirs, here in (
            (HandoverFault.VERSION, str(offer.version), str(HANDOVER_VERSION)),
            (HandoverFault.BOOT, offer.boot, own.boot),
            (HandoverFault.MODEL, offer.model, own.model),
            (HandoverFault.REVISION, offer.revision, own.revision),
            (HandoverFault.LAYOUT, f"{offer.layout}, {offer.block_bytes}", f"{own.layout}, {own.block_bytes}"),
        ):
            if theirs != here:
                raise StagingRefused(fault, f"the {fault} offered is {theirs[:200]!r}, and {here!r} here")
        if offer.regions and own.region not in offer.regions:
            where = ", ".join(offer.regions)
            raise StagingRefused(HandoverFault.REGION, f"it may go to {where} alone, and here is {own.region!r}")
        if len(offer.id) != ID_BYTES or offer.blocks < 1:
            raise StagingRefused(HandoverFault.INVALID, "an offer of no blocks, or under no id")


def _leave_fabric(staged: StagedPrefix, complete: bool) -> None:
    if isinstance(staged.memory, HostMemory):
        staged.memory.leave_fabric(complete)
