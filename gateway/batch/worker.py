"""Runs what is queued, on capacity that live calls leave free: claims it, lets it go the way of a live request, and
writes result and charge in one step. It does not know where batches are kept.

Each gateway claims for itself, while a replica has nothing live that waits. What it cannot run now goes back into the
queue: where a limit of the account is reached, until that gives way; where a replica or the store went away, for a
moment. What a killed gateway had is claimed anew when its lease is over, under the same request id.

Requests are claimed for models on a device alone. Where batches have waited for ASLEEP_S for one that sleeps, its
machines are asked for it as by one live request, which is lighter than any plan's at first, and as heavy as a plain
one's when the oldest of them is a day old: they take the room that nobody wants, and get some in the end.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from starlette.types import Message

from gateway import errors
from gateway.batch.concurrency import ConcurrencyController
from gateway.batch.encryption import BatchEncryption, StoredRequest
from gateway.catalogue.catalogue import Model
from gateway.errors import ApiError
from gateway.http.client_address import ClientAddress
from gateway.http.exchange import Exchange, ExchangeTimeouts
from gateway.inference.embed import EmbeddingCall, serve_embedding
from gateway.inference.embedding_types import EmbeddingRequest
from gateway.inference.generate import admit, serve_generation
from gateway.inference.prompt import SEED_BITS
from gateway.inference.reply import Dialect, GenerationRequest
from gateway.inference.request import GenerationCall, InferenceContext, report_call
from gateway.inference.run_options import RunOptions
from tenants.auth.caller import Caller
from tenants.auth.errors import AccountSuspended, UnknownToken
from tenants.limits.denials import AlreadyRecorded
from tenants.records.batches import BatchJobItem, BatchStatus, QueueDepth
from tenants.records.usage import UsageRecord
from tenants.store.protocol import BatchStore, StoreUnavailable

LEASE_S: Final = 10.0  # shorter than a hold lasts, so that whoever takes over finds it
RENEW_S: Final = 2.0
LOOK_S: Final = 1.0  # for what came through other gateways
TIDY_S: Final = 10.0
PACE_S: Final = 0.1
BACKGROUND_MAX: Final = 128  # at one replica, of all gateways together
CLAIM: Final = 16  # at once at most, all of one account: then others have their turn
TRIES_MAX: Final = 5
AGAIN_S: Final = 1.0
WRONG_REGION: Final = "wrong_region"  # a gateway that may serve it took the batch in, and will take it up
SUSPENDED_S: Final = 60.0
ASLEEP_S: Final = 60.0
DAY_S: Final = 86400.0
SLEEPING_WEIGHT_MIN: Final = 0.001

Work = Callable[[], Awaitable[None]]

log = logging.getLogger(__name__)


class _EnvelopedResult(msgspec.Struct, frozen=True):
    """What is kept of an answer in the envelope."""

    result: msgspec.Raw


class _BackgroundExchange(Exchange):
    """An exchange that nobody waits for: its answer stays here."""

    def __init__(self, gateway: InferenceContext, request_id: str) -> None:
        scope = {"method": "POST", "path": "", "query_string": b"", "headers": []}
        nobody, patience = ClientAddress("", trusted=False), ExchangeTimeouts(0, 0, 0, 0)
        super().__init__(scope, self._silence, self._keep, patience, request_id, gateway.clock, nobody)
        self.answered = b""

    async def _silence(self) -> Message:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def _keep(self, message: Message) -> None:
        self.answered += message.get("body", b"")


class BatchWorker:
    """One gateway's. `waiting` is what the store said last of all gateways' queues; `running` counts this one's, by
    model."""

    def __init__(
        self, gateway: InferenceContext, batches: BatchStore, vault: BatchEncryption, dialect: Dialect
    ) -> None:
        self._gateway = gateway
        self._batches = batches
        self._vault = vault
        self._dialect = dialect  # of `/ai/run`
        self._models = list(gateway.catalogue)
        self._claimed: dict[str, tuple[BatchJobItem, _BackgroundExchange]] = {}
        self._stopped = False
        self._pace = ConcurrencyController()
        self.running = Counter({model.name: 0 for model in self._models})
        self.waiting: Mapping[str, QueueDepth] = {}

    def stop(self) -> None:
        """Claims nothing more."""
        self._stopped = True
        for model in self._models:
            self._gateway.fleet.queue(model.name, 0, 0.0)

    async def run(self) -> None:
        """Until cancelled; what has not ended then is put back."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._every(RENEW_S, self._renew))
                group.create_task(self._every(TIDY_S, self._tidy))
                group.create_task(self._every(PACE_S, self._adjust))
                group.create_task(self._every(0.0, lambda: self._claim(group)))
        except asyncio.CancelledError:
            await self._leave()
            raise

    async def _every(self, seconds: float, act: Callable[[], Awaitable[object]]) -> None:
        """While the store is away nothing is lost: leases and holds run on, or out."""
        while True:
            try:
                await act()
            except StoreUnavailable as problem:
                self._gateway.outage.begin(problem)
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(seconds)

    async def _claim(self, group: asyncio.TaskGroup) -> None:
        """Takes what there is room for; where that is nothing, waits a moment."""
        found = False
        for model in self._models:
            spare = self._gateway.fleet.spare(model.name, BACKGROUND_MAX)
            wanted = min(CLAIM, max(1, self._pace.most // 4))
            if self._stopped or min(spare, self._pace.most - self.running.total()) < wanted:
                continue
            for item in await self._batches.claim(model.name, LEASE_S, wanted):
                found = True
                self.running[model.name] += 1
                group.create_task(self._timed(item, model))
                await asyncio.sleep(0)  # each begins in a turn of the loop of its own, between those of live requests
        if not found:
            await self._wait()

    async def _timed(self, item: BatchJobItem, model: Model) -> None:
        await self._pace.timed(self._run(item, model))

    async def _wait(self) -> None:
        came = self._gateway.desk.came
        came.clear()
        try:
            async with asyncio.timeout(LOOK_S):
                await came.wait()
        except TimeoutError:
            pass

    async def _renew(self) -> None:
        """Keeps the leases, and ends what belongs to a batch that was cancelled."""
        ended = await self._batches.renew([item for item, _ in self._claimed.values()], LEASE_S)
        for item in ended:
            if (found := self._claimed.get(item.request_id)) is not None:
                found[1].interrupt(errors.batch_ended())

    async def _adjust(self) -> None:
        self._pace.adjust()

    async def _tidy(self) -> None:
        await self._batches.sweep()
        self.waiting = await self._batches.waiting([model.name for model in self._models])
        self._wake()

    def _wake(self) -> None:
        """Asks for models that sleep while batches wait for them."""
        fleet, now = self._gateway.fleet, self._gateway.calendar()
        for model in self._models:
            waiting = self.waiting.get(model.name)
            waited_s = now - waiting.oldest_at if waiting is not None and waiting.items else 0.0
            wanted = not self._stopped and waited_s >= ASLEEP_S and not fleet.serves(model.name)
            fleet.queue(model.name, int(wanted), min(1.0, max(SLEEPING_WEIGHT_MIN, waited_s / DAY_S)))

    async def _leave(self) -> None:
        """Another gateway, or this one when it is back, goes on at once."""
        try:
            await self._batches.put_back([item for item, _ in self._claimed.values()], 0.0)
        except StoreUnavailable as problem:
            log.warning("batches_left", extra={"fields": {"items": len(self._claimed), "for": str(problem)}})

    async def _run(self, item: BatchJobItem, model: Model) -> None:
        exchange = _BackgroundExchange(self._gateway, item.request_id)
        self._claimed[item.request_id] = item, exchange
        try:
            await self._try(item, model, exchange)
        except AlreadyRecorded:
            pass  # another gateway was faster
        except StoreUnavailable as problem:
            self._gateway.outage.begin(problem)  # its lease runs out, and somebody takes it up again
        except Exception as error:  # a fault of ours ends no other request: its lease runs out, and its tries do
            log.error(
                "batch_item_failed", extra={"fields": {"request": item.request_id, "error": type(error).__name__}}
            )
        self.running[model.name] -= 1
        del self._claimed[item.request_id]
        self._gateway.desk.came.set()

    async def _try(self, item: BatchJobItem, model: Model, exchange: _BackgroundExchange) -> None:
        try:
            caller = await self._gateway.accounts.absent(item.account_id, item.token_id)
        except UnknownToken:
            await self._batches.close(item.account_id, item.batch_id, BatchStatus.FAILED)
            return
        except AccountSuspended:
            await self._batches.put_back([item], SUSPENDED_S)
            return
        safe = self._vault.safe(item.account_id, item.batch_id)
        try:
            kept = safe.open_request(item.place, item.body)
        except InvalidTag:
            log.error("batch_sealed_otherwise", extra={"fields": {"batch": item.batch_id}})
            await self._batches.close(item.account_id, item.batch_id, BatchStatus.FAILED)
            return
        try:
            request, work = self._request(item, model, caller, kept, exchange)
        except ApiError as refusal:
            if refusal.kind == WRONG_REGION:
                await self._batches.put_back([item], AGAIN_S)
            else:
                await self._batches.end(item, False, safe.seal_result(item.place, _failed(kept, refusal)), None)
            return
        refusal_met = await self._serve(request, work)
        if refusal_met is not None and _passing(refusal_met):
            self._let_go(request)
            await self._batches.put_back([item], float(refusal_met.retry_after_s or AGAIN_S))
            return
        result = _done(kept, exchange.answered) if refusal_met is None else _failed(kept, refusal_met)
        await self._end(item, request, refusal_met is None, safe.seal_result(item.place, result))

    def _request(
        self, item: BatchJobItem, model: Model, caller: Caller, kept: StoredRequest, exchange: _BackgroundExchange
    ) -> tuple[GenerationCall | EmbeddingCall, Work]:
        """The request and what serves it. Raises Refusal where it may not run, or not any more."""
        admit(self._gateway, caller, model, model.name)
        if item.tries > TRIES_MAX:
            raise errors.tried_in_vain(TRIES_MAX)
        asked = self._dialect.read(kept.body, b"", model.name, secrets.randbits(SEED_BITS))
        options = RunOptions(tags=kept.tags, metadata=kept.metadata, background=True)
        if isinstance(asked, EmbeddingRequest):
            embedding = EmbeddingCall(self._gateway, exchange, caller, model, asked, options)
            return embedding, partial(serve_embedding, embedding, zero=False)
        assert isinstance(asked, GenerationRequest), "a batch is of requests for text or vectors"
        request = GenerationCall(self._gateway, exchange, caller, model, asked.prompt, options)
        reply = asked.reply(model.name, item.request_id, int(self._gateway.calendar()))
        return request, partial(serve_generation, request, reply, zero=False)

    async def _serve(self, request: GenerationCall | EmbeddingCall, work: Work) -> ApiError | None:
        """What it was refused for, or what ended it."""
        try:
            async with request.exchange.watching_client():
                await work()
            request.outcome = "done"
        except ApiError as refusal:
            request.outcome = refusal.kind
            return refusal
        except AlreadyRecorded:
            raise
        except asyncio.CancelledError:
            self._let_go(request)
            raise
        except Exception as error:
            told = {"request": request.exchange.request_id, "error": type(error).__name__}
            log.error("batch_item_failed", extra={"fields": told})
            request.outcome = "internal"
            return errors.internal()
        return None

    def _let_go(self, request: GenerationCall | EmbeddingCall) -> None:
        """It will run again, under the same id: its hold is for that."""
        request.stop()
        if request.reservation is not None:
            self._gateway.quota.forget(request.reservation)

    async def _end(
        self, item: BatchJobItem, request: GenerationCall | EmbeddingCall, succeeded: bool, sealed: bytes
    ) -> None:
        """Until the store has it: nobody else would know that it was done."""
        request.stop()
        spent = request.spent(self._gateway.clock())
        record: UsageRecord | None = None
        if request.reservation is not None:
            record = request.reservation.record(spent, spent.outcome)
        while True:
            try:
                await self._batches.end(item, succeeded, sealed, record)
                break
            except StoreUnavailable as problem:
                self._gateway.outage.begin(problem)
                await asyncio.sleep(AGAIN_S)
        if request.reservation is not None:
            self._gateway.quota.forget(request.reservation)
        self._gateway.metrics.counted(request.model.name, spent)
        report_call(request, spent)


def _passing(refusal: ApiError) -> bool:
    """Whether the same request may go well later."""
    return (refusal.retry_after_s is not None and not refusal.lasting) or refusal.kind == "replica_lost"


def _done(kept: StoredRequest, answered: bytes) -> bytes:
    result = msgspec.json.decode(answered, type=_EnvelopedResult).result
    return msgspec.json.encode({"result": result, "success": True, "external_reference": kept.reference})


def _failed(kept: StoredRequest, refusal: ApiError) -> bytes:
    told = [{"code": refusal.code, "message": refusal.message}]
    return msgspec.json.encode({"success": False, "errors": told, "external_reference": kept.reference})
