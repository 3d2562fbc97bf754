"""Calls as Llama 3.2 and Llama 4 may write them: a list of Python calls, [f(a=1, b="x"), g()], and nothing else."""

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from engine.protocol.types import Grammar
from gateway.tool_parsers import call_grammar, json_calls, python_literals
from gateway.tool_parsers.scanner import Scan, Scanner, ScanningParser
from gateway.tool_parsers.tool_schema import (
    FunctionSpec,
    ToolParameter,
    offered_functions,
    properties,
    schema_types,
    tool_schema_error,
)
from gateway.tool_parsers.types import ToolSelection

BEGIN: Final = "<|python_start|>"
END: Final = "<|python_end|>"

_NAME: Final = re.compile(r"[\w.-]*")
_KEY: Final = re.compile(r"""[^\s=(),\[\]{}"']*""")


@dataclass(frozen=True, slots=True)
class PythonicFormat:
    tokens: Mapping[str, int]
    name: ClassVar[str] = "pythonic"
    markers: ClassVar[frozenset[str]] = frozenset({BEGIN, END})

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> ScanningParser:
        return ScanningParser(functools.partial(_read, names=offered_functions(tools, choice)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        return call_grammar.call_grammar(
            tools, choice, parallel, call_grammar.CallDelimiters(first='"["', between='", "', last='"]"'), _write
        )


def _read(tape: Scanner, names: Collection[str]) -> Scan[None]:
    while True:
        yield from tape.blank()
        if (yield from tape.follows("[")):
            yield from _list(tape, names)
        if (yield from tape.prose(BEGIN, END)) is None:
            return


def _list(tape: Scanner, names: Collection[str]) -> Scan[None]:
    while (yield from _call(tape, names)):
        yield from tape.blank()
        mark = yield from tape.follows(",", "]")
        if mark == "]":
            tape.drop()
            yield from tape.blank()
            if (yield from tape.follows(END)):
                tape.drop()
        if mark != ",":
            return


def _call(tape: Scanner, names: Collection[str]) -> Scan[bool]:
    """False: it is none, and all that was read of it is held as text. It is announced with its first argument."""
    yield from tape.blank()
    name = yield from tape.word(_NAME)
    if name not in names or not tape.callable or not (yield from tape.follows("(")):
        return False
    assert name is not None
    yield from tape.blank()
    key = None
    if not (yield from tape.follows(")")):
        key = yield from _key(tape)
        if key is None:
            return False
    if tape.overflow():
        return False
    tape.begin(name)
    if key is None:
        tape.give("{}")
        tape.end()
    elif (yield from _arguments(tape, key)):
        tape.end()
    else:
        yield from json_calls.read_broken_arguments(tape)
    return True


def _arguments(tape: Scanner, key: str | None) -> Scan[bool]:
    before = "{"
    while key is not None:
        tape.give(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        if not (yield from python_literals.read_literal(tape)):
            return False
        yield from tape.blank()
        comma = yield from tape.follows(",")
        yield from tape.blank()
        if (yield from tape.follows(")")):
            tape.give("}")
            return True
        before = ", "
        key = (yield from _key(tape)) if comma else None
    return False


def _key(tape: Scanner) -> Scan[str | None]:
    """Passes over a parameter's name and its equals sign."""
    key = yield from tape.word(_KEY)
    yield from tape.blank()
    return key if key and (yield from tape.follows("=")) else None


def _write(rule: str, function: FunctionSpec) -> list[str]:
    head = call_grammar.quoted(call_grammar.bare_name(function) + "(")
    said = properties(function)
    members = call_grammar.members(f"{rule}_a", [inner.required for inner in said], '", "')
    return [f'{rule}: {head} {rule}_a ")"', *members, *(_member(rule, i, p, function) for i, p in enumerate(said))]


def _member(rule: str, number: int, said: ToolParameter, function: FunctionSpec) -> str:
    if _KEY.fullmatch(said.name) is None:
        raise tool_schema_error(
            function, f"{said.name!r} cannot be written as a parameter in this model's format of calls"
        )
    plain = schema_types(said.schema) == {"boolean"} and "enum" not in said.schema and "const" not in said.schema
    value = '("True" | "False")' if plain else call_grammar.schema(said.schema)
    return f"{rule}_a{number}: {call_grammar.quoted(said.name + '=')} {value}"
