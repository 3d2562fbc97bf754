"""Runs queued requests on capacity that live calls leave free: claims them, runs each as a live call is run, and
writes its result and charge in one step. It does not know where batches are stored.

Each gateway claims for itself, while no live request waits at a replica. A request that cannot run now goes back into
the queue: until a limit of its account gives way, or for a moment where a replica or the store was lost. Requests of a
killed gateway are claimed again when their leases are over, under the same request ids.

Requests are claimed only for models on a device. Once batches have waited ASLEEP_S for a model that sleeps, its
machines get the demand of one live request; where requests of an account found it in none of its regions, machines of
those do. Its weight is below every plan's at first, and that of a plain request when the oldest batch is a day old:
batches take the room that nobody wants, and get some in the end.

Requests for a model that was removed wait: they run once it is asked for again, here or at another gateway.
"""

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from msgspec import structs

from gateway import errors
from gateway.api.dialect import BatchRequest, BatchResultsRequest, Dialect, draw_seed
from gateway.api.endpoint import InferenceEndpoint
from gateway.batch.background_exchange import BackgroundExchange
from gateway.batch.concurrency import ConcurrencyController
from gateway.batch.encryption import BatchEncryption, BatchOrigin, StoredRequest
from gateway.catalogue.catalogue import Model
from gateway.errors import ApiError
from gateway.inference.lifecycle import InferenceCall
from gateway.inference.run_options import RunOptions
from gateway.open_requests import CHECK_S, OpenRequest, OpenRequestChecks
from tenants.auth.accounts import AccountService
from tenants.auth.caller import Caller
from tenants.limits.denials import AlreadyRecorded
from tenants.records.batches import BatchJobItem, BatchStatus, QueueDepth
from tenants.store.protocol import BatchStore, StoreUnavailable

LEASE_S: Final = 10.0  # shorter than a hold lasts, so that the gateway that takes over finds the hold
RENEW_S: Final = 2.0
LOOK_S: Final = 1.0  # how often to look for batches of other gateways
TIDY_S: Final = 10.0
PACE_S: Final = 0.1
BACKGROUND_MAX: Final = 128  # sequences at one replica, of all gateways together
CLAIM: Final = 16  # requests in one claim, all of one account: then others have their turn
TRIES_MAX: Final = 5
AGAIN_S: Final = 1.0
WRONG_REGION: Final = "wrong_region"  # another gateway, which may serve it, accepted the batch and will claim it
SUSPENDED: Final = "account_suspended"
SUSPENDED_S: Final = 60.0
ASLEEP_S: Final = 60.0
DAY_S: Final = 86400.0
SLEEPING_WEIGHT_MIN: Final = 0.001

log = logging.getLogger(__name__)


class _EnvelopedResult(msgspec.Struct, frozen=True):
    """What is stored of an answer in the envelope."""

    result: msgspec.Raw


@dataclass(eq=False, slots=True)
class _ClaimedItem:
    """An item that this gateway runs, and once it was opened the request that it is and where that came from."""

    item: BatchJobItem
    origin: BatchOrigin | None = None
    request: OpenRequest | None = None


class BatchWorker:
    """The worker of one gateway. `waiting` is what the store reported last about all gateways' queues; `running` counts
    this gateway's requests, by model. `arrived` is set when a batch arrives here."""

    def __init__(
        self,
        endpoint: InferenceEndpoint,
        accounts: AccountService,
        checks: OpenRequestChecks,
        batches: BatchStore,
        encryption: BatchEncryption,
        families: Mapping[str, Dialect],
        arrived: asyncio.Event,
    ) -> None:
        self._endpoint = endpoint
        self._context = endpoint.context
        self._calendar = endpoint.calendar
        self._accounts = accounts
        self._checks = checks
        self._batches = batches
        self._encryption = encryption
        self._families = families  # of bodies of `/ai/run`, by their names
        self._arrived = arrived
        self._catalogue = endpoint.catalogue
        self._demanded: set[str] = set()  # models that machines were told of
        self._missed: set[tuple[str, tuple[str, ...]]] = set()  # models that no machine serves in these regions,
        self._bound: set[tuple[str, tuple[str, ...]]] = set()  # and those of them that machines there were told of
        self._claimed: dict[str, _ClaimedItem] = {}
        self._closing: set[str] = set()  # batches that are being closed
        self._stopped = False
        self._concurrency = ConcurrencyController()
        self.running = Counter(dict.fromkeys(endpoint.catalogue.names, 0))
        self.waiting: Mapping[str, QueueDepth] = {}

    def stop(self) -> None:
        """Claims nothing more."""
        self._stopped = True
        for name, regions in {*((name, ()) for name in self._demanded), *self._bound}:
            self._context.fleet.set_batch_demand(name, 0, 0.0, regions)

    async def run(self) -> None:
        """Works until cancelled; then puts back what has not ended."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._every(RENEW_S, self._renew))
                group.create_task(self._every(CHECK_S, self._end_refused))
                group.create_task(self._every(TIDY_S, self._sweep))
                group.create_task(self._every(PACE_S, self._adjust))
                group.create_task(self._every(0.0, lambda: self._claim(group)))
        finally:  # another gateway, or this one once it is begun again, goes on at once
            claimed, self._claimed = [claimed.item for claimed in self._claimed.values()], {}
            self.running = Counter(dict.fromkeys(self.running, 0))
            try:
                await self._batches.put_back(claimed, 0.0)
            except StoreUnavailable as problem:
                log.warning("batches_left", extra={"fields": {"items": len(claimed), "for": str(problem)}})

    async def _every(self, seconds: float, act: Callable[[], Awaitable[object]]) -> None:
        """Repeats `act`. While the store is away nothing is lost: leases and holds go on, or end."""
        while True:
            try:
                await act()
            except StoreUnavailable as problem:
                self._context.store_health.mark_down(problem)
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(seconds)

    async def _claim(self, group: asyncio.TaskGroup) -> None:
        """Claims as much as there is room for; waits a moment if that is nothing."""
        claimed = False
        for model in self._catalogue:
            spare = self._context.fleet.spare(model.name, BACKGROUND_MAX)
            count = min(CLAIM, max(1, self._concurrency.limit // 4))
            if self._stopped or min(spare, self._concurrency.limit - self.running.total()) < count:
                continue
            for item in await self._batches.claim(model.name, LEASE_S, count):
                claimed = True
                self.running[model.name] += 1
                group.create_task(self._timed(item, model))
                await asyncio.sleep(0)  # each begins in a turn of the loop of its own, between live requests
        if not claimed:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._arrived.wait()

    async def _timed(self, item: BatchJobItem, model: Model) -> None:
        await self._concurrency.timed(self._run(item, model))

    async def _renew(self) -> None:
        """Renews the leases, and ends requests of cancelled batches."""
        ended = await self._batches.renew([claimed.item for claimed in self._claimed.values()], LEASE_S)
        for item in ended:
            claimed = self._claimed.get(item.request_id)
            if claimed is not None and claimed.request is not None:
                claimed.request.exchange.interrupt(errors.batch_ended())

    async def _end_refused(self) -> None:
        """Ends requests that would be refused by now."""
        groups: defaultdict[tuple[str, str, BatchOrigin | None], list[OpenRequest]] = defaultdict(list)
        for claimed in self._claimed.values():
            if claimed.request is not None:
                groups[claimed.item.account_id, claimed.item.token_id, claimed.origin].append(claimed.request)
        await self._checks.end_refused((partial(self._caller, *key), requests) for key, requests in groups.items())

    async def _caller(self, account_id: str, token_id: str, origin: BatchOrigin | None) -> Caller:
        """The sender of a batch, as it is now. Raises UnknownToken, AccountSuspended and StoreUnavailable."""
        if origin is not None:
            return await self._accounts.caller_of(account_id, token_id, origin.grant, origin.expires_at, origin.key_id)
        caller = await self._accounts.caller_of(account_id, token_id)
        return replace(caller, grant=structs.replace(caller.grant, networks=()))  # nobody knows where it came from

    async def _adjust(self) -> None:
        self._concurrency.adjust()

    async def _sweep(self) -> None:
        """Tidies the store up, and sends demand for models that sleep while batches wait for them."""
        await self._batches.sweep()
        self.waiting = await self._batches.waiting(self._catalogue.names)
        fleet, now, weights = self._context.fleet, self._calendar(), dict[str, float]()
        names = self._catalogue.names
        for name in {*names, *self._demanded}:
            waiting = self.waiting.get(name) if name in names else None
            waited_s = now - waiting.oldest_at if waiting is not None and waiting.items else 0.0
            needed = not self._stopped and waited_s >= ASLEEP_S and not fleet.serves(name)
            weights[name] = min(1.0, max(SLEEPING_WEIGHT_MIN, waited_s / DAY_S))
            fleet.set_batch_demand(name, int(needed), weights[name])
            (self._demanded.add if needed else self._demanded.discard)(name)
        missed, self._missed = self._missed, set()
        for name, regions in missed | self._bound:
            needed = not self._stopped and (name, regions) in missed and not fleet.serves(name, regions)
            fleet.set_batch_demand(name, int(needed), weights.get(name, SLEEPING_WEIGHT_MIN), regions)
        self._bound = missed

    async def _run(self, item: BatchJobItem, model: Model) -> None:
        self._claimed[item.request_id] = claimed = _ClaimedItem(item)
        try:
            await self._try(claimed, model)
        except AlreadyRecorded:
            pass  # another gateway was faster
        except StoreUnavailable as problem:
            self._context.store_health.mark_down(problem)  # its lease runs out, and a gateway claims it again
        except Exception as error:  # a bug ends no other request: the lease runs out, and this one is tried again
            fields = {"request": item.request_id, "error": type(error).__name__}
            log.error("batch_item_failed", extra={"fields": fields})
        self.running[model.name] -= 1
        if self._claimed.get(item.request_id) is claimed:  # else its lease ran out here, and it was claimed anew
            del self._claimed[item.request_id]
        self._arrived.set()

    async def _try(self, claimed: _ClaimedItem, model: Model) -> None:
        item = claimed.item
        cipher = self._encryption.cipher(item.account_id, item.batch_id)
        try:
            stored = cipher.open_request(item.place, item.body)
        except InvalidTag:
            log.error("batch_sealed_otherwise", extra={"fields": {"batch": item.batch_id}})
            await self._batches.close(item.account_id, item.batch_id, BatchStatus.FAILED)
            return
        try:
            call, exchange = await self._open(claimed, model, stored)
        except ApiError as refusal:
            await self._refuse(item, refusal, cipher.seal_result(item.place, _failed(stored, refusal)))
            return
        refused = await self._serve(call)
        if refused is not None and call.regions and not self._context.fleet.serves(model.name, call.regions):
            self._missed.add((model.name, call.regions))
        if refused is not None and (delay_s := _delay_s(refused)) is not None:
            call.release()
            await self._batches.put_back([item], delay_s)
            return

        def result() -> bytes:
            answer = _succeeded(stored, exchange.content) if refused is None else _failed(stored, refused)
            return cipher.seal_result(item.place, answer)

        await self._end(item, call, refused is None, result)

    async def _open(
        self, claimed: _ClaimedItem, model: Model, stored: StoredRequest
    ) -> tuple[InferenceCall, BackgroundExchange]:
        """The request's call. Raises ApiError where it may not run, or not any more, and StoreUnavailable."""
        item, origin = claimed.item, stored.origin
        exchange = BackgroundExchange(item.request_id, self._context.clock, "" if origin is None else origin.address)
        look_up = partial(self._caller, item.account_id, item.token_id, origin)
        caller = await self._checks.admit(look_up, exchange, model)
        if item.tries > TRIES_MAX:
            raise errors.failed(f"it broke off {TRIES_MAX} times; send it again, or change it")
        exchange.body_bytes = len(stored.body)
        read = partial(self._families[model.run_family], stored.body, b"", model.name, draw_seed())
        request = await self._context.account_locks.parse(item.account_id, exchange.body_bytes, read)
        assert not isinstance(request, BatchRequest | BatchResultsRequest), "a batch holds no batches"
        options = RunOptions(tags=stored.tags, metadata=stored.metadata, background=True)
        work = self._endpoint.work_of(request, model, item.request_id)
        call = InferenceCall(self._context, work, exchange, caller, model, options)
        claimed.origin, claimed.request = origin, OpenRequest(exchange, caller, call)
        return call, exchange

    async def _refuse(self, item: BatchJobItem, refusal: ApiError, result: bytes) -> None:
        """Puts back or fails an item that may not begin. Where the refusal is of whoever sent the batch, the rest of it
        fails too: this item's result says why."""
        if (delay_s := _delay_s(refusal)) is not None:
            await self._batches.put_back([item], delay_s)
        elif refusal.status not in (401, 403):
            await self._batches.end(item, False, result, None)
        elif item.batch_id not in self._closing:
            self._closing.add(item.batch_id)
            try:
                await self._batches.end(item, False, result, None)
                await self._batches.close(item.account_id, item.batch_id, BatchStatus.FAILED)
            finally:
                self._closing.discard(item.batch_id)

    async def _serve(self, call: InferenceCall) -> ApiError | None:
        """Why the call was refused or failed; None where it went well."""
        try:
            async with call.exchange.watching_client():
                await call.work.run(call)
            call.outcome = "done"
        except ApiError as refusal:
            call.outcome = refusal.kind
            return refusal
        except (AlreadyRecorded, asyncio.CancelledError):
            call.release()
            raise
        except Exception as error:
            fields = {"request": call.exchange.request_id, "error": type(error).__name__}
            log.error("batch_item_failed", extra={"fields": fields})
            call.outcome = "internal"
            return errors.internal()
        return None

    async def _end(self, item: BatchJobItem, call: InferenceCall, succeeded: bool, result: Callable[[], bytes]) -> None:
        """Writes result and charge, until the store has them: only this gateway knows that the request was served."""
        spent = call.stop()
        try:
            record = None if call.reservation is None else call.reservation.record(spent, spent.outcome)
            sealed = result()
            while True:
                try:
                    await self._batches.end(item, succeeded, sealed, record)
                    break
                except StoreUnavailable as problem:
                    self._context.store_health.mark_down(problem)
                    await asyncio.sleep(AGAIN_S)
        except BaseException:  # it is tried again under its id, to which the hold belongs
            call.release()
            raise
        call.end_recorded(spent)


def _delay_s(refusal: ApiError) -> float | None:
    """After how long the same request may succeed; None: it may not."""
    if refusal.kind == SUSPENDED:
        return SUSPENDED_S
    if refusal.kind in (WRONG_REGION, "replica_lost"):
        return AGAIN_S
    return None if refusal.retry_after_s is None or refusal.lasting else float(refusal.retry_after_s)


def _succeeded(stored: StoredRequest, content: bytes) -> bytes:
    result = msgspec.json.decode(content, type=_EnvelopedResult).result
    return msgspec.json.encode({"result": result, "success": True, "external_reference": stored.reference})


def _failed(stored: StoredRequest, refusal: ApiError) -> bytes:
    error = [{"code": refusal.code, "message": refusal.enveloped}]
    return msgspec.json.encode({"success": False, "errors": error, "external_reference": stored.reference})
