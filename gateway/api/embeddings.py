"""Bodies that ask for vectors: natively at `/ai/run`, and OpenAI's embeddings. It knows no accounts and no replicas."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from engine.protocol.types import Pooling
from gateway.api.body_fields import ShortText, TokenId, check_same_model
from gateway.errors import bad_input
from gateway.http.json_body import decode_body
from gateway.inference.embedding_types import (
    EmbeddingInput,
    EmbeddingInputs,
    EmbeddingRequest,
    EmbeddingResult,
    Floats,
    InputKind,
    json_floats,
)
from gateway.inference.reply import enveloped
from gateway.inference.run_options import RunOptionsBody

TEXTS_MAX: Final = 100
INPUTS_MAX: Final = 2048  # OpenAI's libraries send so many at once
_encode = msgspec.json.encode

EmbeddingText = Annotated[str, Meta(min_length=1)]
EmbeddingTexts = EmbeddingText | Annotated[list[EmbeddingText], Meta(min_length=1, max_length=TEXTS_MAX)]
Ids = Annotated[list[TokenId], Meta(min_length=1)]


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text that is compared with a query."""

    text: EmbeddingText


Contexts = Annotated[list[Context], Meta(min_length=1, max_length=TEXTS_MAX)]


class RunEmbeddingsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The native body: `text`; or `contexts`, which a `query` makes scores of; or `queries` and `documents`."""

    text: EmbeddingTexts | None = None
    query: EmbeddingText | None = None
    contexts: Contexts | None = None
    queries: EmbeddingTexts | None = None
    documents: EmbeddingTexts | None = None
    instruction: Annotated[str, Meta(min_length=1, max_length=2048)] | None = None
    pooling: Literal["mean", "cls"] | None = None
    truncate_inputs: bool | None = None
    model: ShortText | None = None
    user: ShortText | None = None
    options: RunOptionsBody | None = None


class EmbeddingsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's body. Token ids are the whole input, control tokens included."""

    model: ShortText
    input: EmbeddingText | Annotated[list[EmbeddingText | TokenId | Ids], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: ShortText | None = None


_decoder: Final = msgspec.json.Decoder(RunEmbeddingsBody)


class RunEmbeddingsDialect:
    """The dialect of `/ai/run` for models that give vectors."""

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> EmbeddingRequest:
        """Raises ApiError."""
        assert model is not None, "the path names the model"
        request = decode_body(body, _decoder)
        check_same_model(request.model, model)
        texts = EmbeddingInputs(
            items=_items(request),
            scored=request.query is not None,
            pooling=None if request.pooling is None else Pooling(request.pooling),
            instruction=request.instruction,
            truncate=bool(request.truncate_inputs),
            user=request.user,
            options=request.options,
        )
        return EmbeddingRequest(model, texts, _data if request.contexts is None else _response)


def _items(body: RunEmbeddingsBody) -> list[EmbeddingInput]:
    forms = [body.text is not None, body.contexts is not None, bool(body.queries or body.documents)]
    if forms.count(True) != 1:
        raise bad_input(
            f"oneOf at '/' not met, {forms.count(True)} matches: send 'text', or 'contexts' with or without a 'query', "
            "or 'queries' and 'documents'"
        )
    if body.query is not None and body.contexts is None:
        raise bad_input("'query' goes with 'contexts', which it is compared with; send 'text' for a vector", "query")
    if body.instruction is not None and body.queries is None:
        raise bad_input("'instruction' says what 'queries' are for; leave it out without them", "instruction")
    query = [] if body.query is None else [EmbeddingInput("query", body.query, InputKind.QUERY)]
    contexts = [
        EmbeddingInput(f"contexts[{i}].text", context.text, InputKind.DOCUMENT)
        for i, context in enumerate(body.contexts or ())
    ]
    return [
        *embedding_inputs("text", body.text, InputKind.TEXT),
        *query,
        *contexts,
        *embedding_inputs("queries", body.queries, InputKind.QUERY),
        *embedding_inputs("documents", body.documents, InputKind.DOCUMENT),
    ]


def embedding_inputs(field: str, texts: str | Sequence[str] | None, kind: InputKind) -> list[EmbeddingInput]:
    """The texts of a field that takes one or several."""
    if texts is None:
        return []
    if isinstance(texts, str):
        return [EmbeddingInput(field, texts, kind)]
    return [EmbeddingInput(f"{field}[{i}]", text, kind) for i, text in enumerate(texts)]


def _data(answer: EmbeddingResult) -> bytes:
    """The native answer to texts."""
    return _encode(enveloped(_with_usage("data", answer)))


def _response(answer: EmbeddingResult) -> bytes:
    """The native answer to contexts: vectors, or scores where there is a query."""
    return scores_body(answer) if answer.scores else _encode(enveloped(_with_usage("response", answer)))


def _with_usage(name: str, answer: EmbeddingResult) -> dict[str, Any]:
    fields = {"shape": answer.shape, name: answer.rows, "pooling": answer.pooling}
    return {**fields, "usage": answer.usage.fields()}


def scores_body(answer: EmbeddingResult) -> bytes:
    """Scores as `/ai/run` answers them."""
    response = [{"id": score.index, "score": score.value} for score in answer.scores]
    return _encode(enveloped({"response": response, "usage": answer.usage.fields()}))


# ---- OpenAI's --------------------------------------------------------------------------------------------------


_openai_decoder: Final = msgspec.json.Decoder(EmbeddingsBody)


class EmbeddingsDialect:
    """The dialect of `/v1/embeddings`."""

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> EmbeddingRequest:
        """Raises ApiError."""
        request = decode_body(body, _openai_decoder)
        texts = EmbeddingInputs(items=_inputs(request.input), dimensions=request.dimensions, user=request.user)
        return EmbeddingRequest(
            request.model, texts, _listed, _packed if request.encoding_format == "base64" else json_floats
        )


def _inputs(items: str | Sequence[str | int | list[int]]) -> list[EmbeddingInput]:
    if isinstance(items, str):
        return [EmbeddingInput("input", items)]
    ids = [each for each in items if isinstance(each, int)]
    if len(ids) == len(items):
        return [EmbeddingInput("input", ids)]
    if len(items) > INPUTS_MAX:
        raise bad_input(f"'input' has {len(items)} texts; send at most {INPUTS_MAX} in a call", "input")
    inputs = [EmbeddingInput(f"input[{i}]", each) for i, each in enumerate(items) if not isinstance(each, int)]
    if len({type(item.content) for item in inputs}) > 1 or ids:
        raise bad_input("'input' mixes texts and token ids; send one of them, or a list of the same", "input")
    return inputs


def _listed(answer: EmbeddingResult) -> bytes:
    """OpenAI's list of embeddings."""
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(answer.rows)]
    return _encode({"object": "list", "data": data, "model": answer.model, "usage": input_usage(answer)})


def input_usage(answer: EmbeddingResult) -> dict[str, Any]:
    """The usage of what is only read, as OpenAI has it."""
    fields = answer.usage.fields()
    del fields["completion_tokens"]
    return fields


def _packed(row_H: Floats) -> bytes:
    """A text that holds float32, little-endian, as OpenAI's libraries unpack it."""
    return b'"' + base64.b64encode(row_H.astype("<f4").tobytes()) + b'"'
