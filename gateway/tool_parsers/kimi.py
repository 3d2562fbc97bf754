"""Calls as Kimi K2 writes them: a section of calls, each an id with the name in it, a marker and the arguments."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from engine.protocol.types import Grammar
from gateway.tool_parsers import call_grammar, json_calls, sectioned
from gateway.tool_parsers.scanner import Scan, Scanner, ScanningParser
from gateway.tool_parsers.tool_schema import FunctionSpec, arguments, offered_functions
from gateway.tool_parsers.types import ToolSelection

MARKERS: Final = sectioned.SectionMarkers(
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
)

_ID: Final = re.compile(r"[^<]*")
_NAME: Final = re.compile(r"\s*(?:functions\.)?(.+?)(?::\d+)?\s*")


@dataclass(frozen=True, slots=True)
class KimiFormat:
    tokens: Mapping[str, int]
    name: ClassVar[str] = "kimi"
    markers: ClassVar[frozenset[str]] = MARKERS.all

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        return sectioned.section_parser(MARKERS, _read, offered_functions(tools, choice))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        delimiters = sectioned.section_delimiters(MARKERS, self.tokens)
        return call_grammar.call_grammar(tools, choice, parallel, delimiters, self._write)

    def _write(self, rule: str, function: FunctionSpec) -> list[str]:
        name = call_grammar.quoted(f"functions.{call_grammar.bare_name(function)}:")
        body = call_grammar.schema(arguments(function))
        return sectioned.call_rule(rule, MARKERS, self.tokens, f"{name} /[0-9]{{1,3}}/", body)


def _read(scanner: Scanner, names: Collection[str]) -> Scan[bool]:
    id = _NAME.fullmatch((yield from scanner.match(_ID)) or "")
    if id is None or not (yield from scanner.accept(MARKERS.separator)):
        return False
    called = yield from json_calls.read_named_call(scanner, id[1], names)
    if called:
        yield from sectioned.read_call_end(scanner, MARKERS.call_end)
    return called
