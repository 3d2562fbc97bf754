"""Reads a request's bytes as a checked type: strict JSON, no repeated keys, no deep nesting; errors name the field.

It does not know what the fields mean.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import inspect

from gateway.errors import ApiError, bad_input, body_missing
from gateway.field_hints import allowed_ranges, allowed_words, similar_field, union_members
from gateway.http.unknown_fields import UnknownField

DEPTH_MAX: Final = 64
VALUES_MAX: Final = 65_536  # more would stop all streams for as long as their decoding takes
QUERY_FIELDS_MAX: Final = 64
WALKED_BYTES: Final = 1 << 20  # above it names are compared in Python, where other threads get their turns
_PATH: Final = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`")
_WRONG_WORD: Final = re.compile(r"Invalid (?:enum )?value '")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `([^`]*)`")
_NAME_MAX: Final = 64
_BYTE: Final = re.compile(r"(?:JSON is malformed: )?(.*?)(?: \(byte (\d+)\))?$")
_WHOLE: Final = re.compile("[0-9]{1,18}")
_NO_MARKS: Final = bytes(byte for byte in range(256) if byte not in b":{}")

T = TypeVar("T")


def decode_body(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Returns the body as the decoder's type. Raises ApiError. The typed decode comes first: it fails at the first
    wrong value."""
    if not body.strip():
        raise body_missing()
    check_values(body)
    try:
        decoded = decoder.decode(body)
        if len(body) > WALKED_BYTES:
            check_names(body)
        else:
            json.loads(body, object_pairs_hook=_unrepeated)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), decoder.type) from None
    except RecursionError:
        raise bad_input(f"the body is nested more than {DEPTH_MAX} levels deep; flatten it") from None
    except ValueError as error:  # malformed for msgspec, or bytes that are no UTF-8
        raise bad_input(malformed("the body is not valid JSON", body, error)) from None
    return decoded


def body_without(unknown: UnknownField, body: bytes) -> bytes:
    """The body, which was refused for this field, without it. Raises ApiError where a name is twice in it."""
    check_names(body)
    document = msgspec.json.decode(body)
    unknown.remove_from(document)
    return msgspec.json.encode(document)


def malformed(problem: str, text: bytes, error: ValueError) -> str:
    """The problem with where it is and what is wrong there, of a text in which a decoder found this error."""
    words = _BYTE.fullmatch(str(error))
    fault, place = (words[1], int(words[2] or len(text))) if words else ("", len(text))
    place -= fault == "trailing characters"  # msgspec points behind the first of them
    if "utf-8" in str(error).lower():  # Python's error, or from 0.23 on msgspec's: neither knows the place in the whole
        try:
            text.decode()
        except UnicodeDecodeError as whole:
            fault, place = "no UTF-8", whole.start
    before = text[:place]
    line = before.count(b"\n") + 1
    column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
    return f"{problem} at line {line}, column {column}: {fault[:1].lower()}{fault[1:]}; send one JSON object"


def check_values(body: bytes) -> None:
    """Raises ApiError for a body of more than VALUES_MAX values, before anything is built of them. Costs 7 ms for
    10 MB, and some 50 if a text is full of commas."""
    if _separators(body) <= VALUES_MAX:
        return
    unescaped = _without_escapes(body)
    if unescaped.count(b'"') <= 4 * VALUES_MAX and _separators(b"".join(unescaped.split(b'"')[::2])) <= VALUES_MAX:
        return
    raise bad_input(f"the body has more than {VALUES_MAX} values; send fewer")


def check_names(body: bytes) -> None:
    """Raises ApiError where an object of a body of valid JSON has a name twice, and ValueError where it is no UTF-8.

    Does what json.loads does with `_unrepeated`, without a call into C that takes more than some 10 ms for 10 MB.
    """
    pieces = _without_escapes(body).split(b'"')
    place, names = 0, list[set[str]]()
    for index, piece in enumerate(pieces):  # what is between texts, a text, what is between texts, …
        piece.decode()  # no decoder looks into what it skips
        marks = b"" if index % 2 else piece.translate(None, _NO_MARKS)
        if marks.startswith(b":"):  # the text before a colon is a name
            name: str = msgspec.json.decode(body[place - len(pieces[index - 1]) - 2 : place])
            if name in names[-1]:
                raise _repeated(name)
            names[-1].add(name)
        for mark in marks:
            if mark == ord("{"):
                names.append(set())
            elif mark == ord("}"):
                names.pop()
        place += len(piece) + 1


def _without_escapes(body: bytes) -> bytes:
    """The body, as long as it was, in which all quotation marks begin or end a text."""
    return body.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def _separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"{") + text.count(b"[")


def query_fields(query: bytes) -> dict[str, list[str]]:
    """Returns the query string's fields, each with all its values. Raises ApiError."""
    try:
        return parse_qs(query.decode("latin-1"), keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX)
    except ValueError:
        raise bad_input(f"the query string has more than {QUERY_FIELDS_MAX} fields; send fewer") from None


def is_json(text: str) -> bool:
    """Whether this is the text of one JSON document, nested no deeper than can be read."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def query_options(query: bytes) -> dict[str, str]:
    """Returns the query string's fields, each with its last value. Raises ApiError."""
    return {name: values[-1] for name, values in query_fields(query).items()}


def decode_query(query: bytes, kind: type[T]) -> T:
    """Returns the query string as a type of texts, words, times and whole numbers. Raises ApiError."""
    options: dict[str, str | int] = dict(query_options(query))
    whole = {field.encode_name for field in _fields(kind) if _is_whole(field.type)}
    for name in whole & options.keys():
        if _WHOLE.fullmatch(str(options[name])):
            options[name] = int(options[name])
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from None


def _fields(kind: Any) -> Sequence[inspect.Field]:
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return described.fields


def _is_whole(kind: inspect.Type) -> bool:
    return any(isinstance(member, inspect.IntType) for member in union_members([kind]))


def check_depth(value: Any, name: str, max_depth: int) -> None:
    """Raises ApiError if a free-form value is nested deeper than `max_depth` levels."""
    level = [value] if isinstance(value, dict | list) else []
    while level:
        if max_depth <= 0:
            raise bad_input(f"'{name}' is nested too deeply; flatten it", name)
        max_depth -= 1
        nested: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                nested.extend(item.values())
            elif isinstance(item, list):
                nested.extend(item)
        level = [item for item in nested if isinstance(item, dict | list)]


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _repeated(name)
    return fields


def _repeated(name: str) -> ApiError:
    return replace(bad_input(f"'{name[:_NAME_MAX]}' is given twice; give it once", name[:_NAME_MAX]), coined=True)


def _invalid(message: str, kind: Any) -> ApiError:
    """Turns msgspec's sentence around, so that the field comes first. It quotes types and limits, never values."""
    path = _PATH.search(message)
    place = path.group(1) if path else ""
    field = place[:_NAME_MAX]
    problem = _PATH.sub("", message).replace("`", "")
    if named := _UNKNOWN.match(message) or _MISSING.match(message):
        name = named.group(1)[:_NAME_MAX]
        field = f"{field}.{name}" if field else name
        if _MISSING.match(message):
            return bad_input(f"'{field}' is missing; give it", field)
        similar = similar_field(kind, place, name)
        advice = f"did you mean '{similar}'?" if similar else "leave it out"
        refusal = bad_input(f"'{field}' is not a field of this request; {advice}", field)
        found = None if "..." in place or "`key` in" in message else place
        return UnknownField(**{**vars(refusal), "coined": True}, place=found, name=named.group(1))
    if _WRONG_WORD.match(message):
        return bad_input(f"'{field}': send one of {', '.join(allowed_words(kind, field))}", field)
    if not field:
        return bad_input(f"{problem}; send one JSON object" if problem.startswith("Expected ") else problem)
    allowed = f"; send {ranges}" if (ranges := allowed_ranges(kind, field)) else ""
    return bad_input(f"'{field}': {problem[0].lower()}{problem[1:]}{allowed}", field)
