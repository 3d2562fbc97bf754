"""One HTTP request and its answer, as plain ASGI: the body under limits, events, pings, and a client that leaves.

It does not know what is asked or answered. Every write to the client goes through here.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from gateway import errors
from gateway.errors import ApiError, ErrorFormat
from gateway.http import sse
from gateway.http.client_address import ClientAddress

AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON_CONTENT: Final[Header] = (b"content-type", b"application/json")
DRAIN_GRACE_S: Final = 5.0
FIRST_BYTE_MARGIN: Final = 0.85  # of first_byte_s: the rest is for the way to the client


class ClientDisconnected(Exception):
    """The client closed its connection, or had to be dropped; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class ExchangeTimeouts:
    """How long an exchange waits for its client, in seconds."""

    body_s: float
    first_byte_s: float
    ping_s: float
    blocked_s: float


class Exchange:
    """Reads one request and writes its answer. One task uses it, and its own watches while `attended`.

    `shape` is that of its errors. `clock` is monotonic seconds.
    """

    def __init__(
        self,
        scope: AsgiMessage,
        receive: AsgiReceive,
        send: AsgiSend,
        patience: ExchangeTimeouts,
        request_id: str,
        clock: Callable[[], float],
        origin: ClientAddress,
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of several counts
        self.origin = origin
        self.request_id = request_id
        self.began = clock()
        self.shape = ErrorFormat.ENVELOPE
        self.beside: list[Header] = []  # headers of whatever is answered
        self.status: int | None = None
        self._abort: Callable[[], None] | None = scope.get("hearth.abort")
        self._receive = receive
        self._send = send
        self._patience = patience
        self._clock = clock
        self._ended = False
        self._wrote_at = self.began
        self._blocked_since: float | None = None
        self._asked_at = self.began
        self._group: asyncio.TaskGroup | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._copy: Callable[[bytes], None] | None = None
        self._left = False
        self._fail: Callable[[ApiError, str], bytes] | None = None

    async def body(self, limit_bytes: int) -> bytes:
        """The whole body. Raises Refusal when it is too large or too slow, ClientGone when it ends early."""
        announced = self.headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limit_bytes:
            raise errors.body_too_large(limit_bytes)
        pieces: list[bytes] = []
        left = limit_bytes
        try:
            async with asyncio.timeout(self._patience.body_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    piece = message.get("body", b"")
                    left -= len(piece)
                    if left < 0:
                        raise errors.body_too_large(limit_bytes)
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        self._asked_at = self._clock()
                        return b"".join(pieces)
        except TimeoutError:
            raise errors.body_too_slow(self._patience.body_s) from None

    @contextlib.asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        """Ends what runs inside when the client leaves (ClientGone) or `interrupt` is called (its Refusal)."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._watch(self._notice_leaving())
                try:
                    yield
                finally:
                    self._group = None
                    for watch in self._watches:
                        watch.cancel()
                    self._watches.clear()  # they know this exchange: left in it, it would wait for the collector
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    def copy_to(self, take: Callable[[bytes], None]) -> None:
        """Gives away each piece of the answer as it is sent. An answer in one piece is worked on to its end then, also
        where its client leaves."""
        self._copy = take

    @property
    def streams(self) -> bool:
        """Whether the answer is events."""
        return self._fail is not None

    def stream(self, fail: Callable[[ApiError, str], bytes]) -> None:
        """The answer will be events: from now on the head leaves in time and silence is broken by comments. `fail`
        writes their end where they end with a refusal of the request with this id. Raises ClientGone."""
        if self._left:
            raise ClientDisconnected
        self._fail = fail
        self._watch(self._break_silence())

    def interrupt(self, refusal: ApiError) -> None:
        """Makes the attended work end with this refusal. Does nothing before and after it is attended."""

        async def end() -> None:
            raise refusal

        if self._group is not None:
            self._watch(end())

    async def answer(self, status: int, body: bytes, headers: list[Header]) -> None:
        """The whole answer at once."""
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, [*headers, length])
        self._ended = True
        await self._push({"type": "http.response.body", "body": body})

    async def write(self, events: bytes) -> None:
        """Whole events, in one write; the head goes first where it has not gone yet. Nothing is sent for b""."""
        if self.status is None:
            await self._start(200, sse.HEADERS)
        if events:
            await self._push({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """The last events of a stream."""
        if self.status is None:
            await self._start(200, sse.HEADERS)
        self._ended = True
        await self._push({"type": "http.response.body", "body": events, "more_body": False})

    async def refuse(self, refusal: ApiError) -> None:
        """Answers with the refusal: a status where nothing was sent yet, else the events that end a stream."""
        if self._ended:
            return
        try:
            async with asyncio.timeout(DRAIN_GRACE_S):
                if self.status is not None:
                    assert self._fail is not None, "only events are answered in pieces"
                    await self.end(self._fail(refusal, self.request_id))
                    return
                headers = [JSON_CONTENT, (b"cache-control", b"no-store")]
                if refusal.retry_after_s is not None:
                    headers.append((b"retry-after", b"%d" % refusal.retry_after_s))
                if refusal.status == 401:
                    headers.append((b"www-authenticate", b"Bearer"))
                if refusal.allowed is not None:
                    headers.append((b"allow", refusal.allowed.encode()))
                if refusal.closes:
                    headers.append((b"connection", b"close"))
                await self.answer(refusal.status, errors.error_body(self.shape, refusal, self.request_id), headers)
        except TimeoutError:
            self.drop()

    def drop(self) -> None:
        """Closes the connection at once, with whatever is still unsent."""
        if self._abort is not None:
            self._abort()

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        id_ = self.request_id.encode()
        named = [*headers, *self.beside, (b"x-request-id", id_), (b"request-id", id_)]
        await self._push({"type": "http.response.start", "status": status, "headers": named})

    async def _push(self, message: AsgiMessage) -> None:
        if self._copy is not None:
            self._copy(message.get("body", b""))
        self._blocked_since = self._wrote_at = self._clock()
        await self._send(message)
        self._blocked_since = None

    def _watch(self, watch: Coroutine[Any, Any, None]) -> None:
        assert self._group is not None, "only attended work is watched"
        self._watches.append(self._group.create_task(watch))

    async def _notice_leaving(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        if self._copy is None or self.streams:
            raise ClientDisconnected

    async def _break_silence(self) -> None:
        """Sends the head in time, comments into silence, and drops a client that does not read."""
        while True:
            await asyncio.sleep(max(0.0, self._quiet_left_s()))
            if self._quiet_left_s() > 0:
                continue
            if self._blocked_since is not None:
                self.drop()
                raise ClientDisconnected
            await self._ping()

    async def _ping(self) -> None:
        try:
            async with asyncio.timeout(self._patience.blocked_s):
                await self.write(sse.PING)
        except TimeoutError:
            self.drop()
            raise ClientDisconnected from None

    def _quiet_left_s(self) -> float:
        """Seconds until something must happen if nothing is written until then."""
        now = self._clock()
        if self._blocked_since is not None:
            return self._blocked_since + self._patience.blocked_s - now
        if self.status is None:
            return self._asked_at + self._patience.first_byte_s * FIRST_BYTE_MARGIN - now
        return self._wrote_at + self._patience.ping_s - now
