"""Bodies that ask how well texts answer a query: natively as bge's rerankers have it, and `/v1/rerank` as Jina and
Cohere have it. It knows no accounts and no replicas.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.api.body_fields import ShortText, check_same_model, refuse_field
from gateway.api.embeddings import (
    Context,
    Contexts,
    EmbeddingText,
    context_inputs,
    embedding_inputs,
    input_usage,
    scores_body,
)
from gateway.http.json_body import decode_body
from gateway.inference.embedding_types import (
    EmbeddingInputs,
    EmbeddingRequest,
    EmbeddingResult,
    InputKind,
)
from gateway.inference.run_options import RunOptionsBody

DOCUMENTS_MAX: Final = 1000
_encode = msgspec.json.encode
_Count = Annotated[int, Meta(ge=1)]


class RunRerankBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The native body. `top_k` limits the answer to the best contexts."""

    query: EmbeddingText
    contexts: Contexts
    top_k: _Count | None = None
    truncate_inputs: bool | None = None
    model: ShortText | None = None
    user: ShortText | None = None
    options: RunOptionsBody | None = None


class RerankBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/v1/rerank`. Fields below `truncate_inputs` are refused where they ask for something."""

    model: ShortText
    query: EmbeddingText
    documents: Annotated[list[EmbeddingText | Context], Meta(min_length=1, max_length=DOCUMENTS_MAX)]
    top_n: _Count | None = None
    return_documents: bool | None = None
    user: ShortText | None = None
    truncate_inputs: bool | None = None
    max_chunks_per_doc: Any = None
    max_tokens_per_doc: Any = None
    rank_fields: Any = None


_decoder: Final = msgspec.json.Decoder(RunRerankBody)
_documents_decoder: Final = msgspec.json.Decoder(RerankBody)


def read_run_rerank(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> EmbeddingRequest:
    """The dialect of `/ai/run` for models that score."""
    assert model is not None, "the path names the model"
    request = decode_body(body, _decoder)
    check_same_model(request.model, model)
    texts = EmbeddingInputs(
        items=[*embedding_inputs("query", request.query, InputKind.QUERY), *context_inputs(request.contexts)],
        scored=True,
        best=len(request.contexts) if request.top_k is None else request.top_k,
        truncate=bool(request.truncate_inputs),
        user=request.user,
        options=request.options,
    )
    return EmbeddingRequest(model, texts, scores_body)


def read_rerank(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> EmbeddingRequest:
    """The dialect of `/v1/rerank`. Models that give vectors serve it too: their scores are cosines."""
    request = decode_body(body, _documents_decoder)
    for field in ("max_chunks_per_doc", "max_tokens_per_doc"):
        refuse_field(field, getattr(request, field), "set 'truncate_inputs' to have long documents cut")
    refuse_field("rank_fields", request.rank_fields, "send the documents as texts")
    documents = [document if isinstance(document, str) else document.text for document in request.documents]
    query_inputs = embedding_inputs("query", request.query, InputKind.QUERY)
    texts = EmbeddingInputs(
        items=[*query_inputs, *embedding_inputs("documents", documents, InputKind.DOCUMENT)],
        scored=True,
        best=len(documents) if request.top_n is None else request.top_n,
        truncate=bool(request.truncate_inputs),
        user=request.user,
    )
    return EmbeddingRequest(request.model, texts, partial(_results, documents if request.return_documents else None))


def _results(documents: Sequence[str] | None, answer: EmbeddingResult) -> bytes:
    """`results`, best first, with the documents' texts where they are to be shown."""
    results: list[dict[str, Any]] = []
    for score in answer.scores:
        results.append({"index": score.index, "relevance_score": score.value})
        if documents is not None:
            results[-1]["document"] = {"text": documents[score.index]}
    usage = input_usage(answer)
    return _encode({"id": answer.request_id, "model": answer.model, "results": results, "usage": usage})
