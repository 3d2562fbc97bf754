"""Where gateways of other cells connect: TLS with certificates on both sides, then one question after the other."""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Final

from gateway.cells.messages import CellAnswer, CellMessageError, CellQuestion, body_length, decode_question, encode
from gateway.cells.trust import RELOAD_S, CellTrust
from gateway.identity.host_identity import HostIdentity, IdentityError

HANDSHAKE_S: Final = 10.0
CONNECTIONS_MAX: Final = 256
_RETRY_S: Final = 2.0

log = logging.getLogger(__name__)


class CellListener:
    """Listens until cancelled. A connection ends with the certificate that its peer showed."""

    def __init__(
        self,
        trust: CellTrust,
        answer: Callable[[CellQuestion, HostIdentity], Awaitable[CellAnswer]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._trust = trust
        self._answer = answer
        self._clock = clock
        self._connections: set[asyncio.StreamWriter] = set()

    async def run(self, host: str, port: int) -> None:
        """Tries again where the port is taken."""
        context = self._trust.server()
        while True:
            try:
                server = await asyncio.start_server(
                    self._converse, host, port, ssl=context, ssl_handshake_timeout=HANDSHAKE_S
                )
                break
            except OSError as error:
                log.error("no other cell can ask here: %s:%d: %s", host, port, error)
            await asyncio.sleep(_RETRY_S)
        try:
            while True:
                await asyncio.sleep(RELOAD_S)
                try:
                    self._trust.renew(context)
                except IdentityError as error:
                    log.warning("the certificate before stays in use for other cells: %s", error)
        finally:
            server.close()
            for writer in self._connections:
                writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            if len(self._connections) > CONNECTIONS_MAX:
                return
            tls = writer.get_extra_info("ssl_object")
            certificate = tls.getpeercert()
            peer = self._trust.peer(certificate, tls.getpeercert(binary_form=True))
            ends_s = ssl.cert_time_to_seconds(certificate["notAfter"])  # a removed host's is not renewed
            while self._clock() < ends_s:
                body = await reader.readexactly(body_length(await reader.readexactly(4)))
                writer.write(encode(await self._answer(decode_question(body), peer)))
                await writer.drain()
        except (IdentityError, CellMessageError) as error:
            log.warning("a gateway of another cell was refused: %s", error)
        except (OSError, EOFError):
            pass
        finally:
            self._connections.discard(writer)
            writer.transport.abort()
