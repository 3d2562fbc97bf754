"""Calls that are sent again with the same Idempotency-Key: they get the first answer, and are charged once.

Each is let in as a call of its own: whatever would refuse that refuses the answer, and it counts as one request.

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
from gateway.http import sse
from gateway.http.exchange import JSON_CONTENT, Exchange, Header
from gateway.http.idempotency import IdempotencyStore
from gateway.inference.lifecycle import InferenceCall, Work
from tenants.auth.caller import Caller
from tenants.store.protocol import StoreUnavailable

log = logging.getLogger(__name__)

ANSWER_BYTES_MAX: Final = 256 << 10
ACCOUNT_BYTES_MAX: Final = 64 << 20  # that one gateway stores for one account and day, compressed
REPLAYED_HEADER: Final[Header] = (b"idempotent-replayed", b"true")
_DAY_S: Final = 86_400
_FREE: Final[Header] = (b"cf-ai-neurons", b"0.000000")


class RecordedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`body` is compressed; None where it was too large to be kept. `tokens` were reserved for it: those of the prompt,
    the output and, where fewer were enough, the least of it; None where nothing was."""

    streamed: bool
    body: bytes | None
    tokens: tuple[int, int, int | None] | None = None


class ReplayedAnswer(Work):
    """The work of a call whose answer is recorded. It is one request for the limits and costs no tokens; a limit under
    which the recorded call could not run any more refuses it."""

    def __init__(self, recorded: RecordedAnswer) -> None:
        self._recorded = recorded

    async def run(self, call: InferenceCall) -> None:
        recorded, exchange = self._recorded, call.exchange
        if recorded.tokens is not None:
            call.check_limits(call.caller, call.demand_of(*recorded.tokens), {})
        await call.reserve(0)
        if recorded.body is None:
            raise errors.answer_not_kept()
        body = zlib.decompress(recorded.body)
        exchange.extra_headers = [*exchange.extra_headers, REPLAYED_HEADER]
        if recorded.streamed:
            await exchange.end(body)
        else:
            await exchange.answer(200, body, [JSON_CONTENT, _FREE, (b"cache-control", b"no-store")])


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
        self,
        exchange: Exchange,
        caller: Caller,
        key: bytes,
        body: bytes,
        serve: Callable[[], Awaitable[InferenceCall | None]],
        replay: Callable[[RecordedAnswer], Awaitable[None]],
    ) -> None:
        """Lets `serve` answer and return the call that did, or `replay` repeat its answer. Raises ApiError, also for a
        key with another request, ClientDisconnected, and StoreUnavailable before anything is served."""
        subject, account_id = f"{caller.token_id} {exchange.path}", caller.account.id
        request = exchange.query + b"\n" + body
        claimed = await self._store.claim(account_id, subject, key.decode("latin-1"), request, self._lifetime_s)
        if isinstance(claimed, bytes):
            await replay(msgspec.msgpack.decode(claimed, type=RecordedAnswer))
            return
        copy = AnswerRecorder()
        exchange.tee(copy.append)
        try:
            call = await serve()
        except Exception:
            await _settled(claimed.release)
            raise
        packed = None if copy.body is None else zlib.compress(copy.body, 1)
        if packed is not None and not self._has_room(account_id, len(packed)):
            packed = None
        demand = None if call is None else call.demand
        tokens = None if demand is None else (demand.prompt_tokens, demand.output_tokens, demand.min_output_tokens)
        answer = msgspec.msgpack.encode(RecordedAnswer(exchange.is_streaming, packed, tokens))
        await _settled(lambda: claimed.store(answer))

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
