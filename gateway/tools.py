"""Finds the tool calls in what a model wrote: one JSON object a line, with `name` and `arguments`.

It does not know dialects or streams.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.calls.parts import CallArguments, CallBegan, CallEnded, Part, Text

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


class Lines:
    """Holds text back as long as it may be calls."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._held: str | None = ""

    def push(self, text: str) -> list[Part]:
        if self._held is None:
            return [Text(text)] if text else []
        self._held += text
        if may_be_calls(self._held):
            return []
        held, self._held = self._held, None
        return [Text(held)]

    def finish(self) -> list[Part]:
        held, self._held = self._held, None
        calls = calls_in(held or "", self._names)
        parts: list[Part] = []
        for call in calls:
            arguments = msgspec.json.encode(call.arguments or call.parameters or {}).decode()
            parts += [CallBegan(call.name), CallArguments(arguments), CallEnded()]
        return parts or ([Text(held)] if held else [])


def calls_in(text: str, names: Sequence[str]) -> list[Called]:
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
    return calls
