"""The request path, top to bottom: read, check, encode, reserve, find a replica, follow it, answer; and one end.

It does not know JSON fields, sockets, stores or how a replica is chosen.
"""

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from engine.wire import FinishReason, RejectReason, Scope, ScopeKind, TokenLogprobs
from gateway import errors, tools
from gateway.catalogue import Catalogue, Model
from gateway.config import ServerConfig
from gateway.errors import Refusal
from gateway.exchange import JSON, ClientGone, Exchange
from gateway.fleet import Fleet, Rejected, ReplicaLost, Step, Stream, Unavailable, pack
from gateway.metrics import Metrics
from gateway.prompt import SEED_BITS, Prompt
from gateway.reply import Chosen, Completion, Dialect, Reply, ToolUse, Usage
from gateway.suspects import REMEMBERED_S, Suspects, fingerprint
from gateway.text import Decoder, Text, TextError
from gateway.traces import Span, Traces
from gateway.turns import Turns
from tenants.accounts import Accounts, Caller, UnknownToken
from tenants.quota import Quota, QuotaExceeded, Reservation, Spent
from tenants.store import StoreUnavailable

log = logging.getLogger(__name__)

LONG_TEXT_CHARS: Final = 4096  # longer text is encoded in a thread, so that others' streams go on
CHECKPOINT_S: Final = 1.0
REPLAYS_MAX: Final = 1
LOGPROB_MIN: Final = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the path works with; built once, in app.py."""

    limits: ServerConfig
    accounts: Accounts
    quota: Quota
    catalogue: Catalogue
    fleet: Fleet
    suspects: Suspects
    turns: Turns
    metrics: Metrics
    traces: Traces
    clock: Callable[[], float]  # monotonic seconds
    calendar: Callable[[], float]  # seconds since 1970

    def context_tokens(self, model: Model) -> int:
        """What a replica says, where one can serve; else what the model's folder says."""
        hello = self.fleet.hello(model.name)
        return model.context_tokens if hello is None else hello.context_tokens


class Request:
    """What one request holds and has received so far: the one thing that changes on its way. `close` ends it, once."""

    def __init__(self, gateway: Gateway, exchange: Exchange, caller: Caller, model: Model, prompt: Prompt) -> None:
        self.gateway = gateway
        self.exchange = exchange
        self.caller = caller
        self.model = model
        self.prompt = prompt
        self.span: Span = gateway.traces.begin(model.name, exchange.headers)
        self.reservation: Reservation | None = None
        self.stream: Stream | None = None
        self.choices = [Choice(model, prompt) for _ in range(prompt.n)]
        self.unfinished = prompt.n
        self.prompt_tokens = 0
        self.computed = False  # a replica has begun with the prompt
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.first_token_at: float | None = None
        self.outcome = "cancelled"
        self._checkpoint_at = exchange.began + CHECKPOINT_S

    def spent(self, now: float) -> Spent:
        began = self.exchange.began
        first = self.first_token_at
        return Spent(
            prompt_tokens=self.prompt_tokens if self.computed else 0,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            outcome=self.outcome,
            first_token_ms=None if first is None else (first - began) * 1000,
            total_ms=(now - began) * 1000,
        )

    def checkpoint(self) -> None:
        """Lets the store know, now and then, what a long request has used."""
        now = self.gateway.clock()
        if now >= self._checkpoint_at and self.reservation is not None:
            self._checkpoint_at = now + CHECKPOINT_S
            self.gateway.quota.checkpoint(self.reservation, self.spent(now))

    def receive(self, choice: "Choice", step: Step) -> tuple[str, list[Chosen]]:
        """Counts a step and decodes it: what may be shown of it, text and logprobs. Raises Refusal when it failed."""
        finish = step.finish
        if finish is not None and finish.reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            raise errors.failed(finish.message)
        if choice.finish is not None:
            return "", []
        if step.started is not None:
            self.computed = True
            if step.index_in_n == 0:
                self.cached_tokens = step.started.cached_tokens
        if step.tokens:
            self.computed = True
            self.completion_tokens += len(step.tokens)
            if self.first_token_at is None:
                self.first_token_at = self.gateway.clock()
        text = choice.take(step)
        if choice.finish is not None:
            self.unfinished -= 1
            if finish is None and self.stream is not None:
                self.stream.stop(step.index_in_n)
        return text, choice.score(step) if step.logprobs else []

    def usage(self) -> Usage:
        assert self.reservation is not None
        neurons = self.reservation.neurons(self.spent(self.gateway.clock()))
        return Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens, neurons)

    def close(self) -> None:
        """Whatever happened: the replica stops, the reservation is settled, the request is counted. Awaits nothing."""
        if self.stream is not None:
            self.stream.cancel()
        spent = self.spent(self.gateway.clock())
        if self.reservation is not None:
            self.gateway.quota.settle(self.reservation, spent)
        self.gateway.metrics.finished(self.model.name, spent)
        self.span.end(spent)


class Choice:
    """One completion as it is received. `finish` is stop, length or tool_calls once `last`, its last step, came."""

    __slots__ = ("_decoder", "_held", "_names", "_pieces", "_scored", "_scores", "_text", "finish", "last", "uses")

    def __init__(self, model: Model, prompt: Prompt) -> None:
        self._text = model.text
        self._decoder: Decoder = model.text.decoder(prompt.stop)
        self._names = [tool["function"]["name"] for tool in prompt.tools or []]
        self._held: str | None = "" if self._names else None
        self._pieces: list[str] = []
        self._scores = prompt.sampling.logprobs is not None
        self._scored: list[Chosen] = []
        self.finish: str | None = None
        self.last: Step | None = None
        self.uses: list[ToolUse] = []

    def take(self, step: Step) -> str:
        """The text that may be shown now that these tokens came. Sets `finish` when they were the last."""
        text = self._decoder.push(self._visible(step))
        if self._decoder.stopped:
            self.finish = "stop"
        elif step.finish is not None:
            text += self._decoder.finish()
            self.finish = "length" if step.finish.reason is FinishReason.LENGTH else "stop"
        if self.finish is not None:
            self.last = step
        return text if self._held is None else self._release(text)

    def score(self, step: Step) -> list[Chosen]:
        """The step's log probabilities, without that of a stop token."""
        pairs = zip(self._visible(step), step.logprobs, strict=False)
        return [_scored(self._text, token, scored) for token, scored in pairs]

    def keep(self, text: str, scored: list[Chosen]) -> None:
        self._pieces.append(text)
        self._scored += scored

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion("".join(self._pieces), self.finish, self.uses, self._scored if self._scores else None)

    def _visible(self, step: Step) -> list[int]:
        """The step's tokens without the stop token that ended it."""
        tokens = step.tokens
        stopped = step.finish is not None and step.finish.reason is FinishReason.STOP
        return tokens[:-1] if stopped and tokens and tokens[-1] in self._text.stop_ids else tokens

    def _release(self, text: str) -> str:
        """Holds text back as long as it may be tool calls."""
        assert self._held is not None
        self._held += text
        if self.finish is None and tools.may_be_calls(self._held):
            return ""
        held, self._held = self._held, None
        if self.finish is not None:
            self.uses = tools.tool_uses(held, self._names)
        if self.uses:
            self.finish = "tool_calls"
            return ""
        return held


async def generate(gateway: Gateway, exchange: Exchange, caller: Caller, dialect: Dialect, named: str | None) -> None:
    """One inference request of an authenticated caller, from its body to its settlement.

    Raises Refusal, which may come after a part of the answer was sent, and ClientGone.
    """
    body = await exchange.body(gateway.limits.body_bytes_max)
    name, prompt = dialect.parse(body, exchange.query, named, secrets.randbits(SEED_BITS))
    model = gateway.catalogue.find(name)
    if model is None:
        raise errors.no_such_model(name)
    request = Request(gateway, exchange, caller, model, prompt)
    try:
        async with exchange.attended(), asyncio.timeout(gateway.limits.request_s):
            reply = dialect.reply(prompt, model.name, exchange.request_id, int(gateway.calendar()))
            await serve(request, reply)
            request.outcome = "done"
    except TimeoutError:
        request.outcome = "timeout"
        raise errors.timed_out(gateway.limits.request_s) from None
    except Refusal as refusal:
        request.outcome = refusal.kind
        raise
    except ClientGone:
        request.outcome = "client_gone"
        raise
    finally:
        request.close()


async def serve(request: Request, reply: Reply) -> None:
    """Everything between the checked prompt and the last byte of the answer."""
    gateway, model, prompt = request.gateway, request.model, request.prompt
    ids = await encode(request)
    room = check(gateway, model, prompt, len(ids))
    tokens = pack(ids)
    request.prompt_tokens = len(ids)
    scope = gateway.accounts.scope(request.caller.account.id)
    suspect = fingerprint(model.name, scope, tokens)
    if gateway.suspects.refused(suspect):
        raise errors.crashes(int(REMEMBERED_S / 60))
    max_tokens = min(prompt.max_tokens, room)
    request.reservation = await reserve(request, max_tokens)
    if prompt.stream:
        request.exchange.stream()
    order = Order(tokens, Scope(ScopeKind.TENANT, scope), max_tokens, suspect)
    sink: Sink = Events(request, reply) if prompt.stream else Whole(request, reply)
    await follow(request, order, sink)
    await sink.end()


@dataclass(frozen=True, slots=True)
class Order:
    """What a replica is asked, and asked again where it is lost before its first token."""

    tokens: bytes
    scope: Scope
    max_tokens: int
    suspect: bytes


async def encode(request: Request) -> list[int]:
    """The prompt's ids. Raises Refusal where the model's template or tokenizer cannot take it.

    A long text is encoded in a thread, one at a time for each account; one that cannot fit is not encoded at all.
    """
    gateway, model, prompt = request.gateway, request.model, request.prompt
    if prompt.length <= LONG_TEXT_CHARS:
        return _encode(model, prompt)
    most = model.text.token_bytes_max
    context_tokens = gateway.context_tokens(model)
    if most is not None and prompt.length > context_tokens * most:
        raise errors.too_long(prompt.length // most, context_tokens)
    async with gateway.turns.take(request.caller.account.id):
        return await asyncio.to_thread(_encode, model, prompt)


def _encode(model: Model, prompt: Prompt) -> list[int]:
    text = model.text
    try:
        if prompt.messages is not None:
            if prompt.tools and not text.takes_tools:
                raise errors.bad_input(f"'tools' are not known to {model.name}; leave them out", "tools")
            return text.encode_chat(prompt.messages, prompt.tools)
        assert prompt.text is not None
        if prompt.raw or not text.chats:
            return text.encode_prompt(prompt.text)
        return text.encode_chat([{"role": "user", "content": prompt.text}])
    except TextError as error:
        field = "prompt" if prompt.messages is None else "messages"
        raise errors.bad_input(str(error), field) from None


def check(gateway: Gateway, model: Model, prompt: Prompt, prompt_tokens: int) -> int:
    """How many tokens there is room for behind the prompt. Raises Refusal for what only the model's sizes forbid."""
    context_tokens = gateway.context_tokens(model)
    hello = gateway.fleet.hello(model.name)
    vocabulary = model.vocabulary if hello is None else hello.vocabulary
    if prompt_tokens >= context_tokens:
        raise errors.too_long(prompt_tokens, context_tokens)
    if not prompt_tokens:
        raise errors.bad_input("the prompt is empty; send some text", "prompt")
    over = [id for id in prompt.sampling.logit_bias if id >= vocabulary]
    if over:
        raise errors.bad_input(f"'logit_bias': {over[0]} is no token id; the vocabulary has {vocabulary}", "logit_bias")
    return context_tokens - prompt_tokens


async def reserve(request: Request, max_tokens: int) -> Reservation:
    """Holds the most that the request can cost. Raises Refusal; nothing is held then."""
    gateway, model, prompt = request.gateway, request.model, request.prompt
    try:
        return await gateway.quota.reserve(
            request.caller,
            request.exchange.request_id,
            model.name,
            model.price,
            request.prompt_tokens,
            max_tokens * prompt.n,
        )
    except QuotaExceeded as exceeded:
        if exceeded.limit == "neurons_per_day":
            raise errors.allocation_used(exceeded.message, exceeded.retry_after_s) from None
        raise errors.too_many_requests(exceeded.message, exceeded.retry_after_s) from None
    except StoreUnavailable:
        raise errors.store_unavailable() from None
    except UnknownToken:
        raise errors.unauthenticated() from None


def _scored(text: Text, token: int, scored: TokenLogprobs) -> Chosen:
    top = zip(scored.top_ids, scored.top_logprobs, strict=True)
    return _chosen(text, token, scored.logprob, [_chosen(text, id, logprob, []) for id, logprob in top])


def _chosen(text: Text, token: int, logprob: float, top: list[Chosen]) -> Chosen:
    raw = text.token_bytes(token)
    return Chosen(raw.decode("utf-8", "replace"), raw, max(logprob, LOGPROB_MIN), top)


class Sink(Protocol):
    """Where steps go: into events, or into one body."""

    def take(self, step: Step) -> None: ...

    async def flush(self) -> None:
        """Sends what was taken, if it is sent before the end at all."""
        ...

    async def end(self) -> None: ...


async def follow(request: Request, order: Order, sink: Sink) -> None:
    """Runs the order on a replica, and once more on another one where the first is lost before any token came."""
    lost = 0
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
        except ReplicaLost:
            lost += 1
            request.gateway.suspects.note(order.suspect)
            if lost > REPLAYS_MAX or request.completion_tokens:
                raise errors.replica_lost() from None
            request.computed = False  # nothing of it reached the client
        except Rejected as rejected:
            raise _rejection(rejected) from None


async def submit(request: Request, order: Order) -> Stream:
    """Waits for a replica that can serve, and sends it the order. Raises Refusal, Rejected, ReplicaLost."""
    gateway, model, prompt = request.gateway, request.model, request.prompt
    if prompt.reject_if_busy and gateway.fleet.busy(model.name):
        raise errors.busy()
    wait_s = 0.0 if prompt.reject_if_busy else gateway.limits.wait_s
    deadline = asyncio.get_running_loop().time() + wait_s
    try:
        link = await gateway.fleet.link(model.name, order.scope.id, order.tokens, deadline)
    except Unavailable as unavailable:
        raise errors.no_replica(model.name, loading=unavailable.loading) from None
    return link.submit(
        tokens=order.tokens,
        scope=order.scope,
        sampling=prompt.sampling,
        max_tokens=order.max_tokens,
        stop_ids=model.stop_ids,
        n=prompt.n,
        traceparent=request.span.traceparent,
    )


class Events:
    """The streamed answer: all steps that came since the last write leave as events in one write."""

    def __init__(self, request: Request, reply: Reply) -> None:
        self._request = request
        self._reply = reply
        self._events = [reply.begin()]

    def take(self, step: Step) -> None:
        choice, index = self._request.choices[step.index_in_n], step.index_in_n
        text, scored = self._request.receive(choice, step)
        if text or scored:
            self._events.append(self._reply.text(index, text, scored))
        if choice.finish is not None and step is choice.last:
            if choice.uses:
                self._events.append(self._reply.tools(index, choice.uses))
            self._events.append(self._reply.finish(index, choice.finish))

    async def flush(self) -> None:
        if self._events:
            events, self._events = b"".join(self._events), []
            await self._request.exchange.write(events)
            self._request.checkpoint()

    async def end(self) -> None:
        events = b"".join(self._events)
        await self._request.exchange.end(events + self._reply.end(self._request.usage()))


class Whole:
    """The answer in one piece."""

    def __init__(self, request: Request, reply: Reply) -> None:
        self._request = request
        self._reply = reply

    def take(self, step: Step) -> None:
        choice = self._request.choices[step.index_in_n]
        text, scored = self._request.receive(choice, step)
        choice.keep(text, scored)

    async def flush(self) -> None:
        self._request.checkpoint()

    async def end(self) -> None:
        usage = self._request.usage()
        body = self._reply.whole([choice.completion() for choice in self._request.choices], usage)
        neurons = (b"cf-ai-neurons", f"{usage.neurons:.6f}".encode())
        await self._request.exchange.answer(200, body, [JSON, neurons, (b"cache-control", b"no-store")])


def _rejection(rejected: Rejected) -> Refusal:
    retry_after_s = max(1, math.ceil(rejected.retry_after_ms / 1000))
    match rejected.reason:
        case RejectReason.TOO_LONG:
            return errors.never_fits(rejected.message)
        case RejectReason.INVALID:
            log.error("a replica refused a frame of ours: %s", rejected.message)
            return errors.internal()
        case _:
            return errors.busy(retry_after_s)
