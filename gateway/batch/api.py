"""What callers do with batches: submit one, ask for its results, list and cancel them. It runs nothing.

A batch is taken in slices, between which other requests go on: each request of it is read as the model's own bodies
are, then sealed and written.
"""

import asyncio
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from gateway import errors
from gateway.api.run_batch import BatchRequest, BatchResultsRequest, check_item
from gateway.batch.encryption import BatchEncryption, StoredRequest, join_responses
from gateway.catalogue.catalogue import Model
from gateway.errors import bad_input
from gateway.http.exchange import JSON_CONTENT, Exchange
from gateway.http.json_body import decode_query
from gateway.inference.reply import enveloped
from gateway.inference.run_options import run_options
from tenants.auth.caller import Caller
from tenants.records.batches import ARRIVING_S, BatchJob, BatchStatus
from tenants.store.protocol import BatchStore, StoreUnavailable

_SLICE: Final = 64  # requests that are read, or results that are opened, before others have their turn
Status = Literal["queued", "running", "done", "cancelled", "failed"]
_UNKEPT: Final = (b"cache-control", b"no-store")


class Counts(msgspec.Struct, frozen=True):
    """Of a batch's requests. Those that neither succeeded nor failed wait, run, or were cancelled."""

    total: int
    succeeded: int
    failed: int


class BatchUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class BatchItem(msgspec.Struct, frozen=True):
    """At `expires_at` all of it is deleted."""

    request_id: str
    model: str
    status: Status
    requests: Counts
    usage: BatchUsage
    created_at: datetime
    ended_at: datetime | None
    expires_at: datetime


class BatchesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Without `status` all are listed."""

    status: Status | None = None


class BatchApi:
    """One store's. `came` is set when a batch came."""

    def __init__(
        self, batches: BatchStore, vault: BatchEncryption, keep_s: float, calendar: Callable[[], float]
    ) -> None:
        self._batches = batches
        self._vault = vault
        self._keep_s = int(keep_s)
        self._calendar = calendar
        self.came = asyncio.Event()

    async def answer(
        self, exchange: Exchange, caller: Caller, model: Model, asked: BatchRequest | BatchResultsRequest, zero: bool
    ) -> None:
        """One call of `/ai/run` about a batch. Raises Refusal and ClientGone."""
        try:
            if isinstance(asked, BatchRequest):
                await self._submit(exchange, caller, model, asked, zero)
            else:
                await self._results(exchange, await self._find(caller, asked.request_id, model.name))
        except StoreUnavailable:
            raise errors.store_unavailable() from None

    async def _submit(self, exchange: Exchange, caller: Caller, model: Model, asked: BatchRequest, zero: bool) -> None:
        if zero:
            raise errors.not_kept()
        options = run_options(exchange.headers, exchange.query)
        if options.reject_if_busy or options.timeout_ms is not None:
            raise bad_input("a queued request waits for its turn; leave 'rejectIfBusy' and time limits out")
        now = int(self._calendar())
        batch = BatchJob(
            id=str(uuid.uuid4()),
            account_id=caller.account.id,
            token_id=caller.token_id,
            model=model.name,
            items=len(asked.requests),
            keep_s=self._keep_s,
            created_at=now,
            expires_at=now + ARRIVING_S,
        )
        read = []
        for place in range(batch.items):
            read.append(check_item(asked, place))
            if place % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        if not await self._batches.begin(batch):
            raise errors.too_many_batches()
        safe = self._vault.safe(batch.account_id, batch.id)
        for first in range(0, batch.items, _SLICE):
            kept = (StoredRequest(*one, options.tags, options.metadata) for one in read[first : first + _SLICE])
            sealed = [safe.seal_request(place, one) for place, one in enumerate(kept, first)]
            await self._batches.add_items(batch.account_id, batch.id, first, sealed)
            await asyncio.sleep(0)
        await self._batches.open(batch.account_id, batch.id)
        self.came.set()
        await _answer(exchange, {"status": "queued", "request_id": batch.id, "model": model.name})

    async def _find(self, caller: Caller, batch_id: str, model: str | None = None) -> BatchJob:
        """Another account's is as one that is not there, and so is one of a model that the token may not call."""
        found = await self._batches.get(caller.account.id, batch_id)
        if found is None or found.model != (model or found.model) or not caller.grant.serves(found.model):
            raise errors.no_such_batch()
        return found

    async def _results(self, exchange: Exchange, batch: BatchJob) -> None:
        if batch.status.open:
            await _answer(exchange, {"status": batch.status, "request_id": batch.id, "model": batch.model})
            return
        result: dict[str, Any] = {"responses": await self._responses(batch), "usage": _usage(batch)}
        if batch.status is not BatchStatus.DONE:
            result |= {"status": batch.status, "request_id": batch.id, "model": batch.model}
        await _answer(exchange, result)

    async def _responses(self, batch: BatchJob) -> msgspec.Raw:
        """Of all that ended."""
        safe, found = self._vault.safe(batch.account_id, batch.id), []
        for first in range(0, batch.items, _SLICE):
            ended = await self._batches.results(batch.account_id, batch.id, first, _SLICE)
            found += [(one.place, safe.open_result(one.place, one.result)) for one in ended]
            await asyncio.sleep(0)
        return msgspec.Raw(join_responses(found))

    async def list(self, exchange: Exchange, caller: Caller) -> None:
        """All of the account's, the newest first. Raises Refusal."""
        wanted = decode_query(exchange.query, BatchesQuery).status
        try:
            found = await self._batches.of_account(caller.account.id)
        except StoreUnavailable:
            raise errors.store_unavailable() from None
        shown = [batch for batch in found if caller.grant.serves(batch.model) and wanted in (None, batch.status)]
        await _answer(exchange, [_item(batch) for batch in shown])

    async def one(self, exchange: Exchange, caller: Caller, batch_id: str) -> None:
        """GET says how far it is, DELETE cancels what has not ended of it. Raises Refusal."""
        try:
            batch = await self._find(caller, batch_id)
            if exchange.method == "DELETE":
                await self._batches.close(batch.account_id, batch.id, BatchStatus.CANCELLED)
                batch = await self._find(caller, batch_id)
        except StoreUnavailable:
            raise errors.store_unavailable() from None
        await _answer(exchange, _item(batch))


async def _answer(exchange: Exchange, result: Any) -> None:
    await exchange.answer(200, msgspec.json.encode(enveloped(result)), [JSON_CONTENT, _UNKEPT])


def _usage(batch: BatchJob) -> BatchUsage:
    prompt, completion = batch.prompt_tokens, batch.completion_tokens
    return BatchUsage(prompt, completion, prompt + completion)


def _item(batch: BatchJob) -> BatchItem:
    return BatchItem(
        request_id=batch.id,
        model=batch.model,
        status=batch.status.value,  # type: ignore[arg-type]
        requests=Counts(batch.items, batch.succeeded, batch.failed),
        usage=_usage(batch),
        created_at=_when(batch.created_at),
        ended_at=None if batch.ended_at is None else _when(batch.ended_at),
        expires_at=_when(batch.expires_at),
    )


def _when(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
