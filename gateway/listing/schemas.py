"""What a model takes and answers at `/ai/run`, as JSON Schemas: made from the types that read its bodies, so that they
cannot differ from what is accepted.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from gateway import errors
from gateway.body import asked_in
from gateway.catalogue import Model
from gateway.dialects import chat, embeddings, native, rerank
from gateway.request import Gateway

_INPUTS: Final = {
    "native": native.Input,
    "chat": chat.Input,
    "embeddings": embeddings.Input,
    "rerank": rerank.Input,
}


class Pair(msgspec.Struct, frozen=True):
    """JSON Schemas of what a model takes, and of what it answers."""

    input: dict[str, Any]
    output: dict[str, Any]


class Schemas(msgspec.Struct, frozen=True):
    result: Pair
    success: Literal[True] = True
    errors: tuple[()] = ()
    messages: tuple[()] = ()


class SchemaQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str


def one(gateway: Gateway, models: Sequence[Model], query: bytes) -> bytes:
    """`/ai/models/schema`. Raises Refusal."""
    name = asked_in(query, SchemaQuery).model
    model = next((model for model in models if name in (model.name, *model.aliases)), None)
    if model is None:
        raise errors.no_such_model(name)
    return msgspec.json.encode(Schemas(Pair(whole(_INPUTS[model.family]), {})))


def whole(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a type, with the type itself at its top."""
    schema = msgspec.json.schema(kind)
    name = schema.pop("$ref").rpartition("/")[2]
    definitions = schema.pop("$defs")
    return {**definitions.pop(name), "$defs": definitions}
