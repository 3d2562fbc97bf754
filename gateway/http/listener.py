"""Accepts connections: so many at once, so many from one address, and TLS before all else. It does not know HTTP.

A connection counts from its acceptance to its end, the handshake too: one that never ends it holds its place for
`header_s` and no longer.
"""

import asyncio
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Final

from gateway.config import ServerConfig
from gateway.http.client_address import ClientAddressPolicy, parse_ip_address
from gateway.http.tls import Certificate

ACCEPTS: Final = 16  # connections that are accepted in one turn of the loop
FAREWELL_S: Final = 5.0  # for a client to answer the end of TLS
_PAUSE_S: Final = 0.1  # where the system has no descriptor left

log = logging.getLogger(__name__)


class Listener:
    """One listener. `make` gives the protocol of a new connection, and is given what to call when that one is lost.

    uvloop's own server would accept one connection in a turn of the loop, count none that is in its handshake, and
    hold one certificate for good.
    """

    def __init__(
        self,
        listener: socket.socket,
        server: ServerConfig,
        certificate: Certificate | None,
        too_many: bytes,
        make: Callable[[Callable[[], None]], asyncio.Protocol],
    ) -> None:
        self._listener = listener
        self._server = server
        self._certificate = certificate
        self._too_many = too_many
        self._make = make
        self._edge = ClientAddressPolicy(server)
        self._loop = asyncio.get_running_loop()
        self._numbers = count()
        self._places: dict[int, str] = {}  # where each connection comes from
        self._from: Counter[str] = Counter()
        self._arriving: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Those in their handshake too."""
        return len(self._places)

    def open(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accepts no more, and drops who is still in the handshake. Others stay."""
        self._loop.remove_reader(self._listener.fileno())
        if self._resuming is not None:
            self._resuming.cancel()
        for task in self._arriving:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                client, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot accept connections: %s", error)
                self._loop.remove_reader(self._listener.fileno())
                self._resuming = self._loop.call_later(_PAUSE_S, self.open)
                return
            client.setblocking(False)
            self._admit(client, address[0])

    def _admit(self, client: socket.socket, peer: str) -> None:
        source = _source(peer)
        crowded = self._from[source] >= self._server.address_connections and not self._edge.trusts(peer)
        if crowded or self.connections >= self._server.connections:
            self._turn_away(client)
            return
        place = next(self._numbers)
        self._places[place] = source
        self._from[source] += 1
        task = self._loop.create_task(self._arrive(client, place))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    def _turn_away(self, client: socket.socket) -> None:
        """Says so where that takes no handshake."""
        try:
            if self._certificate is None:
                client.send(self._too_many)
                client.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        finally:
            client.close()

    async def _arrive(self, client: socket.socket, place: int) -> None:
        protocol = self._make(lambda: self._leave(place))
        try:
            if self._certificate is None:
                await self._loop.connect_accepted_socket(lambda: protocol, client)
                return
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                client,
                ssl=self._certificate.context,
                ssl_handshake_timeout=self._server.header_s,
                ssl_shutdown_timeout=FAREWELL_S,
            )
            if transport.is_closing():  # it may have been lost in the handshake, which nobody is told
                self._leave(place)
        except BaseException as error:
            self._leave(place)
            client.close()
            if not isinstance(error, OSError):  # a handshake that failed, or a client that has left already
                raise

    def _leave(self, place: int) -> None:
        source = self._places.pop(place, None)
        if source is None:
            return
        self._from[source] -= 1
        if not self._from[source]:
            del self._from[source]


def _source(peer: str) -> str:
    """What counts as one address: of IPv6, the 64 bits that a customer is given."""
    if ":" not in peer:
        return peer
    address = parse_ip_address(peer)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)
