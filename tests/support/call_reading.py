"""Reads completions with the parsers of formats, and says what must hold of whatever they give."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.inference.prompt import AUTO
from gateway.tool_parsers.parts import (
    OutputParser,
    OutputPart,
    ReasoningPart,
    TextPart,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from gateway.tool_parsers.registry import TOOL_FORMATS
from gateway.tool_parsers.scanner import CALLS_MAX
from gateway.tool_parsers.tool_schema import ToolSelection


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters or {}}}


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "unit": {"type": ["string", "null"]},
        "wind": {"type": "object", "properties": {"knots": {"type": "number"}}},
        "hours": {"type": "array", "items": {"type": "integer"}},
        "note": {},
    },
    "required": ["city"],
}
TOOLS = [tool("get_weather", WEATHER), tool("now")]


@dataclass
class Read:
    """What a completion turned out to be. A call is its name, its arguments' text, and whether it ended."""

    text: str = ""
    thought: str = ""
    calls: list[tuple[str, str, bool]] = field(default_factory=list)

    @property
    def values(self) -> list[tuple[str, Any]]:
        """The calls with their arguments as values; each must have ended."""
        assert all(ended for _, _, ended in self.calls)
        return [(name, json.loads(arguments)) for name, arguments, _ in self.calls]


def parser(format: str, tools: Sequence[dict[str, Any]] = TOOLS, choice: ToolSelection = AUTO) -> OutputParser:
    return TOOL_FORMATS[format].parser(tools, choice)


def read(parser: OutputParser, pieces: Iterable[str]) -> Read:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return gathered([*parts, *parser.finish()])


def gathered(parts: Sequence[OutputPart]) -> Read:
    """Checks the order of parts too: arguments and an end belong to a call that has begun and not ended."""
    found = Read()
    is_open = False
    for part in parts:
        match part:
            case TextPart(text):
                assert text
                assert not is_open
                found.text += text
            case ReasoningPart(text):
                assert text
                assert not found.calls
                assert not found.text
                found.thought += text
            case ToolCallStart(name):
                assert not is_open
                is_open = True
                found.calls.append((name, "", False))
            case ToolCallDelta(fragment):
                assert fragment
                assert is_open
                name, arguments, _ = found.calls[-1]
                found.calls[-1] = (name, arguments + fragment, False)
            case ToolCallEnd():
                assert is_open
                is_open = False
                found.calls[-1] = (*found.calls[-1][:2], True)
    return found


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def check(format: str, text: str, pieces: Sequence[str]) -> Read:
    """What must hold of any text, however it is cut. Gives what it turned out to be."""
    whole = read(parser(format), [text])
    assert read(parser(format), pieces) == whole
    assert len(whole.calls) <= CALLS_MAX
    for name, arguments, ended in whole.calls:
        assert name in ("get_weather", "now")
        if ended:
            assert isinstance(json.loads(arguments), dict)
    assert all(ended for _, _, ended in whole.calls[:-1])
    if not whole.calls and TOOL_FORMATS[format].hold is None:
        assert whole.text == text
    return whole
