"""JSON Schemas of what a model takes and answers at `/ai/run`, made from the types that read its bodies, so that the
schemas and the readers cannot differ.

This module adds only the rules on fields that exclude each other, which a type cannot express.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any, Final, Literal

import msgspec

from gateway import errors
from gateway.api import body_fields, chat, embeddings, rerank, run_native
from gateway.catalogue.catalogue import Model
from gateway.http.exchange import Exchange
from gateway.http.json_body import decode_query
from gateway.listing.answers import RESPONSE_TYPES
from gateway.listing.context import ListingContext

Json = dict[str, Any]

_NULL: Final[Json] = {"type": "null"}
_NOTHING: Final[Json] = {"enum": [None, False, []]}
_UNSERVED: Final = "Not served here: any other value is refused."


@dataclass(frozen=True, slots=True)
class BodyForm:
    """One of the forms that a body can have: at least one of `fields`, and none of the other forms'. Fields in `never`
    may be there only with values that ask for nothing."""

    title: str
    fields: tuple[str, ...]
    never: tuple[str, ...] = ()


_PROMPTED: Final = (
    BodyForm("Prompt", ("prompt",), never=("tools",)),
    BodyForm("Messages", ("messages",), never=("raw",)),
)
_BODIES: Final[dict[str, tuple[Any, tuple[BodyForm, ...]]]] = {
    "native": (run_native.RunNativeBody, _PROMPTED),
    "chat": (chat.RunChatBody, _PROMPTED),
    "embeddings": (
        embeddings.RunEmbeddingsBody,
        (
            BodyForm("Texts", ("text",), never=("query", "instruction")),
            BodyForm("Contexts", ("contexts",), never=("instruction",)),
            BodyForm("Queries and documents", ("queries", "documents"), never=("query",)),
        ),
    ),
    "rerank": (rerank.RunRerankBody, ()),
}


class Pair(msgspec.Struct, frozen=True):
    """JSON Schemas of what a model takes, and of what it answers."""

    input: Json
    output: Json


class Schemas(msgspec.Struct, frozen=True):
    result: Pair
    success: Literal[True] = True
    errors: tuple[()] = ()
    messages: tuple[()] = ()


class SchemaQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str


def one(context: ListingContext, models: Sequence[Model], exchange: Exchange) -> bytes:
    """`/ai/models/schema`. Raises ApiError."""
    name = decode_query(exchange.query, SchemaQuery).model
    model = context.find(models, name)
    if model is None:
        raise errors.no_such_model(name, context.did_you_mean(models, name))
    asked = with_sampling(input_schema(model.run_family), model.run_family, model.sampling)
    return msgspec.json.encode(Schemas(Pair(asked, output_schema(model.run_family))))


def with_sampling(schema: Json, family: str, own: Mapping[str, float]) -> Json:
    """The schema of a family's bodies with what is in force where a body leaves out how a model samples that has such
    parameters of its `own`."""
    if family == "native":
        defaults = {**own, "temperature": run_native.TEMPERATURE_DEFAULT}
    else:
        defaults = {"temperature": body_fields.TEMPERATURE_DEFAULT, **own}
    for name, value in defaults.items():
        if name in schema["properties"]:
            schema["properties"][name]["default"] = value
    return schema


def input_schema(family: str) -> Json:
    """The schema of bodies for a family of models."""
    kind, forms = _BODIES[family]
    schema = _whole(kind)
    if forms:
        schema["oneOf"] = [_form(form, forms) for form in forms]
    return schema


def output_schema(family: str) -> Json:
    """The schema of whole answers from a family of models."""
    first, *others = map(_whole, RESPONSE_TYPES[family])
    if not others:
        return first
    definitions = {name: part for schema in (first, *others) for name, part in schema.pop("$defs").items()}
    described = {"description": "One of these", "additionalProperties": True}
    return {"type": "object", **described, "anyOf": [first, *others], "$defs": definitions}


def _whole(kind: Any) -> Json:
    """The JSON Schema of a type, with the type itself at its top."""
    whole = msgspec.json.schema(kind)
    definitions = whole.pop("$defs")
    top = definitions.pop(whole["$ref"].rpartition("/")[2])
    for schema in (top, *definitions.values()):
        tidy_schema(schema)
    return {**top, "$defs": definitions}


def tidy_schema(schema: Json) -> None:
    """Tidies a type's schema: its description becomes plain text, and fields that take any value become unserved, since
    they exist to be refused by name."""
    if "description" in schema:
        schema["description"] = cleandoc(schema["description"])
    for name, field in schema.get("properties", {}).items():
        if field.get("default", "") is not None:
            continue
        del field["default"]  # null marks a field that was left out, and does not say what is done then
        if field.keys() <= {"description"}:
            schema["properties"][name] = {**_NULL, "description": field.get("description", _UNSERVED)}


def _form(form: BodyForm, forms: tuple[BodyForm, ...]) -> Json:
    others = [name for other in forms if other is not form for name in other.fields]
    needed = [{"required": [name], "properties": {name: {"not": _NULL}}} for name in form.fields]
    return {
        "title": form.title,
        "anyOf": needed,
        "properties": {**dict.fromkeys(others, _NULL), **dict.fromkeys(form.never, _NOTHING)},
    }
