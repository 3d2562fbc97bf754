"""Turns literals of Python, of which JSON's are almost all a part, into JSON text as they come. It knows no calls."""

import re
from typing import Final

import msgspec

from gateway.tool_parsers.scanner import Scan, Scanner
from gateway.tool_parsers.streaming_json import ATOM_MAX, BLANK, DEPTH_MAX, SCALAR, Expected

_ATOM: Final = re.compile(r"[-+.\w]*")
_PLAIN: Final = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}
_ENDS: Final = {"{": "}", "[": "]", "(": ")"}
_ESCAPES: Final = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""},
    **{'"': '"', "'": "'", "\\": "\\", "/": "/"},
}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_PAIR: Final = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")


def read_literal(scanner: Scanner) -> Scan[bool]:
    """Passes over one value, and gives it out as arguments; false where it stops being one. Tuples become arrays."""
    ends: list[str] = []  # what closes the containers that are open
    expected = Expected.VALUE
    first = True  # in its container
    while True:
        scanner.at = BLANK.match(scanner.text, scanner.at).end()  # type: ignore[union-attr]  # it matches always
        scanner.discard()
        if scanner.at == len(scanner.text):
            if not (yield from scanner.wait_text()):
                return False
            continue
        char = scanner.text[scanner.at]
        if ends and char == ends[-1] and expected not in (Expected.VALUE, Expected.COLON):
            scanner.at += 1
            scanner.emit_arguments_text("}" if ends.pop() == "}" else "]")
        elif expected in (Expected.VALUE, Expected.VALUE_OR_END):
            scanner.emit_arguments_text("" if first or expected is Expected.VALUE else ", ")
            if char in _ENDS:
                if len(ends) == DEPTH_MAX:
                    return False
                ends.append(_ENDS[char])
                expected = Expected.KEY_OR_END if char == "{" else Expected.VALUE_OR_END
                first = True
                scanner.at += 1
                scanner.emit_arguments_text("{" if char == "{" else "[")
                continue
            if not (yield from (_string(scanner) if char in _PLAIN else _atom(scanner))):
                return False
        elif expected is Expected.COMMA_OR_END and char == ",":
            scanner.at += 1
            expected = Expected.KEY_OR_END if ends[-1] == "}" else Expected.VALUE_OR_END
            first = False
            continue
        elif expected is Expected.COLON and char == ":":
            scanner.at += 1
            scanner.emit_arguments_text(": ")
            expected = Expected.VALUE
            continue
        elif expected is Expected.KEY_OR_END and char in _PLAIN:
            scanner.emit_arguments_text("" if first else ", ")
            if not (yield from _string(scanner)):
                return False
            expected = Expected.COLON
            continue
        else:
            return False
        if not ends:
            return True
        expected = Expected.COMMA_OR_END


def escape_json_text(text: str) -> str:
    """The text as it stands between the quotation marks of a JSON string."""
    return msgspec.json.encode(text)[1:-1].decode()


def _string(scanner: Scanner) -> Scan[bool]:
    quote = scanner.text[scanner.at]
    scanner.at += 1
    scanner.emit_arguments_text('"')
    while True:
        end = _PLAIN[quote].match(scanner.text, scanner.at).end()  # type: ignore[union-attr]  # it matches always
        run = scanner.text[scanner.at : end]
        scanner.at = end
        scanner.emit_arguments_text(escape_json_text(run))
        char = yield from scanner.peek()
        if char == quote:
            scanner.at += 1
            scanner.emit_arguments_text('"')
            return True
        if not char:
            return False
        if char == "\\":
            yield from _escape(scanner)


def _escape(scanner: Scanner) -> Scan[None]:
    """Reads an escape as Python does: an unknown one stands for itself. Surrogates pair as in JSON."""
    yield from _reach(scanner, 2)
    kind = scanner.text[scanner.at + 1 : scanner.at + 2]
    size = 2 + _HEX_DIGITS.get(kind, 0)
    yield from _reach(scanner, size)
    code = _code(scanner.text[scanner.at + 2 : scanner.at + size]) if size > 2 else None
    if code is not None and 0xD800 <= code < 0xE000:
        yield from _reach(scanner, 12)
        pair = _PAIR.match(scanner.text, scanner.at)
        size = size if pair is None else 12
        code = 0xFFFD if pair is None else 0x10000 + (int(pair[1], 16) - 0xD800) * 1024 + int(pair[2], 16) - 0xDC00
    if code is None:
        text = _ESCAPES.get(kind, "\\" + kind)
        size = 1 + len(kind)
    else:
        text = chr(code)
    scanner.at += size
    scanner.emit_arguments_text(escape_json_text(text))


def _code(digits: str) -> int | None:
    """The character's number; None where there is none of these digits."""
    if not digits or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
        return None
    code = int(digits, 16)
    return code if code <= 0x10FFFF else None


def _reach(scanner: Scanner, size: int) -> Scan[None]:
    """Waits until so many characters are there, or no more come."""
    while len(scanner.text) - scanner.at < size:
        if not (yield from scanner.wait_text()):
            return


def _atom(scanner: Scanner) -> Scan[bool]:
    """A number, or a constant as Python or JSON has it."""
    while True:
        end = _ATOM.match(scanner.text, scanner.at).end()  # type: ignore[union-attr]  # it matches always
        if end - scanner.at > ATOM_MAX:
            return False
        if end < len(scanner.text):
            break
        if not (yield from scanner.wait_text()):
            return False
    atom = scanner.text[scanner.at : end]
    atom = CONSTANTS.get(atom, atom)
    if SCALAR.fullmatch(atom) is None:
        return False
    scanner.at = end
    scanner.emit_arguments_text(atom)
    return True
