"""A listener for other hosts: mutual TLS 1.3, with bounds on what may come before a host has shown who it is. It knows
neither what is said behind it nor where it goes.

Bytes are decrypted here and not by asyncio, because asyncio's own TLS bounds neither the bytes of a handshake nor how
many there are at once.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Final, Protocol, cast

from gateway.identity.authority import certificate_key
from gateway.identity.files import HostFiles
from gateway.identity.host_identity import HostIdentity, IdentityError, peer_identity

# What a connection has in all until its peer has shown a certificate, and how many there may be without one. The next
# one takes the place of the oldest: a member needs its place for a moment, who floods this host for as long as he may.
STRANGER_S: Final = 10.0
STRANGER_BYTES: Final = 16 << 10
STRANGERS_MAX: Final = 1024
STRANGERS_PER_ADDRESS_MAX: Final = 256  # a hundred hosts may join at once from behind one address
CHANNELS_MAX: Final = 8192
_TELL_S: Final = 1.0
_RECORD_BYTES: Final = 64 << 10
_HIGH_WATER_BYTES: Final = 1 << 20


class ChannelHandler(Protocol):
    """What takes a channel's bytes. `opened` comes first, `lost` last and once."""

    def opened(self, channel: "TlsChannel") -> None: ...

    def received(self, plain: bytes) -> None: ...

    def lost(self) -> None: ...

    def hold(self) -> None:
        """The peer reads too slowly: nothing more is to be written."""

    def resume(self) -> None:
        """The peer reads again."""


class TlsChannel(asyncio.Protocol):
    """One connection.

    identity     who the peer is; None where it showed no certificate.
    key          the digest of its key; empty without one.
    server_name  what it asked for, as its hello says.
    address      where it comes from.
    """

    def __init__(self, door: "TlsDoor", context: ssl.SSLContext) -> None:
        self.identity: HostIdentity | None = None
        self.key = ""
        self.server_name = ""
        self.address = ""
        self._door = door
        self._handler: ChannelHandler | None = None  # until its peer is known
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stranger_bytes = 0
        self._open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        self.address = str(transport.get_extra_info("peername")[0])
        if not self._door.admit(self):
            self.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(STRANGER_S, self.abort)

    def data_received(self, data: bytes) -> None:
        if self.identity is None:
            self._stranger_bytes += len(data)
            if self._stranger_bytes > STRANGER_BYTES:
                self.abort()
                return
        self._incoming.write(data)
        try:
            if not self._open:
                self._shake_hands()
            if self._open:
                self._read()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLZeroReturnError:  # its goodbye, after ours
            self._end()
        except (ssl.SSLError, IdentityError) as error:
            self._door.refused(self, str(getattr(error, "reason", None) or error))
            self._flush()  # the alert says why
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._known()
        self._door.forget(self)
        if self._handler is not None and self._open:
            self._open = False
            self._handler.lost()

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.hold()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume()

    def write(self, plain: bytes) -> None:
        """Does nothing on a connection that has ended."""
        if self._transport is not None and self._open:
            self._tls.write(plain)
            self._flush()

    def hold_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        """Ends the connection once the peer has all that was written."""
        if self._open:
            with contextlib.suppress(ssl.SSLError):  # it waits for the peer's goodbye, and we do not
                self._tls.unwrap()
            self._flush()
        self._end()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def give_way(self) -> None:
        """Ends the connection of a stranger, which counts no more from now on."""
        self._known()
        self.abort()

    def _shake_hands(self) -> None:
        """Raises SSLWantReadError until the peer has said enough, SSLError and IdentityError."""
        self._door.shake_hands(self, self._tls)
        certificate = self._tls.getpeercert(binary_form=True)
        if certificate is not None:
            self.identity = peer_identity(self._tls.getpeercert())
            self.key = certificate_key(certificate)
            self._known()
        self._open, self._handler = True, self._door.handler(self.server_name)
        self._flush()
        self._handler.opened(self)

    def _read(self) -> None:
        """Raises SSLWantReadError at the end of what has come, SSLZeroReturnError at the peer's goodbye after ours."""
        assert self._handler is not None
        while self._open and self._transport is not None:
            if not (plain := self._tls.read(_RECORD_BYTES)):  # its goodbye, again and again
                self._end()
                return
            self._handler.received(plain)

    def _flush(self) -> None:
        if self._transport is not None and self._outgoing.pending:
            self._transport.write(self._outgoing.read())

    def _end(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _known(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._door.known(self)


class TlsDoor:
    """Listens with a host's credentials. `make` makes the handler of each connection, for the name that its peer asks
    for; `refused` hears of handshakes that failed, with the peer's address and the reason."""

    def __init__(
        self,
        files: HostFiles,
        make: Callable[[str], ChannelHandler],
        refused: Callable[[str, str], None] = lambda address, reason: None,
    ) -> None:
        self.channels: set[TlsChannel] = set()
        self._files = files
        self.handler = make
        self._refused = refused
        self._strangers: dict[str, dict[TlsChannel, None]] = {}  # by address, the oldest first
        self._shaking: TlsChannel | None = None
        self._tell_at = 0.0

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Raises OSError."""
        return await asyncio.get_running_loop().create_server(self._open_channel, host, port, backlog=1024)

    def _open_channel(self) -> TlsChannel:
        context = self._files.credentials().server
        context.sni_callback = self._on_server_name
        return TlsChannel(self, context)

    def admit(self, channel: TlsChannel) -> bool:
        """Counts a new connection, in place of another stranger's where there are too many; False where members have
        all places."""
        if len(self.channels) >= CHANNELS_MAX:
            return False
        crowd = self._strangers.get(channel.address, {})
        if len(crowd) < STRANGERS_PER_ADDRESS_MAX:
            full = sum(map(len, self._strangers.values())) >= STRANGERS_MAX
            crowd = max(self._strangers.values(), key=len) if full else {}
        for oldest in [*crowd][:1]:
            oldest.give_way()
        self.channels.add(channel)
        self._strangers.setdefault(channel.address, {})[channel] = None
        return True

    def shake_hands(self, channel: TlsChannel, tls: ssl.SSLObject) -> None:
        """Goes on with a handshake. Raises what that does."""
        self._shaking = channel
        try:
            tls.do_handshake()
        finally:
            self._shaking = None

    def _on_server_name(self, _: object, name: str | None, __: object) -> None:
        if self._shaking is not None:
            self._shaking.server_name = name or ""

    def known(self, channel: TlsChannel) -> None:
        """The peer showed who it is, or left."""
        del self._strangers[channel.address][channel]
        if not self._strangers[channel.address]:
            del self._strangers[channel.address]

    def refused(self, channel: TlsChannel, reason: str) -> None:
        """Tells of a handshake that failed, of one a second at the most: strangers may make many."""
        now = asyncio.get_running_loop().time()
        if now >= self._tell_at:
            self._tell_at = now + _TELL_S
            self._refused(channel.address, reason)

    def forget(self, channel: TlsChannel) -> None:
        self.channels.discard(channel)

    def cut(self, keys: frozenset[str]) -> int:
        """Ends the connections of peers with these keys; returns how many there were."""
        found = [channel for channel in self.channels if channel.key in keys]
        for channel in found:
            channel.abort()
        return len(found)
