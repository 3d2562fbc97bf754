"""What a caller wants an answer to be, by whichever of its names: the grammar that the answer's text is held to.

It checks sizes, and knows neither the library that understands a schema nor the answer.
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
    """`response_format`. The schema stands there bare, as Workers AI has it, or in OpenAI's wrapper."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


@dataclass(frozen=True, slots=True)
class ResponseConstraint:
    """A grammar, whether what it describes is a JSON document, and the field that asked for it. None: any text."""

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
    """The one that is asked for, or none. Raises Refusal."""
    found: list[ResponseConstraint] = []
    if response_format is not None and response_format.type != "text":
        found.append(_formatted(response_format))
    if guided_json is not None:
        found.append(schema_constraint(_document(guided_json), "guided_json"))
    if guided_regex is not None:
        found.append(_sized(GrammarKind.REGEX, guided_regex, "guided_regex"))
    if guided_choice is not None:
        source = "start: answer\nanswer: " + " | ".join(
            json.dumps(choice, ensure_ascii=False) for choice in guided_choice
        )
        found.append(_sized(GrammarKind.LARK, source, "guided_choice"))
    if guided_grammar is not None:
        source = gbnf.gbnf_to_lark(guided_grammar) if gbnf.is_gbnf(guided_grammar) else guided_grammar
        found.append(_sized(GrammarKind.LARK, source, "guided_grammar"))
    if len(found) > 1:
        raise bad_input(
            f"'{found[0].field}' and '{found[1].field}' both say what the answer is; send one", found[1].field
        )
    return found[0] if found else UNCONSTRAINED


def schema_constraint(schema: Schema, field: str) -> ResponseConstraint:
    """Any document that the schema describes. Raises Refusal where it is too deep or too large."""
    check_depth(schema, field, DEPTH_MAX)
    return _sized(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode(), field)


def unwrap_json_schema(wrapper: dict[str, Any], field: str) -> Schema:
    """The schema in OpenAI's wrapper: `name`, `description`, `schema`, `strict`. Raises Refusal."""
    schema = wrapper.get("schema")
    if not isinstance(schema, dict | bool):
        raise bad_input(f"'{field}.schema' is missing, or is no JSON schema; send an object", f"{field}.schema")
    if wrapper.get("strict") not in (None, True, False):
        raise bad_input(f"'{field}.strict': expected `bool`; all schemas are held to strictly", f"{field}.strict")
    return schema


def _formatted(asked: ResponseFormat) -> ResponseConstraint:
    schema = asked.json_schema
    if schema is None and asked.type == "json_schema":
        raise bad_input("'response_format.json_schema' is missing; give the schema", "response_format.json_schema")
    if schema is None:
        schema = {"type": "object"}
    elif isinstance(schema, dict) and schema.keys() <= _WRAPPER and ("schema" in schema or "name" in schema):
        schema = unwrap_json_schema(schema, "response_format.json_schema")
    return schema_constraint(schema, "response_format")


def _document(asked: GuidedJson) -> Schema:
    """A schema may come as the text of one."""
    if isinstance(asked, dict):
        return asked
    try:
        found = msgspec.json.decode(asked)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise bad_input("'guided_json' is not the text of a JSON object; send the schema itself", "guided_json")
    return found


def _sized(kind: GrammarKind, source: str, field: str) -> ResponseConstraint:
    if len(source.encode()) > SOURCE_BYTES_MAX:
        raise bad_input(f"'{field}' has more than {SOURCE_BYTES_MAX} bytes; shorten it", field)
    return ResponseConstraint(Grammar(kind, source), kind is GrammarKind.JSON_SCHEMA, field)
