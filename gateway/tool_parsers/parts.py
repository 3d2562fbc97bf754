"""Parts of a completion's text: plain text, reasoning, and calls of tools. It does not know how parsers find them."""

from typing import Protocol

import msgspec


class TextPart(msgspec.Struct, frozen=True):
    text: str


class ReasoningPart(msgspec.Struct, frozen=True):
    """Reasoning before the answer."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call of an offered tool begins. Calls are numbered in order, and one ends before the next begins."""

    name: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of the JSON text of the current call's arguments."""

    fragment: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """The current call is whole: its fragments are the text of one JSON object."""


OutputPart = TextPart | ReasoningPart | ToolCallStart | ToolCallDelta | ToolCallEnd


class OutputParser(Protocol):
    """Finds the parts of one completion's text, which comes in pieces: the same whatever the pieces are.

    A call is announced once it cannot be anything else, and only if its name is that of an offered tool. What only
    looks like a call is text. No part is taken back. The fragments of a call that ends by ToolCallEnd are
    the text of a JSON object. A call without is the last part: the text ended in it, or broke its JSON, in which case
    all the rest of the text went into its fragments.
    """

    def push(self, text: str) -> list[OutputPart]: ...

    def finish(self) -> list[OutputPart]:
        """The rest, now that no more text comes."""
        ...


class PlainTextParser:
    """A parser for which all is text."""

    def push(self, text: str) -> list[OutputPart]:
        return [TextPart(text)] if text else []

    def finish(self) -> list[OutputPart]:
        return []
