"""One member's connection through the porter: decrypted bytes to the unix socket that it asked for, and back. It
parses nothing; no more than what one side has not read yet is in memory."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from engine.protocol.address import FILES_SOCKET, HANDOVER_SOCKET, AddressError, parse_server_name
from engine.protocol.frames import Reject, encode_frame
from engine.protocol.types import RejectReason
from gateway.identity.host_identity import HostIdentity, HostRole
from gateway.identity.tls_door import TlsChannel

_HIGH_WATER_BYTES: Final = 1 << 20


class Relay:
    """See ChannelHandler. `folder` has the sockets; `own` says who this host is now, `removed` whose keys open
    nothing."""

    def __init__(self, folder: Path, own: Callable[[], HostIdentity], removed: Callable[[], frozenset[str]]) -> None:
        self._folder = folder
        self._own = own
        self._removed = removed
        self._channel: TlsChannel | None = None
        self._local: _LocalSide | None = None
        self._task: asyncio.Task[None] | None = None

    def opened(self, channel: TlsChannel) -> None:
        self._channel = channel
        problem = self._problem(channel)
        if problem:
            _refuse(channel, problem)
            return
        socket, _ = parse_server_name(channel.server_name)
        channel.hold_reading()
        self._local = _LocalSide(channel)
        self._task = asyncio.get_running_loop().create_task(self._connect(channel, self._local, socket))

    def received(self, plain: bytes) -> None:
        if self._local is not None:
            self._local.write(plain)

    def lost(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._local is not None:
            self._local.close()

    def hold(self) -> None:
        if self._local is not None:
            self._local.hold_reading()

    def resume(self) -> None:
        if self._local is not None:
            self._local.resume_reading()

    def _problem(self, channel: TlsChannel) -> str:
        """Why this peer may not open what it asks for, in words; empty where it may."""
        own, peer = self._own(), channel.identity
        if peer is None:
            return "it asks for a certificate, and this connection shows none"
        if peer.cluster != own.cluster:
            return f"it is of the cluster {own.cluster}, and the certificate of {peer.cluster}"
        if channel.key in self._removed():
            return f"the {peer} was removed from the cluster"
        try:
            socket, host = parse_server_name(channel.server_name)
        except AddressError as error:
            return str(error)
        if host != own.name:
            return f"it is of the {own.role} {own.name}, and not of {host}"
        if socket == FILES_SOCKET:  # models' files are for all members
            return ""
        if own.role is not HostRole.MACHINE:
            return f"a gateway gives models' files, and has no socket {socket}"
        if peer.role is not HostRole.GATEWAY and not socket.endswith(HANDOVER_SOCKET):
            return f"it opens to gateways alone, and the certificate is of the {peer}"
        return ""

    async def _connect(self, channel: TlsChannel, local: "_LocalSide", socket: str) -> None:
        path = self._folder / f"{socket}.sock"
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: local, str(path))
        except OSError as error:
            _refuse(channel, f"nothing answers at its socket {socket} now: {error.strerror or error}")
        else:
            channel.resume_reading()


class _LocalSide(asyncio.Protocol):
    """The connection to the socket behind. What comes before it is open waits; the channel holds back more."""

    def __init__(self, channel: TlsChannel) -> None:
        self._channel = channel
        self._transport: asyncio.Transport | None = None
        self._waiting = bytearray()
        self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        if self._closed:
            self._transport.abort()
        elif self._waiting:
            self._transport.write(bytes(self._waiting))
            self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        self._channel.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._channel.close()

    def pause_writing(self) -> None:
        self._channel.hold_reading()

    def resume_writing(self) -> None:
        self._channel.resume_reading()

    def write(self, plain: bytes) -> None:
        if self._transport is None:
            self._waiting += plain
        else:
            self._transport.write(plain)

    def hold_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.close()


def _refuse(channel: TlsChannel, problem: str) -> None:
    """Says why, as a frame that ends the whole connection, and closes it."""
    channel.write(encode_frame(Reject(0, RejectReason.INVALID, f"the porter refused: {problem}")))
    channel.close()
