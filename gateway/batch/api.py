"""The calls about batches: submit one, get its results, list and cancel them. It runs nothing.

A batch is accepted in slices, between which other requests go on: each of its requests is read as the model's own
bodies are, then sealed and written.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal

import msgspec

from gateway import errors
from gateway.api.dialect import BatchRequest, BatchResultsRequest
from gateway.api.run_batch import check_item
from gateway.batch.encryption import BatchCipher, BatchEncryption, BatchOrigin, StoredRequest, join_responses
from gateway.catalogue.catalogue import Model
from gateway.errors import bad_input
from gateway.http.exchange import JSON_CONTENT, Exchange
from gateway.http.json_body import decode_query
from gateway.inference.account_lock import AccountLocks
from gateway.inference.reply import enveloped
from gateway.inference.run_options import run_options
from gateway.open_requests import OpenRequest
from tenants.auth.caller import Caller
from tenants.auth.issuers import is_jwt_id
from tenants.records.batches import ARRIVING_S, BatchItemResult, BatchJob, BatchStatus
from tenants.store.protocol import BatchStore, StoreUnavailable

_SLICE: Final = 64  # requests that are read, or results that are opened, before others have their turn
_PIECE_BYTES: Final = 256 << 10  # in one call of the store, if it is more than one request or result
Status = Literal["queued", "running", "done", "cancelled", "failed"]
_UNKEPT: Final = (b"cache-control", b"no-store")


class Counts(msgspec.Struct, frozen=True):
    """The requests of a batch. The others wait, run, or were cancelled."""

    total: int
    succeeded: int
    failed: int


class BatchUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class BatchItem(msgspec.Struct, frozen=True):
    """A batch. At `expires_at` all of it is deleted."""

    request_id: str
    model: str
    status: Status
    requests: Counts
    usage: BatchUsage
    created_at: datetime
    ended_at: datetime | None
    expires_at: datetime


class BatchesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of the list; without `status` all batches are listed."""

    status: Status | None = None


@dataclass(frozen=True, slots=True)
class BatchApi:
    """Answers calls about the batches of one store; large ones are read and written in `threads`. `arrived` is set when
    a batch arrives."""

    batches: BatchStore
    encryption: BatchEncryption
    keep_s: int
    calendar: Callable[[], float]
    threads: AccountLocks
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(
        self, request: OpenRequest, model: Model, asked: BatchRequest | BatchResultsRequest, zero_retention: bool
    ) -> None:
        """Answers one call of `/ai/run` about a batch. Raises ApiError and ClientDisconnected."""
        exchange, caller = request.exchange, request.caller
        try:
            if isinstance(asked, BatchRequest):
                await self._submit(exchange, caller, model, asked, zero_retention)
            else:
                await self._results(exchange, await self._find(caller, asked.request_id, model.name))
        except StoreUnavailable:
            raise errors.store_unavailable() from None

    async def _submit(
        self, exchange: Exchange, caller: Caller, model: Model, request: BatchRequest, zero_retention: bool
    ) -> None:
        if zero_retention:
            raise errors.not_kept()
        options = run_options(exchange.headers, exchange.query)
        if options.reject_if_busy or options.timeout_ms is not None:
            raise bad_input("a queued request waits for its turn; leave 'rejectIfBusy' and time limits out")
        now = int(self.calendar())
        batch = BatchJob(
            id=str(uuid.uuid4()),
            account_id=caller.account.id,
            token_id=caller.token_id,
            model=model.name,
            items=len(request.requests),
            keep_s=self.keep_s,
            created_at=now,
            expires_at=now + ARRIVING_S,
        )
        size_bytes, read = exchange.body_bytes, list[tuple[bytes, str | None]]()
        for first in range(0, batch.items, _SLICE):
            places = range(first, min(first + _SLICE, batch.items))
            read += await self.threads.parse(caller.account.id, size_bytes, partial(_check_items, request, places))
            await asyncio.sleep(0)
        if not await self.batches.begin(batch):
            raise errors.too_many_batches()
        cipher = self.encryption.cipher(batch.account_id, batch.id)
        rights = (caller.grant, caller.expires_at, caller.key_id) if is_jwt_id(caller.token_id) else ()
        origin = BatchOrigin(exchange.client.address, *rights)
        for first in range(0, batch.items, _SLICE):
            slice_ = read[first : first + _SLICE]
            items = [StoredRequest(*item, options.tags, options.metadata, origin) for item in slice_]
            seal = partial(_sealed, cipher, first, items)
            for place, sealed in _pieces(first, await self.threads.parse(caller.account.id, size_bytes, seal)):
                await self.batches.add_items(batch.account_id, batch.id, place, sealed)
                await asyncio.sleep(0)
        await self.batches.open(batch.account_id, batch.id)
        self.arrived.set()
        await _answer(exchange, {"status": "queued", "request_id": batch.id, "model": model.name})

    async def _find(self, caller: Caller, batch_id: str, model: str | None = None) -> BatchJob:
        """The account's batch. Raises ApiError, which is the same for another account's batch, for a model that the
        token may not call, and for a batch that does not exist."""
        batch = await self.batches.get(caller.account.id, batch_id)
        if batch is None or batch.model != (model or batch.model) or not caller.grant.serves(batch.model):
            raise errors.not_found("batch in this account")
        return batch

    async def _results(self, exchange: Exchange, batch: BatchJob) -> None:
        if batch.status.open:
            await _answer(exchange, {"status": batch.status, "request_id": batch.id, "model": batch.model})
            return
        result: dict[str, Any] = {"responses": [], "usage": _usage(batch)}
        if batch.status is not BatchStatus.DONE:
            result |= {"status": batch.status, "request_id": batch.id, "model": batch.model}
        responses = await self._responses(batch)
        size_bytes, render = sum(len(response) for _, response in responses), partial(_rendered, result, responses)
        body = await self.threads.parse(batch.account_id, size_bytes, render)
        await exchange.answer(200, body, [JSON_CONTENT, _UNKEPT])

    async def _responses(self, batch: BatchJob) -> list[tuple[int, bytes]]:
        """The places and results of all requests that have ended. Few are read at once while they are large."""
        cipher, opened = self.encryption.cipher(batch.account_id, batch.id), list[tuple[int, bytes]]()
        first, count = 0, 1
        while first < batch.items:
            ended = await self.batches.results(batch.account_id, batch.id, first, count)
            size_bytes = sum(len(item.result) for item in ended)
            decrypt = partial(_opened, cipher, ended)
            opened += await self.threads.parse(batch.account_id, size_bytes, decrypt)
            first, count = first + count, min(_SLICE, 2 * count) if size_bytes < _PIECE_BYTES else max(1, count // 2)
            await asyncio.sleep(0)
        return opened

    async def list_batches(self, exchange: Exchange, caller: Caller) -> None:
        """The account's batches, the newest first. Raises ApiError."""
        status = decode_query(exchange.query, BatchesQuery).status
        try:
            batches = await self.batches.of_account(caller.account.id)
        except StoreUnavailable:
            raise errors.store_unavailable() from None
        allowed = (batch for batch in batches if caller.grant.serves(batch.model))
        await _answer(exchange, [_item(batch) for batch in allowed if status in (None, batch.status)])

    async def get_or_cancel(self, exchange: Exchange, caller: Caller, batch_id: str) -> None:
        """GET tells how far the batch is, DELETE cancels what has not ended. Raises ApiError."""
        try:
            batch = await self._find(caller, batch_id)
            if exchange.method == "DELETE":
                await self.batches.close(batch.account_id, batch.id, BatchStatus.CANCELLED)
                batch = await self._find(caller, batch_id)
        except StoreUnavailable:
            raise errors.store_unavailable() from None
        await _answer(exchange, _item(batch))


def _check_items(request: BatchRequest, places: range) -> list[tuple[bytes, str | None]]:
    return [check_item(request, place) for place in places]


def _sealed(cipher: BatchCipher, first: int, items: Sequence[StoredRequest]) -> list[bytes]:
    return [cipher.seal_request(place, item) for place, item in enumerate(items, first)]


def _pieces(first: int, sealed: Sequence[bytes]) -> Iterator[tuple[int, Sequence[bytes]]]:
    """Cuts sealed requests into pieces of _PIECE_BYTES, or of one request, each with its first place."""
    begin = size_bytes = 0
    for index, item in enumerate(sealed):
        if index > begin and size_bytes + len(item) > _PIECE_BYTES:
            yield first + begin, sealed[begin:index]
            begin, size_bytes = index, 0
        size_bytes += len(item)
    yield first + begin, sealed[begin:]


def _opened(cipher: BatchCipher, ended: Sequence[BatchItemResult]) -> list[tuple[int, bytes]]:
    return [(item.place, cipher.open_result(item.place, item.result)) for item in ended]


def _rendered(result: dict[str, Any], responses: Sequence[tuple[int, bytes]]) -> bytes:
    """The answer with the responses in place of its first list, which is empty. Joining bytes holds up no thread."""
    head, empty, tail = msgspec.json.encode(enveloped(result)).partition(b"[]")
    assert empty, "the result has a place for responses"
    return b"".join((head, join_responses(responses), tail))


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
