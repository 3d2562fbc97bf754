"""The grammar that an answer's text is held to, by whichever of its fields a caller asks for it.

It checks sizes, and knows neither the library that compiles a schema nor the answer.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from engine.protocol.types import Grammar, GrammarKind
from gateway.errors import bad_input
from gateway.http.json_body import check_depth
from gateway.inference import gbnf

SOURCE_BYTES_MAX: Final = 32 << 10
REGEX_CHARS_MAX: Final = 4096
GRAMMAR_CHARS_MAX: Final = 8192
CHOICES_MAX: Final = 1024
DEPTH_MAX: Final = 48
_WRAPPER: Final = frozenset({"name", "description", "schema", "strict"})

Schema = dict[str, Any] | bool
GuidedJson = dict[str, Any] | str
GuidedRegex = Annotated[str, Meta(min_length=1, max_length=REGEX_CHARS_MAX)]
GuidedChoice = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(min_length=1, max_length=CHOICES_MAX)
]
GuidedGrammar = Annotated[str, Meta(min_length=1, max_length=GRAMMAR_CHARS_MAX)]


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`response_format`. The schema is bare, as in Workers AI, or in OpenAI's wrapper."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


@dataclass(frozen=True, slots=True)
class ResponseConstraint:
    """A grammar, whether it describes a JSON document, and the field that asked for it. None: any text."""

    grammar: Grammar | None
    json: bool
    field: str


UNCONSTRAINED: Final = ResponseConstraint(None, False, "response_format")


def response_constraint(
    response_format: ResponseFormat | None = None,
    guided_json: GuidedJson | None = None,
    guided_regex: str | None = None,
    guided_choice: list[str] | None = None,
    guided_grammar: str | None = None,
) -> ResponseConstraint:
    """The one constraint that is asked for, or none. Raises ApiError."""
    constraints: list[ResponseConstraint] = []
    if response_format is not None and response_format.type != "text":
        constraints.append(_formatted(response_format))
    if guided_json is not None:
        constraints.append(schema_constraint(_document(guided_json), "guided_json"))
    if guided_regex is not None:
        constraints.append(_sized(GrammarKind.REGEX, guided_regex, "guided_regex"))
    if guided_choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in guided_choice)
        source = f"start: answer\nanswer: {choices}"
        constraints.append(_sized(GrammarKind.LARK, source, "guided_choice"))
    if guided_grammar is not None:
        source = gbnf.gbnf_to_lark(guided_grammar) if gbnf.is_gbnf(guided_grammar) else guided_grammar
        constraints.append(_sized(GrammarKind.LARK, source, "guided_grammar"))
    if len(constraints) > 1:
        first, second = constraints[0].field, constraints[1].field
        raise bad_input(f"'{first}' and '{second}' both say what the answer is; send one", second)
    return constraints[0] if constraints else UNCONSTRAINED


def schema_constraint(schema: Schema, field: str) -> ResponseConstraint:
    """Any document that the schema describes. Raises ApiError where it is too deep or too large."""
    check_depth(schema, field, DEPTH_MAX)
    return _sized(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode(), field)


def unwrap_json_schema(wrapper: dict[str, Any], field: str) -> Schema:
    """The schema in OpenAI's wrapper: `name`, `description`, `schema`, `strict`. Raises ApiError."""
    schema = wrapper.get("schema")
    if not isinstance(schema, dict | bool):
        raise bad_input(f"'{field}.schema' is missing, or is no JSON schema; send an object", f"{field}.schema")
    if wrapper.get("strict") not in (None, True, False):
        raise bad_input(f"'{field}.strict': expected `bool`; all schemas are held to strictly", f"{field}.strict")
    return schema


def _formatted(format: ResponseFormat) -> ResponseConstraint:
    schema = format.json_schema
    if schema is None and format.type == "json_schema":
        raise bad_input("'response_format.json_schema' is missing; give the schema", "response_format.json_schema")
    if schema is None:
        schema = {"type": "object"}
    elif isinstance(schema, dict) and schema.keys() <= _WRAPPER and ("schema" in schema or "name" in schema):
        schema = unwrap_json_schema(schema, "response_format.json_schema")
    return schema_constraint(schema, "response_format")


def _document(schema: GuidedJson) -> Schema:
    """The schema, which may come as its text. Raises ApiError."""
    if isinstance(schema, dict):
        return schema
    try:
        document = msgspec.json.decode(schema)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise bad_input("'guided_json' is not the text of a JSON object; send the schema itself", "guided_json")
    return document


def _sized(kind: GrammarKind, source: str, field: str) -> ResponseConstraint:
    if len(source.encode()) > SOURCE_BYTES_MAX:
        raise bad_input(f"'{field}' has more than {SOURCE_BYTES_MAX} bytes; shorten it", field)
    return ResponseConstraint(Grammar(kind, source), kind is GrammarKind.JSON_SCHEMA, field)
