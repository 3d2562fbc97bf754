"""What ranks say to each other as their model opens: small facts, and file descriptors, each in one message over a
socket between rank 0 and each follower. Commands go through the ring (command_ring.py). It knows no model."""

import os
import socket
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from engine.memory.symmetric import SwapDescriptors
from engine.ranks.exchange import Wait

_MESSAGE_BYTES: Final = 64 << 10
_DESCRIPTORS: Final = 64


class RankChannel:
    """One end of the socket between rank 0 and a follower, which is closed with it."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end

    @classmethod
    def pair(cls) -> tuple["RankChannel", "RankChannel"]:
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(first), cls(second)

    def send(self, content: object, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._socket, [msgspec.msgpack.encode(content)], descriptors)

    def receive(self, wait: Wait) -> tuple[Any, list[int]]:
        """The next message and its descriptors, which are the caller's to close. Raises ConnectionError where the other
        end is gone, and what `wait` raises."""
        received: list[tuple[bytes, list[int]]] = []

        def arrived() -> bool:
            try:
                content, descriptors, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, _DESCRIPTORS)
            except BlockingIOError:
                return False
            received.append((content, descriptors))
            return True

        wait(arrived)
        ((content, descriptors),) = received
        if not content:
            raise ConnectionError("a rank has ended as its model opened")
        return msgspec.msgpack.decode(content), descriptors


def swap_as_leader(followers: Sequence[RankChannel], wait: Wait) -> SwapDescriptors:
    """How rank 0 swaps descriptors: it collects all of them, and hands all to everybody."""

    def swap(own: int) -> list[int]:
        descriptors = [own]
        for follower in followers:
            descriptors += follower.receive(wait)[1]
        for follower in followers:
            follower.send(None, descriptors)
        return [os.dup(own), *descriptors[1:]]

    return swap


def swap_as_follower(leader: RankChannel, wait: Wait) -> SwapDescriptors:
    def swap(own: int) -> list[int]:
        leader.send(None, [own])
        return leader.receive(wait)[1]

    return swap
