"""One socket that speaks frames, and the one to a machine; over TLS where it is on another host. Reading is done by a
protocol, not by a task: a frame costs one callback."""

import asyncio
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar, cast

from engine.protocol import frames
from engine.protocol.address import TlsAddress, parse_address, parse_tls_address
from engine.protocol.connection import notice_vanished
from gateway.cluster.handshakes import HandshakePlaces
from gateway.identity.authority import certificate_key
from gateway.identity.host_identity import HostIdentity, HostRole, IdentityError, peer_identity

WRITE_BYTES_MAX: Final = 32 << 20
CONNECT_S: Final = 2.0  # to another host: once it may begin with its handshake
# What a connection fails with: also an address that is none, of which the name or the port cannot be.
UNREACHABLE: Final = (OSError, TimeoutError, ValueError, OverflowError)


class FrameProtocol(asyncio.Protocol, ABC):
    """`closed` is set once the socket is closed, with the reason in `close_reason`."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.close_reason = "the connection was closed"
        self.received_s = 0.0  # when the last bytes came
        self.peer_problem: Callable[[asyncio.BaseTransport], str] | None = None  # of one on another host, in words
        self._certified_region: str | None = None  # of one that showed a certificate
        self._frames = frames.FrameReader()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transport has no such base class
        self.watch_peer()
        if self.peer_problem is None:
            return
        if problem := self.peer_problem(transport):
            self.close(problem)
        else:
            self._certified_region = _peer_identity(transport).region

    def watch_peer(self, idle_s: int = 1) -> None:
        """See notice_vanished."""
        if self._transport is not None and (peer := self._transport.get_extra_info("socket")) is not None:
            notice_vanished(peer, idle_s)

    def region_of(self, word: str) -> str:
        """The region that the peer says it is in; empty where its certificate names another one, or none."""
        return word if self._certified_region in (None, word) else ""

    def data_received(self, received: bytes) -> None:
        self.received_s = time.monotonic()
        try:
            for frame in self._frames.feed(received):
                if isinstance(frame, frames.Reject) and not frame.id:  # a porter's answer: the whole connection
                    self.close(frame.message)
                    return
                self.receive(frame)
        except frames.FrameError as error:
            self.close(f"it sent {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if isinstance(error, ssl.SSLError):
            self.close_reason = f"its host refused this gateway's certificate: {error.reason}"
        if not self.closed.done():
            self.closed.set_result(None)

    @abstractmethod
    def receive(self, frame: frames.Frame) -> None:
        """Takes one whole frame. A FrameError that it raises closes the connection."""

    @property
    def congested(self) -> bool:
        """Whether the other side reads too slowly for more to be written."""
        return self._transport is not None and self._transport.get_write_buffer_size() > WRITE_BYTES_MAX

    def send(self, frame: frames.Frame) -> None:
        """Writes a frame; nothing on a connection that has ended."""
        if self._transport is not None:
            self._transport.write(frames.encode_frame(frame))

    def close(self, reason: str) -> None:
        self.close_reason = reason
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Closes the connection when its task is cancelled."""
        try:
            await self.closed
        finally:
            if self._transport is not None:
                self.close("the gateway closed it")


class MachineConnection(FrameProtocol):
    """Reports come in, and are passed on where they differ from the one before; demand goes out."""

    def __init__(self, on_report: Callable[["MachineConnection", frames.MachineState], None]) -> None:
        super().__init__()
        self._on_report = on_report
        self._last: frames.MachineState | None = None
        self.asked = False  # it was told of calls that wait

    def data_received(self, received: bytes) -> None:
        """What is said again is not looked at: a thousand machines say it twice a second."""
        if self._frames.repeats(received):
            self.received_s = time.monotonic()
        else:
            super().data_received(received)

    def receive(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.MachineState):
            known, self._last = self._last, frame
            if frame != known:
                self._on_report(self, frame)

    def send_demand(self, demand: frames.ModelDemand) -> None:
        """Left out where the machine does not read: demand is sent again and again."""
        if not self.congested:
            self.asked = True
            self.send(demand)


_C = TypeVar("_C", bound=FrameProtocol)


class Connector(Protocol):
    """Opens a connection to an address, as `connect` does. Raises what is in UNREACHABLE."""

    async def __call__(self, address: str, make: Callable[[], _C]) -> _C: ...


async def connect(address: str, make: Callable[[], _C]) -> _C:
    """Connects to a process of this host. Raises OSError or TimeoutError."""
    return await HostConnector(None)(address, make)


class HostConnector:
    """Connects to processes of this host and, with this host's certificate, to other hosts'. `client_context` gives the
    TLS context of now; None: this host has joined no cluster. `is_removed` says of a key whether its member was
    removed."""

    def __init__(
        self, client_context: Callable[[], ssl.SSLContext] | None, is_removed: Callable[[str], bool] | None = None
    ) -> None:
        self._client_context = client_context
        self._is_removed = is_removed or (lambda key: False)
        self._places = HandshakePlaces()

    async def __call__(self, address: str, make: Callable[[], _C]) -> _C:
        """Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        if (peer := parse_tls_address(address)) is not None:
            return await self._connect_to_host(peer, make)
        async with asyncio.timeout(CONNECT_S):
            target = parse_address(address)
            if isinstance(target, str):
                return (await loop.create_unix_connection(make, target))[1]
            return (await loop.create_connection(make, *target))[1]

    async def _connect_to_host(self, peer: TlsAddress, make: Callable[[], _C]) -> _C:
        if self._client_context is None:
            raise ConnectionError("this gateway's host has joined no cluster: `hearth cluster init`, or --join")

        def expecting() -> _C:
            protocol = make()
            protocol.peer_problem = partial(peer_problem, peer, is_removed=self._is_removed)
            return protocol

        loop, host, name = asyncio.get_running_loop(), peer.host.strip("[]"), peer.server_name
        if self._places.crowded:  # a host that is gone is not to wait for a place, nor to have one
            async with asyncio.timeout(CONNECT_S):
                (await loop.create_connection(asyncio.Protocol, host, peer.port))[0].close()
        async with self._places.take(), asyncio.timeout(CONNECT_S):
            context = self._client_context()
            return (await loop.create_connection(expecting, host, peer.port, ssl=context, server_hostname=name))[1]


def peer_problem(peer: TlsAddress, transport: asyncio.BaseTransport, is_removed: Callable[[str], bool]) -> str:
    """Why what answers there is not that machine, in words; empty where it is."""
    tls: ssl.SSLObject = transport.get_extra_info("ssl_object")
    try:
        identity = _peer_identity(transport)
    except IdentityError as error:
        return str(error)
    if (identity.role, identity.name) != (HostRole.MACHINE, peer.machine):
        return f"the {identity.role} {identity.name} answers there, and not the machine {peer.machine}"
    if is_removed(certificate_key(tls.getpeercert(binary_form=True) or b"")):
        return f"the machine {peer.machine} was removed from the cluster"
    return ""


def _peer_identity(transport: asyncio.BaseTransport) -> HostIdentity:
    """Raises IdentityError."""
    tls: ssl.SSLObject = transport.get_extra_info("ssl_object")
    return peer_identity(tls.getpeercert())


def error_text(error: Exception) -> str:
    return str(error) or f"no answer within {CONNECT_S:g} s"
