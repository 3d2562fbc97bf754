"""Accepts connections: so many at once, so many from one address, and TLS before all else. It does not know HTTP.

A connection counts from its acceptance to its end, its handshake included, which may take `header_s`.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Final

from gateway.http.client_address import ClientAddressPolicy, address_group
from gateway.http.tls import Certificate
from gateway.settings.server import ServerConfig

ACCEPTS: Final = 16  # connections that are accepted in one turn of the loop
FAREWELL_S: Final = 5.0  # for a client to answer the end of TLS
_PAUSE_S: Final = 0.1  # while the system has no descriptor left

log = logging.getLogger(__name__)


class Listener:
    """One listening socket. `new_protocol` makes a connection's protocol, and gets what to call when it is lost.

    uvloop's own server would accept one connection in a turn of the loop, count none that is in its handshake, and
    keep one certificate for good.
    """

    def __init__(
        self,
        listener: socket.socket,
        server: ServerConfig,
        certificate: Certificate | None,
        too_many: Callable[[], bytes],
        new_protocol: Callable[[Callable[[], None]], asyncio.Protocol],
    ) -> None:
        self._listener = listener
        self._server = server
        self._certificate = certificate
        self._too_many = too_many
        self._new_protocol = new_protocol
        self._clients = ClientAddressPolicy(server)
        self._loop = asyncio.get_running_loop()
        self._ids = count()
        self._sources: dict[int, str] = {}  # of each connection, by its id
        self._connections_of: Counter[str] = Counter()
        self._connecting: set[asyncio.Task[None]] = set()
        self._resume_timer: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """How many there are, handshakes included."""
        return len(self._sources)

    def open(self) -> None:
        self._resume_timer = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accepts no more, and ends connections that are still in their handshake. Others stay."""
        self._loop.remove_reader(self._listener.fileno())
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        for task in self._connecting:
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
                self._resume_timer = self._loop.call_later(_PAUSE_S, self.open)
                return
            client.setblocking(False)
            self._admit(client, address[0])

    def _admit(self, client: socket.socket, peer: str) -> None:
        source = address_group(peer)
        crowded = self._connections_of[source] >= self._server.address_connections and not self._clients.trusts(peer)
        if crowded or self.connections >= self._server.connections:
            self._reject(client)
            return
        connection_id = next(self._ids)
        self._sources[connection_id] = source
        self._connections_of[source] += 1
        task = self._loop.create_task(self._connect(client, connection_id))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _reject(self, client: socket.socket) -> None:
        """Closes a connection, with an answer unless that takes a handshake."""
        try:
            if self._certificate is None:
                client.send(self._too_many())
                client.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        finally:
            client.close()

    async def _connect(self, client: socket.socket, connection_id: int) -> None:
        protocol = self._new_protocol(lambda: self._disconnected(connection_id))
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
            if transport.is_closing():  # lost in the handshake: the protocol is not called
                self._disconnected(connection_id)
        except BaseException as error:
            self._disconnected(connection_id)
            client.close()
            if not isinstance(error, OSError):  # a failed handshake, or a client that has disconnected
                raise

    def _disconnected(self, connection_id: int) -> None:
        source = self._sources.pop(connection_id, None)
        if source is None:
            return
        self._connections_of[source] -= 1
        if not self._connections_of[source]:
            del self._connections_of[source]
