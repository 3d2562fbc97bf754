"""One request on its way: what it holds, what it has received, and how both end. It does not know what comes next.

`generate` is the path; this is what walks it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from engine.protocol.types import FinishReason
from gateway import errors
from gateway.batch.api import BatchApi
from gateway.catalogue.catalogue import Catalogue, Model
from gateway.cluster.client import OutputDelta, ReplicaStream
from gateway.cluster.fleet import ReplicaFleet
from gateway.config import ServerConfig
from gateway.http.exchange import Exchange
from gateway.http.json_body import is_json
from gateway.inference import rate_limit_headers
from gateway.inference.account_lock import AccountLocks
from gateway.inference.completion import CompletionBuilder
from gateway.inference.crash_breaker import CrashBreaker
from gateway.inference.prompt import Prompt
from gateway.inference.replay import ReplayCache
from gateway.inference.reply import ScoredToken, Usage
from gateway.inference.run_options import RunOptions
from gateway.observability.metrics import Metrics
from gateway.observability.store_health import StoreHealth
from gateway.observability.tracing import RequestSpan, RequestTracer
from gateway.privacy.interned import InternedScrubber
from gateway.tool_parsers.parts import OutputPart
from tenants.auth.accounts import AccountService
from tenants.auth.caller import Caller
from tenants.limits.quota import Quota
from tenants.limits.reservation import CallUsage, Reservation
from tenants.limits.soft_caps import SoftCaps

log = logging.getLogger(__name__)

CHECKPOINT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class InferenceContext:
    """What the path works with; built once, in app.py."""

    limits: ServerConfig
    accounts: AccountService
    quota: Quota
    thresholds: SoftCaps
    catalogue: Catalogue
    fleet: ReplicaFleet
    suspects: CrashBreaker
    outage: StoreHealth
    turns: AccountLocks
    residue: InternedScrubber
    repeats: ReplayCache
    desk: BatchApi
    metrics: Metrics
    traces: RequestTracer
    clock: Callable[[], float]  # monotonic seconds
    calendar: Callable[[], float]  # seconds since 1970

    def context_tokens(self, model: Model) -> int:
        """What a replica says, where one can serve; else what the model's folder says."""
        hello = self.fleet.hello(model.name)
        return model.context_tokens if hello is None else hello.context_tokens


class GenerationCall:
    """What one request holds and has received so far: the one thing that changes on its way. `close` ends it, once."""

    def __init__(
        self,
        gateway: InferenceContext,
        exchange: Exchange,
        caller: Caller,
        model: Model,
        prompt: Prompt,
        options: RunOptions = RunOptions(),  # noqa: B008 frozen
    ) -> None:
        self.gateway = gateway
        self.exchange = exchange
        self.caller = caller
        self.model = model
        self.prompt = prompt
        self.options = options
        self.span: RequestSpan = gateway.traces.begin(model.name, exchange.headers)
        self.reservation: Reservation | None = None
        self.stream: ReplicaStream | None = None
        self.choices: list[CompletionBuilder] = []  # from the time on when the prompt is encoded
        self.unfinished = prompt.n
        self.prompt_tokens = 0
        self.computed = False  # a replica has begun with the prompt
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.first_token_at: float | None = None
        self.outcome = "cancelled"
        self.cut = False  # a limit of neurons lets it generate less than it asked for
        self._checkpoint_at = exchange.began + CHECKPOINT_S

    def begin(self, prompt_tokens: int, opened: bool) -> None:
        """The prompt is encoded; `opened`: it ends within a thought."""
        self.prompt_tokens = prompt_tokens
        self.choices = [CompletionBuilder(self.model, self.prompt, opened) for _ in range(self.prompt.n)]

    def spent(self, now: float) -> CallUsage:
        began = self.exchange.began
        first = self.first_token_at
        return CallUsage(
            prompt_tokens=self.prompt_tokens if self.computed else 0,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            outcome=self.outcome,
            first_token_ms=None if first is None else (first - began) * 1000,
            total_ms=(now - began) * 1000,
        )

    @property
    def limit_s(self) -> float:
        """How long it may take, from its first byte on."""
        return self.options.limit_s(self.gateway.limits.request_s)

    def left_s(self) -> float:
        return self.limit_s - (self.gateway.clock() - self.exchange.began)

    def own_s(self) -> float | None:
        """What the gateway took to the first token, the replica's part left out; None where none came."""
        if self.first_token_at is None or self.stream is None or self.stream.taken_s is None:
            return None
        return max(0.0, self.first_token_at - self.exchange.began - self.stream.taken_s)

    def checkpoint(self) -> None:
        """Lets the store know, now and then, what a long request has used. Of one in the background nothing is charged
        before its end: it would run again."""
        now = self.gateway.clock()
        if now >= self._checkpoint_at and self.reservation is not None and not self.options.background:
            self._checkpoint_at = now + CHECKPOINT_S
            self.gateway.quota.checkpoint(self.reservation, self.spent(now))

    def receive(self, choice: CompletionBuilder, step: OutputDelta) -> tuple[list[OutputPart], list[ScoredToken]]:
        """Counts a step and decodes it: what may be shown of it, and its log probabilities. Raises Refusal when it
        failed, or when it ended before its text was what the prompt's grammar wants."""
        finish = step.finish
        if finish is not None and finish.reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            raise errors.failed(finish.message)
        if choice.finish is not None:
            return [], []
        if step.started is not None:
            self.computed = True
            if step.index_in_n == 0:
                self.cached_tokens = step.started.cached_tokens
        if step.tokens:
            self.computed = True
            self.completion_tokens += len(step.tokens)
            if self.first_token_at is None:
                self.first_token_at = self.gateway.clock()
        parts = choice.take(step)
        if choice.finish is not None:
            self.unfinished -= 1
            if self.cut and choice.finish == "length":
                choice.finish = "quota"
            if finish is None and self.stream is not None:
                self.stream.stop(step.index_in_n)
            if self.prompt.grammar is not None:
                check_grammar_met(choice, self.prompt)
        return parts, choice.score(step) if step.logprobs else []

    def restart(self) -> None:
        """The replica went before any token came: nothing of what it did reached the client, or is charged."""
        assert not self.completion_tokens
        self.computed, self.cached_tokens = False, 0

    def usage(self) -> Usage:
        assert self.reservation is not None
        spent = self.spent(self.gateway.clock())
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            neurons=self.reservation.neurons(spent),
            left=rate_limit_headers.fields(self.reservation.after(spent)),
            cut=any(choice.finish == "quota" for choice in self.choices),
            thought_tokens=sum(choice.thought_tokens for choice in self.choices),
        )

    def stop(self) -> None:
        """Its replica goes no further."""
        if self.stream is not None:
            self.stream.cancel()

    def close(self) -> None:
        """Whatever happened: the replica stops, the reservation is settled, the request is counted. Awaits nothing."""
        self.stop()
        end_call(self, self.spent(self.gateway.clock()), self.own_s())


class EndedCall(Protocol):
    """What there is of a request of any kind at its end."""

    gateway: InferenceContext
    exchange: Exchange
    caller: Caller
    model: Model
    span: RequestSpan
    reservation: Reservation | None


def end_call(request: EndedCall, spent: CallUsage, own_s: float | None) -> None:
    """Settles what it reserved, and counts it. `own_s` is the gateway's part of the time to its first token."""
    if request.reservation is not None:
        request.gateway.quota.settle(request.reservation, spent)
    request.gateway.metrics.finished(request.model.name, spent, own_s)
    report_call(request, spent)


def report_call(request: EndedCall, spent: CallUsage) -> None:
    """Tells of the end of a request: those whom its account wants to know it, its share, its trace and the journal."""
    gateway, account, reservation = request.gateway, request.caller.account, request.reservation
    neurons = 0.0
    if reservation is not None:
        gateway.thresholds.consider(account, reservation.after(spent))
        neurons = reservation.neurons(spent)
    gateway.metrics.shares.finished(account.id, account.plan.name, spent, neurons)
    request.span.end(spent)
    log.info("request_ended", extra={"fields": _fields(request, spent)})


def _fields(request: EndedCall, spent: CallUsage) -> dict[str, Any]:
    """What the journal says of it: ids, counts and times, never text."""
    first_ms = spent.first_token_ms
    return {
        "request": request.exchange.request_id,
        "account": request.caller.account.id,
        "token": request.caller.token_id,
        "model": request.model.name,
        "outcome": spent.outcome,
        "prompt_tokens": spent.prompt_tokens,
        "cached_tokens": spent.cached_tokens,
        "completion_tokens": spent.completion_tokens,
        "first_token_ms": None if first_ms is None else round(first_ms, 3),
        "total_ms": round(spent.total_ms, 3),
    }


def check_grammar_met(choice: CompletionBuilder, prompt: Prompt) -> None:
    """Raises Refusal where a choice that ended is not what the prompt's grammar wants: a part is never sent as a whole.

    The replica holds the answer to the grammar until something cuts it; that a document is one is looked at again here.
    """
    limit, stop = prompt.word("max_tokens"), prompt.word("stop")
    if choice.finish == "length":
        raise errors.grammar_not_met(f"the answer was not whole within its tokens; raise '{limit}'", limit)
    if choice.finish == "quota":
        raise errors.grammar_not_met("a limit of neurons ended the answer; ask again when it has more", limit)
    if choice.stopped_by is not None:
        raise errors.grammar_not_met(f"a stop string ended the answer; leave '{stop}' out", stop)
    if prompt.json and choice.finish != "tool_calls" and not is_json(choice.text):
        raise errors.grammar_not_met("the answer is no JSON document; ask again", prompt.grammar_field)
