"""How a family of models writes calls of tools: what reads them, and the grammar of an answer that has them.

It knows no family. https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md has the grammar's language, Lark.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from engine.protocol.types import Grammar, GrammarKind
from gateway.tool_parsers.scanner import CALLS_MAX, Scan, Scanner, ScanningParser
from gateway.tool_parsers.tool_schema import FunctionSpec, ToolSelection, offered_functions

_PROSE: Final = r"PROSE: /(.|\n)*/"


@dataclass(frozen=True, slots=True)
class CallDelimiters:
    """What stands around calls, as Lark expressions: `mark` is where they begin, `first` goes before the first call,
    `between` between two of them, `last` behind all."""

    mark: str = ""
    first: str = ""
    between: str = ""
    last: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls of tools, which are dictionaries in OpenAI's shape.

    `markers` are the spellings that `read` looks for: a decoder must show them even where they are control tokens.
    `read` takes the functions that may be called, by name. `write` gives the Lark rule of this name, and those that it
    needs, for calls of a function. `tokens` are the added tokens of a model's tokenizer, their ids by their spellings.
    Where all chats are in the format, with tools or without, `hold` makes the grammar of a whole answer of that of its
    calls, or else of its text.
    """

    name: str
    markers: frozenset[str] = frozenset()
    read: Callable[[Scanner, Mapping[str, FunctionSpec]], Scan[None]]
    delimiters: Callable[[Mapping[str, int]], CallDelimiters]
    write: Callable[[str, FunctionSpec, Mapping[str, int]], list[str]]
    tokens: Mapping[str, int] = field(default_factory=dict)
    hold: Callable[[Grammar, Mapping[str, int], bool], Grammar] | None = None

    def with_tokens(self, tokens: Mapping[str, int]) -> "ToolFormat":
        return replace(self, tokens=tokens)

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        functions = offered_functions(tools, choice)
        return ScanningParser(lambda scanner: self.read(scanner, functions))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        """What the answer must be, so that the calls in it are valid by their tools' schemas: nothing but one call
        (several if `parallel`) where they are required; with `auto`, text until they begin. None where there are no
        tools, or `auto` has no mark: nobody can tell the beginning of a call from text then. Raises ApiError, naming
        the tool, for one that an answer cannot be held to."""
        functions = offered_functions(tools, choice)
        delimiters = self.delimiters(self.tokens)
        free = choice.mode == "auto"
        if not functions or (free and not delimiters.mark):
            return None
        rules = [f"t{number}" for number in range(len(functions))]
        more = f"({delimiters.between} call){{0,{CALLS_MAX - 1}}}" if parallel else ""
        lines = [
            "start: answer",
            *_answer(delimiters.mark, free),
            f"calls: {delimiters.first} call {more} {delimiters.last}",
            f"call: {' | '.join(rules)}",
        ]
        for rule, function in zip(rules, functions.values(), strict=True):
            lines += [f"// {json.dumps(function['name'])}", *self.write(rule, function, self.tokens), ""]
        return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")


def _answer(mark: str, free: bool) -> list[str]:
    if not free:
        return [f"answer: {mark} calls"]
    if mark.startswith("<["):
        return [f"answer: PROSE ({mark} calls)?", _PROSE]
    return ["answer: PROSE | marked calls", f"marked[lazy]: PROSE {mark}", _PROSE]
