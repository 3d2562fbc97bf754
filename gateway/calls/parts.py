"""What a completion's text is made of, piece by piece: plain text, thought, and calls of tools."""

import msgspec


class Text(msgspec.Struct, frozen=True):
    text: str


class Thought(msgspec.Struct, frozen=True):
    """What the model reasons before it answers."""

    text: str


class CallBegan(msgspec.Struct, frozen=True):
    """A call of an offered tool begins. Calls are numbered in order, and one ends before the next begins."""

    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of the JSON text of the current call's arguments."""

    fragment: str


class CallEnded(msgspec.Struct, frozen=True):
    """The current call is whole: its fragments are the text of one JSON object."""


Part = Text | Thought | CallBegan | CallArguments | CallEnded
