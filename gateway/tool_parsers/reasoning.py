"""Reasoning between <think> and </think>, split from the answer behind it.

It is a layer before a format's parser, and around a grammar. It knows no formats.
"""

import re
from collections.abc import Mapping
from typing import Final

from engine.protocol.types import Grammar, GrammarKind
from gateway.tool_parsers import call_grammar
from gateway.tool_parsers.parts import OutputParser, OutputPart, ReasoningPart
from gateway.tool_parsers.scanner import Scan, Scanner, partial_marker_start

BEGIN: Final = "<think>"
END: Final = "</think>"
MARKERS: Final = frozenset({BEGIN, END})  # a decoder must show them even where they are control tokens

_FIRSTS: Final = frozenset("\n<")  # with which the end of a thought may begin
_ESCAPED: Final = re.compile(r"\\.|/|\n", re.DOTALL)
# What a regex has to spell differently in Lark, where a class is one of Unicode.
_SPELLED: Final = {
    **{"/": r"\/", "\n": r"\n", r"\d": "[0-9]", r"\D": "[^0-9]"},
    **{r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"},
}
_START: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?P<name>\bstart\b)')


def template_has_reasoning(template: str) -> bool:
    """Whether a model with this chat template (its source) may reason."""
    return BEGIN in template or END in template


def opens_reasoning(prompt: str) -> bool:
    """Whether the prompt (its last characters are enough) ends within a thought, with which the model goes on."""
    return prompt.rstrip().endswith(BEGIN)


class ReasoningParser:
    """A parser that emits a thought as ReasoningPart, and gives the answer behind it to another parser.

    `opened`: the text begins within a thought. Else there is one only if <think> comes first. The blank around a
    thought is part of neither.
    """

    __slots__ = ("_answering", "_inner", "_reading", "_scanner")

    def __init__(self, inner: OutputParser, opened: bool) -> None:
        self._inner = inner
        self._scanner = Scanner()
        self._reading = _read(self._scanner, opened)
        self._answering = False

    def push(self, text: str) -> list[OutputPart]:
        if self._answering or not text:
            return self._inner.push(text)
        idle = self._scanner.idle
        if idle is not None and idle.isdisjoint(text):
            return [ReasoningPart(text)]
        self._scanner.append(text)
        return self._advance()

    def finish(self) -> list[OutputPart]:
        """The rest. A thought that has no end is thought all the same."""
        parts: list[OutputPart] = []
        if not self._answering:
            self._scanner.ended = True
            parts = self._advance()
        return parts + self._inner.finish()

    def _advance(self) -> list[OutputPart]:
        self._answering = next(self._reading, True) is True
        parts = self._scanner.drain_parts()
        return parts + self._inner.push(self._scanner.text[self._scanner.committed :]) if self._answering else parts


def _read(scanner: Scanner, opened: bool) -> Scan[None]:
    """Reads up to the beginning of the answer; pending text belongs to the answer."""
    yield from scanner.skip_blank()
    if not scanner.overflow() and (yield from scanner.accept(BEGIN)):
        opened = True
    if opened:
        yield from _blank(scanner)
        yield from _thought(scanner)
        yield from _blank(scanner)


def _thought(scanner: Scanner) -> Scan[None]:
    """Emits the thought up to its end, without the line break before that."""
    while True:
        end = scanner.text.find(END, scanner.at)
        stop = end if end >= 0 else partial_marker_start(scanner.text, scanner.at, ("\n" + END, END))
        if end > scanner.at and scanner.text[end - 1] == "\n":
            stop -= 1
        scanner.at = stop
        scanner.emit_reasoning()
        if end >= 0:
            scanner.at = end + len(END)
            return
        scanner.idle = _FIRSTS if scanner.committed == len(scanner.text) else None
        more = yield from scanner.wait_text()
        scanner.idle = None
        if not more:
            scanner.at = len(scanner.text)
            scanner.emit_reasoning()
            return


def _blank(scanner: Scanner) -> Scan[None]:
    scanner.discard()
    yield from scanner.skip_blank()
    scanner.overflow()
    scanner.discard()


def grammar_after_reasoning(grammar: Grammar, tokens: Mapping[str, int], opened: bool) -> Grammar:
    """The grammar of an answer that may come behind a thought, which is free. `opened`: the thought has begun.

    `tokens` are the added tokens of the model's tokenizer, their ids by their spellings.
    """
    begin, end = call_grammar.marker(BEGIN, tokens), call_grammar.marker(END, tokens)
    thought = 'free_thought (/\\n{1,2}/ | "")'
    return grammar_behind(grammar, thought if opened else f"({begin} {thought})?", end)


def grammar_behind(grammar: Grammar, start: str, end: str) -> Grammar:
    """The grammar of an answer behind `start`: Lark expressions, in which `free_thought` is any text up to `end`."""
    lazy = "" if end.startswith("<[") else "[lazy]"
    lines = [f"start: {start} behind_thought", f"free_thought{lazy}: /(.|\\n)*/ {end}"]
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            lines.append(f"behind_thought: %json {grammar.source}")
        case GrammarKind.REGEX:
            source = grammar.source.removeprefix("^").removesuffix("$")
            lines.append(f"behind_thought: /{_ESCAPED.sub(lambda found: _SPELLED.get(found[0], found[0]), source)}/")
        case GrammarKind.LARK:
            lines.append(_START.sub(lambda found: "behind_thought" if found["name"] else found[0], grammar.source))
    return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")
