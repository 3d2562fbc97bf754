"""An authenticated inference request from its body to its answer: read, admit, and hand over to the work it asks for.

It does not know JSON fields, stores, replicas or how batches are kept.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from gateway import errors
from gateway.api.dialect import (
    BatchRequest,
    BatchResultsRequest,
    Dialect,
    GenerationRequest,
    LiveRequest,
    TokenCountRequest,
    draw_seed,
    matches_task,
    options_in_body,
)
from gateway.catalogue.catalogue import Catalogue, Model
from gateway.http import sse
from gateway.http.exchange import Exchange
from gateway.inference.cache_scope import zero_retention_of
from gateway.inference.context import InferenceContext
from gateway.inference.embed import EmbeddingWork
from gateway.inference.lifecycle import InferenceCall, Work
from gateway.inference.pipeline import TextGeneration, TokenCount
from gateway.inference.replay import ReplayCache
from gateway.inference.run_options import refuse_options, run_options
from gateway.privacy.interned import InternedScrubber
from tenants.auth.caller import Caller
from tenants.store.protocol import StoreUnavailable

# Answers a call about a batch: exchange, caller, model, request, zero retention.
BatchHandler = Callable[[Exchange, Caller, Model, BatchRequest | BatchResultsRequest, bool], Awaitable[None]]


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

    async def serve(self, exchange: Exchange, caller: Caller, dialect: Dialect, model_name: str | None) -> None:
        """One request, from its body to its settlement. `model_name` is the model that the path names, if any.

        Raises ApiError, which may come after a part of the answer was sent, and ClientDisconnected.
        """
        zero_retention = zero_retention_of(exchange, caller)
        key = exchange.headers.get(b"idempotency-key")
        if zero_retention and key is not None:
            raise errors.bad_input("the header 'Idempotency-Key' asks to keep what may not be kept; leave it out")
        try:
            body = await exchange.body(self.context.limits.body_bytes_max)
            answer = partial(self._answer, exchange, caller, dialect, model_name, body, zero_retention)
            await (answer() if key is None else self.replays.answer(exchange, caller, key, body, answer))
        except StoreUnavailable as problem:
            self.context.store_health.mark_down(problem)
            raise errors.store_unavailable() from None
        finally:
            if zero_retention:
                self.scrubber.mark_dirty()

    async def _answer(
        self,
        exchange: Exchange,
        caller: Caller,
        dialect: Dialect,
        model_name: str | None,
        body: bytes,
        zero_retention: bool,
    ) -> None:
        read = partial(dialect, body, exchange.query, model_name, draw_seed())
        request = await self.context.account_locks.parse(caller.account.id, len(body), read)
        model = self.catalogue.find(request.model)
        if model is None:
            raise errors.no_such_model(request.model)
        check_admission(self.context, self.calendar(), caller, model, request.model)
        if not matches_task(model, request):
            raise errors.wrong_task(model.name, model.task)
        if isinstance(request, BatchRequest | BatchResultsRequest):
            await self.answer_batch(exchange, caller, model, request, zero_retention)
            return
        refuse_options(exchange.query)
        options = run_options(exchange.headers, exchange.query).joined(options_in_body(request))
        work = self.work_of(request, model, exchange.request_id)
        call = InferenceCall(self.context, work, exchange, caller, model, options, zero_retention=zero_retention)
        async with call.live():
            await work.run(call)

    def work_of(self, request: LiveRequest, model: Model, request_id: str) -> Work:
        """What the request, which arrives now, asks to be done."""
        if isinstance(request, GenerationRequest):
            reply = request.reply(request.model, request_id, int(self.calendar()), self.paddings)
            return TextGeneration(request.prompt, reply)
        if isinstance(request, TokenCountRequest):
            return TokenCount(request.prompt, request.render)
        assert model.embedding_spec is not None, "the model writes text"
        return EmbeddingWork(request, model.embedding_spec)


def check_admission(context: InferenceContext, now: float, caller: Caller, model: Model, name: str) -> None:
    """Raises ApiError where the caller may not have this model, by this name, served here and now."""
    if not caller.grant.serves(model.name):
        raise errors.model_not_permitted(model.name)
    if model.ends_on is not None and model.ended(datetime.fromtimestamp(now, UTC).date()):
        raise errors.deprecated(name, model.ends_on)
    regions = caller.account.settings.regions
    if regions and context.limits.region not in regions:
        raise errors.wrong_region(context.limits.region, regions)
