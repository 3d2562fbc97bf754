"""Calls as Mistral writes them, behind [TOOL_CALLS]: older models a JSON array of objects, later ones the name, [ARGS]
and the arguments, each call behind a marker of its own."""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from engine.protocol.types import Grammar
from gateway.tool_parsers import call_grammar, json_calls
from gateway.tool_parsers.scanner import Reader, Reading, Tape
from gateway.tool_parsers.tool_schema import Function, arguments, offered
from gateway.tool_parsers.types import ToolChoice

CALLS: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGUMENTS: Final = "[ARGS]"

_WORD: Final = re.compile(r"[\w.-]*")


@dataclass(frozen=True, slots=True)
class MistralList:
    """[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]"""

    tokens: Mapping[str, int]
    name: ClassVar[str] = "mistral"
    markers: ClassVar[frozenset[str]] = frozenset({CALLS, CALL_ID, ARGUMENTS})

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> Reader:
        return Reader(functools.partial(_read, names=offered(tools, choice)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, parallel: bool) -> Grammar | None:
        frame = call_grammar.Frame(
            mark=call_grammar.marker(CALLS, self.tokens), first='" "? "["', between='", "', last='"]"'
        )
        return call_grammar.grammar(tools, choice, parallel, frame, call_grammar.written_as_object("arguments"))


@dataclass(frozen=True, slots=True)
class MistralNamed:
    """[TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]…"""

    tokens: Mapping[str, int]
    name: ClassVar[str] = "mistral_named"
    markers: ClassVar[frozenset[str]] = MistralList.markers

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> Reader:
        return Reader(functools.partial(_read, names=offered(tools, choice)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, parallel: bool) -> Grammar | None:
        mark = call_grammar.marker(CALLS, self.tokens)
        return call_grammar.grammar(tools, choice, parallel, call_grammar.Frame(mark=mark, between=mark), self._write)

    def _write(self, rule: str, function: Function) -> list[str]:
        name, separator = (
            call_grammar.quoted(call_grammar.bare_name(function)),
            call_grammar.marker(ARGUMENTS, self.tokens),
        )
        id = f"({call_grammar.marker(CALL_ID, self.tokens)} /[0-9A-Za-z]{{9}}/)?" if CALL_ID in self.tokens else ""
        return [f"{rule}: {name} {id} {separator} {call_grammar.schema(arguments(function))}"]


def _read(tape: Tape, names: Collection[str]) -> Reading[None]:
    while (yield from tape.prose(CALLS)) is not None:
        yield from tape.blank()
        if (yield from tape.follows("[")):
            yield from _list(tape, names)
        else:
            yield from _named(tape, names)


def _list(tape: Tape, names: Collection[str]) -> Reading[None]:
    while True:
        yield from tape.blank()
        if not (yield from json_calls.call(tape, names)):
            return
        yield from tape.blank()
        mark = yield from tape.follows(",", "]")
        if mark == "]":
            tape.drop()
        if mark != ",":
            return


def _named(tape: Tape, names: Collection[str]) -> Reading[None]:
    name = yield from tape.word(_WORD)
    if name in names:
        if (yield from tape.follows(CALL_ID)):
            yield from tape.word(_WORD)
        yield from tape.follows(ARGUMENTS)
        yield from json_calls.named(tape, name, names)
