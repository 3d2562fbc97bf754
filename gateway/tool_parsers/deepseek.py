"""Calls as DeepSeek writes them, in a section: V3 and R1 with the arguments in a fenced block, V3.1 and later bare."""

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

SECTION: Final = "<｜tool▁calls▁begin｜>"
SECTION_END: Final = "<｜tool▁calls▁end｜>"
CALL: Final = "<｜tool▁call▁begin｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
CALL_END: Final = "<｜tool▁call▁end｜>"
FENCE: Final = "```json"
FENCE_END: Final = "```"

_HEAD: Final = re.compile(r"[^<]*")
_LINE: Final = re.compile(r"[^\n]*")


@dataclass(frozen=True, slots=True)
class DeepSeekFormat:
    """…begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…"""

    tokens: Mapping[str, int]
    name: ClassVar[str] = "deepseek"
    markers: ClassVar[frozenset[str]] = frozenset({SECTION, SECTION_END, CALL, SEPARATOR, CALL_END})

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        return _parser(tools, choice)

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        return call_grammar.call_grammar(tools, choice, parallel, _frame(self.tokens, ""), self._write)

    def _write(self, rule: str, function: FunctionSpec) -> list[str]:
        name = call_grammar.quoted(call_grammar.bare_name(function))
        separator, end = call_grammar.marker(SEPARATOR, self.tokens), call_grammar.marker(CALL_END, self.tokens)
        return [f"{rule}: {name} {separator} {call_grammar.schema(arguments(function))} {end}"]


@dataclass(frozen=True, slots=True)
class DeepSeekFencedFormat:
    """…begin｜>function<｜tool▁sep｜>name, a fenced block of JSON, <｜tool▁call▁end｜>…"""

    tokens: Mapping[str, int]
    name: ClassVar[str] = "deepseek_fenced"
    markers: ClassVar[frozenset[str]] = DeepSeekFormat.markers

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        return _parser(tools, choice)

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        return call_grammar.call_grammar(tools, choice, parallel, _frame(self.tokens, '"\\n"'), self._write)

    def _write(self, rule: str, function: FunctionSpec) -> list[str]:
        name = call_grammar.quoted(f"{call_grammar.bare_name(function)}\n{FENCE}\n")
        separator, end = call_grammar.marker(SEPARATOR, self.tokens), call_grammar.marker(CALL_END, self.tokens)
        block = f"{call_grammar.schema(arguments(function))} {call_grammar.quoted(chr(10) + FENCE_END)}"
        return [f'{rule}: "function" {separator} {name} {block} {end}']


def _parser(tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
    one = functools.partial(_read, names=offered_functions(tools, choice))
    return ScanningParser(lambda scanner: json_calls.read_call_sections(scanner, SECTION, CALL, SECTION_END, one))


def _frame(tokens: Mapping[str, int], between: str) -> call_grammar.CallDelimiters:
    call = call_grammar.marker(CALL, tokens)
    return call_grammar.CallDelimiters(
        mark=call_grammar.marker(SECTION, tokens),
        first=call,
        between=f"{between} {call}",
        last=call_grammar.marker(SECTION_END, tokens),
    )


def _read(scanner: Scanner, names: Collection[str]) -> Scan[bool]:
    """Reads both forms, behind the opening of a call: of which it is, the character behind the separator says."""
    name = yield from scanner.match(_HEAD)
    if name is None or not (yield from scanner.accept(SEPARATOR)):
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
        if fenced and (yield from scanner.accept(FENCE_END)):
            yield from scanner.skip_blank()
        if (yield from scanner.accept(CALL_END)):
            scanner.discard()
    return called
