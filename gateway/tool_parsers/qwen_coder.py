"""Calls as Qwen3-Coder writes them: <function=name> with a <parameter=key> for each argument, its text unquoted."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from gateway.tool_parsers import call_grammar, json_calls, python_literals
from gateway.tool_parsers.scanner import Scan, Scanner, partial_marker_start
from gateway.tool_parsers.tool_format import CallDelimiters, ToolFormat
from gateway.tool_parsers.tool_schema import (
    ANNOTATIONS,
    TYPES,
    FunctionSpec,
    ToolParameter,
    json_type_of,
    properties,
    schema_types,
    tool_schema_error,
    types_by_name,
)

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"
VALUE_MAX: Final = 64 << 10  # characters of one whose type shows only when all of it is there

_NAME: Final = re.compile(r"[^>\n]*")
_STRING: Final = frozenset({"string"})


def _read(scanner: Scanner, functions: Mapping[str, FunctionSpec]) -> Scan[None]:
    """Some models forget the tag around a function: it is not asked for."""
    while (mark := (yield from scanner.read_text_until(BEGIN, FUNCTION))) is not None:
        if mark == BEGIN:
            yield from scanner.skip_blank()
            if not (yield from scanner.accept(FUNCTION)):
                continue
        name = yield from scanner.match(_NAME)
        if name not in functions or not scanner.may_call or not (yield from scanner.accept(">")) or scanner.overflow():
            continue
        assert name is not None
        scanner.start_call(name)
        if not (yield from _parameters(scanner, types_by_name(functions[name]))):
            yield from json_calls.read_broken_arguments(scanner)
            continue
        scanner.end_call()
        yield from scanner.skip_blank()
        if (yield from scanner.accept(END)):
            scanner.discard()


def _parameters(scanner: Scanner, kinds: Mapping[str, frozenset[str]]) -> Scan[bool]:
    """Gives out the arguments, up to the end of the function; false where something else comes."""
    before = "{"
    while True:
        yield from scanner.skip_blank()
        mark = yield from scanner.accept(PARAMETER, FUNCTION_END)
        if mark == FUNCTION_END:
            scanner.emit_arguments_text("{}" if before == "{" else "}")
            return True
        name = (yield from scanner.match(_NAME)) if mark else None
        if name is None or not (yield from scanner.accept(">")):
            return False
        scanner.emit_arguments_text(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
        before = ", "
        yield from scanner.accept("\n")
        scanner.discard()
        if not (yield from _value(scanner, kinds.get(name, TYPES))):
            return False


def _value(scanner: Scanner, kinds: frozenset[str]) -> Scan[bool]:
    """Text is given out as it comes, and so is what can only be an array or an object."""
    if kinds == _STRING:
        scanner.emit_arguments_text('"')
        whole = yield from _raw(
            scanner, lambda piece: scanner.emit_arguments_text(python_literals.escape_json_text(piece)), sys.maxsize
        )
        scanner.emit_arguments_text('"' if whole else "")
        return whole
    if "string" not in kinds:
        yield from scanner.skip_blank()
        scanner.discard()
        if (yield from scanner.peek()) in ("[", "{"):
            if not (yield from python_literals.read_literal(scanner)):
                return False
            yield from scanner.skip_blank()
            return (yield from scanner.accept(PARAMETER_END)) is not None
    pieces: list[str] = []
    whole = yield from _raw(scanner, pieces.append, VALUE_MAX)
    text = "".join(pieces)
    scanner.emit_arguments_text(_json(text, kinds) if whole else text)
    return whole


def _raw(scanner: Scanner, give: Callable[[str], None], characters_max: int) -> Scan[bool]:
    """Gives a value's text in pieces, without the line break before its end; false: it has no end, or is longer."""
    left = characters_max
    while True:
        end = scanner.text.find(PARAMETER_END, scanner.at)
        stop = (
            end if end >= 0 else partial_marker_start(scanner.text, scanner.at, ("\n" + PARAMETER_END, PARAMETER_END))
        )
        piece = scanner.text[scanner.at : stop]
        left -= len(piece)
        if left < 0:
            return False
        if end >= 0:
            scanner.at = end + len(PARAMETER_END)
            scanner.discard()
            give(piece.removesuffix("\n"))
            return True
        scanner.at = stop
        scanner.discard()
        give(piece)
        if not (yield from scanner.wait_text()):
            rest = scanner.text[scanner.at :]
            scanner.at = len(scanner.text)
            scanner.discard()
            give(rest)
            return False


def _json(text: str, kinds: frozenset[str]) -> str:
    """A value that has one of these types, as JSON; a string where it has none of them."""
    value = text.strip()
    value = python_literals.CONSTANTS.get(value, value)
    try:
        known = json_type_of(json.loads(value, parse_constant=_no_json)) in kinds
    except (ValueError, RecursionError):
        known = False
    return value if known else json.dumps(text, ensure_ascii=False)


def _no_json(constant: str) -> NoReturn:
    raise ValueError(constant)


def _write(rule: str, function: FunctionSpec, tokens: Mapping[str, int]) -> list[str]:
    head = call_grammar.quoted(f"\n{FUNCTION}{call_grammar.bare_name(function)}>\n")
    parameters = properties(function, _NAME)
    members = call_grammar.members(f"{rule}_a", [parameter.required for parameter in parameters], "")
    end = f"{call_grammar.quoted(FUNCTION_END + chr(10))} {call_grammar.marker(END, tokens)}"
    lines = [f"{rule}: {head} {rule}_a {end}", *members]
    for number, parameter in enumerate(parameters):
        lines += _write_member(f"{rule}_a{number}", parameter, function)
    return lines


def _write_member(rule: str, parameter: ToolParameter, function: FunctionSpec) -> list[str]:
    head = call_grammar.quoted(f"{PARAMETER}{parameter.name}>\n")
    close = call_grammar.quoted(f"\n{PARAMETER_END}\n")
    kinds = schema_types(parameter.schema)
    if "string" not in kinds:
        return [f"{rule}: {head} {call_grammar.schema(parameter.schema)} {close}"]
    constraints = parameter.schema.keys() - ANNOTATIONS - {"type", "format"}
    values = parameter.schema.get("enum", [parameter.schema.get("const")])
    if constraints in ({"enum"}, {"const"}) and all(isinstance(v, str) and PARAMETER_END not in v for v in values):
        return [f"{rule}: {head} ({' | '.join(map(call_grammar.quoted, values))}) {close}"]
    if constraints:
        raise tool_schema_error(
            function, f"{min(constraints)!r} of {parameter.name!r} cannot be kept in this model's format of calls"
        )
    text = f"{rule}_text"
    return [f'{rule}: {head} {text} "\\n"', f"{text}[lazy]: /(.|\\n)*/ {call_grammar.quoted(PARAMETER_END)}"]


def _delimiters(tokens: Mapping[str, int]) -> CallDelimiters:
    begin = call_grammar.marker(BEGIN, tokens)
    return CallDelimiters(mark=begin, between=f'"\\n" {begin}')


QWEN_CODER: Final = ToolFormat(
    name="qwen_coder", markers=frozenset({BEGIN, END}), read=_read, delimiters=_delimiters, write=_write
)
