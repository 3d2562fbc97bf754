"""Grammars of calls, in llguidance's Lark: an answer that is made of calls, or text until the first of them begins.

It knows no format: these say how a call is written. https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.protocol.types import Grammar, GrammarKind
from gateway.tool_parsers.scanner import CALLS_MAX
from gateway.tool_parsers.tool_schema import FunctionSpec, arguments, offered_functions, tool_schema_error
from gateway.tool_parsers.types import ToolSelection

_BARE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_FAULT: Final = re.compile(r"\bat (\d+)\(\d+\)")
_PROSE: Final = r"PROSE: /(.|\n)*/"


@dataclass(frozen=True, slots=True)
class CallDelimiters:
    """What stands around calls, as Lark expressions: `mark` is where they begin, `first` goes before the first call,
    `between` between two of them, `last` behind all."""

    mark: str = ""
    first: str = ""
    between: str = ""
    last: str = ""


# Writes the rule of this name, and those that it needs, for calls of a function.
RuleWriter = Callable[[str, FunctionSpec], list[str]]


def call_grammar(
    tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool, frame: CallDelimiters, write: RuleWriter
) -> Grammar | None:
    """At least one call where the choice requires it. With `auto` text is free up to the mark; None where there is no
    mark, for nobody can tell the beginning of a call from text then. Raises ApiError, naming the tool."""
    functions = offered_functions(tools, choice)
    free = choice.mode == "auto"
    if not functions or (free and not frame.mark):
        return None
    rules = [f"t{number}" for number in range(len(functions))]
    more = f"({frame.between} call){{0,{CALLS_MAX - 1}}}" if parallel else ""
    lines = [
        "start: answer",
        *_answer(frame.mark, free),
        f"calls: {frame.first} call {more} {frame.last}",
        f"call: {' | '.join(rules)}",
    ]
    for rule, function in zip(rules, functions.values(), strict=True):
        lines += [f"// {json.dumps(function['name'])}", *write(rule, function), ""]
    return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")


def tool_at_fault(source: str, message: str) -> str | None:
    """The tool whose schema the library refuses by this message, which says the line. That may be one too high, where
    a replica put its options before the source: what stands behind a tool's rules is an empty line."""
    fault = _FAULT.search(message)
    lines = source.split("\n")[: int(fault[1])] if fault else []
    comment = next((line for line in reversed(lines) if line.startswith("// ")), None)
    return None if comment is None else str(json.loads(comment[3:]))


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def schema(document: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(document)


def object_rule_writer(key: str) -> RuleWriter:
    """Calls that are JSON objects, with the arguments under this key."""

    def write(rule: str, function: FunctionSpec) -> list[str]:
        head = quoted('{"name": ' + quoted(function["name"]) + f', "{key}": ')
        return [f'{rule}: {head} {schema(arguments(function))} "}}"']

    return write


def members(rule: str, required: Sequence[bool], between: str) -> list[str]:
    """`rule` is {rule}0, {rule}1, … in this order, without some of those that are not required."""
    count = len(required)
    lines = [f"{rule}: {rule}_first0", f'{rule}_first{count}: ""', f'{rule}_more{count}: ""']
    for i, needed in enumerate(required):
        skip = "" if needed else f" | {rule}_first{i + 1}"
        lines.append(f"{rule}_first{i}: {rule}{i} {rule}_more{i + 1}{skip}")
        skip = "" if needed else f" | {rule}_more{i + 1}"
        lines.append(f"{rule}_more{i}: {between} {rule}{i} {rule}_more{i + 1}{skip}")
    return lines


def marker(spelling: str, tokens: Mapping[str, int]) -> str:
    """A marker that a model may have as one token, which is then the only way to write it."""
    return f"<[{tokens[spelling]}]>" if spelling in tokens else quoted(spelling)


def bare_name(function: FunctionSpec) -> str:
    """A name that is written without quotation marks. Raises ApiError where it would not be read as one."""
    name = str(function["name"])
    if _BARE_NAME.fullmatch(name) is None:
        raise tool_schema_error(
            function, "its name may have letters, digits, '_', '-' and '.' in this model's format of calls"
        )
    return name


def _answer(mark: str, free: bool) -> list[str]:
    if not free:
        return [f"answer: {mark} calls"]
    if mark.startswith("<["):
        return [f"answer: PROSE ({mark} calls)?", _PROSE]
    return ["answer: PROSE | marked calls", f"marked[lazy]: PROSE {mark}", _PROSE]
