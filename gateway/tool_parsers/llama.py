"""Calls as Llama 3 writes them: JSON objects with `parameters`, perhaps behind <|python_tag|>, with "; " between."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from engine.protocol.types import Grammar
from gateway.tool_parsers import call_grammar, json_calls
from gateway.tool_parsers.scanner import Scan, Scanner, ScanningParser
from gateway.tool_parsers.tool_schema import offered_functions
from gateway.tool_parsers.types import ToolSelection

# Of Llama 3, and of Llama 4, which puts them around text before its calls.
TAGS: Final = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")


@dataclass(frozen=True, slots=True)
class LlamaJsonFormat:
    tokens: Mapping[str, int]
    name: ClassVar[str] = "llama3_json"
    markers: ClassVar[frozenset[str]] = frozenset(TAGS)

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        return ScanningParser(functools.partial(_read, names=offered_functions(tools, choice)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        frame = call_grammar.CallDelimiters(between='"; "')
        return call_grammar.call_grammar(tools, choice, parallel, frame, call_grammar.object_rule_writer("parameters"))


def _read(scanner: Scanner, names: Collection[str]) -> Scan[None]:
    return json_calls.read_call_sequence(scanner, names, *TAGS)
