"""Finds the tool calls in what a model wrote: one JSON object a line, with `name` and `arguments`.

It does not know dialects or streams.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.reply import ToolUse

CALLS_MAX: Final = 16


class Called(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line that is a call; some models say `parameters`."""

    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


_decoder: Final = msgspec.json.Decoder(Called)


def may_be_calls(text: str) -> bool:
    """Whether text that goes on like this may still turn out to be calls; until then a stream holds it back."""
    start = text.lstrip()
    return not start or start[0] == "{"


def tool_uses(text: str, names: Sequence[str]) -> list[ToolUse]:
    """The calls, where the whole text is nothing but calls of tools that were offered; else none, and it stays text."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or len(lines) > CALLS_MAX:
        return []
    calls: list[Called] = []
    for line in lines:
        try:
            calls.append(_decoder.decode(line))
        except (ValueError, RecursionError):
            return []
    if any(call.name not in names for call in calls):
        return []
    return [ToolUse(_call_id(), call.name, call.arguments or call.parameters or {}) for call in calls]


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
