"""Calls as Mistral writes them, behind [TOOL_CALLS]: older models a JSON array of objects, later ones the name, [ARGS]
and the arguments, each call behind a marker of its own."""

import re
from collections.abc import Collection, Mapping
from typing import Final

from gateway.tool_parsers.call_grammar import bare_name, marker, object_rule_writer, quoted, schema
from gateway.tool_parsers.json_calls import read_call, read_named_call
from gateway.tool_parsers.scanner import Scan, Scanner
from gateway.tool_parsers.tool_format import CallDelimiters, ToolFormat
from gateway.tool_parsers.tool_schema import FunctionSpec, arguments

CALLS: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGUMENTS: Final = "[ARGS]"
MARKERS: Final = frozenset({CALLS, CALL_ID, ARGUMENTS})

_WORD: Final = re.compile(r"[\w.-]*")


def _read(scanner: Scanner, names: Mapping[str, FunctionSpec]) -> Scan[None]:
    while (yield from scanner.read_text_until(CALLS)) is not None:
        yield from scanner.skip_blank()
        if (yield from scanner.accept("[")):
            yield from _list(scanner, names)
        else:
            yield from _named(scanner, names)


def _list(scanner: Scanner, names: Collection[str]) -> Scan[None]:
    while True:
        yield from scanner.skip_blank()
        if not (yield from read_call(scanner, names)):
            return
        yield from scanner.skip_blank()
        mark = yield from scanner.accept(",", "]")
        if mark == "]":
            scanner.discard()
        if mark != ",":
            return


def _named(scanner: Scanner, names: Collection[str]) -> Scan[None]:
    name = yield from scanner.match(_WORD)
    if name in names:
        if (yield from scanner.accept(CALL_ID)):
            yield from scanner.match(_WORD)
        yield from scanner.accept(ARGUMENTS)
        yield from read_named_call(scanner, name, names)


def _list_delimiters(tokens: Mapping[str, int]) -> CallDelimiters:
    return CallDelimiters(mark=marker(CALLS, tokens), first='" "? "["', between='", "', last='"]"')


def _named_delimiters(tokens: Mapping[str, int]) -> CallDelimiters:
    mark = marker(CALLS, tokens)
    return CallDelimiters(mark=mark, between=mark)


def _write_named(rule: str, function: FunctionSpec, tokens: Mapping[str, int]) -> list[str]:
    name, separator = quoted(bare_name(function)), marker(ARGUMENTS, tokens)
    id = f"({marker(CALL_ID, tokens)} /[0-9A-Za-z]{{9}}/)?" if CALL_ID in tokens else ""
    return [f"{rule}: {name} {id} {separator} {schema(arguments(function))}"]


# [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]
MISTRAL_LIST: Final = ToolFormat(
    name="mistral",
    markers=MARKERS,
    read=_read,
    delimiters=_list_delimiters,
    write=object_rule_writer("arguments"),
)
# [TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]…
MISTRAL_NAMED: Final = ToolFormat(
    name="mistral_named", markers=MARKERS, read=_read, delimiters=_named_delimiters, write=_write_named
)
