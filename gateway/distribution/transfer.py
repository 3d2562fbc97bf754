"""Files of models from host to host: a question names a file by its SHA-256 and where to begin, the answer is its size
and its bytes. Whoever asks compares the sum; what answers has files by their sums alone, and knows no paths that a
peer could choose.
"""

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from engine.log import log
from engine.protocol.address import FILES_SOCKET
from gateway.identity.host_identity import IdentityError, peer_identity
from gateway.joining.client import NoGatewayAnswers, split_address

CONNECTIONS_MAX: Final = 16  # peers that are served at once; others are told so and look elsewhere
QUESTION_BYTES_MAX: Final = 1024
ANSWER_S: Final = 10.0  # between two pieces of an answer, or of a question once it has begun
IDLE_S: Final = 60.0
_ACCEPT_AGAIN_S: Final = 0.5  # once there was no descriptor for a peer
_LENGTH: Final = struct.Struct(">I")
_PIECE_BYTES: Final = 1 << 20


class FileQuestion(msgspec.Struct, frozen=True, array_like=True):
    """The file of this SHA-256, from `offset` on."""

    sha256: str
    offset: int


class FileAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`bytes` of the file follow; where `problem` says why not, in words, none do."""

    bytes: int = 0
    problem: str = ""


class TransferError(Exception):
    """A peer gives no file now; the message says which peer, and why."""


class FileServer:
    """Gives files to whoever reaches the socket in `folder`, which the porter and a gateway's door open to members
    alone. `find` is the path of a sum's file, None where this host has none."""

    def __init__(self, folder: Path, find: Callable[[str], Path | None]) -> None:
        """Raises OSError where it cannot listen."""
        self._find = find
        self._closed = False
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        path = folder / f"{FILES_SOCKET}.sock"
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(CONNECTIONS_MAX)

    def start(self) -> None:
        threading.Thread(target=self._accept, name="files", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log("files_wait", level="warning", error=str(error))
                    time.sleep(_ACCEPT_AGAIN_S)
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()
            else:
                with peer, contextlib.suppress(OSError):
                    peer.settimeout(ANSWER_S)
                    _send(peer, FileAnswer(problem=f"it serves {CONNECTIONS_MAX} hosts already"))

    def _serve(self, peer: socket.socket) -> None:
        try:
            with contextlib.closing(peer), contextlib.suppress(OSError, EOFError, msgspec.MsgspecError, ValueError):
                while True:
                    peer.settimeout(IDLE_S)
                    self._answer(peer, msgspec.msgpack.decode(_receive(peer, QUESTION_BYTES_MAX), type=FileQuestion))
        finally:
            self._places.release()

    def _answer(self, peer: socket.socket, question: FileQuestion) -> None:
        peer.settimeout(ANSWER_S)
        path = self._find(question.sha256)
        try:
            file = None if path is None else path.open("rb", buffering=0)
        except OSError:
            file = None
        if file is None:
            _send(peer, FileAnswer(problem="it has no such file"))
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            left = max(0, size - question.offset) if question.offset >= 0 else 0
            _send(peer, FileAnswer(left))
            if left:
                peer.sendfile(file, question.offset, left)


class PeerFiles:
    """The files that one member has, over TLS to its porter or, of a gateway, to where hosts join."""

    def __init__(self, member_id: str, address: str, context: ssl.SSLContext, cluster: str) -> None:
        self.name = member_id
        self._address = address
        self._context = context
        self._cluster = cluster

    def read(self, sha256: str, offset: int) -> Iterator[bytes]:
        """The file's bytes from `offset` on, in pieces. Raises TransferError, also half-way."""
        try:
            with self._connect() as connection:
                _send(connection, FileQuestion(sha256, offset))
                answer = msgspec.msgpack.decode(_receive(connection, QUESTION_BYTES_MAX), type=FileAnswer)
                if answer.problem:
                    raise TransferError(f"{self.name}: {answer.problem}")
                left, memory = answer.bytes, bytearray(_PIECE_BYTES)
                while left > 0:
                    count = connection.recv_into(memory, min(left, _PIECE_BYTES))
                    if not count:
                        raise EOFError("it ended half-way")
                    left -= count
                    yield bytes(memoryview(memory)[:count])
        except (OSError, EOFError, ValueError, OverflowError, NoGatewayAnswers, msgspec.MsgspecError) as error:
            raise TransferError(f"{self.name}: {str(error) or type(error).__name__}") from None

    @contextlib.contextmanager
    def _connect(self) -> Iterator[ssl.SSLSocket]:
        host, port = split_address(self._address)
        name = self.name.partition("/")[2]
        with socket.create_connection((host, port), ANSWER_S) as plain:
            plain.settimeout(ANSWER_S)
            with self._context.wrap_socket(plain, server_hostname=f"{FILES_SOCKET}.{name}") as connection:
                identity = peer_identity(connection.getpeercert())
                if identity.member_id != self.name or identity.cluster != self._cluster:
                    raise IdentityError(f"what answers at {self._address} is the {identity}")
                yield connection


def _send(connection: socket.socket, message: FileQuestion | FileAnswer) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket, most: int) -> bytes:
    """Raises EOFError at the connection's end, ValueError for a message over the limit."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if length > most:
        raise ValueError(f"a message of {length} bytes is over the limit of {most}")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError("the connection ended")
        parts += part
    return bytes(parts)
