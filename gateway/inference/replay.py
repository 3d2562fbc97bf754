"""Calls of a model that are sent again with the same Idempotency-Key: they get the first answer, and are charged once.

What is kept is what was sent: the bytes of a whole answer with status 200, streamed or not. An error frees its key, so
that the call can be made; so does a stream whose client left it. A call that is not streamed goes on when its client
leaves, for it is the answer that the client will ask for again.
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
ACCOUNT_BYTES_MAX: Final = 64 << 20  # that one gateway keeps for one account and day, compressed
REPLAYED_HEADER: Final[Header] = (b"idempotent-replayed", b"true")
_DAY_S: Final = 86_400
_FREE: Final[Header] = (b"cf-ai-neurons", b"0.000000")


class _RecordedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`body` is compressed; None where it was too large to be kept."""

    streamed: bool
    body: bytes | None


class AnswerRecorder:
    """What an exchange sends of its answer, without comments; None once it is too large."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._left = ANSWER_BYTES_MAX

    def take(self, piece: bytes) -> None:
        self._left -= len(piece)
        if self._left < 0:
            self._pieces.clear()
        elif piece != sse.PING:
            self._pieces.append(piece)

    @property
    def whole(self) -> bytes | None:
        return b"".join(self._pieces) if self._left >= 0 else None


class ReplayCache:
    """One gateway's. `calendar` is seconds since 1970; a call without an end frees its key after `lifetime_s`."""

    def __init__(self, once: IdempotencyStore, calendar: Callable[[], float], lifetime_s: int) -> None:
        self._once = once
        self._calendar = calendar
        self._lifetime_s = lifetime_s
        self._day = 0
        self._kept_bytes: Counter[str] = Counter()  # of each account today

    async def answer(
        self, exchange: Exchange, caller: Caller, key: bytes, body: bytes, serve: Callable[[], Awaitable[None]]
    ) -> None:
        """Lets `serve` answer, or answers as it did before. Raises Refusal, also for a key with another request,
        ClientGone, and StoreUnavailable before anything is served."""
        asker, account_id = f"{caller.token_id} {exchange.path}", caller.account.id
        asked = exchange.query + b"\n" + body
        claimed = await self._once.claim(account_id, asker, key.decode("latin-1"), asked, self._lifetime_s)
        if isinstance(claimed, bytes):
            await _replay(exchange, msgspec.msgpack.decode(claimed, type=_RecordedAnswer))
            return
        copy = AnswerRecorder()
        exchange.tee(copy.take)
        try:
            await serve()
        except (ApiError, ClientDisconnected):
            await _settled(claimed.release)
            raise
        await self._keep(claimed, account_id, exchange, copy.whole)

    async def _keep(self, claim: IdempotencyClaim, account_id: str, exchange: Exchange, whole: bytes | None) -> None:
        packed = None if whole is None else zlib.compress(whole, 1)
        if packed is not None and not self._has_room(account_id, len(packed)):
            packed = None
        answer = msgspec.msgpack.encode(_RecordedAnswer(exchange.is_streaming, packed))
        await _settled(lambda: claim.store(answer))

    def _has_room(self, account_id: str, answer_bytes: int) -> bool:
        today = int(self._calendar() // _DAY_S)
        if self._day != today:
            self._day = today
            self._kept_bytes.clear()
        if self._kept_bytes[account_id] + answer_bytes > ACCOUNT_BYTES_MAX:
            return False
        self._kept_bytes[account_id] += answer_bytes
        return True


async def _settled(act: Callable[[], Awaitable[None]]) -> None:
    """The client has its answer: where the store is away now, the key stays taken until its time is over."""
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
