"""Rules and expressions for grammars of calls, in llguidance's Lark. It knows no format."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gateway.tool_parsers.tool_schema import FunctionSpec, arguments, tool_schema_error

_BARE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_FAULT: Final = re.compile(r"\bat (\d+)\(\d+\)")


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


def object_rule_writer(key: str) -> Callable[[str, FunctionSpec, Mapping[str, int]], list[str]]:
    """Calls that are JSON objects, with the arguments under this key."""

    def write(rule: str, function: FunctionSpec, tokens: Mapping[str, int]) -> list[str]:
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
