"""Reads calls that are JSON objects: {"name": …, "arguments": {…}}, in any order, with `parameters` for `arguments`.

It does not know what stands around them.
"""

from collections.abc import Callable, Collection
from typing import Final

from gateway.tool_parsers import streaming_json
from gateway.tool_parsers.scanner import Scan, Scanner

_BESIDE: Final = ("type", "id")  # the members that a call may have beside its name and arguments


def read_call(tape: Scanner, names: Collection[str]) -> Scan[bool]:
    """Reads an object as a call of one of the tools. False: it is none, and all that was read of it is held as text.

    A call is announced once its arguments begin, or when all of it was read. With any other member than
    those of _BESIDE it is some JSON that the model wrote.
    """
    if not tape.callable or (yield from tape.next()) != "{":
        return False
    tape.at += 1
    name = arguments = None
    while True:
        member = yield from _member(tape)
        if member == "name" and name is None:
            name = yield from streaming_json.read_json_string(tape)
            if name not in names:
                return False
        elif member in ("arguments", "parameters") and arguments is None:
            yield from tape.blank()
            if (yield from tape.next()) != "{":
                return False
            if name is not None:
                if tape.overflow():
                    return False
                tape.begin(name)
                yield from read_arguments(tape)
                yield from _rest(tape)
                return True
            start = tape.at - tape.kept
            if not (yield from streaming_json.read_json_value(tape, streamed=False)):
                return False
            arguments = tape.text[tape.kept + start : tape.at]
        elif member not in _BESIDE or (yield from streaming_json.read_json_string(tape)) is None:
            return False
        yield from tape.blank()
        mark = yield from tape.follows("}", ",")
        if mark == ",":
            continue
        if mark is None or name is None or tape.overflow():
            return False
        tape.begin(name)
        tape.give(arguments or "{}")
        tape.end()
        return True


def read_call_sequence(tape: Scanner, names: Collection[str], *markers: str) -> Scan[None]:
    """Reads calls that stand at the beginning of the text, or behind one of the markers, and one after another."""
    while True:
        called = True
        while called:
            yield from tape.blank()
            called = yield from read_call(tape, names)
            if called:
                yield from tape.blank()
                yield from tape.follows(";", ",")
        if (yield from tape.prose(*markers)) is None:
            return


def read_call_sections(
    tape: Scanner, begin: str, opening: str, closing: str, one: Callable[[Scanner], Scan[bool]]
) -> Scan[None]:
    """Reads sections of calls, between `begin` and `closing`; `one` reads a call behind its `opening`."""
    while (yield from tape.prose(begin)) is not None:
        called = False
        while True:
            yield from tape.blank()
            mark = yield from tape.follows(opening, closing)
            if mark != opening or not (yield from one(tape)):
                break
            called = True
        if mark == closing and called:
            tape.drop()


def read_named_call(tape: Scanner, name: str | None, names: Collection[str]) -> Scan[bool]:
    """Reads the arguments of a call, an object that comes next, behind its name. False: it is none, as in `call`."""
    yield from tape.blank()
    if name not in names or not tape.callable or (yield from tape.next()) != "{" or tape.overflow():
        return False
    assert name is not None
    tape.begin(name)
    yield from read_arguments(tape)
    return True


def read_arguments(tape: Scanner) -> Scan[None]:
    """Streams the arguments of a call that has begun, an object that comes next. Where they are no JSON, the call gets
    all the rest of the text, and no end."""
    whole = yield from streaming_json.read_json_value(tape, streamed=True)
    tape.argue()
    if whole:
        tape.end()
    else:
        yield from read_broken_arguments(tape)


def read_broken_arguments(tape: Scanner) -> Scan[None]:
    """The call's arguments are broken: nobody can say where it ends, so that all the rest belongs to it."""
    while True:
        tape.at = len(tape.text)
        tape.argue()
        if not (yield from tape.more()):
            return


def _member(tape: Scanner) -> Scan[str | None]:
    """Passes over a member's key and its colon; None where none comes."""
    yield from tape.blank()
    key = yield from streaming_json.read_json_string(tape)
    yield from tape.blank()
    if key is None or (yield from tape.follows(":")) is None:
        return None
    yield from tape.blank()
    return key


def _rest(tape: Scanner) -> Scan[None]:
    """Passes over what may follow the arguments in the object, its end included. Anything else is left to be text."""
    while True:
        yield from tape.blank()
        mark = yield from tape.follows("}", ",")
        if mark == "}" and not tape.overflow():
            return tape.drop()
        if (
            mark is None
            or (yield from _member(tape)) not in _BESIDE
            or (yield from streaming_json.read_json_string(tape)) is None
        ):
            return None
