"""One HTTP request and its answer, as plain ASGI: the body under limits, events, pings, and a client that disconnects.

It does not know what is asked or answered. Every write to the client goes through here.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Message, Receive, Scope, Send

from gateway import errors
from gateway.errors import ApiError
from gateway.http import sse
from gateway.http.client_address import ClientAddress
from gateway.http.error_format import ErrorFormat, error_body

Header = tuple[bytes, bytes]

JSON_CONTENT: Final[Header] = (b"content-type", b"application/json")
NO_BODY: Final = (204, 304)  # statuses whose answers have no body, and so no length
DRAIN_GRACE_S: Final = 5.0
PIECE_BYTES: Final = 256 << 10  # in one write: encrypting that takes a fraction of a millisecond
JOINED_BYTES: Final = 1 << 20  # of a body whose pieces the loop joins: 9 MB would take it up to 20 ms, in new memory
FIRST_BYTE_MARGIN: Final = 0.85  # of first_byte_s: the rest is for the way to the client


class ClientDisconnected(Exception):
    """The client closed its connection, or was cut off; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class ExchangeTimeouts:
    """How long an exchange waits for its client, in seconds."""

    body_s: float
    first_byte_s: float
    ping_s: float
    blocked_s: float


class Exchange:
    """Reads one request and writes its answer. One task uses it, and its own watches run inside `watching_client`.

    `path_params` are what the placeholders of its route stand for. `clock` is monotonic seconds.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        timeouts: ExchangeTimeouts,
        request_id: str,
        clock: Callable[[], float],
        client: ClientAddress,
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self.query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of several counts
        self.client = client
        self.request_id = request_id
        self.began = clock()
        self.error_format = ErrorFormat.ENVELOPE
        self.route = "none"  # its name in the metrics, once it is known what serves it
        self.extra_headers: list[Header] = []  # sent with every answer
        self.origin_headers: list[Header] = []  # likewise: what browsers ask for pages of other origins
        self.status: int | None = None
        self.body_bytes = 0  # once it was read
        self.counted = False  # whether a limit of requests has counted it
        self.account_id = self.token_id = ""  # for the log, once the caller is verified
        self.reported = False  # whether the log has a line of its end
        self._abort_transport: Callable[[], None] | None = scope.get("hearth.abort")
        self._receive = receive
        self._send = send
        self._timeouts = timeouts
        self._clock = clock
        self._ended = False
        self._wrote_at = self.began
        self._blocked_since: float | None = None
        self._body_read_at = self.began
        self._group: asyncio.TaskGroup | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._tee: Callable[[bytes], None] | None = None
        self._disconnected = False
        self._refusal: ApiError | None = None
        self._fail: Callable[[ApiError, str], bytes] | None = None

    def elapsed_s(self) -> float:
        return self._clock() - self.began

    async def body(self, limit_bytes: int, take: Callable[[int], None] = lambda size_bytes: None) -> bytes:
        """Reads the whole body. `take` gets how many bytes come, all that are announced before any is read; what it
        raises ends the reading. Raises ApiError if it is too large or too slow, ClientDisconnected if it ends early."""
        length = self.headers.get(b"content-length", b"0")
        announced = int(length) if length.isdigit() else 0
        if announced > limit_bytes:
            raise errors.body_too_large(limit_bytes)
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise errors.bad_input("the header 'Content-Encoding': a body is read as it comes; send it uncompressed")
        take(announced)
        pieces: list[bytes] = []
        left = limit_bytes
        try:
            async with asyncio.timeout(self._timeouts.body_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    piece = message.get("body", b"")
                    left -= len(piece)
                    if left < 0:
                        raise errors.body_too_large(limit_bytes)
                    if not announced:
                        take(len(piece))
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise errors.body_too_slow(self._timeouts.body_s) from None
        self._body_read_at = self._clock()
        self.body_bytes = limit_bytes - left
        return _joined(pieces) if self.body_bytes <= JOINED_BYTES else await asyncio.to_thread(_joined, pieces)

    @contextlib.asynccontextmanager
    async def watching_client(self) -> AsyncIterator[None]:
        """Ends what runs inside when the client disconnects (ClientDisconnected) or `interrupt` is called (its
        ApiError), or was called before."""
        if self._refusal is not None:
            raise self._refusal
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._watch(self._watch_disconnect())
                try:
                    yield
                finally:
                    self._group = None
                    for watch in self._watches:
                        watch.cancel()
                    self._watches.clear()  # they refer to this exchange: kept, the cycle would wait for the collector
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    def tee(self, push: Callable[[bytes], None]) -> None:
        """Passes each piece of the answer to `push` as it is sent. From now on an answer in one piece is computed to
        its end even if the client disconnects."""
        self._tee = push

    @property
    def is_streaming(self) -> bool:
        """Whether the answer is a stream of events."""
        return self._fail is not None

    def stream(self, fail: Callable[[ApiError, str], bytes]) -> None:
        """Makes the answer a stream: from now on the head leaves in time and silence is broken by comments. `fail`
        renders the events that end a stream with an error. Raises ClientDisconnected."""
        if self._disconnected:
            raise ClientDisconnected
        self._fail = fail
        self._watch(self._send_pings())

    def interrupt(self, refusal: ApiError) -> None:
        """Ends the work inside `watching_client` with this refusal, before which it keeps the work from beginning; does
        nothing afterwards."""

        async def end() -> None:
            raise refusal

        self._refusal = refusal
        if self._group is not None:
            self._watch(end())

    async def answer(self, status: int, body: bytes, headers: list[Header]) -> None:
        """Sends the whole answer, a long one in pieces: each once the client has taken most of those before it."""
        length = [] if status in NO_BODY else [(b"content-length", b"%d" % len(body))]
        await self._start(status, [*headers, *length])
        self._ended = True
        for end in range(PIECE_BYTES, max(1, len(body)) + PIECE_BYTES, PIECE_BYTES):
            piece = body[end - PIECE_BYTES : end]
            await self._push({"type": "http.response.body", "body": piece, "more_body": end < len(body)})

    async def write(self, events: bytes) -> None:
        """Sends whole events in one write, after the head if it was not sent yet. Sends no events for b""."""
        if self.status is None:
            await self._start(200, sse.HEADERS)
        if events:
            await self._push({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Sends the last events of a stream."""
        if self.status is None:
            await self._start(200, sse.HEADERS)
        self._ended = True
        await self._push({"type": "http.response.body", "body": events, "more_body": False})

    async def refuse(self, refusal: ApiError) -> None:
        """Answers with the refusal: with its status if nothing was sent yet, else with the events that end a stream."""
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
                if refusal.location is not None:
                    headers.append((b"location", refusal.location.encode()))
                if refusal.closes:
                    headers.append((b"connection", b"close"))
                if refusal.kind == "draining":  # a proxy may send it to another gateway at once, as SDKs do
                    headers.append((b"x-should-retry", b"true"))
                body = error_body(self.error_format, refusal, self.request_id)
                await self.answer(refusal.status, body, headers)
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """Closes the connection at once and discards what is unsent."""
        if self._abort_transport is not None:
            self._abort_transport()

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        id_ = self.request_id.encode()
        named = [*headers, *self.extra_headers, *self.origin_headers, (b"x-request-id", id_), (b"request-id", id_)]
        await self._push({"type": "http.response.start", "status": status, "headers": named})

    async def _push(self, message: Message) -> None:
        if self._tee is not None:
            self._tee(message.get("body", b""))
        self._blocked_since = self._wrote_at = self._clock()
        await self._send(message)
        self._blocked_since = None

    def _watch(self, watch: Coroutine[Any, Any, None]) -> None:
        assert self._group is not None, "watches need watching_client"
        self._watches.append(self._group.create_task(watch))

    async def _watch_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        if self._tee is None or self.is_streaming:
            raise ClientDisconnected

    async def _send_pings(self) -> None:
        """Sends the head in time and comments into silence, and cuts off a client that does not read."""
        while True:
            await asyncio.sleep(max(0.0, self._silence_left_s()))
            if self._silence_left_s() > 0:
                continue
            if self._blocked_since is not None:
                self.abort()
                raise ClientDisconnected
            await self._ping()

    async def _ping(self) -> None:
        try:
            async with asyncio.timeout(self._timeouts.blocked_s):
                await self.write(sse.PING)
        except TimeoutError:
            self.abort()
            raise ClientDisconnected from None

    def _silence_left_s(self) -> float:
        """Seconds until `_send_pings` must act if nothing is written before."""
        now = self._clock()
        if self._blocked_since is not None:
            return self._blocked_since + self._timeouts.blocked_s - now
        if self.status is None:
            return self._body_read_at + self._timeouts.first_byte_s * FIRST_BYTE_MARGIN - now
        return self._wrote_at + self._timeouts.ping_s - now


def _joined(pieces: list[bytes]) -> bytes:
    """One copy of all pieces, which are freed here: that takes as long again. Joining more than a megabyte holds up no
    other thread."""
    body = b"".join(pieces)
    pieces.clear()
    return body
