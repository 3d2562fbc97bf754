"""One socket between two replicas that hand over KV: whole messages and bytes of blocks, each wait within the lease. It
does not know what the messages mean."""

import socket
from types import TracebackType
from typing import Final, Self, TypeVar, overload

from engine.handover.messages import LENGTH, HandoverError, Message, body_bytes, decode_message, encode_message
from engine.protocol.connection import notice_vanished

_M = TypeVar("_M")
_N = TypeVar("_N")
_O = TypeVar("_O")
_P = TypeVar("_P")
_DESCRIPTOR: Final = b"m"


class HandoverLost(Exception):
    """The peer is gone, or silent for longer than the lease."""


class MessageChannel:
    """Whoever uses it waits for at most `lease_s` for any progress. Used by one thread; `close` by any."""

    def __init__(self, peer: socket.socket, lease_s: float) -> None:
        peer.settimeout(lease_s)
        notice_vanished(peer)
        self._socket = peer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Sends a message and the bytes behind it. Raises HandoverLost."""
        head = memoryview(encode_message(message))
        sent = self._send([head] if payload is None else [head, payload])
        self._send_all(head[sent:])
        if payload is not None:
            self._send_all(payload[max(0, sent - len(head)) :])

    @overload
    def receive(self, kind: type[_M], /) -> _M: ...
    @overload
    def receive(self, kind: type[_M], other: type[_N], /) -> _M | _N: ...
    @overload
    def receive(self, kind: type[_M], other: type[_N], third: type[_O], /) -> _M | _N | _O: ...
    @overload
    def receive(self, kind: type[_M], other: type[_N], third: type[_O], fourth: type[_P], /) -> _M | _N | _O | _P: ...
    def receive(self, *kinds: type[object]) -> object:
        """The next message, of one of these kinds. Raises HandoverLost and HandoverError."""
        head = bytearray(LENGTH.size)
        self.receive_into(memoryview(head))
        body = bytearray(body_bytes(bytes(head)))
        self.receive_into(memoryview(body))
        message = decode_message(bytes(body))
        if not isinstance(message, kinds):
            raise HandoverError(f"a {type(message).__name__} where it does not belong")
        return message

    def receive_into(self, view: memoryview) -> None:
        """Fills a view. Raises HandoverLost."""
        at = 0
        while at < len(view):
            try:
                received = self._socket.recv_into(view[at:])
            except TimeoutError:
                raise HandoverLost("the peer was silent for longer than the lease") from None
            except OSError as error:
                raise HandoverLost(str(error)) from error
            if not received:
                raise HandoverLost("closed by the peer")
            at += received

    def send_descriptor(self, descriptor: int) -> None:
        """Gives the peer, a process of this host, an open file. Raises HandoverLost."""
        try:
            socket.send_fds(self._socket, [_DESCRIPTOR], [descriptor])
        except OSError as error:
            raise HandoverLost(str(error)) from error

    def receive_descriptor(self) -> int:
        """The file that the peer gave, the caller's to close. Raises HandoverLost and HandoverError."""
        try:
            byte, descriptors, _, _ = socket.recv_fds(self._socket, len(_DESCRIPTOR), 1)
        except OSError as error:
            raise HandoverLost(str(error)) from error
        if byte != _DESCRIPTOR or not descriptors:
            raise HandoverError("no descriptor came with the grant")
        return descriptors[0]

    def close(self) -> None:
        """Has whoever waits for the peer wait no longer."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self._socket.close()

    def _send_all(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            at += self._send([view[at:]])

    def _send(self, views: list[memoryview]) -> int:
        """Sends of these, one behind the other, as much as goes now. Returns how many bytes that were."""
        try:
            return self._socket.sendmsg(views)
        except TimeoutError:
            raise HandoverLost("the peer took nothing for longer than the lease") from None
        except OSError as error:
            raise HandoverLost(str(error)) from error
