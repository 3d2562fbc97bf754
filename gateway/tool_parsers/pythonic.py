"""Calls as Llama 3.2 and Llama 4 may write them: a list of Python calls, [f(a=1, b="x"), g()], and nothing else."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Final

from gateway.tool_parsers import call_grammar, json_calls, python_literals
from gateway.tool_parsers.scanner import Scan, Scanner
from gateway.tool_parsers.tool_format import CallDelimiters, ToolFormat
from gateway.tool_parsers.tool_schema import (
    FunctionSpec,
    properties,
    schema_types,
)

BEGIN: Final = "<|python_start|>"
END: Final = "<|python_end|>"

_NAME: Final = re.compile(r"[\w.-]*")
_KEY: Final = re.compile(r"""[^\s=(),\[\]{}"']*""")


def _read(scanner: Scanner, names: Mapping[str, FunctionSpec]) -> Scan[None]:
    while True:
        yield from scanner.skip_blank()
        if (yield from scanner.accept("[")):
            yield from _list(scanner, names)
        if (yield from scanner.read_text_until(BEGIN, END)) is None:
            return


def _list(scanner: Scanner, names: Collection[str]) -> Scan[None]:
    while (yield from _call(scanner, names)):
        yield from scanner.skip_blank()
        mark = yield from scanner.accept(",", "]")
        if mark == "]":
            scanner.discard()
            yield from scanner.skip_blank()
            if (yield from scanner.accept(END)):
                scanner.discard()
        if mark != ",":
            return


def _call(scanner: Scanner, names: Collection[str]) -> Scan[bool]:
    """False: it is none, and all that was read of it is held as text. It is announced with its first argument."""
    yield from scanner.skip_blank()
    name = yield from scanner.match(_NAME)
    if name not in names or not scanner.may_call or not (yield from scanner.accept("(")):
        return False
    assert name is not None
    yield from scanner.skip_blank()
    key = None
    if not (yield from scanner.accept(")")):
        key = yield from _key(scanner)
        if key is None:
            return False
    if scanner.overflow():
        return False
    scanner.start_call(name)
    if key is None:
        scanner.emit_arguments_text("{}")
        scanner.end_call()
    elif (yield from _arguments(scanner, key)):
        scanner.end_call()
    else:
        yield from json_calls.read_broken_arguments(scanner)
    return True


def _arguments(scanner: Scanner, key: str | None) -> Scan[bool]:
    before = "{"
    while key is not None:
        scanner.emit_arguments_text(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        if not (yield from python_literals.read_literal(scanner)):
            return False
        yield from scanner.skip_blank()
        comma = yield from scanner.accept(",")
        yield from scanner.skip_blank()
        if (yield from scanner.accept(")")):
            scanner.emit_arguments_text("}")
            return True
        before = ", "
        key = (yield from _key(scanner)) if comma else None
    return False


def _key(scanner: Scanner) -> Scan[str | None]:
    """Passes over a parameter's name and its equals sign."""
    key = yield from scanner.match(_KEY)
    yield from scanner.skip_blank()
    return key if key and (yield from scanner.accept("=")) else None


def _write(rule: str, function: FunctionSpec, tokens: Mapping[str, int]) -> list[str]:
    head = call_grammar.quoted(call_grammar.bare_name(function) + "(")
    parameters = properties(function, _KEY)
    members = call_grammar.members(f"{rule}_a", [parameter.required for parameter in parameters], '", "')
    lines = [f'{rule}: {head} {rule}_a ")"', *members]
    for number, parameter in enumerate(parameters):
        schema = parameter.schema
        plain = schema_types(schema) == {"boolean"} and "enum" not in schema and "const" not in schema
        value = '("True" | "False")' if plain else call_grammar.schema(schema)
        lines.append(f"{rule}_a{number}: {call_grammar.quoted(parameter.name + '=')} {value}")
    return lines


PYTHONIC: Final = ToolFormat(
    name="pythonic",
    markers=frozenset({BEGIN, END}),
    read=_read,
    delimiters=lambda _: CallDelimiters(first='"["', between='", "', last='"]"'),
    write=_write,
)
