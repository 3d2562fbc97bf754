"""A call for vectors, top to bottom: check, encode, reserve, send every text to a replica, answer with all of them.

It does not know JSON fields, sockets or stores.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from engine.protocol.frames import Submit
from engine.protocol.types import FinishReason, Pooling, RejectReason, SamplingParams
from gateway import errors
from gateway.catalogue.tasks import EmbeddingSpec
from gateway.cluster.stream import ReplicaLeaving, ReplicaLost, ReplicaRejected, ReplicaStream, pack_token_ids
from gateway.inference.cache_scope import scope_of, terms_of
from gateway.inference.embedding_inputs import check_inputs, encode_inputs
from gateway.inference.embedding_types import EmbeddingRequest, EmbeddingResult, Floats, RankScore
from gateway.inference.lifecycle import InferenceCall, Work
from gateway.inference.replica_wait import error_of_rejection, submit
from tenants.limits.reservation import CallUsage

AT_ONCE_MAX: Final = 256  # texts of one call that are at replicas at the same time: other calls need places there too
_ROWS_PER_TURN: Final = 16  # vectors that are written before other requests have their turn: a millisecond or two


class EmbeddingWork(Work):
    """The work of a call for vectors: a stream for each sequence of tokens."""

    operation = "embeddings"

    def __init__(self, request: EmbeddingRequest, spec: EmbeddingSpec) -> None:
        self._request = request
        self._spec = spec
        self._sequences: list[list[int]] = []
        self._streams: dict[int, ReplicaStream] = {}  # by the index of the sequence that is at a replica,
        self._submitted: dict[int, int] = {}  # and how many replicas had been lost when it was sent there
        self._losses = 0
        self._cached: dict[int, int] = {}  # of the sequences whose vector came, how many tokens their replica had

    async def run(self, call: InferenceCall) -> None:
        """Everything between the checked body and the last byte of the answer."""
        pooling = check_inputs(call.model, self._spec, self._request.texts)
        self._sequences = await encode_inputs(call, self._spec, self._request.texts)
        fingerprint = call.fingerprint(b"".join(map(pack_token_ids, self._sequences)))
        await call.reserve(sum(map(len, self._sequences)))
        order = Submit(
            id=0,
            tokens=b"",
            scope=scope_of(call.caller, self._request.texts.user, call.zero_retention),
            sampling=SamplingParams(),
            max_tokens=1,
            pooling=pooling,
            traceparent=call.span.traceparent,
            terms=terms_of(call.caller, call.zero_retention, background=call.options.background),
            regions=list(call.regions),
        )
        result = await self._result(call, await self._run_on_replicas(call, order, fingerprint), pooling)
        await call.answer(self._request.render(result), result.usage)

    async def _run_on_replicas(self, call: InferenceCall, order: Submit, fingerprint: bytes) -> Floats:
        """A row for each sequence. Only AT_ONCE_MAX of them are at replicas at once, and one whose replica is lost is
        sent to another one."""
        rows: list[bytes] = []
        submitted = 0
        for index in range(len(self._sequences)):
            while True:
                try:
                    for later in range(submitted, min(len(self._sequences), index + AT_ONCE_MAX)):
                        if later not in self._streams:  # not submitted before others of its replica were taken back
                            await self._submit(call, order, later)
                        submitted = later + 1
                    if index not in self._streams:
                        await self._submit(call, order, index)
                    rows.append(await self._row(index))
                    break
                except ReplicaLeaving:
                    self._streams = {i: stream for i, stream in self._streams.items() if not stream.left}
                    submitted = index
                    continue
                except ReplicaLost as lost:
                    if self._submitted.get(index, self._losses) == self._losses:  # a loss that is not counted yet
                        self._losses += 1
                        await call.note_loss(lost.crashed, fingerprint)
                except ReplicaRejected as rejected:
                    if rejected.reason is not RejectReason.DRAINING:
                        raise error_of_rejection(call, rejected) from None
                if (stream := self._streams.pop(index, None)) is not None:
                    stream.cancel()  # nothing of what it did reaches the client, or is charged
            call.checkpoint()
        return np.frombuffer(b"".join(rows), "<f4").reshape(len(rows), -1)

    async def _submit(self, call: InferenceCall, order: Submit, index: int) -> None:
        """Sends one sequence to a replica. Raises ApiError, ReplicaRejected, ReplicaLost."""
        self._submitted[index] = self._losses
        tokens = pack_token_ids(self._sequences[index])
        self._streams[index] = await submit(call, msgspec.structs.replace(order, tokens=tokens))

    async def _row(self, index: int) -> bytes:
        """The sequence's vector. Raises ApiError where it failed, ReplicaLost, ReplicaRejected and ReplicaLeaving."""
        vector, stream = None, self._streams[index]
        async for step in stream:
            if step.finish is not None and step.finish.reason is not FinishReason.STOP:
                raise errors.failed(step.finish.message)
            vector = step.vector if step.vector is not None else vector
        assert vector is not None, "a text ended well without a vector"
        assert stream.started is not None
        self._cached[index] = stream.started.cached_tokens
        del self._streams[index]
        return vector

    async def _result(self, call: InferenceCall, vectors_NH: Floats, pooling: Pooling) -> EmbeddingResult:
        inputs, spec = self._request.texts, self._spec
        scores: list[RankScore] = []
        if pooling is Pooling.SCORE:
            scores = _ranked([_sigmoid(value) for value in vectors_NH[:, 0].tolist()], inputs.best)
        elif inputs.scored:
            query_H, *others = _unit(vectors_NH)
            scores = _ranked([float(query_H @ other_H) for other_H in others], inputs.best)
        elif inputs.dimensions is not None and inputs.dimensions < spec.dimensions:
            vectors_NH = _unit(vectors_NH[:, : inputs.dimensions])
        elif spec.normalized:
            vectors_NH = _unit(vectors_NH)
        rows = [] if scores else await self._rows(vectors_NH)
        shape = (len(vectors_NH), vectors_NH.shape[1])
        name, request_id = self._request.model, call.exchange.request_id
        return EmbeddingResult(name, request_id, shape, rows, scores, pooling, call.usage())

    async def _rows(self, vectors_NH: Floats) -> list[msgspec.Raw]:
        """Each vector as the answer has it, while other requests go on."""
        rows = []
        for index, row_H in enumerate(vectors_NH):
            rows.append(msgspec.Raw(self._request.row(row_H)))
            if index % _ROWS_PER_TURN == _ROWS_PER_TURN - 1:
                await asyncio.sleep(0)
        return rows

    def spent(self, began: float) -> CallUsage:
        """The sequences that replicas have begun with count."""
        started = {index: stream.started for index, stream in self._streams.items()}
        cached = self._cached | {index: start.cached_tokens for index, start in started.items() if start is not None}
        prompt_tokens = sum(len(self._sequences[index]) for index in cached)
        return CallUsage(prompt_tokens=prompt_tokens, cached_tokens=sum(cached.values()))

    def cancel(self) -> None:
        for stream in self._streams.values():
            stream.cancel()


def _ranked(values: Sequence[float], best: int | None) -> list[RankScore]:
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
