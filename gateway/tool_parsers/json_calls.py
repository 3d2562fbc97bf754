"""Reads calls that are JSON objects: {"name": …, "arguments": {…}}, in any order, with `parameters` for `arguments`.

It does not know what stands around them.
"""

from collections.abc import Collection
from typing import Final

from gateway.tool_parsers import streaming_json
from gateway.tool_parsers.scanner import Scan, Scanner

_BESIDE: Final = ("type", "id")  # the members that a call may have beside its name and arguments


def read_call(scanner: Scanner, names: Collection[str]) -> Scan[bool]:
    """Reads an object as a call of one of the tools. False: it is none, and all that was read of it is held as text.

    A call is announced once its arguments begin, or when all of it was read. With any other member than
    those of _BESIDE it is some JSON that the model wrote.
    """
    if not scanner.may_call or (yield from scanner.peek()) != "{":
        return False
    scanner.at += 1
    name = arguments = None
    while True:
        member = yield from _member(scanner)
        if member == "name" and name is None:
            name = yield from streaming_json.read_json_string(scanner)
            if name not in names:
                return False
        elif member in ("arguments", "parameters") and arguments is None:
            yield from scanner.skip_blank()
            if (yield from scanner.peek()) != "{":
                return False
            if name is not None:
                if scanner.overflow():
                    return False
                scanner.start_call(name)
                yield from read_arguments(scanner)
                yield from _rest(scanner)
                return True
            start = scanner.at - scanner.committed
            if not (yield from streaming_json.read_json_value(scanner, streamed=False)):
                return False
            arguments = scanner.text[scanner.committed + start : scanner.at]
        elif member not in _BESIDE or (yield from streaming_json.read_json_string(scanner)) is None:
            return False
        yield from scanner.skip_blank()
        mark = yield from scanner.accept("}", ",")
        if mark == ",":
            continue
        if mark is None or name is None or scanner.overflow():
            return False
        scanner.start_call(name)
        scanner.emit_arguments_text(arguments or "{}")
        scanner.end_call()
        return True


def read_call_sequence(scanner: Scanner, names: Collection[str], *markers: str) -> Scan[None]:
    """Reads calls that stand at the beginning of the text, or behind one of the markers, and one after another."""
    while True:
        called = True
        while called:
            yield from scanner.skip_blank()
            called = yield from read_call(scanner, names)
            if called:
                yield from scanner.skip_blank()
                yield from scanner.accept(";", ",")
        if (yield from scanner.read_text_until(*markers)) is None:
            return


def read_named_call(scanner: Scanner, name: str | None, names: Collection[str]) -> Scan[bool]:
    """Reads the arguments of a call, an object that comes next, behind its name. False: it is none, as in `call`."""
    yield from scanner.skip_blank()
    if name not in names or not scanner.may_call or (yield from scanner.peek()) != "{" or scanner.overflow():
        return False
    assert name is not None
    scanner.start_call(name)
    yield from read_arguments(scanner)
    return True


def read_arguments(scanner: Scanner) -> Scan[None]:
    """Streams the arguments of a call that has begun, an object that comes next. Where they are no JSON, the call gets
    all the rest of the text, and no end."""
    whole = yield from streaming_json.read_json_value(scanner, streamed=True)
    scanner.emit_arguments()
    if whole:
        scanner.end_call()
    else:
        yield from read_broken_arguments(scanner)


def read_broken_arguments(scanner: Scanner) -> Scan[None]:
    """The call's arguments are broken: nobody can say where it ends, so that all the rest belongs to it."""
    while True:
        scanner.at = len(scanner.text)
        scanner.emit_arguments()
        if not (yield from scanner.wait_text()):
            return


def _member(scanner: Scanner) -> Scan[str | None]:
    """Passes over a member's key and its colon; None where none comes."""
    yield from scanner.skip_blank()
    key = yield from streaming_json.read_json_string(scanner)
    yield from scanner.skip_blank()
    if key is None or (yield from scanner.accept(":")) is None:
        return None
    yield from scanner.skip_blank()
    return key


def _rest(scanner: Scanner) -> Scan[None]:
    """Passes over what may follow the arguments in the object, its end included. Anything else is left to be text."""
    while True:
        yield from scanner.skip_blank()
        mark = yield from scanner.accept("}", ",")
        if mark == "}" and not scanner.overflow():
            return scanner.discard()
        if (
            mark is None
            or (yield from _member(scanner)) not in _BESIDE
            or (yield from streaming_json.read_json_string(scanner)) is None
        ):
            return None
