"""The text of a completion as a parser reads it: the scanner waits for more text, and emits parts in order.

Parsers are generators over a scanner: they yield wherever the text so far does not decide how to go on. Their output
depends on the characters alone, never on where the text was cut. It knows no format.
"""

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from gateway.tool_parsers.parts import OutputPart, ReasoningPart, TextPart, ToolCallDelta, ToolCallEnd, ToolCallStart

CALLS_MAX: Final = 16  # of one completion; what looks like a further one stays text
BUFFERED_CHARS_MAX: Final = 4096  # characters that may wait for the decision whether they begin a call

_BLANKS: Final = " \t\r\n"
_BLANK: Final = re.compile(f"[{_BLANKS}]*")

T = TypeVar("T")
Scan = Generator[None, None, T]


class Scanner:
    """`text[committed:at]` was read and is pending: it may be text, or the beginning of a call.

    While `idle` is set nothing is pending, and text without one of these characters continues the part before it.
    """

    __slots__ = ("_between_calls", "_calls", "_parts", "at", "committed", "ended", "idle", "in_arguments", "text")

    def __init__(self) -> None:
        self.text = ""
        self.committed = 0
        self.at = 0
        self.ended = False
        self.idle: frozenset[str] | None = None
        self.in_arguments = False  # while idle: the part before was arguments
        self._parts: list[OutputPart] = []
        self._calls = 0
        self._between_calls = True  # nothing but blank since the beginning or the last call

    def append(self, text: str) -> None:
        self.text = self.text[self.committed :] + text
        self.at -= self.committed
        self.committed = 0

    def drain_parts(self) -> list[OutputPart]:
        """Returns the parts since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def wait_text(self) -> Scan[bool]:
        """Waits for text; false where no more will come."""
        if self.ended:
            return False
        yield
        return True

    def wait_pending_text(self) -> Scan[bool]:
        """Waits for text while all that was read is pending; false too where that is too much."""
        return not self._full and (yield from self.wait_text())

    @property
    def pending(self) -> str:
        return self.text[self.committed : self.at]

    def overflow(self) -> bool:
        """Whether more is pending than allowed. The excess is unread again: it can begin no call any more."""
        full = self._full
        self.at = min(self.at, self.committed + BUFFERED_CHARS_MAX)
        return full

    @property
    def _full(self) -> bool:
        return self.at - self.committed > BUFFERED_CHARS_MAX

    @property
    def may_call(self) -> bool:
        """Whether one more call may begin."""
        return self._calls < CALLS_MAX

    # ---- emitting ---------------------------------------------------------------------------------------------

    def emit_text(self) -> None:
        """Emits the pending text as text."""
        if self.committed < self.at:
            self._parts.append(TextPart(self.pending))
            self.committed = self.at
            self._between_calls = False

    def emit_reasoning(self) -> None:
        """Emits the pending text as reasoning."""
        if self.committed < self.at:
            self._parts.append(ReasoningPart(self.pending))
            self.committed = self.at

    def discard(self) -> None:
        """Discards the pending text: punctuation of calls."""
        self.committed = self.at

    def start_call(self, name: str) -> None:
        """Starts a call; the pending text announced it."""
        assert self.may_call
        self.discard()
        self._calls += 1
        self._parts.append(ToolCallStart(name))

    def emit_arguments(self) -> None:
        """Emits the pending text as arguments."""
        if self.committed < self.at:
            self._parts.append(ToolCallDelta(self.pending))
            self.committed = self.at

    def emit_arguments_text(self, fragment: str) -> None:
        """Emits `fragment` as arguments in place of the pending text."""
        self.discard()
        if fragment:
            self._parts.append(ToolCallDelta(fragment))

    def end_call(self) -> None:
        """Ends the call, which is complete."""
        self.discard()
        self._parts.append(ToolCallEnd())
        self._between_calls = True

    # ---- reading -----------------------------------------------------------------------------------------------

    def read_text_until(self, *markers: str) -> Scan[str | None]:
        """Emits text up to the first of the markers, and passes over that; None: the text ended before one.

        Blank between a call and the next, or before the first, is no text.
        """
        self.overflow()
        if not self._between_calls or self.pending.strip(_BLANKS):
            self.emit_text()
        firsts = frozenset(marker[0] for marker in markers)
        while True:
            if self._between_calls:
                yield from self.skip_blank()
                if self.overflow():
                    self.emit_text()
            match = min(((at, m) for m in markers if (at := self.text.find(m, self.at)) >= 0), default=None)
            if match is not None:
                if match[0] > self.at or not self._between_calls:
                    self.at = match[0]
                    self.emit_text()
                self.at = match[0] + len(match[1])
                return match[1]
            whole = partial_marker_start(self.text, self.at, markers)
            if whole > self.at:
                self.at = whole
                self.emit_text()
            self.idle = firsts if self.committed == len(self.text) else None
            more = yield from self.wait_text()
            self.idle = None
            if not more:
                self.at = len(self.text)
                if self._calls and not self.pending.strip(_BLANKS):
                    self.discard()
                self.emit_text()
                return None

    def skip_blank(self) -> Scan[None]:
        """Passes over white space, as far as it may be pending."""
        while True:
            self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches always
            if self.at < len(self.text) or not (yield from self.wait_pending_text()):
                return

    def accept(self, *spellings: str) -> Scan[str | None]:
        """Passes over one of these spellings and returns it; None where none comes next."""
        while True:
            for spelling in spellings:
                if self.text.startswith(spelling, self.at):
                    self.at += len(spelling)
                    return spelling
            rest = self.text[self.at :]
            if not any(spelling.startswith(rest) for spelling in spellings) or not (yield from self.wait_text()):
                return None

    def peek(self) -> Scan[str]:
        """The next character, not passed over; empty at the end."""
        while self.at == len(self.text):
            if not (yield from self.wait_text()):
                return ""
        return self.text[self.at]

    def match(self, pattern: re.Pattern[str]) -> Scan[str | None]:
        """Passes over the longest match of a pattern that also matches any beginning of it, and returns it. None where
        the text ends with it, or it is too long."""
        start = self.at - self.committed
        while True:
            self.at = pattern.match(self.text, self.at).end()  # type: ignore[union-attr]  # it may match nothing
            if self.at < len(self.text):
                return None if self._full else self.text[self.committed + start : self.at]
            if not (yield from self.wait_pending_text()):
                return None


class ScanningParser:
    """A parser made of a generator over a scanner."""

    __slots__ = ("_reading", "_scanner")

    def __init__(self, read: Callable[[Scanner], Scan[None]]) -> None:
        self._scanner = Scanner()
        self._reading = read(self._scanner)

    def push(self, text: str) -> list[OutputPart]:
        scanner = self._scanner
        if scanner.idle is not None and scanner.idle.isdisjoint(text):
            return [ToolCallDelta(text) if scanner.in_arguments else TextPart(text)] if text else []
        scanner.append(text)
        next(self._reading)
        return scanner.drain_parts()

    def finish(self) -> list[OutputPart]:
        """Emits the pending text. An incomplete call gets the rest of its arguments, and no end."""
        self._scanner.ended = True
        next(self._reading, None)
        assert self._scanner.committed == len(self._scanner.text)
        return self._scanner.drain_parts()


def partial_marker_start(text: str, start: int, markers: tuple[str, ...]) -> int:
    """Where in text[start:] what may be the beginning of a marker begins, that the text ends with; else its end."""
    first = len(text)
    for marker in markers:
        at = text.find(marker[0], max(start, len(text) - len(marker) + 1))
        while 0 <= at < first:
            if marker.startswith(text[at:]):
                first = at
            at = text.find(marker[0], at + 1)
    return first
