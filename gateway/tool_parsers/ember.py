"""Calls as Ember writes them: one JSON object a line. Many a small model of other families does, too."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.protocol.types import Grammar
from gateway.tool_parsers import call_grammar, json_calls
from gateway.tool_parsers.scanner import Reader
from gateway.tool_parsers.tool_schema import offered
from gateway.tool_parsers.types import ToolChoice


@dataclass(frozen=True, slots=True)
class Ember:
    tokens: Mapping[str, int]
    name: ClassVar[str] = "ember"
    markers: ClassVar[frozenset[str]] = frozenset()

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> Reader:
        return Reader(functools.partial(json_calls.sequence, names=offered(tools, choice)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, parallel: bool) -> Grammar | None:
        return call_grammar.grammar(
            tools, choice, parallel, call_grammar.Frame(between='"\\n"'), call_grammar.written_as_object("arguments")
        )
