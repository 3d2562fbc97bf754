"""Calls as Kimi K2 writes them: a section of calls, each an id with the name in it, a marker and the arguments."""

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

SECTION: Final = "<|tool_calls_section_begin|>"
SECTION_END: Final = "<|tool_calls_section_end|>"
CALL: Final = "<|tool_call_begin|>"
ARGUMENTS: Final = "<|tool_call_argument_begin|>"
CALL_END: Final = "<|tool_call_end|>"

_ID: Final = re.compile(r"[^<]*")
_NAME: Final = re.compile(r"\s*(?:functions\.)?(.+?)(?::\d+)?\s*")


@dataclass(frozen=True, slots=True)
class KimiFormat:
    tokens: Mapping[str, int]
    name: ClassVar[str] = "kimi"
    markers: ClassVar[frozenset[str]] = frozenset({SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END})

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        one = functools.partial(_read, names=offered_functions(tools, choice))
        return ScanningParser(lambda scanner: json_calls.read_call_sections(scanner, SECTION, CALL, SECTION_END, one))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        frame = call_grammar.CallDelimiters(
            mark=call_grammar.marker(SECTION, self.tokens),
            first=call_grammar.marker(CALL, self.tokens),
            between=call_grammar.marker(CALL, self.tokens),
            last=call_grammar.marker(SECTION_END, self.tokens),
        )
        return call_grammar.call_grammar(tools, choice, parallel, frame, self._write)

    def _write(self, rule: str, function: FunctionSpec) -> list[str]:
        name = call_grammar.quoted(f"functions.{call_grammar.bare_name(function)}:")
        separator, end = call_grammar.marker(ARGUMENTS, self.tokens), call_grammar.marker(CALL_END, self.tokens)
        return [f"{rule}: {name} /[0-9]{{1,3}}/ {separator} {call_grammar.schema(arguments(function))} {end}"]


def _read(scanner: Scanner, names: Collection[str]) -> Scan[bool]:
    said = _NAME.fullmatch((yield from scanner.match(_ID)) or "")
    if said is None or not (yield from scanner.accept(ARGUMENTS)):
        return False
    called = yield from json_calls.read_named_call(scanner, said[1], names)
    if called:
        yield from scanner.skip_blank()
        if (yield from scanner.accept(CALL_END)):
            scanner.discard()
    return called
