"""Passes over JSON as it comes, checking it to the letter. It knows no calls."""

import json
import re
from enum import Enum, auto
from typing import Final

from gateway.tool_parsers.scanner import Scan, Scanner

DEPTH_MAX: Final = 64
ATOM_MAX: Final = 256  # characters of a number

_BLANK: Final = re.compile(r"[ \t\r\n]*")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_NOT_PLAIN: Final = frozenset('"\\' + "".join(map(chr, range(0x20))))
_ATOM: Final = re.compile(r"[-+.0-9A-Za-z]*")
SCALAR: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
# A surrogate is no character: only a pair is.
_ESCAPE: Final = re.compile(
    r'\\(?:["\\/bfnrt]|u(?:[0-9abcefABCEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_ESCAPE_MAX: Final = 12


class _Next(Enum):
    """What may come."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


def read_json_value(tape: Scanner, streamed: bool) -> Scan[bool]:
    """Passes over one JSON value; false where there is none, at the character where it stops being one.

    `streamed`: what is read is given out as arguments whenever more must come; else it is held. At the end of the text
    all of it was read, whole or not.
    """
    ends: list[str] = []  # what closes the containers that are open
    expected = _Next.VALUE
    while True:
        tape.at = _BLANK.match(tape.text, tape.at).end()  # type: ignore[union-attr]  # it matches always
        if tape.at == len(tape.text):
            if not (yield from _wait(tape, streamed)):
                return False
            continue
        char = tape.text[tape.at]
        if ends and char == ends[-1] and expected in (_Next.VALUE_OR_END, _Next.KEY_OR_END, _Next.COMMA_OR_END):
            ends.pop()
            tape.at += 1
        elif expected in (_Next.VALUE, _Next.VALUE_OR_END):
            if char in "{[":
                if len(ends) == DEPTH_MAX:
                    return False
                ends.append("}" if char == "{" else "]")
                expected = _Next.KEY_OR_END if char == "{" else _Next.VALUE_OR_END
                tape.at += 1
                continue
            if not (yield from (_string(tape, streamed) if char == '"' else _atom(tape, streamed))):
                return False
        elif expected is _Next.COLON:
            if char != ":":
                return False
            tape.at += 1
            expected = _Next.VALUE
            continue
        elif expected is _Next.COMMA_OR_END:
            if char != ",":
                return False
            tape.at += 1
            expected = _Next.KEY if ends[-1] == "}" else _Next.VALUE
            continue
        else:
            if char != '"' or not (yield from _string(tape, streamed)):
                return False
            expected = _Next.COLON
            continue
        if not ends:
            return True
        expected = _Next.COMMA_OR_END


def read_json_string(tape: Scanner) -> Scan[str | None]:
    """Passes over a JSON string, holding it, and gives what it says; None where none comes."""
    start = tape.at - tape.kept
    if (yield from tape.next()) != '"' or not (yield from _string(tape, False)):
        return None
    said: str = json.loads(tape.text[tape.kept + start : tape.at])
    return said


def _wait(tape: Scanner, streamed: bool) -> Scan[bool]:
    if not streamed:
        return (yield from tape.more_held())
    tape.argue()
    if not (yield from tape.more()):
        tape.at = len(tape.text)
        return False
    return True


def _string(tape: Scanner, streamed: bool) -> Scan[bool]:
    """Passes over a string. Control characters, which models write and JSON forbids, are escaped if it is streamed."""
    tape.at += 1
    while True:
        tape.at = _PLAIN.match(tape.text, tape.at).end()  # type: ignore[union-attr]  # it matches always
        if tape.at == len(tape.text):
            if streamed:
                tape.idle, tape.arguing = _NOT_PLAIN, True
            more = yield from _wait(tape, streamed)
            tape.idle, tape.arguing = None, False
            if not more:
                return False
            continue
        char = tape.text[tape.at]
        if char == '"':
            tape.at += 1
            return True
        if char != "\\":
            if not streamed:
                return False
            tape.argue()
            tape.at += 1
            tape.give(json.dumps(char)[1:-1])
        elif escape := _ESCAPE.match(tape.text, tape.at):
            tape.at = escape.end()
        elif len(tape.text) - tape.at >= _ESCAPE_MAX or not (yield from _wait(tape, streamed)):
            return False


def _atom(tape: Scanner, streamed: bool) -> Scan[bool]:
    """Passes over a number, true, false or null."""
    while True:
        end = _ATOM.match(tape.text, tape.at).end()  # type: ignore[union-attr]  # it matches always
        if end - tape.at > ATOM_MAX:
            return False
        if end < len(tape.text):
            break
        if not (yield from _wait(tape, streamed)):
            return False
    whole = SCALAR.fullmatch(tape.text, tape.at, end) is not None
    if whole:
        tape.at = end
    return whole
