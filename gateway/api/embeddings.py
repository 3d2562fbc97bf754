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


def read_run_embeddings(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> EmbeddingRequest:
    """The dialect of `/ai/run` for models that give vectors."""
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
    return [
        *embedding_inputs("text", body.text, InputKind.TEXT),
        *embedding_inputs("query", body.query, InputKind.QUERY),
        *context_inputs(body.contexts or ()),
        *embedding_inputs("queries", body.queries, InputKind.QUERY),
        *embedding_inputs("documents", body.documents, InputKind.DOCUMENT),
    ]


def embedding_inputs(field: str, texts: str | Sequence[str] | None, kind: InputKind) -> list[EmbeddingInput]:
    """The texts of a field that takes one or several."""
    if isinstance(texts, str):
        return [EmbeddingInput(field, texts, kind)]
    return [EmbeddingInput(f"{field}[{i}]", text, kind) for i, text in enumerate(texts or ())]


def context_inputs(contexts: Sequence[Context]) -> list[EmbeddingInput]:
    return [EmbeddingInput(f"contexts[{i}].text", each.text, InputKind.DOCUMENT) for i, each in enumerate(contexts)]


def _data(answer: EmbeddingResult, name: str = "data") -> bytes:
    """The native answer to texts: vectors under this name."""
    fields = {"shape": answer.shape, name: answer.rows, "pooling": answer.pooling, "usage": answer.usage.fields()}
    return _encode(enveloped(fields))


def _response(answer: EmbeddingResult) -> bytes:
    """The native answer to contexts: vectors, or scores where there is a query."""
    return scores_body(answer) if answer.scores else _data(answer, "response")


def scores_body(answer: EmbeddingResult) -> bytes:
    """Scores as `/ai/run` answers them."""
    response = [{"id": score.index, "score": score.value} for score in answer.scores]
    return _encode(enveloped({"response": response, "usage": answer.usage.fields()}))


# ---- OpenAI's --------------------------------------------------------------------------------------------------


_openai_decoder: Final = msgspec.json.Decoder(EmbeddingsBody)


def read_embeddings(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> EmbeddingRequest:
    """The dialect of `/v1/embeddings`."""
    request = decode_body(body, _openai_decoder)
    texts = EmbeddingInputs(items=_inputs(request.input), dimensions=request.dimensions, user=request.user)
    row = _packed if request.encoding_format == "base64" else json_floats
    return EmbeddingRequest(request.model, texts, _listed, row)


def _inputs(items: str | Sequence[str | int | list[int]]) -> list[EmbeddingInput]:
    if isinstance(items, str):
        return [EmbeddingInput("input", items)]
    ids = [item for item in items if isinstance(item, int)]
    if len(ids) == len(items):
        return [EmbeddingInput("input", ids)]
    if len(items) > INPUTS_MAX:
        raise bad_input(f"'input' has {len(items)} texts; send at most {INPUTS_MAX} in a call", "input")
    inputs = [EmbeddingInput(f"input[{i}]", item) for i, item in enumerate(items) if not isinstance(item, int)]
    if len({type(text.content) for text in inputs}) > 1 or ids:
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
