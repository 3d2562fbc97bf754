"""Calls as Mistral writes them, behind [TOOL_CALLS]: older models a JSON array of objects, later ones the name, [ARGS]
and the arguments, each call behind a marker of its own."""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from engine.protocol.types import Grammar
from gateway.tool_parsers import call_grammar, json_calls
from gateway.tool_parsers.scanner import Scan, Scanner, ScanningParser
from gateway.tool_parsers.tool_schema import FunctionSpec, arguments, offered_functions
from gateway.tool_parsers.types import ToolSelection

CALLS: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGUMENTS: Final = "[ARGS]"

_WORD: Final = re.compile(r"[\w.-]*")


@dataclass(frozen=True, slots=True)
class MistralListFormat:
    """[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]"""

    tokens: Mapping[str, int]
    name: ClassVar[str] = "mistral"
    markers: ClassVar[frozenset[str]] = frozenset({CALLS, CALL_ID, ARGUMENTS})

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        return ScanningParser(functools.partial(_read, names=offered_functions(tools, choice)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        frame = call_grammar.CallDelimiters(
            mark=call_grammar.marker(CALLS, self.tokens), first='" "? "["', between='", "', last='"]"'
        )
        return call_grammar.call_grammar(tools, choice, parallel, frame, call_grammar.object_rule_writer("arguments"))


@dataclass(frozen=True, slots=True)
class MistralNamedFormat:
    """[TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]…"""

    tokens: Mapping[str, int]
    name: ClassVar[str] = "mistral_named"
    markers: ClassVar[frozenset[str]] = MistralListFormat.markers

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        return ScanningParser(functools.partial(_read, names=offered_functions(tools, choice)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        mark = call_grammar.marker(CALLS, self.tokens)
        return call_grammar.call_grammar(
            tools, choice, parallel, call_grammar.CallDelimiters(mark=mark, between=mark), self._write
        )

    def _write(self, rule: str, function: FunctionSpec) -> list[str]:
        name, separator = (
            call_grammar.quoted(call_grammar.bare_name(function)),
            call_grammar.marker(ARGUMENTS, self.tokens),
        )
        id = f"({call_grammar.marker(CALL_ID, self.tokens)} /[0-9A-Za-z]{{9}}/)?" if CALL_ID in self.tokens else ""
        return [f"{rule}: {name} {id} {separator} {call_grammar.schema(arguments(function))}"]


def _read(scanner: Scanner, names: Collection[str]) -> Scan[None]:
    while (yield from scanner.read_text_until(CALLS)) is not None:
        yield from scanner.skip_blank()
        if (yield from scanner.accept("[")):
            yield from _list(scanner, names)
        else:
            yield from _named(scanner, names)


def _list(scanner: Scanner, names: Collection[str]) -> Scan[None]:
    while True:
        yield from scanner.skip_blank()
        if not (yield from json_calls.read_call(scanner, names)):
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
        yield from json_calls.read_named_call(scanner, name, names)
