"""An authenticated inference request from its body to its answer: read, admit, and hand over to the work it asks for.

It does not know JSON fields, stores, replicas or how batches are kept.
"""

import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from gateway import errors
from gateway.api.dialect import (
    AnyRequest,
    BatchRequest,
    BatchResultsRequest,
    Dialect,
    GenerationRequest,
    LiveRequest,
    TokenCountRequest,
    options_in_body,
)
from gateway.api.reading import read_call
from gateway.catalogue.catalogue import Catalogue, Model
from gateway.errors import ApiError
from gateway.http import sse
from gateway.inference.cache_scope import zero_retention_of
from gateway.inference.context import InferenceContext
from gateway.inference.embed import EmbeddingWork
from gateway.inference.lifecycle import InferenceCall, Work, count_refused
from gateway.inference.pipeline import TextGeneration, TokenCount
from gateway.inference.replay import RecordedAnswer, ReplayCache, ReplayedAnswer
from gateway.inference.run_options import RunOptionsBody, refuse_options, run_options
from gateway.open_requests import OpenRequest
from gateway.privacy.interned import InternedScrubber
from tenants.store.protocol import StoreUnavailable

# Answers a call about a batch: the call, its model, what it asks, zero retention.
BatchHandler = Callable[[OpenRequest, Model, BatchRequest | BatchResultsRequest, bool], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class InferenceEndpoint:
    """Answers inference requests; built once, in app.py. `calendar` is seconds since 1970; `paddings` are those of all
    streams."""

    context: InferenceContext
    catalogue: Catalogue
    replays: ReplayCache
    scrubber: InternedScrubber
    answer_batch: BatchHandler
    calendar: Callable[[], float]
    paddings: Iterator[bytes] = field(default_factory=sse.paddings)

    async def serve(self, request: OpenRequest, dialect: Dialect, model_name: str | None) -> None:
        """One request, from its body to its settlement. `model_name` is the model that the path names, if any.

        Raises ApiError, which may come after a part of the answer was sent, and ClientDisconnected.
        """
        exchange = request.exchange
        zero_retention = zero_retention_of(exchange, request.caller)
        key = exchange.headers.get(b"idempotency-key")
        if zero_retention and key is not None:
            raise errors.bad_input("the header 'Idempotency-Key' asks to keep what may not be kept; leave it out")
        try:
            body = await exchange.body(self.context.limits.body_bytes_max, partial(self._take_bytes, request))
            now = self.calendar()
            asked, model = await read_call(self.context, self.catalogue, now, request, body, dialect, model_name)
            answer = partial(self._answer, request, model, asked, zero_retention)
            if key is None:
                await answer()
            else:
                replay = partial(self._replay, request, model, asked)
                await self.replays.answer(exchange, request.caller, key, body, answer, replay)
        except StoreUnavailable as problem:
            self.context.store_health.mark_down(problem)
            raise errors.store_unavailable() from None
        except ApiError as refusal:
            if exchange.counted or refusal.status == 401 or refusal.status >= 429:  # 429 and 503 are no fault of it
                raise
            raise await count_refused(self.context, exchange, request.caller, refusal) from None
        finally:
            if zero_retention:
                self.scrubber.mark_dirty()

    def _take_bytes(self, request: OpenRequest, size_bytes: int) -> None:
        """Raises ApiError where the account sends more bytes than it may."""
        account = request.caller.account
        if wait_s := self.context.account_bytes.take(account.id, size_bytes):
            self.context.metrics.account_usage.refused(account, "bytes_per_second")
            allowed, retry_after_s = self.context.limits.account_bytes, math.ceil(wait_s)
            message = f"account {account.name} may send {allowed:,} bytes per second; wait {retry_after_s} s"
            raise errors.too_many_requests(message, retry_after_s)

    async def _answer(
        self, request: OpenRequest, model: Model, asked: AnyRequest, zero_retention: bool
    ) -> InferenceCall | None:
        """Answers anew. Returns the call if a model was asked."""
        exchange = request.exchange
        if isinstance(asked, BatchRequest | BatchResultsRequest):
            if home := request.caller.account.home:
                raise errors.kept_at_home(home)
            await self.answer_batch(request, model, asked, zero_retention)
            return None
        refuse_options(exchange.query)
        work = self.work_of(asked, model, exchange.request_id)
        return await self._run(request, model, work, options_in_body(asked), zero_retention)

    async def _replay(self, request: OpenRequest, model: Model, asked: AnyRequest, recorded: RecordedAnswer) -> None:
        """Answers with what was recorded."""
        options = None if isinstance(asked, BatchRequest | BatchResultsRequest) else options_in_body(asked)
        await self._run(request, model, ReplayedAnswer(recorded), options, zero_retention=False)

    async def _run(
        self, request: OpenRequest, model: Model, work: Work, options: RunOptionsBody | None, zero_retention: bool
    ) -> InferenceCall:
        exchange = request.exchange
        joined = run_options(exchange.headers, exchange.query).joined(options)
        call = InferenceCall(self.context, work, exchange, request.caller, model, joined, zero_retention=zero_retention)
        request.call = call
        async with call.live():
            await work.run(call)
        return call

    def work_of(self, request: LiveRequest, model: Model, request_id: str) -> Work:
        """What the request, which arrives now, asks to be done."""
        if isinstance(request, GenerationRequest):
            reply = request.reply(request.model, request_id, int(self.calendar()), self.paddings)
            return TextGeneration(request.prompt, reply)
        if isinstance(request, TokenCountRequest):
            return TokenCount(request.prompt, request.render)
        assert model.embedding_spec is not None, "the model writes text"
        return EmbeddingWork(request, model.embedding_spec)
