"""Calls that are sent again with the same Idempotency-Key: they get the first answer, and are charged once.

Stored are the bytes that were sent: a whole answer with status 200, streamed or not. An error frees its key, so that
the call can be made again; so does a stream whose client left it. A call that is not streamed goes on when its client
leaves, since the client will ask for its answer again.
"""

import logging
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from gateway import errors
from gateway.errors import ApiError
from gateway.http import sse
from gateway.http.exchange import JSON_CONTENT, ClientDisconnected, Exchange, Header
from gateway.http.idempotency import IdempotencyClaim, IdempotencyStore
from tenants.auth.caller import Caller
from tenants.store.protocol import StoreUnavailable

log = logging.getLogger(__name__)

ANSWER_BYTES_MAX: Final = 256 << 10
ACCOUNT_BYTES_MAX: Final = 64 << 20  # that one gateway stores for one account and day, compressed
REPLAYED_HEADER: Final[Header] = (b"idempotent-replayed", b"true")
_DAY_S: Final = 86_400
_FREE: Final[Header] = (b"cf-ai-neurons", b"0.000000")


class _RecordedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`body` is compressed; None where it was too large to be kept."""

    streamed: bool
    body: bytes | None


class AnswerRecorder:
    """The answer that an exchange sends, without comments; `body` is None once it is too large."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._bytes_left = ANSWER_BYTES_MAX

    def append(self, piece: bytes) -> None:
        self._bytes_left -= len(piece)
        if self._bytes_left < 0:
            self._pieces.clear()
        elif piece != sse.PING:
            self._pieces.append(piece)

    @property
    def body(self) -> bytes | None:
        return b"".join(self._pieces) if self._bytes_left >= 0 else None


class ReplayCache:
    """The answers of one gateway. `calendar` is seconds since 1970; a call without an end frees its key after
    `lifetime_s`."""

    def __init__(self, store: IdempotencyStore, calendar: Callable[[], float], lifetime_s: int) -> None:
        self._store = store
        self._calendar = calendar
        self._lifetime_s = lifetime_s
        self._day = 0
        self._stored_bytes: Counter[str] = Counter()  # by account, today

    async def answer(
        self, exchange: Exchange, caller: Caller, key: bytes, body: bytes, serve: Callable[[], Awaitable[None]]
    ) -> None:
        """Lets `serve` answer, or repeats its answer. Raises ApiError, also for a key with another request,
        ClientDisconnected, and StoreUnavailable before anything is served."""
        subject, account_id = f"{caller.token_id} {exchange.path}", caller.account.id
        request = exchange.query + b"\n" + body
        claimed = await self._store.claim(account_id, subject, key.decode("latin-1"), request, self._lifetime_s)
        if isinstance(claimed, bytes):
            await _replay(exchange, msgspec.msgpack.decode(claimed, type=_RecordedAnswer))
            return
        copy = AnswerRecorder()
        exchange.tee(copy.append)
        try:
            await serve()
        except (ApiError, ClientDisconnected):
            await _settled(claimed.release)
            raise
        await self._keep(claimed, account_id, exchange, copy.body)

    async def _keep(self, claim: IdempotencyClaim, account_id: str, exchange: Exchange, body: bytes | None) -> None:
        packed = None if body is None else zlib.compress(body, 1)
        if packed is not None and not self._has_room(account_id, len(packed)):
            packed = None
        answer = msgspec.msgpack.encode(_RecordedAnswer(exchange.is_streaming, packed))
        await _settled(lambda: claim.store(answer))

    def _has_room(self, account_id: str, answer_bytes: int) -> bool:
        today = int(self._calendar() // _DAY_S)
        if self._day != today:
            self._day = today
            self._stored_bytes.clear()
        if self._stored_bytes[account_id] + answer_bytes > ACCOUNT_BYTES_MAX:
            return False
        self._stored_bytes[account_id] += answer_bytes
        return True


async def _settled(act: Callable[[], Awaitable[None]]) -> None:
    """Ends a claim whose client has its answer: while the store is away, the key stays taken until its time is over."""
    try:
        await act()
    except StoreUnavailable as problem:
        log.warning("answer_not_kept", extra={"fields": {"for": str(problem)}})


async def _replay(exchange: Exchange, answer: _RecordedAnswer) -> None:
    if answer.body is None:
        raise errors.answer_not_kept()
    body = zlib.decompress(answer.body)
    exchange.extra_headers = [REPLAYED_HEADER]
    if answer.streamed:
        await exchange.end(body)
    else:
        await exchange.answer(200, body, [JSON_CONTENT, _FREE, (b"cache-control", b"no-store")])
