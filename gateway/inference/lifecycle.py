"""What requests for text and for vectors do alike on their way: hold neurons, find a replica, and say why one refused.

It does not know what is asked of the replica.
"""

import asyncio
import logging
import math
from typing import Final, Protocol

from engine.protocol.types import RejectReason, Scope
from gateway import errors
from gateway.catalogue.catalogue import Model
from gateway.cluster.client import ReplicaClient, ReplicaRejected
from gateway.cluster.fleet import NoReplicaAvailable
from gateway.errors import ApiError
from gateway.http.exchange import Exchange
from gateway.inference import rate_limit_headers
from gateway.inference.request import InferenceContext
from gateway.inference.run_options import RunOptions
from tenants.auth.caller import Caller
from tenants.auth.errors import AccountSuspended, UnknownToken
from tenants.limits.denials import QuotaExceeded
from tenants.limits.reservation import QuotaRequest, Reservation
from tenants.records.holds import BUDGETS
from tenants.store.protocol import StoreUnavailable

log = logging.getLogger(__name__)

LONG_TEXT_CHARS: Final = 4096  # longer text is encoded in a thread, so that others' streams go on
TRIES_MAX: Final = 2
NO_WAIT_S: Final = 1.0  # what a call that is not to wait may: others' steps, but nobody's turn
ANSWER_MARGIN_S: Final = 0.02  # what an answer to a call takes whose time is over


class OpenCall(Protocol):
    """A request of either kind."""

    gateway: InferenceContext
    exchange: Exchange
    caller: Caller
    model: Model
    options: RunOptions

    def left_s(self) -> float: ...


async def reserve(request: OpenCall, demand: QuotaRequest) -> Reservation:
    """Holds the most that the request can cost. Raises Refusal; nothing is held then.

    Its id is this exchange's own and new, so that AlreadyRecorded would be a fault of ours: it ends as one.
    """
    gateway = request.gateway
    try:
        reservation = await gateway.quota.reserve(request.caller, request.exchange.request_id, demand)
    except QuotaExceeded as exceeded:
        request.exchange.extra_headers = rate_limit_headers.headers([exceeded.left])
        gateway.thresholds.consider(request.caller.account, [exceeded.left])
        account = request.caller.account
        gateway.metrics.shares.refused(account.id, account.plan.name, exceeded.limit)
        refuse = errors.allocation_used if exceeded.limit in BUDGETS else errors.too_many_requests
        raise refuse(exceeded.message, exceeded.retry_after_s, lasting=exceeded.lasting) from None
    except StoreUnavailable as problem:
        gateway.outage.begin(problem)
        raise errors.store_unavailable() from None
    except UnknownToken:
        raise errors.unauthenticated() from None
    except AccountSuspended:
        raise errors.suspended() from None
    gateway.outage.end()
    return reservation


async def acquire_replica(request: OpenCall, scope: Scope, tokens: bytes, deadline: float) -> ReplicaClient:
    """Waits for a replica that can serve these tokens until the loop's clock shows `deadline`. A call that is not to
    wait does not wake its model either. Raises Refusal."""
    gateway, model, options = request.gateway, request.model, request.options
    if options.reject_if_busy and (busy_s := gateway.fleet.busy(model.name)) is not None:
        raise errors.busy(busy_s)
    # A session is its account's, whatever its calls share; else those come together that can share a prefix.
    whose = scope.account if options.session else scope.id or scope.account
    weight, background = request.caller.account.plan.weight, options.background
    try:
        return await gateway.fleet.link(
            model.name, whose, tokens, deadline, options.session, weight=weight, background=background
        )
    except NoReplicaAvailable as unavailable:
        retry_after_s = unavailable.retry_after_s
        if options.reject_if_busy and unavailable.loading:
            raise errors.busy(retry_after_s) from None
        raise errors.no_replica(model.name, retry_after_s, loading=unavailable.loading) from None


def replica_deadline(request: OpenCall) -> float:
    """Until when a request waits for a replica from now on, on the loop's clock: as long as gateway, account and call
    allow. Where its model sleeps, its own time ends a moment earlier, so that it is told when to come back."""
    gateway, options = request.gateway, request.options
    limits_s = [0.0 if options.reject_if_busy else gateway.limits.wait_s, *_limits_s(request)]
    if options.timeout_ms is not None and gateway.fleet.expected_s(request.model.name) is not None:
        limits_s.append(request.left_s() - ANSWER_MARGIN_S)
    return asyncio.get_running_loop().time() + min(limits_s)


def replica_wait_ms(request: OpenCall, held_s: float) -> int:
    """For how long it may wait at the replica, once it has waited for it; 0 for ever."""
    limits_s = [limit_s - held_s for limit_s in _limits_s(request)]
    if request.options.reject_if_busy:
        limits_s.append(NO_WAIT_S)
    if request.options.timeout_ms is not None:
        limits_s.append(request.left_s() - (0.0 if _loads_s(request) is None else ANSWER_MARGIN_S))
    return max(1, int(1000 * min(limits_s))) if limits_s else 0


def _limits_s(request: OpenCall) -> list[float]:
    """What its account's plan says, where it does."""
    wait_s = request.caller.account.plan.wait_s
    return [] if wait_s is None else [wait_s]


def error_of_rejection(request: OpenCall, rejected: ReplicaRejected) -> ApiError:
    """What the caller is told where a replica did not take the request, or not in time: it may be one that wakes."""
    match rejected.reason:
        case RejectReason.TOO_LONG:
            return errors.never_fits(rejected.message)
        case RejectReason.INVALID:
            log.error("a replica refused a frame of ours: %s", rejected.message)
            return errors.internal()
        case RejectReason.BUSY if (expected_s := _loads_s(request)) is not None:
            return errors.no_replica(request.model.name, expected_s, loading=True)
        case _:
            return errors.busy(max(1, math.ceil(rejected.retry_after_ms / 1000)))


def _loads_s(request: OpenCall) -> int | None:
    """How long a call that may wait would wait for its model to be loaded; None where that is not what it waits for."""
    return None if request.options.reject_if_busy else request.gateway.fleet.expected_s(request.model.name)
