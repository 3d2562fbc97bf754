"""Opens a connection to a replica that takes in handovers: of this host directly, of another one by the porter's way
out, which has the certificates."""

import socket
from typing import Final

from engine.protocol.address import OUTWARD_SOCKET, parse_address, parse_tls_address
from engine.protocol.connection import socket_family

CONNECT_S: Final = 2.0
_ANSWER_BYTES: Final = 1024


def dial(address: str, folder: str = "") -> socket.socket:
    """A connected socket. The way out to other hosts is in the folder of this host's sockets. Raises OSError, and
    AddressError for an address that is none."""
    if parse_tls_address(address) is None:
        return _connect(address)
    peer = _connect(f"unix:{folder}/{OUTWARD_SOCKET}")
    try:
        peer.settimeout(2 * CONNECT_S)
        peer.sendall(address.encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            if not (byte := peer.recv(1)) or len(answer) >= _ANSWER_BYTES:
                raise ConnectionError("the porter of this host gave no answer")
            answer += byte
        if len(answer) > 1:
            raise ConnectionError(answer.decode("utf-8", "replace").strip())
    except OSError:
        peer.close()
        raise
    return peer


def _connect(address: str) -> socket.socket:
    target = parse_address(address)
    peer = socket.socket(socket_family(target))
    try:
        peer.settimeout(CONNECT_S)
        peer.connect(target)
    except OSError:
        peer.close()
        raise
    return peer
