"""The request path, top to bottom: read, check, encode, reserve, find a replica, follow it, answer; and one end.

It does not know JSON fields, sockets, stores or how a replica is chosen.
"""

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol

from engine.protocol.types import Grammar, RejectReason, SchedulingTerms, Scope
from gateway import errors
from gateway.api.run_batch import BatchRequest, BatchResultsRequest
from gateway.catalogue.catalogue import Model
from gateway.catalogue.tasks import ModelTask
from gateway.cluster.client import (
    OutputDelta,
    ReplicaAsleep,
    ReplicaLost,
    ReplicaRejected,
    ReplicaStream,
    pack_token_ids,
)
from gateway.errors import ApiError
from gateway.http.exchange import JSON_CONTENT, ClientDisconnected, Exchange
from gateway.inference import rate_limit_headers
from gateway.inference.cache_scope import scope_of, terms_of, zero_retention
from gateway.inference.completion import reasoning_enabled
from gateway.inference.crash_breaker import CRASH_MEMORY_S, request_fingerprint
from gateway.inference.embed import EmbeddingCall, serve_embedding
from gateway.inference.embedding_types import EmbeddingRequest
from gateway.inference.grammar import answer_grammar, grammar_error
from gateway.inference.lifecycle import (
    LONG_TEXT_CHARS,
    TRIES_MAX,
    acquire_replica,
    error_of_rejection,
    replica_deadline,
    replica_wait_ms,
    reserve,
)
from gateway.inference.prompt import SEED_BITS, Prompt
from gateway.inference.reply import Dialect, GenerationRequest, Reply, TokenCountRequest
from gateway.inference.request import GenerationCall, InferenceContext
from gateway.inference.run_options import refuse_options, run_options
from gateway.text.tokenizer import TokenizationError
from gateway.tool_parsers.reasoning import MARKERS, grammar_after_reasoning, opens_reasoning
from tenants.auth.caller import Caller
from tenants.limits.reservation import QuotaRequest
from tenants.store.protocol import StoreUnavailable

THOUGHT_TOKENS_MAX: Final = 16  # of a prompt, in which "<think>" and some line breaks behind it are


async def generate(
    gateway: InferenceContext, exchange: Exchange, caller: Caller, dialect: Dialect, named: str | None
) -> None:
    """One inference request of an authenticated caller, from its body to its settlement.

    Raises Refusal, which may come after a part of the answer was sent, and ClientGone.
    """
    zero, key = zero_retention(exchange, caller), exchange.headers.get(b"idempotency-key")
    if zero and key is not None:
        raise errors.bad_input("the header 'Idempotency-Key' asks to keep what may not be kept; leave it out")
    try:
        body = await exchange.body(gateway.limits.body_bytes_max)
        work = partial(dispatch, gateway, exchange, caller, dialect, named, body, zero)
        await (work() if key is None else gateway.repeats.answer(exchange, caller, key, body, work))
    except StoreUnavailable as problem:
        gateway.outage.begin(problem)
        raise errors.store_unavailable() from None
    finally:
        if zero:
            gateway.residue.leave()


async def dispatch(
    gateway: InferenceContext,
    exchange: Exchange,
    caller: Caller,
    dialect: Dialect,
    named: str | None,
    body: bytes,
    zero: bool,
) -> None:
    """The same from its body on; `zero` says that nothing of it may be kept."""
    asked = dialect.read(body, exchange.query, named, secrets.randbits(SEED_BITS))
    model = gateway.catalogue.find(asked.model)
    if model is None:
        raise errors.no_such_model(asked.model)
    admit(gateway, caller, model, asked.model)
    if not matches_task(model, asked):
        raise errors.wrong_task(model.name, model.task)
    if isinstance(asked, BatchRequest | BatchResultsRequest):
        await gateway.desk.answer(exchange, caller, model, asked, zero)
        return
    refuse_options(exchange.query)
    options = run_options(exchange.headers, exchange.query)
    request: GenerationCall | EmbeddingCall
    if isinstance(asked, EmbeddingRequest):
        request = EmbeddingCall(gateway, exchange, caller, model, asked, options.joined(asked.texts.options))
    else:
        request = GenerationCall(gateway, exchange, caller, model, asked.prompt, options.joined(asked.prompt.options))
    try:
        async with exchange.watching_client(), asyncio.timeout(request.left_s()):
            if isinstance(request, EmbeddingCall):
                await serve_embedding(request, zero)
            elif isinstance(asked, TokenCountRequest):
                await serve_token_count(request, asked, zero)
            elif isinstance(asked, GenerationRequest):
                reply = asked.reply(asked.model, exchange.request_id, int(gateway.calendar()))
                await serve_generation(request, reply, zero)
            request.outcome = "done"
    except TimeoutError:
        request.outcome = "timeout"
        raise errors.timed_out(request.limit_s) from None
    except ApiError as refusal:
        request.outcome = refusal.kind
        raise
    except ClientDisconnected:
        request.outcome = "client_gone"
        raise
    except Exception:
        request.outcome = "internal"
        raise
    finally:
        request.close()


def admit(gateway: InferenceContext, caller: Caller, model: Model, named: str) -> None:
    """Raises Refusal where the caller may not have this model, by this name, served here and now."""
    if not caller.grant.serves(model.name):
        raise errors.model_not_permitted(model.name)
    if model.ends_on is not None and model.ended(datetime.fromtimestamp(gateway.calendar(), UTC).date()):
        raise errors.deprecated(named, model.ends_on)
    regions = caller.account.settings.regions
    if regions and gateway.limits.region not in regions:
        raise errors.wrong_region(gateway.limits.region, regions)


def matches_task(
    model: Model, asked: GenerationRequest | TokenCountRequest | EmbeddingRequest | BatchRequest | BatchResultsRequest
) -> bool:
    """Whether the model does what is asked."""
    if isinstance(asked, BatchRequest | BatchResultsRequest):
        return True  # each request of a batch is read as the model's own bodies are
    if not isinstance(asked, EmbeddingRequest):
        return model.task is ModelTask.GENERATION
    return model.task is ModelTask.EMBEDDINGS or (model.task is ModelTask.CLASSIFICATION and asked.texts.scored)


async def serve_generation(request: GenerationCall, reply: Reply, zero: bool) -> None:
    """Everything between the checked prompt and the last byte of the answer."""
    gateway, model, prompt = request.gateway, request.model, request.prompt
    ids = await encode_generation(request, zero)
    room = check_prompt_fits(gateway, model, prompt, len(ids))
    opened = reasoning_enabled(model, prompt) and opens_reasoning(
        model.text.decoder(shown=MARKERS).push(ids[-THOUGHT_TOKENS_MAX:])
    )
    grammar = grammar_with_reasoning(model, prompt, opened)
    tokens = pack_token_ids(ids)
    request.begin(len(ids), opened)
    caller = request.caller
    suspect = request_fingerprint(model.name, caller.own_scope, tokens)
    if gateway.suspects.refused(suspect):
        raise errors.crashes(int(CRASH_MEMORY_S / 60))
    max_tokens = min(prompt.max_tokens or model.default_tokens, room)
    request.reservation = reservation = await reserve(request, quota_request(request, max_tokens, zero))
    request.exchange.extra_headers = rate_limit_headers.headers(reservation.left)
    affordable = reservation.output_tokens // prompt.n
    request.cut = affordable < max_tokens
    if prompt.stream:
        request.exchange.stream(reply.fail)
    scope, terms = scope_of(caller, prompt.user, zero), terms_of(caller, zero, background=request.options.background)
    order = SubmitParams(tokens, scope, terms, min(max_tokens, affordable), grammar, suspect)
    sink: OutputSink = EventStreamSink(request, reply) if prompt.stream else SingleBodySink(request, reply)
    await run_on_replica(request, order, sink)
    await sink.end()


async def serve_token_count(request: GenerationCall, asked: TokenCountRequest, zero: bool) -> None:
    """Answers how many tokens the prompt has. It counts as one request for the limits, and costs no tokens."""
    request.reservation = reservation = await reserve(request, quota_request(request, 0, zero))
    request.exchange.extra_headers = rate_limit_headers.headers(reservation.left)
    ids = await encode_generation(request, zero)
    await request.exchange.answer(200, asked.answer(len(ids)), [JSON_CONTENT, (b"cache-control", b"no-store")])


@dataclass(frozen=True, slots=True)
class SubmitParams:
    """What a replica is asked, and asked again where it is lost before its first token."""

    tokens: bytes
    scope: Scope
    terms: SchedulingTerms
    max_tokens: int
    grammar: Grammar | None
    suspect: bytes


async def encode_generation(request: GenerationCall, zero: bool) -> list[int]:
    """The prompt's ids. Raises Refusal where the model's template or tokenizer cannot take it.

    A long text is encoded in a thread, one at a time for each account; one that cannot fit is not encoded at all. So is
    one of which nothing may be kept, in a thread of its own: tokenizers keep the words that they met in a thread until
    it ends.
    """
    gateway, model, prompt = request.gateway, request.model, request.prompt
    if prompt.bulk <= LONG_TEXT_CHARS and not zero:
        return _encode(model, prompt)
    most = model.text.token_bytes_max
    context_tokens = gateway.context_tokens(model)
    if most is not None and prompt.length > context_tokens * most:
        raise errors.too_long(prompt.length // most, context_tokens)
    async with gateway.turns.take(request.caller.account.id):
        return await (_encode_alone(model, prompt) if zero else asyncio.to_thread(_encode, model, prompt, True))


async def _encode_alone(model: Model, prompt: Prompt) -> list[int]:
    thread = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, _encode, model, prompt)
    finally:
        thread.shutdown(wait=False)


def _encode(model: Model, prompt: Prompt, spread: bool = False) -> list[int]:
    """`spread`: by several threads."""
    text = model.text
    if prompt.ids is not None:
        return prompt.ids
    options = _template_options(model, prompt)
    try:
        if prompt.messages is not None:
            if prompt.tools and not text.takes_tools:
                raise errors.bad_input(f"'tools' are not known to {model.name}; leave them out", "tools")
            return text.encode_chat(prompt.messages, prompt.tools, options=options, spread=spread)
        assert prompt.text is not None
        if prompt.raw or not text.chats:
            return text.encode_prompt(prompt.text)
        return text.encode_chat([{"role": "user", "content": prompt.text}], options=options)
    except TokenizationError as error:
        field = prompt.word("prompt" if prompt.messages is None else "messages")
        raise errors.bad_input(str(error), field) from None


def _template_options(model: Model, prompt: Prompt) -> dict[str, Any]:
    """Raises Refusal for those that the chat template does not know. Without thinking there is none to turn off."""
    known = frozenset() if prompt.raw else model.text.options
    options: dict[str, Any] = {}
    for name, value in prompt.template_options.items():
        if name in known:
            options[name] = value
        elif (name, value) not in (("reasoning_effort", "none"), ("enable_thinking", False)):
            field = prompt.word(name if name == "reasoning_effort" else f"chat_template_kwargs.{name}")
            said = ", ".join(sorted(known)) or "none"
            raise errors.bad_input(f"'{field}' is not known to the template of {model.name}, which has {said}", field)
    return options


def check_prompt_fits(gateway: InferenceContext, model: Model, prompt: Prompt, prompt_tokens: int) -> int:
    """How many tokens there is room for behind the prompt. Raises Refusal for what only the model's sizes forbid."""
    context_tokens = gateway.context_tokens(model)
    hello = gateway.fleet.hello(model.name)
    vocabulary = model.vocabulary if hello is None else hello.vocabulary
    if prompt_tokens >= context_tokens:
        raise errors.too_long(prompt_tokens, context_tokens)
    if not prompt_tokens:
        raise errors.bad_input("the prompt is empty; send some text", "prompt")
    if prompt.ids is not None and max(prompt.ids) >= vocabulary:
        raise errors.bad_input(f"'prompt': ids of tokens are below {vocabulary}; send smaller ones", "prompt")
    over = [id for id in prompt.sampling.logit_bias if id >= vocabulary]
    if over:
        raise errors.bad_input(f"'logit_bias': {over[0]} is no token id; the vocabulary has {vocabulary}", "logit_bias")
    return context_tokens - prompt_tokens


def grammar_with_reasoning(model: Model, prompt: Prompt, opened: bool) -> Grammar | None:
    """What the answer is held to; a thought before it is free. Raises Refusal."""
    grammar = answer_grammar(prompt, model.calls, model.name)
    if grammar is None or not reasoning_enabled(model, prompt):
        return grammar
    return grammar_after_reasoning(grammar, model.text.added, opened)


def quota_request(request: GenerationCall, max_tokens: int, zero: bool) -> QuotaRequest:
    """The most that the request can cost. One in the background waits until there is all of it."""
    model, prompt, options = request.model, request.prompt, request.options
    return QuotaRequest(
        model=model.name,
        price=model.batch_price if options.background else model.price,
        prompt_tokens=request.prompt_tokens,
        output_tokens=max_tokens * prompt.n,
        least_tokens=None if options.background else prompt.n,
        model_class=model.limits_class,
        tags=() if zero else options.tags,
        metadata="" if zero else options.metadata,
    )


class OutputSink(Protocol):
    """Where steps go: into events, or into one body."""

    def take(self, step: OutputDelta) -> None: ...

    async def flush(self) -> None:
        """Sends what was taken, if it is sent before the end at all."""
        ...

    async def end(self) -> None: ...


async def run_on_replica(request: GenerationCall, order: SubmitParams, sink: OutputSink) -> None:
    """Runs the order on a replica, and once more on another one where the first goes away before any token came. One
    whose model goes to sleep before it has begun waits for it again."""
    tries = 1
    while True:
        try:
            request.stream = await submit(request, order)
            async for step in request.stream:
                sink.take(step)
                if not request.stream.ready:
                    await sink.flush()
                if not request.unfinished:
                    break
            return
        except ReplicaAsleep:
            continue
        except ReplicaLost:
            request.gateway.suspects.note(order.suspect)
            if request.completion_tokens:
                raise errors.replica_lost() from None
            request.restart()
            if tries == TRIES_MAX:
                raise errors.replica_lost() from None
        except ReplicaRejected as rejected:
            if tries == TRIES_MAX or rejected.reason is not RejectReason.DRAINING:
                if rejected.reason is RejectReason.GRAMMAR:
                    raise grammar_error(request.prompt, order.grammar, rejected.message) from None
                raise error_of_rejection(request, rejected) from None
        tries += 1


async def submit(request: GenerationCall, order: SubmitParams) -> ReplicaStream:
    """Waits for a replica that can serve, and sends it the order. Raises Refusal, Rejected, ReplicaLost."""
    prompt, chosen = (
        request.prompt,
        await acquire_replica(request, order.scope, order.tokens, replica_deadline(request)),
    )
    return chosen.submit(
        tokens=order.tokens,
        scope=order.scope,
        sampling=prompt.sampling,
        max_tokens=order.max_tokens,
        grammar=order.grammar,
        stop_ids=request.model.stop_ids,
        n=prompt.n,
        traceparent=request.span.traceparent,
        terms=order.terms,
        deadline_ms=replica_wait_ms(request, chosen.held_s),
    )


class EventStreamSink:
    """The streamed answer: all steps that came since the last write leave as events in one write."""

    def __init__(self, request: GenerationCall, reply: Reply) -> None:
        self._request = request
        self._reply = reply
        self._begun = False
        self._events: list[bytes] = []

    def take(self, step: OutputDelta) -> None:
        choice, index = self._request.choices[step.index_in_n], step.index_in_n
        parts, scored = self._request.receive(choice, step)
        if not self._begun:
            self._begun = True
            self._events.append(self._reply.begin(self._request.prompt_tokens, self._request.cached_tokens))
        if parts or scored:
            self._events.append(choice.render(self._reply, index, parts, scored))
        if choice.finish is not None and step is choice.last:
            self._events.append(self._reply.finish(index, choice.finish, choice.stopped_by))

    async def flush(self) -> None:
        if self._events:
            events, self._events = b"".join(self._events), []
            await self._request.exchange.write(events)
            self._request.checkpoint()

    async def end(self) -> None:
        events = b"".join(self._events)
        await self._request.exchange.end(events + self._reply.end(self._request.usage()))


class SingleBodySink:
    """The answer in one piece."""

    def __init__(self, request: GenerationCall, reply: Reply) -> None:
        self._request = request
        self._reply = reply

    def take(self, step: OutputDelta) -> None:
        self._request.receive(self._request.choices[step.index_in_n], step)

    async def flush(self) -> None:
        self._request.checkpoint()

    async def end(self) -> None:
        usage = self._request.usage()
        body = self._reply.whole([choice.completion() for choice in self._request.choices], usage)
        neurons = (b"cf-ai-neurons", f"{usage.neurons:.6f}".encode())
        await self._request.exchange.answer(200, body, [JSON_CONTENT, neurons, (b"cache-control", b"no-store")])
