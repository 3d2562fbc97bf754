"""Bodies that ask how well texts answer a query: natively as bge's rerankers have it, and `/v1/rerank` as Jina and
Cohere have it. It knows no accounts and no replicas.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.api.body_fields import ShortText, check_same_model, refuse_field
from gateway.api.embeddings import Context, Contexts, EmbeddingText, input_usage, scores_body
from gateway.http.json_body import decode_body
from gateway.inference.embedding_types import (
    EmbeddingInput,
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


class RunRerankDialect:
    """The dialect of `/ai/run` for models that score."""

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> EmbeddingRequest:
        """Raises ApiError."""
        assert model is not None, "the path names the model"
        request = decode_body(body, _decoder)
        check_same_model(request.model, model)
        documents = [(f"contexts[{i}].text", context.text) for i, context in enumerate(request.contexts)]
        texts = EmbeddingInputs(
            items=_items(request.query, documents),
            scored=True,
            best=len(documents) if request.top_k is None else request.top_k,
            truncate=bool(request.truncate_inputs),
            user=request.user,
            options=request.options,
        )
        return EmbeddingRequest(model, texts, scores_body)


class RerankDialect:
    """The dialect of `/v1/rerank`. Models that give vectors serve it too: their scores are cosines."""

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> EmbeddingRequest:
        """Raises ApiError."""
        request = decode_body(body, _documents_decoder)
        for field in ("max_chunks_per_doc", "max_tokens_per_doc"):
            refuse_field(field, getattr(request, field), "set 'truncate_inputs' to have long documents cut")
        refuse_field("rank_fields", request.rank_fields, "send the documents as texts")
        documents = [each if isinstance(each, str) else each.text for each in request.documents]
        texts = EmbeddingInputs(
            items=_items(request.query, [(f"documents[{i}]", text) for i, text in enumerate(documents)]),
            scored=True,
            best=len(documents) if request.top_n is None else request.top_n,
            truncate=bool(request.truncate_inputs),
            user=request.user,
        )
        shown = documents if request.return_documents else None
        return EmbeddingRequest(request.model, texts, lambda answer: _results(answer, shown))


def _items(query: str, documents: Sequence[tuple[str, str]]) -> list[EmbeddingInput]:
    return [
        EmbeddingInput("query", query, InputKind.QUERY),
        *(EmbeddingInput(place, text, InputKind.DOCUMENT) for place, text in documents),
    ]


def _results(answer: EmbeddingResult, documents: Sequence[str] | None) -> bytes:
    """`results`, best first, with the documents' texts where they are to be shown."""
    results = []
    for score in answer.scores:
        result: dict[str, Any] = {"index": score.index, "relevance_score": score.value}
        shown = {} if documents is None else {"document": {"text": documents[score.index]}}
        results.append({**result, **shown})
    usage = input_usage(answer)
    return _encode({"id": answer.request_id, "model": answer.model, "results": results, "usage": usage})
