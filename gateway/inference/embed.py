"""The way of a request for vectors: encode, check, reserve, send every text to a replica, and answer with all of them.

It is `generate`'s sibling, which has led it as far as its model. It does not know JSON fields, sockets or stores.
"""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import numpy as np

from engine.protocol.types import FinishReason, Pooling, RejectReason, SamplingParams
from gateway import errors
from gateway.catalogue.catalogue import Model
from gateway.catalogue.tasks import EmbeddingSpec
from gateway.cluster.client import ReplicaAsleep, ReplicaLost, ReplicaRejected, ReplicaStream, pack_token_ids
from gateway.http.exchange import JSON_CONTENT, Exchange
from gateway.inference import rate_limit_headers
from gateway.inference.cache_scope import scope_of, terms_of
from gateway.inference.crash_breaker import CRASH_MEMORY_S, request_fingerprint
from gateway.inference.embedding_types import (
    EmbeddingInput,
    EmbeddingInputs,
    EmbeddingRequest,
    EmbeddingResult,
    Floats,
    InputKind,
    RankScore,
)
from gateway.inference.lifecycle import (
    LONG_TEXT_CHARS,
    TRIES_MAX,
    acquire_replica,
    error_of_rejection,
    replica_deadline,
    replica_wait_ms,
    reserve,
)
from gateway.inference.reply import Usage
from gateway.inference.request import CHECKPOINT_S, InferenceContext, end_call
from gateway.inference.run_options import RunOptions
from gateway.observability.tracing import RequestSpan
from gateway.text.tokenizer import TokenizationError
from tenants.auth.caller import Caller
from tenants.limits.reservation import CallUsage, QuotaRequest, Reservation

AT_ONCE_MAX: Final = 256  # texts of one request that are at replicas: others' have places there too
_WRITTEN: Final = 16  # vectors that are written before other requests have their turn: a millisecond or two


class EmbeddingCall:
    """What one request holds and has received so far. `close` ends it, once."""

    def __init__(
        self,
        gateway: InferenceContext,
        exchange: Exchange,
        caller: Caller,
        model: Model,
        asked: EmbeddingRequest,
        options: RunOptions,
    ) -> None:
        assert model.vectors is not None, "the model writes text"
        self.gateway = gateway
        self.exchange = exchange
        self.caller = caller
        self.model = model
        self.asked = asked
        self.texts = asked.texts
        self.options = options
        self.vectors: EmbeddingSpec = model.vectors
        self.span: RequestSpan = gateway.traces.begin(model.name, exchange.headers, "embeddings")
        self.reservation: Reservation | None = None
        self.streams: dict[int, ReplicaStream] = {}  # by the index of the sequence that is at a replica,
        self.submitted: dict[int, int] = {}  # and after how many lost replicas it was sent there
        self.losses = 0
        self.sequences: list[list[int]] = []
        self.cached: dict[int, int] = {}  # of the sequences whose vector came, how many tokens their replica had
        self.outcome = "cancelled"
        self._checkpoint_at = exchange.began + CHECKPOINT_S

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.sequences))

    def spent(self, now: float) -> CallUsage:
        """What replicas have begun with counts."""
        begun = {index: stream.started for index, stream in self.streams.items()}
        cached = self.cached | {index: each.cached_tokens for index, each in begun.items() if each is not None}
        return CallUsage(
            prompt_tokens=sum(len(self.sequences[index]) for index in cached),
            cached_tokens=sum(cached.values()),
            outcome=self.outcome,
            total_ms=(now - self.exchange.began) * 1000,
        )

    @property
    def limit_s(self) -> float:
        """How long it may take, from its first byte on."""
        return self.options.limit_s(self.gateway.limits.request_s)

    def left_s(self) -> float:
        return self.limit_s - (self.gateway.clock() - self.exchange.began)

    def checkpoint(self) -> None:
        """Lets the store know, now and then, what a long request has used; of one in the background as Request does."""
        now = self.gateway.clock()
        if now >= self._checkpoint_at and self.reservation is not None and not self.options.background:
            self._checkpoint_at = now + CHECKPOINT_S
            self.gateway.quota.checkpoint(self.reservation, self.spent(now))

    def usage(self) -> Usage:
        assert self.reservation is not None
        spent = self.spent(self.gateway.clock())
        left = rate_limit_headers.fields(self.reservation.after(spent))
        return Usage(spent.prompt_tokens, 0, spent.cached_tokens, self.reservation.neurons(spent), left)

    def stop(self) -> None:
        """Its replicas go no further."""
        for stream in self.streams.values():
            stream.cancel()

    def close(self) -> None:
        """Whatever happened: the replicas stop, the reservation is settled, the request is counted. Awaits nothing."""
        self.stop()
        end_call(self, self.spent(self.gateway.clock()), None)


async def serve_embedding(request: EmbeddingCall, zero: bool) -> None:
    """Everything between the checked texts and the last byte of the answer. Raises Refusal and ClientGone."""
    gateway, model = request.gateway, request.model
    pooling = check_inputs(model, request.vectors, request.texts)
    request.sequences = await encode_inputs(request, zero)
    suspect = request_fingerprint(
        model.name, request.caller.own_scope, b"".join(map(pack_token_ids, request.sequences))
    )
    if gateway.suspects.refused(suspect):
        raise errors.crashes(int(CRASH_MEMORY_S / 60))
    request.reservation = await reserve(
        request,
        QuotaRequest(
            model=model.name,
            price=model.batch_price if request.options.background else model.price,
            prompt_tokens=request.prompt_tokens,
            output_tokens=0,
            model_class=model.limits_class,
            tags=() if zero else request.options.tags,
            metadata="" if zero else request.options.metadata,
        ),
    )
    request.exchange.extra_headers = rate_limit_headers.headers(request.reservation.left)
    vectors_NH = await run_on_replicas(request, pooling, suspect, zero)
    answer = await _answer(request, vectors_NH, pooling)
    neurons = (b"cf-ai-neurons", f"{answer.usage.neurons:.6f}".encode())
    headers = [JSON_CONTENT, neurons, (b"cache-control", b"no-store")]
    await request.exchange.answer(200, request.asked.render(answer), headers)


def check_inputs(model: Model, vectors: EmbeddingSpec, texts: EmbeddingInputs) -> Pooling:
    """How the texts are pooled. Raises Refusal for what this model does not do."""
    if texts.pooling is not None and texts.pooling not in vectors.poolings:
        known = " or ".join(f"'{pooling}'" for pooling in vectors.poolings)
        raise errors.bad_input(f"'pooling' of {model.name} is {known}; leave it out", "pooling")
    if texts.instruction is not None and not vectors.instructed:
        raise errors.bad_input(f"'instruction' is not known to {model.name}; leave it out", "instruction")
    asked, cuts, whole = texts.dimensions, vectors.cuts, vectors.dimensions
    if asked is not None and asked != whole and (asked > whole or (cuts is not None and asked not in cuts)):
        served = f"1 to {whole}" if cuts is None else ", ".join(map(str, sorted({*cuts, whole})))
        raise errors.bad_input(f"'dimensions' of {model.name} may be {served}; leave it out", "dimensions")
    return texts.pooling or vectors.poolings[0]


async def encode_inputs(request: EmbeddingCall, zero: bool) -> list[list[int]]:
    """The token ids of each sequence: of each item, or of pairs of the query and each other one. Raises Refusal.

    Long texts are encoded in a thread, one request at a time for each account; those of which nothing may be kept in a
    thread of its own, since tokenizers keep the words that they met in a thread until it ends.
    """
    hello = request.gateway.fleet.hello(request.model.name)
    most = request.vectors.tokens_max if hello is None else min(request.vectors.tokens_max, hello.context_tokens)

    def work() -> list[list[int]]:
        return _encode(request.model, request.vectors, request.texts, most)

    if request.texts.length <= LONG_TEXT_CHARS and not zero:
        return work()
    async with request.gateway.turns.take(request.caller.account.id):
        if not zero:
            return await asyncio.to_thread(work)
        thread = ThreadPoolExecutor(1)
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work)
        finally:
            thread.shutdown(wait=False)


def _encode(model: Model, vectors: EmbeddingSpec, texts: EmbeddingInputs, most: int) -> list[list[int]]:
    frame, items = model.text.frame, texts.items
    if Pooling.SCORE in vectors.poolings:
        query, *others = [_ids(model, item, "", most, texts) for item in items]
        room = most - frame.pair_tokens - len(query)
        if room < 1:
            raise errors.text_too_long("query", len(query) + frame.pair_tokens, most, cut=False)
        cut = [_fitting(item, ids, room, most, texts) for item, ids in zip(items[1:], others, strict=True)]
        return [frame.pair(query, ids) for ids in cut]
    before = {
        InputKind.TEXT: "",
        InputKind.QUERY: vectors.prompt(texts.instruction),
        InputKind.DOCUMENT: vectors.document,
    }
    sequences = []
    for item in items:
        if isinstance(item.content, str):
            ids = _fitting(item, _ids(model, item, before[item.kind], most, texts), most - frame.tokens, most, texts)
            sequences.append(frame.single(ids))
            if not sequences[-1]:
                raise errors.bad_input(f"'{item.place}' has no tokens; send some text", item.place)
        else:
            sequences.append(_known(model, item, _fitting(item, item.content, most, most, texts)))
    return sequences


def _ids(model: Model, item: EmbeddingInput, before: str, most: int, texts: EmbeddingInputs) -> list[int]:
    """What cannot fit, and may not be cut, is not encoded at all."""
    assert isinstance(item.content, str)
    longest = model.text.token_bytes_max
    if longest and not texts.truncate and len(item.content) > most * longest:
        raise errors.text_too_long(item.place, len(item.content) // longest, most, cut=True)
    try:
        return model.text.encode_text(before + item.content)
    except TokenizationError as error:
        raise errors.bad_input(f"'{item.place}': {error}", item.place) from None


def _known(model: Model, item: EmbeddingInput, ids: list[int]) -> list[int]:
    """Token ids of a caller's. Raises Refusal where the model has no such ones."""
    over = [id for id in ids if id >= model.vocabulary]
    if over:
        message = f"'{item.place}': {over[0]} is no token id; the vocabulary has {model.vocabulary}"
        raise errors.bad_input(message, item.place)
    return ids


def _fitting(item: EmbeddingInput, ids: list[int], room: int, most: int, texts: EmbeddingInputs) -> list[int]:
    """Its ids, or the first of them where there is no room for all and they may be cut: what is not theirs of `most`
    is taken. Raises Refusal."""
    if len(ids) <= room:
        return ids
    if not texts.truncate:
        raise errors.text_too_long(item.place, len(ids) + most - room, most, cut=True)
    return ids[:room]


async def run_on_replicas(request: EmbeddingCall, pooling: Pooling, suspect: bytes, zero: bool) -> Floats:
    """A row for each sequence: so many of them at once are at replicas, and one whose replica goes away is sent once
    more to another one."""
    rows: list[bytes] = []
    submitted = 0
    for index in range(len(request.sequences)):
        tries = 1
        while True:
            try:
                for later in range(submitted, min(len(request.sequences), index + AT_ONCE_MAX)):
                    if later not in request.streams:  # it was not taken back with others
                        await submit(request, later, pooling, zero)
                    submitted = later + 1
                if index not in request.streams:
                    await submit(request, index, pooling, zero)
                rows.append(await _row(request, index))
                break
            except ReplicaAsleep:
                request.streams = {one: stream for one, stream in request.streams.items() if not stream.asleep}
                submitted = index
                continue
            except ReplicaLost:
                if request.submitted.get(index, request.losses) == request.losses:  # not one that was known to be gone
                    request.losses += 1
                    request.gateway.suspects.note(suspect)
                if tries == TRIES_MAX:
                    raise errors.replica_lost() from None
            except ReplicaRejected as rejected:
                if tries == TRIES_MAX or rejected.reason is not RejectReason.DRAINING:
                    raise error_of_rejection(request, rejected) from None
            if (stream := request.streams.pop(index, None)) is not None:
                stream.cancel()  # nothing of what it did reaches the client, or is charged
            tries += 1
        request.checkpoint()
    return np.frombuffer(b"".join(rows), "<f4").reshape(len(rows), -1)


async def submit(request: EmbeddingCall, index: int, pooling: Pooling, zero: bool) -> None:
    """Waits for a replica that can serve, and sends it a sequence. Raises Refusal, Rejected, ReplicaLost."""
    caller, tokens = request.caller, pack_token_ids(request.sequences[index])
    scope = scope_of(caller, request.texts.user, zero)
    chosen = await acquire_replica(request, scope, tokens, replica_deadline(request))
    request.submitted[index] = request.losses
    request.streams[index] = chosen.submit(
        tokens=tokens,
        scope=scope,
        sampling=SamplingParams(),
        max_tokens=1,
        pooling=pooling,
        traceparent=request.span.traceparent,
        terms=terms_of(caller, zero, background=request.options.background),
        deadline_ms=replica_wait_ms(request, chosen.held_s),
    )


async def _row(request: EmbeddingCall, index: int) -> bytes:
    """The sequence's vector. Raises Refusal where it failed, ReplicaLost and Rejected."""
    vector, stream = None, request.streams[index]
    async for step in stream:
        if step.finish is not None and step.finish.reason is not FinishReason.STOP:
            raise errors.failed(step.finish.message)
        vector = step.vector if step.vector is not None else vector
    assert vector is not None, "a text ended well without a vector"
    assert stream.started is not None
    request.cached[index] = stream.started.cached_tokens
    del request.streams[index]
    return vector


async def _answer(request: EmbeddingCall, vectors_NH: Floats, pooling: Pooling) -> EmbeddingResult:
    texts, vectors = request.texts, request.vectors
    scores: list[RankScore] = []
    if pooling is Pooling.SCORE:
        scores = _ordered([_sigmoid(value) for value in vectors_NH[:, 0].tolist()], texts.best)
    elif texts.scored:
        query_H, *others = _unit(vectors_NH)
        scores = _ordered([float(query_H @ other_H) for other_H in others], texts.best)
    elif texts.dimensions is not None and texts.dimensions < vectors.dimensions:
        vectors_NH = _unit(vectors_NH[:, : texts.dimensions])
    elif vectors.normalized:
        vectors_NH = _unit(vectors_NH)
    rows = [] if scores else await _rows(request.asked, vectors_NH)
    shape = (len(vectors_NH), vectors_NH.shape[1])
    name, request_id = request.asked.model, request.exchange.request_id
    return EmbeddingResult(name, request_id, shape, rows, scores, pooling, request.usage())


async def _rows(asked: EmbeddingRequest, vectors_NH: Floats) -> list[msgspec.Raw]:
    """Each vector as the answer has it, while other requests go on."""
    rows = []
    for index, row_H in enumerate(vectors_NH):
        rows.append(msgspec.Raw(asked.row(row_H)))
        if index % _WRITTEN == _WRITTEN - 1:
            await asyncio.sleep(0)
    return rows


def _ordered(values: Sequence[float], best: int | None) -> list[RankScore]:
    """The best first, or all as they came."""
    scores = [RankScore(index, value) for index, value in enumerate(values)]
    return scores if best is None else sorted(scores, key=lambda score: -score.value)[:best]


def _sigmoid(value: float) -> float:
    """Without overflow, whatever the sign."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def _unit(vectors_NH: Floats) -> Floats:
    """Each with length 1; one of length 0 stays what it is."""
    lengths_N1 = np.linalg.norm(vectors_NH, axis=1, keepdims=True)
    unit_NH: Floats = vectors_NH / np.maximum(lengths_N1, np.float32(1e-12))
    return unit_NH
