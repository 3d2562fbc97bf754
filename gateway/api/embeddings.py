"""Bodies that ask for vectors: natively at `/ai/run`, and OpenAI's embeddings. It knows no accounts and no replicas."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from engine.protocol.types import Pooling
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
from gateway.inference.prompt import ShortText, TokenId
from gateway.inference.reply import enveloped
from gateway.inference.run_options import RunOptionsBody

TEXTS_MAX: Final = 100
INPUTS_MAX: Final = 2048  # of OpenAI's, whose libraries send so many at once
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
        """Raises Refusal."""
        asked = decode_body(body, _decoder)
        assert model is not None, "the path names the model"
        if asked.model is not None and asked.model != model:
            raise bad_input("'model' differs from the model in the path; leave it out", "model")
        texts = EmbeddingInputs(
            items=_items(asked),
            scored=asked.query is not None,
            pooling=None if asked.pooling is None else Pooling(asked.pooling),
            instruction=asked.instruction,
            truncate=bool(asked.truncate_inputs),
            user=asked.user,
            options=asked.options,
        )
        return EmbeddingRequest(model, texts, _data if asked.contexts is None else _response)


def _items(asked: RunEmbeddingsBody) -> list[EmbeddingInput]:
    forms = [asked.text is not None, asked.contexts is not None, bool(asked.queries or asked.documents)]
    if forms.count(True) != 1:
        raise bad_input(
            f"oneOf at '/' not met, {forms.count(True)} matches: send 'text', or 'contexts' with or without a 'query', "
            "or 'queries' and 'documents'"
        )
    if asked.query is not None and asked.contexts is None:
        raise bad_input("'query' goes with 'contexts', which it is compared with; send 'text' for a vector", "query")
    if asked.instruction is not None and asked.queries is None:
        raise bad_input("'instruction' says what 'queries' are for; leave it out without them", "instruction")
    query = [] if asked.query is None else [EmbeddingInput("query", asked.query, InputKind.QUERY)]
    contexts = [
        EmbeddingInput(f"contexts[{i}].text", context.text, InputKind.DOCUMENT)
        for i, context in enumerate(asked.contexts or ())
    ]
    return [
        *embedding_inputs("text", asked.text, InputKind.TEXT),
        *query,
        *contexts,
        *embedding_inputs("queries", asked.queries, InputKind.QUERY),
        *embedding_inputs("documents", asked.documents, InputKind.DOCUMENT),
    ]


def embedding_inputs(field: str, said: str | Sequence[str] | None, kind: InputKind) -> list[EmbeddingInput]:
    """The texts of a field that takes one or several."""
    if said is None:
        return []
    if isinstance(said, str):
        return [EmbeddingInput(field, said, kind)]
    return [EmbeddingInput(f"{field}[{i}]", text, kind) for i, text in enumerate(said)]


def _data(answer: EmbeddingResult) -> bytes:
    """The native answer to texts."""
    return _encode(enveloped(_shown("data", answer)))


def _response(answer: EmbeddingResult) -> bytes:
    """The native answer to contexts: vectors, or scores where there is a query."""
    return scores_body(answer) if answer.scores else _encode(enveloped(_shown("response", answer)))


def _shown(name: str, answer: EmbeddingResult) -> dict[str, Any]:
    shown = {"shape": answer.shape, name: answer.rows, "pooling": answer.pooling}
    return {**shown, "usage": answer.usage.fields()}


def scores_body(answer: EmbeddingResult) -> bytes:
    """Scores as `/ai/run` answers them."""
    response = [{"id": score.index, "score": score.value} for score in answer.scores]
    return _encode(enveloped({"response": response, "usage": answer.usage.fields()}))


# ---- OpenAI's --------------------------------------------------------------------------------------------------


_openai_decoder: Final = msgspec.json.Decoder(EmbeddingsBody)


class EmbeddingsDialect:
    """The dialect of `/v1/embeddings`."""

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> EmbeddingRequest:
        """Raises Refusal."""
        asked = decode_body(body, _openai_decoder)
        texts = EmbeddingInputs(items=_inputs(asked.input), dimensions=asked.dimensions, user=asked.user)
        return EmbeddingRequest(
            asked.model, texts, _listed, _packed if asked.encoding_format == "base64" else json_floats
        )


def _inputs(said: str | Sequence[str | int | list[int]]) -> list[EmbeddingInput]:
    if isinstance(said, str):
        return [EmbeddingInput("input", said)]
    ids = [each for each in said if isinstance(each, int)]
    if len(ids) == len(said):
        return [EmbeddingInput("input", ids)]
    if len(said) > INPUTS_MAX:
        raise bad_input(f"'input' has {len(said)} texts; send at most {INPUTS_MAX} in a call", "input")
    found = [EmbeddingInput(f"input[{i}]", each) for i, each in enumerate(said) if not isinstance(each, int)]
    if len({type(item.content) for item in found}) > 1 or ids:
        raise bad_input("'input' mixes texts and token ids; send one of them, or a list of the same", "input")
    return found


def _listed(answer: EmbeddingResult) -> bytes:
    """OpenAI's list of embeddings."""
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(answer.rows)]
    return _encode({"object": "list", "data": data, "model": answer.model, "usage": input_usage(answer)})


def input_usage(answer: EmbeddingResult) -> dict[str, Any]:
    """The usage of what is only read, as OpenAI has it."""
    told = answer.usage.fields()
    del told["completion_tokens"]
    return told


def _packed(row_H: Floats) -> bytes:
    """A text that holds float32, little-endian, as OpenAI's libraries unpack it."""
    return b'"' + base64.b64encode(row_H.astype("<f4").tobytes()) + b'"'
