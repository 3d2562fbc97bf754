"""Serves an App over sockets with uvicorn, and adds what uvicorn leaves out: limits on heads and on clients that do not
write or read, TLS whose certificate can change, and a drain that clients see. It does not know what the App answers.

On SIGTERM or SIGINT:  readiness false, new work 503 ─► what runs ends, at most drain_s ─► the rest gets an error event
─► the listener closes. A second signal skips the waiting.
"""

import asyncio
import functools
import gc
import math
import resource
import socket
import sys
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Protocol

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway import errors
from gateway.errors import ApiError
from gateway.http import client_address
from gateway.http.error_format import envelope
from gateway.http.listener import Listener
from gateway.http.tls import Certificate
from gateway.settings.server import ServerConfig

SEND_BUFFER_BYTES: Final = 256 << 10  # in the kernel, for each connection: what a client that does not read can occupy
WRITE_BUFFER_BYTES: Final = 64 << 10  # in this process, for each connection; then `send` waits
BACKLOG: Final = 4096
PIPELINED_MAX: Final = 32  # requests of one connection that wait for the answer to an earlier one
DESCRIPTORS: Final = 512  # beside connections: listeners, the store, replicas, files
KEEP_ALIVE_S: Final = 30
LAST_EVENTS_S: Final = 2.0  # for the last error events to be written
SWITCH_S: Final = 0.0005  # after which a thread that reads a large body lets the loop go on; Python's own is 5 ms
_TICK_S: Final = 0.05
_CERTIFICATE_TICKS: Final = 10  # of uvicorn, a tenth of a second each


def _answer(refusal: ApiError) -> bytes:
    """Renders a whole answer, for requests that never reach the App, with a new id like all others."""
    request_id = str(uuid.uuid4())
    body, id_ = envelope(refusal, request_id), request_id.encode()
    retry = b"" if refusal.retry_after_s is None else b"retry-after: %d\r\n" % refusal.retry_after_s
    ids = b"x-request-id: %b\r\nrequest-id: %b\r\n%b" % (id_, id_, retry)
    head = b"content-type: application/json\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n" % (ids, len(body))
    return STATUS_LINE[refusal.status] + head + body


_HEAD_TOO_LARGE: Final = errors.head_too_large()
_HEAD_TOO_SLOW: Final = errors.head_too_slow()
_TOO_MANY: Final = errors.too_many_connections()
_NO_HTTP: Final = errors.bad_head("this is no well-formed HTTP/1.1")


class DrainableApp(Protocol):
    """The ASGI application that is served, whose work can be ended."""

    @property
    def open_requests(self) -> int:
        """Requests that a drain waits for."""

    @property
    def failed(self) -> str:
        """What ended by an error and cannot be begun again: the server drains and ends then. Empty as long as all goes
        on."""

    def drain(self) -> None:
        """Refuses new work from now on; what runs goes on."""

    def interrupt(self) -> None:
        """Ends what still runs, each request with an error that says why."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class HeadRejected(Exception):
    """Stops the parser; then send_400_response answers."""


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol with bounds on heads, and on how long a client may keep it waiting.

    One timer at a time runs for what the client has to write: the head (then 408), or the rest of a body that nobody
    reads any more (then the connection ends). Another runs while the client does not take what it was sent.
    """

    def __init__(self, limits: ServerConfig, on_lost: Callable[[], None], **uvicorn_options: Any) -> None:
        super().__init__(**uvicorn_options)
        self._limits = limits
        self._on_lost = on_lost
        self._in_head = True
        self._head_bytes = 0
        self._trailer_bytes = 0
        self._refusal: ApiError = _NO_HTTP
        self._write_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)  # over TLS uvloop's own is 512 KiB
        self._start_write_timer(self._limits.header_s, self._reject, _HEAD_TOO_SLOW)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_write_timer()
        self._stop_read_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.header_bytes_max:
            self._reject(_HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["hearth.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self._start_write_timer(self._limits.header_s, self._reject, _HEAD_TOO_SLOW)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header, or a trailer of a chunked body, which nobody reads."""
        if self._in_head:
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailer_bytes > self._limits.header_bytes_max:
            self._refuse(_HEAD_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._stop_write_timer()
        self._head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._head_bytes > self._limits.header_bytes_max:
            self._refuse(_HEAD_TOO_LARGE)
        if fault := client_address.head_problem(self.parser.get_http_version(), self.url, self.headers):
            self._refuse(errors.bad_head(fault))
        if len(self.pipeline) >= PIPELINED_MAX:
            self._refuse(_TOO_MANY)
        self._in_head = False
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # it is answered here; what follows would be another protocol

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes, self._trailer_bytes = True, 0, 0
        self._stop_write_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.response_complete:  # it is not that of a request behind, whose body is still to be read
            self.cycle.body = bytearray()  # unread bytes would stay as long as the connection does
        super().on_response_complete()
        if self.transport.is_closing():
            self._linger()
        elif not self._in_head and self.cycle.response_complete:
            self._start_write_timer(self._limits.body_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        self._reject(self._refusal)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_read_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_read_timer()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._linger()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._linger()

    def _refuse(self, refusal: ApiError) -> None:
        self._refusal = refusal
        raise HeadRejected

    def _start_write_timer(self, seconds: float, on_timeout: Callable[..., object], *arguments: ApiError) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(seconds, on_timeout, *arguments)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _start_read_timer(self) -> None:
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self._limits.blocked_s, self.transport.abort)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _linger(self) -> None:
        """Bounds how long a closed connection waits for its client to take all that was written."""
        self._stop_write_timer()
        self._start_read_timer()

    def _reject(self, refusal: ApiError) -> None:
        """Answers in one write and closes; only closes if that could be taken for the answer to another request. An
        open request whose own body is at fault has no answer yet, and gets this one."""
        self._stop_write_timer()
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and (self._in_head or self.pipeline or self.cycle.response_started):
            self.transport.abort()
            return
        self.transport.write(_answer(refusal))
        self.transport.close()
        self._linger()


class HttpServer(uvicorn.Server):
    """uvicorn's server around one App, with a drain. `serve` and `run` are uvicorn's own."""

    def __init__(self, app: DrainableApp, limits: ServerConfig, certificate: Certificate | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=limits.host,
                port=limits.port,
                ws="none",
                loop="uvloop",
                lifespan="on",
                log_config=None,
                log_level="error",  # input of strangers is no warning: they would write our log
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(LAST_EVENTS_S),
            )
        )
        self._app = app
        self._limits = limits
        self._certificate = certificate
        self._listener: Listener | None = None
        self._skip_waiting = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Starts the drain at the first signal, and ends its waiting at the second."""
        self._skip_waiting = self.should_exit
        self._captured_signals.append(sig)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets, "the listener is open before the server starts"
        (listener,) = sockets
        await super().startup([])
        new_protocol = functools.partial(
            HttpProtocol,
            self._limits,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        too_many = functools.partial(_answer, _TOO_MANY)
        self._listener = Listener(listener, self._limits, self._certificate, too_many, new_protocol)
        self._listener.open()

    async def on_tick(self, counter: int) -> bool:
        if self._certificate is not None and counter % _CERTIFICATE_TICKS == 0:
            self._certificate.refresh()
        return await super().on_tick(counter) or bool(self._app.failed)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.drain()
        await self._wait_idle(self._limits.drain_s)
        self._app.interrupt()
        await self._wait_idle(LAST_EVENTS_S)
        if self._listener is not None:
            self._listener.close()
        await super().shutdown(sockets)
        self._captured_signals.clear()  # they are handled: the process ends by itself, with status 0

    async def _wait_idle(self, seconds: float) -> None:
        """Returns once no request runs, at the latest after `seconds`, and at once after a second signal."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._app.open_requests and loop.time() < deadline and not self._skip_waiting:  # noqa: ASYNC110 signals set no event
            await asyncio.sleep(_TICK_S)


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket whose connections have a bounded send buffer. Port 0 takes a free one. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def allow_descriptors(connections: int) -> int:
    """Allows as many file descriptors as connections need and the system gives; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def run_server(app: DrainableApp, server: ServerConfig, certificate: Certificate | None) -> None:
    """Serves until a signal arrives, or the app has failed, and all requests have ended or were interrupted. Call it on
    the main thread.

    Raises OSError if the port cannot be taken.
    """
    listener = listen(server.host, server.port)
    allow_descriptors(server.connections)
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # objects that stay for good: going through them again would stop all streams for some 15 ms
    HttpServer(app, server, certificate).run([listener])
