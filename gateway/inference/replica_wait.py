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
from gateway.cluster.stream import ReplicaLost, ReplicaMoved, ReplicaRejected, ReplicaStream
from gateway.errors import ApiError
from gateway.inference.lifecycle import InferenceCall

log = logging.getLogger(__name__)

NO_WAIT_S: Final = 1.0  # what a call that must not wait may still wait: others' steps, but no place in a queue
NOW_S: Final = 0.0  # on the loop's clock: a deadline that is over
ANSWER_MARGIN_S: Final = 0.02  # how long before its deadline a call is answered that it cannot be served in time


async def submit(
    call: InferenceCall, order: Submit, began_as: str | None = None, moved: ReplicaMoved | None = None
) -> ReplicaStream:
    """Waits for a replica that can serve the order, and sends it. A call that must not wait does not wake its model
    either; an order that another replica of the model `began_as` began waits for as long as its call may take. One that
    was handed over goes where it was.

    Raises ApiError, ReplicaRejected, ReplicaLost."""
    if moved is not None and moved.target.ready:
        return moved.target.open_stream(order, 0, None)
    fleet, model, options = call.context.fleet, call.model.name, call.options
    if began_as is None and options.reject_if_busy and (busy_s := fleet.busy(model, call.regions)) is not None:
        raise errors.busy(busy_s)
    weight, background = call.caller.account.plan.weight, options.background
    deadline = replica_deadline(call) if began_as is None else _end_of_call(call)
    try:
        replica = await fleet.acquire(
            model,
            _affinity(call, order),
            order.tokens,
            deadline,
            options.session,
            weight=weight,
            background=background,
            began_as=began_as,
            regions=call.regions,
            shared=(order.scope.kind, order.scope.id, order.scope.epoch) if order.scope.kind else None,
            movable=_movable(order),
        )
    except NoReplicaAvailable as unavailable:
        if began_as is not None:
            problem = {"model": model, "problem": unavailable.message}
            log.error("stream_not_resumed", extra={"fields": problem})
            raise errors.replica_lost() from None
        if unavailable.outside:
            raise errors.no_machine_in_region(model, call.regions) from None
        if options.reject_if_busy and unavailable.loading:
            raise errors.busy(unavailable.retry_after_s) from None
        raise errors.no_replica(model, unavailable.retry_after_s, loading=unavailable.loading) from None
    if began_as is not None:
        return replica.submit(order)
    call.waited_s = replica.waited_s
    return replica.submit(order, replica_wait_ms(call, replica.waited_s))


async def submit_beside(call: InferenceCall, order: Submit, stream: ReplicaStream) -> ReplicaStream | None:
    """Sends an order at once to another replica than that of a stream, which goes on meanwhile; to the one that the
    stream has warmed, if any. None: no other takes it now."""
    try:
        if stream.warmed is not None and stream.warmed.ready:
            return stream.warmed.open_stream(order, 0, None)
        replica = await call.context.fleet.acquire(
            call.model.name,
            _affinity(call, order),
            order.tokens,
            NOW_S,
            call.options.session,
            background=call.options.background,
            began_as=stream.model,
            regions=call.regions,
            besides=stream.replica,
        )
        return replica.submit(order)
    except (NoReplicaAvailable, ReplicaRejected, ReplicaLost):
        return None


def _affinity(call: InferenceCall, order: Submit) -> bytes:
    """A session belongs to its account, whatever its calls share; other calls are grouped by the prefixes they
    share."""
    return order.scope.account if call.options.session else order.scope.id or order.scope.account


def _movable(order: Submit) -> int:
    """How many completions may go on at another replica than computes their prompt: none of one that goes on already,
    of images, whose KV has names in one replica alone, of batches, and where there is nothing to go on with."""
    whole = not (order.given or order.images or order.pooling or order.terms.background) and order.max_tokens > 1
    return order.n if whole else 0


def _end_of_call(call: InferenceCall) -> float:
    """On the loop's clock, a moment before the call's time is over."""
    return asyncio.get_running_loop().time() + max(0.0, call.left_s() - ANSWER_MARGIN_S)


def replica_deadline(call: InferenceCall) -> float:
    """Until when the call waits for a replica, on the loop's clock: as long as gateway, account and call allow. Where
    its model sleeps, its own time ends a moment earlier, so that the caller still learns when to come back."""
    options = call.options
    limits_s = [0.0 if options.reject_if_busy else call.context.limits.wait_s, *_plan_limits_s(call)]
    if options.timeout_ms is not None and call.context.fleet.expected_s(call.model.name, call.regions) is not None:
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
        case RejectReason.REGION:  # what its Hello said is not what it holds to
            log.error("a replica refused a call for its region: %s", rejected.message)
            return errors.no_machine_in_region(call.model.name, call.regions)
        case RejectReason.BUSY if (expected_s := _loading_s(call)) is not None:
            return errors.no_replica(call.model.name, expected_s, loading=True)
        case _:
            return errors.busy(max(1, math.ceil(rejected.retry_after_ms / 1000)))


def _loading_s(call: InferenceCall) -> int | None:
    """Seconds until the call's model is expected to be loaded; None where the call does not wait for that."""
    return None if call.options.reject_if_busy else call.context.fleet.expected_s(call.model.name, call.regions)
