"""Translates a caller's grammar into llguidance's Lark dialect, with our options, or says which part is not supported.

Nothing is compiled here. A schema's `format` that the library does not know is left out: by the standard it annotates a
value and asserts nothing.
"""

import json
import re
from typing import Any, Final

from llguidance import regex_to_lark

from engine.protocol.types import Grammar, GrammarKind, RejectReason
from engine.sequences.validation import SubmitRejected

SOURCE_BYTES_MAX: Final = {
    GrammarKind.JSON_SCHEMA: 32 << 10,
    GrammarKind.REGEX: 32 << 10,
    GrammarKind.LARK: 256 << 10,  # the schemas of many tools
}
SCHEMA_DEPTH_MAX: Final = 16
# Where text is forced the library would tokenize all of it anew for every token: 8 ms each behind a constant of 24 KB.
# Without forcing the mask allows each of its tokenizations, and the model samples the one that it knows.
_OPTIONS: Final = '%llguidance {"no_forcing": true}\n'
_SCHEMA_OPTIONS: Final = {
    # Between two tokens of JSON a space, or a line end and an indent: a small model that begins more does not stop.
    "whitespace_pattern": r" |\n {0,32}|\n\t{0,8}",
    "json_allow_general_unicode_escapes": True,
}
_OPTIONS_KEY: Final = "x-guidance"  # under it a schema would set the library's options
_FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_NAMED: Final = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
_LISTED: Final = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
_SINGLE: Final = frozenset(
    (
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    )
)
# A literal, a regex, a comment, or an embedded schema, whichever begins first.
_PIECES: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|\#)[^\n]*|(?P<schema>%json\b\s*)')


def to_lark(grammar: Grammar) -> str:
    """The grammar as Lark. Raises SubmitRejected."""
    max_bytes, size = SOURCE_BYTES_MAX[grammar.kind], len(grammar.source.encode())
    if size > max_bytes:
        raise _refused(f"it has {size} bytes; at most {max_bytes} are taken")
    if grammar.kind == GrammarKind.REGEX:
        return f"{_OPTIONS}start: /{regex_to_lark(_unanchored(grammar.source), use_ascii='dw') or '()'}/\n"
    if grammar.kind == GrammarKind.LARK:
        return _OPTIONS + _with_embedded_schemas(grammar.source)
    try:
        schema = json.loads(grammar.source, parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        raise _refused(f"it is no JSON: {error}") from error
    return f"{_OPTIONS}start: %json {_with_schema_options(schema)}\n"


def _refused(problem: str) -> SubmitRejected:
    return SubmitRejected(RejectReason.GRAMMAR, problem)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _unanchored(regex: str) -> str:
    """The regex without anchors at its ends: a grammar's regex matches the whole text anyway."""
    if regex.endswith("$") and not re.search(r"(?<!\\)(?:\\\\)*\\\$$", regex):
        regex = regex[:-1]
    return regex.removeprefix("^")


def _with_embedded_schemas(lark: str) -> str:
    """The text with each of its schemas as the library gets them."""
    parts, end = [], 0
    while piece := _PIECES.search(lark, end):
        parts.append(lark[end : piece.end()])
        end = piece.end()
        if piece["schema"] is not None:
            try:
                schema, end = _DECODER.raw_decode(lark, end)
            except (ValueError, RecursionError) as error:
                raise _refused(f"what follows a %json is no JSON: {error}") from error
            parts.append(_with_schema_options(schema))
    return "".join([*parts, lark[end:]])


_DECODER: Final = json.JSONDecoder(parse_constant=_no_json)


def _with_schema_options(schema: Any) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refused("a schema must be an object, and allow something")
    return json.dumps({**_supported(schema, 1), _OPTIONS_KEY: _SCHEMA_OPTIONS})


def _supported(schema: Any, depth: int) -> Any:
    """The schema without keywords that assert nothing, which the library would refuse."""
    if not isinstance(schema, dict):
        return schema
    if depth > SCHEMA_DEPTH_MAX:
        raise _refused(f"its schemas are nested deeper than {SCHEMA_DEPTH_MAX}")
    return {
        key: _part(key, value, depth + 1)
        for key, value in schema.items()
        if not (key == "format" and value not in _FORMATS) and not (key == "uniqueItems" and value is False)
    }


def _part(key: str, value: Any, depth: int) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: _supported(each, depth) for name, each in value.items()}
    if key in _LISTED and isinstance(value, list):
        return [_supported(each, depth) for each in value]
    return _supported(value, depth) if key in _SINGLE else value
