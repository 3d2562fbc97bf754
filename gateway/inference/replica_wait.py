"""How a call waits for a replica and hands it an order, and what the caller is told where no replica takes it.

It does not know what is ordered.
"""

import asyncio
import logging
import math
from typing import Final

from engine.protocol.frames import Submit
from engine.protocol.types import RejectReason
from gateway import errors
from gateway.cluster.fleet import NoReplicaAvailable
from gateway.cluster.stream import ReplicaRejected, ReplicaStream
from gateway.errors import ApiError
from gateway.inference.lifecycle import InferenceCall

log = logging.getLogger(__name__)

TRIES_MAX: Final = 2  # replicas that one call is sent to
NO_WAIT_S: Final = 1.0  # what a call that must not wait may still wait: others' steps, but no place in a queue
ANSWER_MARGIN_S: Final = 0.02  # how long before its deadline a call is answered that it cannot be served in time


async def submit(call: InferenceCall, order: Submit) -> ReplicaStream:
    """Waits for a replica that can serve the order, and sends it. A call that must not wait does not wake its model
    either. Raises ApiError, ReplicaRejected, ReplicaLost."""
    fleet, model, options = call.context.fleet, call.model.name, call.options
    if options.reject_if_busy and (busy_s := fleet.busy(model)) is not None:
        raise errors.busy(busy_s)
    # A session belongs to its account, whatever its calls share; other calls are grouped by the prefixes they share.
    scope = order.scope.account if options.session else order.scope.id or order.scope.account
    weight, background = call.caller.account.plan.weight, options.background
    deadline = replica_deadline(call)
    try:
        replica = await fleet.acquire(
            model, scope, order.tokens, deadline, options.session, weight=weight, background=background
        )
    except NoReplicaAvailable as unavailable:
        if options.reject_if_busy and unavailable.loading:
            raise errors.busy(unavailable.retry_after_s) from None
        raise errors.no_replica(model, unavailable.retry_after_s, loading=unavailable.loading) from None
    return replica.submit(order, replica_wait_ms(call, replica.waited_s))


def replica_deadline(call: InferenceCall) -> float:
    """Until when the call waits for a replica, on the loop's clock: as long as gateway, account and call allow. Where
    its model sleeps, its own time ends a moment earlier, so that the caller still learns when to come back."""
    options = call.options
    limits_s = [0.0 if options.reject_if_busy else call.context.limits.wait_s, *_plan_limits_s(call)]
    if options.timeout_ms is not None and call.context.fleet.expected_s(call.model.name) is not None:
        limits_s.append(call.left_s() - ANSWER_MARGIN_S)
    return asyncio.get_running_loop().time() + min(limits_s)


def replica_wait_ms(call: InferenceCall, waited_s: float) -> int:
    """How long the call may wait at the replica, after `waited_s` here; 0: without a limit."""
    limits_s = [limit_s - waited_s for limit_s in _plan_limits_s(call)]
    if call.options.reject_if_busy:
        limits_s.append(NO_WAIT_S)
    if call.options.timeout_ms is not None:
        limits_s.append(call.left_s() - (0.0 if _loading_s(call) is None else ANSWER_MARGIN_S))
    return max(1, int(1000 * min(limits_s))) if limits_s else 0


def _plan_limits_s(call: InferenceCall) -> list[float]:
    """The account's plan's limit, where it has one."""
    wait_s = call.caller.account.plan.wait_s
    return [] if wait_s is None else [wait_s]


def error_of_rejection(call: InferenceCall, rejected: ReplicaRejected) -> ApiError:
    """What the caller is told where a replica did not take the order, or not in time: it may be one that wakes."""
    match rejected.reason:
        case RejectReason.TOO_LONG:
            return errors.too_long(rejected.message)
        case RejectReason.INVALID:
            log.error("a replica refused a frame of ours: %s", rejected.message)
            return errors.internal()
        case RejectReason.BUSY if (expected_s := _loading_s(call)) is not None:
            return errors.no_replica(call.model.name, expected_s, loading=True)
        case _:
            return errors.busy(max(1, math.ceil(rejected.retry_after_ms / 1000)))


def _loading_s(call: InferenceCall) -> int | None:
    """Seconds until the call's model is expected to be loaded; None where the call does not wait for that."""
    return None if call.options.reject_if_busy else call.context.fleet.expected_s(call.model.name)
