"""Calls as Hermes and Qwen write them: <tool_call>, a JSON object, </tool_call>, each call in tags of its own."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from engine.protocol.types import Grammar
from gateway.tool_parsers import call_grammar, json_calls
from gateway.tool_parsers.scanner import Scan, Scanner, ScanningParser
from gateway.tool_parsers.tool_schema import offered_functions
from gateway.tool_parsers.types import ToolSelection

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"


@dataclass(frozen=True, slots=True)
class HermesFormat:
    tokens: Mapping[str, int]
    name: ClassVar[str] = "hermes"
    markers: ClassVar[frozenset[str]] = frozenset({BEGIN, END})

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        return ScanningParser(functools.partial(_read, names=offered_functions(tools, choice)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        begin, end = call_grammar.marker(BEGIN, self.tokens), call_grammar.marker(END, self.tokens)
        frame = call_grammar.CallDelimiters(
            mark=begin,
            first='"\\n"',
            between=f'"\\n" {end} "\\n" {begin} "\\n"',
            last=f'"\\n" {end}',
        )
        return call_grammar.call_grammar(tools, choice, parallel, frame, call_grammar.object_rule_writer("arguments"))


def _read(scanner: Scanner, names: Collection[str]) -> Scan[None]:
    while (yield from scanner.read_text_until(BEGIN)) is not None:
        yield from scanner.skip_blank()
        if (yield from json_calls.read_call(scanner, names)):
            yield from scanner.skip_blank()
            if (yield from scanner.accept(END)):
                scanner.discard()
