"""One inference call from its reservation to its only end. It does not know dialects, bodies or how tokens are made.

    async with call.live():         what work.run does with it:
        await work.run(call)        call.reserve ─► replica_wait.submit ─► … ─► exchange.answer

Whatever happens inside, `live` stops the work's streams, settles the reservation and counts the call, once.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from gateway import errors
from gateway.admission import check_model
from gateway.catalogue.catalogue import Model
from gateway.errors import ApiError
from gateway.http.exchange import JSON_CONTENT, ClientDisconnected, Exchange
from gateway.inference import rate_limit_headers
from gateway.inference.context import InferenceContext
from gateway.inference.crash_breaker import CRASH_MEMORY_S, CRASHES_MAX, request_fingerprint
from gateway.inference.reply import Usage
from gateway.inference.run_options import RunOptions
from tenants.auth.caller import Caller
from tenants.auth.errors import AccountSuspended, HomeUnavailable, UnknownToken
from tenants.limits.denials import QuotaExceeded
from tenants.limits.reservation import CallUsage, Overdrawn, QuotaRequest, Reservation
from tenants.records.holds import BUDGETS
from tenants.store.protocol import StoreUnavailable

log = logging.getLogger(__name__)

CHECKPOINT_S: Final = 1.0
CAUSE_S: Final = 5.0  # how long a call whose replicas were lost waits at most to learn why
LONG_BODY_BYTES: Final = 4096  # what a longer body asks for is encoded in a thread, so that others' streams go on

T = TypeVar("T")


class Work(ABC):
    """What a call does at replicas, and what this has cost so far: the only part in which kinds of calls differ.

    A kind that runs at no replica overrides `run` alone.
    """

    operation = "chat"  # the name of the GenAI conventions, for the span

    @abstractmethod
    async def run(self, call: "InferenceCall") -> None:
        """Does everything from the checked input to the last byte of the answer. Raises ApiError and
        ClientDisconnected."""

    def spent(self, began: float) -> CallUsage:
        """Tokens so far, and the time from `began` to the first one; the call adds its outcome and its total time."""
        return CallUsage()

    def gateway_s(self, began: float) -> float | None:
        """Seconds of the first token's time that the gateway took itself; None before the first token."""
        return None

    @property
    def queue_ms(self) -> float:
        """How long the replica let it wait for its turn."""
        return 0.0

    def cancel(self) -> None:  # noqa: B027 a kind without replicas has nothing to stop
        """Stops the replicas that still compute. Idempotent, awaits nothing."""


@dataclass(eq=False, repr=False)
class InferenceCall:
    """One inference call: its deadline, its reservation, its one end. It ends with exactly one of `settle` (live calls,
    in `live`), `end_recorded` and `release` (calls of batches)."""

    context: InferenceContext
    work: Work
    exchange: Exchange
    caller: Caller
    model: Model
    options: RunOptions
    zero_retention: bool = field(default=False, kw_only=True)
    demand: QuotaRequest | None = field(default=None, init=False)  # what was reserved
    reservation: Reservation | None = field(default=None, init=False)
    outcome: str = field(default="cancelled", init=False)
    refusal: ApiError | None = field(default=None, init=False)  # that ended it
    waited_s: float = field(default=0.0, init=False)  # here, for a replica
    _losses: list[asyncio.Future[bool]] = field(default_factory=list, init=False)
    _ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        name, headers, tracer = self.model.name, self.exchange.headers, self.context.tracer
        self.span = tracer.start_span(name, headers, self.work.operation, self.regions)
        self._checkpoint_at = self.exchange.began + CHECKPOINT_S

    @property
    def regions(self) -> tuple[str, ...]:
        """Where alone it may be served; empty: anywhere."""
        return self.caller.account.settings.regions

    @property
    def limit_s(self) -> float:
        """How long the call may take, from its first byte on."""
        longest_s, timeout_ms = self.context.limits.request_s, self.options.timeout_ms
        return longest_s if timeout_ms is None else min(longest_s, timeout_ms / 1000)

    def left_s(self) -> float:
        return self.limit_s - (self.context.clock() - self.exchange.began)

    @property
    def is_long(self) -> bool:
        """Whether what was sent is long, however few characters of text it has: calls and messages take time too."""
        return self.exchange.body_bytes > LONG_BODY_BYTES

    async def compute(self, work: Callable[[], T]) -> T:
        """Runs work whose time grows with what was sent: at once where that is short, else in a thread, one piece at a
        time for each account; under zero retention in a thread of its own."""
        if not self.is_long and not self.zero_retention:
            return work()
        locks, account_id = self.context.account_locks, self.caller.account.id
        return await locks.run_in_thread(account_id, work, fresh=self.zero_retention)

    def fingerprint(self, tokens: bytes) -> bytes:
        """The prompt's fingerprint for the crash breaker. Raises ApiError where this prompt crashed replicas before."""
        fingerprint = request_fingerprint(self.model.name, self.caller.account_scope, tokens)
        if self.context.crash_breaker.is_open(fingerprint):
            raise errors.crashes(int(CRASH_MEMORY_S / 60))
        return fingerprint

    async def note_loss(self, crashed: asyncio.Future[bool] | None, fingerprint: bytes) -> None:
        """Notes that a replica was lost with this call, as in ReplicaLost; from the second time on it waits until it is
        known why. Raises ApiError where its prompt was in too many crashes: the next replica would follow."""
        breaker = self.context.crash_breaker
        if crashed is not None:
            breaker.watch(fingerprint, crashed)
            self._losses.append(crashed)
        if len(self._losses) >= CRASHES_MAX:
            done, _ = await asyncio.wait(self._losses, timeout=CAUSE_S)
            for loss in done:
                if loss.result():
                    breaker.record_crash(fingerprint, loss)
        if breaker.is_open(fingerprint):
            raise errors.replica_lost()

    async def reserve(
        self, prompt_tokens: int, output_tokens: int = 0, min_output_tokens: int | None = None
    ) -> Reservation:
        """Holds the most that the call can cost, and tells the client in headers what its limits have left. A call in
        the background waits until there is all of it. Raises ApiError; nothing is held then.

        The id of a live call is this exchange's own and new, so that AlreadyRecorded would be a fault of the gateway.
        """
        context, caller, again = self.context, self.caller, self.options.background
        demand = self.demand_of(prompt_tokens, output_tokens, min_output_tokens)
        try:
            self.reservation = await context.quota.reserve(caller, self.exchange.request_id, demand, again=again)
        except QuotaExceeded as exceeded:
            raise _limit_error(context, self.exchange, self.caller, exceeded) from None
        except HomeUnavailable:
            raise errors.home_unavailable() from None
        except StoreUnavailable as problem:
            context.store_health.mark_down(problem)
            raise errors.store_unavailable() from None
        except UnknownToken:
            raise errors.unauthenticated() from None
        except AccountSuspended:
            raise errors.suspended() from None
        context.store_health.mark_up()
        self.demand, self.caller = demand, caller  # a change that came meanwhile is checked again
        self.exchange.counted = True
        self.exchange.extra_headers += rate_limit_headers.headers(self.reservation.limits_left)
        return self.reservation

    def demand_of(self, prompt_tokens: int, output_tokens: int, min_output_tokens: int | None) -> QuotaRequest:
        """What a call of this model that holds so many tokens takes of its limits."""
        model, options = self.model, self.options
        return QuotaRequest(
            model=model.name,
            price=model.batch_price if options.background else model.price,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            min_output_tokens=None if options.background else min_output_tokens,
            model_class=model.settings.limits_class,
            tags=() if self.zero_retention else options.tags,
            metadata="" if self.zero_retention else options.metadata,
        )

    def check(self, caller: Caller, now: float, overdrawn: Overdrawn) -> None:
        """Raises ApiError where a call like this one would be refused for more than a moment, as its caller and its
        `overdrawn` budgets are by now; `now` is seconds since 1970. Else the call goes on with this caller."""
        check_model(self.context.limits.region, now, caller, self.model, self.model.name)
        if self.demand is not None:
            self.check_limits(caller, self.demand, overdrawn)
        self.caller = caller

    def check_limits(self, caller: Caller, demand: QuotaRequest, overdrawn: Overdrawn) -> None:
        """Raises ApiError where the limits of the caller leave no room for this demand, which was granted earlier."""
        try:
            self.context.quota.check_limits(caller, demand, overdrawn)
        except QuotaExceeded as exceeded:
            raise _limit_error(self.context, self.exchange, self.caller, exceeded) from None

    def spent(self) -> CallUsage:
        """What the call has used so far."""
        began = self.exchange.began
        total_ms = (self.context.clock() - began) * 1000
        return msgspec.structs.replace(self.work.spent(began), outcome=self.outcome, total_ms=total_ms)

    def usage(self) -> Usage:
        """What the call costs if it ends now, as answers say it."""
        assert self.reservation is not None, "only what was reserved is answered"
        spent = self.spent()
        return Usage(
            prompt_tokens=spent.prompt_tokens,
            completion_tokens=spent.completion_tokens,
            cached_tokens=spent.cached_tokens,
            neurons=self.reservation.neurons(spent),
            left=rate_limit_headers.fields(self.reservation.limits_after(spent)),
        )

    def checkpoint(self) -> None:
        """Tells the store, at most once a second, what a long call has used. A call in the background is charged at its
        end alone, since it would run again."""
        now = self.context.clock()
        if now >= self._checkpoint_at and self.reservation is not None and not self.options.background:
            self._checkpoint_at = now + CHECKPOINT_S
            self.context.quota.checkpoint(self.reservation, self.spent())

    async def answer(self, body: bytes, usage: Usage | None = None) -> None:
        """Sends the whole answer, with what it costs in a header; None: nothing."""
        neurons = [] if usage is None else [(b"cf-ai-neurons", f"{usage.neurons:.6f}".encode())]
        await self.exchange.answer(200, body, [JSON_CONTENT, *neurons, (b"cache-control", b"no-store")])

    @contextlib.asynccontextmanager
    async def live(self) -> AsyncIterator[None]:
        """Bounds a live call by its time, ends it when its client leaves, and settles it once whatever happens.

        Raises ApiError and ClientDisconnected.
        """
        try:
            async with self.exchange.watching_client(), asyncio.timeout(self.left_s()):
                yield
            self.outcome = "done"
        except TimeoutError:
            self.outcome, self.refusal = "timeout", errors.timed_out(self.limit_s)
            raise self.refusal from None
        except ApiError as refusal:
            self.outcome, self.refusal = refusal.kind, refusal
            raise
        except ClientDisconnected:
            self.outcome = "client_gone"
            raise
        except Exception:
            self.outcome = "internal"
            raise
        finally:
            self.settle()

    def settle(self) -> None:
        """Ends a live call: charges what it used, and counts it. Awaits nothing."""
        self._end()
        spent = self.spent()
        if self.reservation is not None:
            self.context.quota.settle(self.reservation, spent)
        self.context.metrics.finished(self.model.name, spent, self.work.gateway_s(self.exchange.began))
        self._report(spent)

    def release(self) -> None:
        """Ends a try of a batch's call without a charge: it will run again under the same id, to which the hold
        belongs."""
        self._end()
        if self.reservation is not None:
            self.context.quota.forget(self.reservation)

    def stop(self) -> CallUsage:
        """Stops the work of a batch's call and returns what it used in all, which the caller records."""
        self.work.cancel()
        return self.spent()

    def end_recorded(self, spent: CallUsage) -> None:
        """Ends a batch's call whose usage record the store has, and counts it."""
        self.release()
        self.context.metrics.count(self.model.name, spent)
        self._report(spent)

    def _end(self) -> None:
        assert not self._ended, "a call ends once"
        self._ended = True
        self.work.cancel()

    def _report(self, spent: CallUsage) -> None:
        """Tells of the end: soft caps, the account's usage, the trace, and one line of the log without any text."""
        account, reservation, neurons = self.caller.account, self.reservation, 0.0
        if reservation is not None:
            self.context.soft_caps.check(account, reservation.limits_after(spent))
            neurons = reservation.neurons(spent)
        self.context.metrics.account_usage.finished(account, spent, neurons)
        self.span.end(spent)
        first_ms, gateway_s = spent.first_token_ms, self.work.gateway_s(self.exchange.began)
        waits_ms = {
            "gateway_ms": None if gateway_s is None else gateway_s * 1000,
            "held_ms": self.waited_s * 1000,
            "queue_ms": self.work.queue_ms,
        }
        fields = {
            "request": self.exchange.request_id,
            "account": account.id,
            "token": self.caller.token_id,
            "model": self.model.name,
            "outcome": spent.outcome,
            "prompt_tokens": spent.prompt_tokens,
            "cached_tokens": spent.cached_tokens,
            "completion_tokens": spent.completion_tokens,
            "first_token_ms": None if first_ms is None else round(first_ms, 3),
            "total_ms": round(spent.total_ms, 3),
            **{name: round(wait_ms, 3) for name, wait_ms in waits_ms.items() if wait_ms},
            **({} if self.refusal is None else self.refusal.log_fields),
        }
        self.exchange.reported = True
        log.info("request_ended", extra={"fields": fields})


async def count_refused(context: InferenceContext, exchange: Exchange, caller: Caller, refusal: ApiError) -> ApiError:
    """Counts a call that is refused before it is reserved as a request of its account's minute. Returns the refusal, or
    that of the limit where it has no room."""
    try:
        await context.quota.count_refused(caller)
    except QuotaExceeded as exceeded:
        return _limit_error(context, exchange, caller, exceeded)
    except StoreUnavailable as problem:
        context.store_health.mark_down(problem)
    return refusal


def _limit_error(context: InferenceContext, exchange: Exchange, caller: Caller, exceeded: QuotaExceeded) -> ApiError:
    """The refusal of what a limit has no room for, which is counted and told of in the headers."""
    account = caller.account
    exchange.extra_headers += rate_limit_headers.headers([exceeded.status])
    context.soft_caps.check(account, [exceeded.status])
    context.metrics.account_usage.refused(account, exceeded.limit)
    refuse = errors.allocation_used if exceeded.limit in BUDGETS else errors.too_many_requests
    return refuse(exceeded.message, exceeded.retry_after_s, lasting=exceeded.lasting)
