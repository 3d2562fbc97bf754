"""The way out of a host for its replicas, which hand KV to those of other hosts: a unix socket of this user's alone,
whose clients say which socket of which machine they want, and get bytes there and back over mutual TLS. It parses
nothing else, and no more than what one side has not read yet is in memory. Keys and certificates stay with the porter.

    client → `tls:NAME@HOST:PORT/SOCKET` and a line's end; back comes a line: empty, or why it cannot be reached
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine.protocol.address import HANDOVER_SOCKET, OUTWARD_SOCKET, AddressError, TlsAddress, parse_tls_address
from gateway.cluster.connection import CONNECT_S, peer_problem
from gateway.identity.files import HostFiles

CHANNELS_MAX: Final = 256
_ADDRESS_BYTES: Final = 512
_PIECE_BYTES: Final = 256 << 10


class OutwardRelay:
    """See above. `removed` says whose keys are believed no more."""

    def __init__(self, files: HostFiles, removed: Callable[[], frozenset[str]]) -> None:
        self._files = files
        self._removed = removed
        self._channels = 0

    async def listen(self, folder: Path) -> asyncio.Server:
        """Listens in a folder. Raises OSError."""
        path = folder / OUTWARD_SOCKET
        path.unlink(missing_ok=True)
        umask = os.umask(0o077)  # whoever opens it speaks as this host
        try:
            return await asyncio.start_unix_server(self._serve, path, limit=_PIECE_BYTES)
        finally:
            os.umask(umask)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._channels += 1
        try:
            async with asyncio.timeout(CONNECT_S):
                far_reader, far_writer = await self._open((await reader.readline()).decode().strip())
        except (OSError, ValueError) as error:  # TimeoutError and TLS errors are OSErrors, AddressError a ValueError
            problem = str(error) or f"no answer within {CONNECT_S:g} s"
            writer.write(" ".join(problem.split()).encode()[:_ADDRESS_BYTES] + b"\n")
        else:
            writer.write(b"\n")
            await _carry(reader, writer, far_reader, far_writer)
            far_writer.close()
        finally:
            self._channels -= 1
            writer.close()

    async def _open(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError, AddressError and TimeoutError."""
        peer = parse_tls_address(address[:_ADDRESS_BYTES])
        if peer is None or not peer.socket.endswith(HANDOVER_SOCKET):
            raise AddressError(f"{address[:100]!r} is where no other host takes KV")
        if self._channels > CHANNELS_MAX:
            raise ConnectionError(f"{CHANNELS_MAX} handovers to other hosts are under way")
        return await self._connect(peer)

    async def _connect(self, peer: TlsAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = self._files.credentials().client
        reader, writer = await asyncio.open_connection(
            peer.host.strip("[]"), peer.port, ssl=context, server_hostname=peer.server_name, limit=_PIECE_BYTES
        )
        if problem := peer_problem(peer, writer.transport, lambda key: key in self._removed()):
            writer.transport.abort()
            raise ConnectionError(problem)
        return reader, writer


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader, far_writer: asyncio.StreamWriter,
) -> None:  # fmt: skip
    """Carries bytes both ways until either side ends."""

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(_PIECE_BYTES):
                target.write(piece)
                await target.drain()
        except OSError:
            pass
        for end in (writer, far_writer):
            end.transport.abort() if end is not target else end.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(pump(reader, far_writer))
        group.create_task(pump(far_reader, writer))
