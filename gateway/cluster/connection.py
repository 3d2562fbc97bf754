"""One socket that speaks frames, and the one to a machine. Reading is done by a protocol, not by a task: a frame costs
one callback."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, TypeVar, cast

from engine.protocol import frames
from engine.protocol.address import parse_address

WRITE_BYTES_MAX: Final = 32 << 20
CONNECT_S: Final = 2.0


class FrameProtocol(asyncio.Protocol, ABC):
    """`closed` is set once the socket is closed, with the reason in `close_reason`."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.close_reason = "the connection was closed"
        self.received_s = 0.0  # when the last bytes came
        self._frames = frames.FrameReader()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transport has no such base class

    def data_received(self, received: bytes) -> None:
        self.received_s = time.monotonic()
        try:
            for frame in self._frames.feed(received):
                self.receive(frame)
        except frames.FrameError as error:
            self.close(f"it sent {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    @abstractmethod
    def receive(self, frame: frames.Frame) -> None:
        """Takes one whole frame. A FrameError that it raises closes the connection."""

    @property
    def congested(self) -> bool:
        """Whether the other side reads too slowly for more to be written."""
        return self._transport is not None and self._transport.get_write_buffer_size() > WRITE_BYTES_MAX

    def send(self, frame: frames.Frame) -> None:
        """Writes a frame; nothing on a connection that has ended."""
        if self._transport is not None:
            self._transport.write(frames.encode_frame(frame))

    def close(self, reason: str) -> None:
        self.close_reason = reason
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Closes the connection when its task is cancelled."""
        try:
            await self.closed
        finally:
            if self._transport is not None:
                self.close("the gateway closed it")


class MachineConnection(FrameProtocol):
    """Reports come in, demand goes out. `models` are those that the machine reported last to have replicas of."""

    def __init__(self, on_report: Callable[["MachineConnection", frames.MachineState], None]) -> None:
        super().__init__()
        self.models: frozenset[str] = frozenset()
        self._on_report = on_report

    def receive(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.MachineState):
            self._on_report(self, frame)

    def send_demand(self, demand: frames.ModelDemand) -> None:
        """Left out where the machine does not read: demand is sent again and again."""
        if not self.congested:
            self.send(demand)


_C = TypeVar("_C", bound=FrameProtocol)


async def connect(address: str, make: Callable[[], _C]) -> _C:
    """Raises OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    target = parse_address(address)
    async with asyncio.timeout(CONNECT_S):
        if isinstance(target, str):
            return (await loop.create_unix_connection(make, target))[1]
        return (await loop.create_connection(make, *target))[1]


def error_text(error: Exception) -> str:
    return str(error) or f"no answer within {CONNECT_S:g} s"
