"""Calls as Ember writes them: one JSON object a line. Many a small model of other families does, too."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.protocol.types import Grammar
from gateway.tool_parsers import call_grammar, json_calls
from gateway.tool_parsers.scanner import ScanningParser
from gateway.tool_parsers.tool_schema import offered_functions
from gateway.tool_parsers.types import ToolSelection


@dataclass(frozen=True, slots=True)
class EmberFormat:
    tokens: Mapping[str, int]
    name: ClassVar[str] = "ember"
    markers: ClassVar[frozenset[str]] = frozenset()

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        return ScanningParser(functools.partial(json_calls.read_call_sequence, names=offered_functions(tools, choice)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        return call_grammar.call_grammar(
            tools,
            choice,
            parallel,
            call_grammar.CallDelimiters(between='"\\n"'),
            call_grammar.object_rule_writer("arguments"),
        )
