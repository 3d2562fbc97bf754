"""Calls as DeepSeek writes them, in a section: V3 and R1 with the arguments in a fenced block, V3.1 and later bare."""

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
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)
FENCE: Final = "```json"
FENCE_END: Final = "```"

_HEAD: Final = re.compile(r"[^<]*")
_LINE: Final = re.compile(r"[^\n]*")


@dataclass(frozen=True, slots=True)
class DeepSeekFormat:
    """…begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…"""

    tokens: Mapping[str, int]
    name: ClassVar[str] = "deepseek"
    markers: ClassVar[frozenset[str]] = MARKERS.all

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        return sectioned.section_parser(MARKERS, _read, offered_functions(tools, choice))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        delimiters = sectioned.section_delimiters(MARKERS, self.tokens)
        return call_grammar.call_grammar(tools, choice, parallel, delimiters, self._write)

    def _write(self, rule: str, function: FunctionSpec) -> list[str]:
        name = call_grammar.quoted(call_grammar.bare_name(function))
        return sectioned.call_rule(rule, MARKERS, self.tokens, name, call_grammar.schema(arguments(function)))


@dataclass(frozen=True, slots=True)
class DeepSeekFencedFormat:
    """…begin｜>function<｜tool▁sep｜>name, a fenced block of JSON, <｜tool▁call▁end｜>…"""

    tokens: Mapping[str, int]
    name: ClassVar[str] = "deepseek_fenced"
    markers: ClassVar[frozenset[str]] = MARKERS.all

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        return sectioned.section_parser(MARKERS, _read, offered_functions(tools, choice))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        delimiters = sectioned.section_delimiters(MARKERS, self.tokens, '"\\n"')
        return call_grammar.call_grammar(tools, choice, parallel, delimiters, self._write)

    def _write(self, rule: str, function: FunctionSpec) -> list[str]:
        name = call_grammar.quoted(f"{call_grammar.bare_name(function)}\n{FENCE}\n")
        block = f"{name} {call_grammar.schema(arguments(function))} {call_grammar.quoted(chr(10) + FENCE_END)}"
        return sectioned.call_rule(rule, MARKERS, self.tokens, '"function"', block)


def _read(scanner: Scanner, names: Collection[str]) -> Scan[bool]:
    """Reads both forms of a call: the character behind the separator tells them apart."""
    name = yield from scanner.match(_HEAD)
    if name is None or not (yield from scanner.accept(MARKERS.separator)):
        return False
    yield from scanner.skip_blank()
    fenced = (yield from scanner.peek()) != "{"
    if fenced:
        name = yield from scanner.match(_LINE)
        yield from scanner.skip_blank()
        if name is None or not (yield from scanner.accept(FENCE)):
            return False
    called = yield from json_calls.read_named_call(scanner, name.strip(), names)
    if called:
        yield from scanner.skip_blank()
        if fenced:
            yield from scanner.accept(FENCE_END)
        yield from sectioned.read_call_end(scanner, MARKERS.call_end)
    return called
