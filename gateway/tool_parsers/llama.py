"""Calls as Llama 3 writes them: JSON objects with `parameters`, perhaps behind <|python_tag|>, with "; " between."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from engine.protocol.types import Grammar
from gateway.tool_parsers import call_grammar, json_calls
from gateway.tool_parsers.scanner import Reader, Reading, Tape
from gateway.tool_parsers.tool_schema import offered
from gateway.tool_parsers.types import ToolChoice

# Of Llama 3, and of Llama 4, which puts them around text before its calls.
TAGS: Final = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")


@dataclass(frozen=True, slots=True)
class LlamaJson:
    tokens: Mapping[str, int]
    name: ClassVar[str] = "llama3_json"
    markers: ClassVar[frozenset[str]] = frozenset(TAGS)

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> Reader:
        return Reader(functools.partial(_read, names=offered(tools, choice)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, parallel: bool) -> Grammar | None:
        frame = call_grammar.Frame(between='"; "')
        return call_grammar.grammar(tools, choice, parallel, frame, call_grammar.written_as_object("parameters"))


def _read(tape: Tape, names: Collection[str]) -> Reading[None]:
    return json_calls.sequence(tape, names, *TAGS)
