"""Passes over JSON as it comes, checking it to the letter. It knows no calls."""

import json
import re
from enum import Enum, auto
from typing import Final

from gateway.tool_parsers.scanner import Scan, Scanner

DEPTH_MAX: Final = 64
ATOM_MAX: Final = 256  # characters of a number

BLANK: Final = re.compile(r"[ \t\r\n]*")
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


class Expected(Enum):
    """What may come next in a value."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


def read_json_value(scanner: Scanner, streamed: bool) -> Scan[bool]:
    """Passes over one JSON value; false where there is none, at the character where it stops being one.

    `streamed`: what is read is given out as arguments whenever more must come; else it is held. At the end of the text
    all of it was read, whole or not.
    """
    ends: list[str] = []  # what closes the containers that are open
    expected = Expected.VALUE
    while True:
        scanner.at = BLANK.match(scanner.text, scanner.at).end()  # type: ignore[union-attr]  # it matches always
        if scanner.at == len(scanner.text):
            if not (yield from _wait(scanner, streamed)):
                return False
            continue
        char = scanner.text[scanner.at]
        if ends and char == ends[-1] and expected not in (Expected.VALUE, Expected.KEY, Expected.COLON):
            ends.pop()
            scanner.at += 1
        elif expected in (Expected.VALUE, Expected.VALUE_OR_END):
            if char in "{[":
                if len(ends) == DEPTH_MAX:
                    return False
                ends.append("}" if char == "{" else "]")
                expected = Expected.KEY_OR_END if char == "{" else Expected.VALUE_OR_END
                scanner.at += 1
                continue
            if not (yield from (_string(scanner, streamed) if char == '"' else _atom(scanner, streamed))):
                return False
        elif expected is Expected.COLON and char == ":":
            scanner.at += 1
            expected = Expected.VALUE
            continue
        elif expected is Expected.COMMA_OR_END and char == ",":
            scanner.at += 1
            expected = Expected.KEY if ends[-1] == "}" else Expected.VALUE
            continue
        elif expected in (Expected.KEY, Expected.KEY_OR_END) and char == '"':
            if not (yield from _string(scanner, streamed)):
                return False
            expected = Expected.COLON
            continue
        else:
            return False
        if not ends:
            return True
        expected = Expected.COMMA_OR_END


def read_json_string(scanner: Scanner) -> Scan[str | None]:
    """Passes over a JSON string, holding it, and gives what it says; None where none comes."""
    start = scanner.at - scanner.committed
    if (yield from scanner.peek()) != '"' or not (yield from _string(scanner, False)):
        return None
    text: str = json.loads(scanner.text[scanner.committed + start : scanner.at])
    return text


def _wait(scanner: Scanner, streamed: bool) -> Scan[bool]:
    if not streamed:
        return (yield from scanner.wait_pending_text())
    scanner.emit_arguments()
    if not (yield from scanner.wait_text()):
        scanner.at = len(scanner.text)
        return False
    return True


def _string(scanner: Scanner, streamed: bool) -> Scan[bool]:
    """Passes over a string. Control characters, which models write and JSON forbids, are escaped if it is streamed."""
    scanner.at += 1
    while True:
        scanner.at = _PLAIN.match(scanner.text, scanner.at).end()  # type: ignore[union-attr]  # it matches always
        if scanner.at == len(scanner.text):
            if streamed:
                scanner.idle, scanner.in_arguments = _NOT_PLAIN, True
            more = yield from _wait(scanner, streamed)
            scanner.idle, scanner.in_arguments = None, False
            if not more:
                return False
            continue
        char = scanner.text[scanner.at]
        if char == '"':
            scanner.at += 1
            return True
        if char != "\\":
            if not streamed:
                return False
            scanner.emit_arguments()
            scanner.at += 1
            scanner.emit_arguments_text(json.dumps(char)[1:-1])
        elif escape := _ESCAPE.match(scanner.text, scanner.at):
            scanner.at = escape.end()
        elif len(scanner.text) - scanner.at >= _ESCAPE_MAX or not (yield from _wait(scanner, streamed)):
            return False


def _atom(scanner: Scanner, streamed: bool) -> Scan[bool]:
    """Passes over a number, true, false or null."""
    while True:
        end = _ATOM.match(scanner.text, scanner.at).end()  # type: ignore[union-attr]  # it matches always
        if end - scanner.at > ATOM_MAX:
            return False
        if end < len(scanner.text):
            break
        if not (yield from _wait(scanner, streamed)):
            return False
    if SCALAR.fullmatch(scanner.text, scanner.at, end) is None:
        return False
    scanner.at = end
    return True
