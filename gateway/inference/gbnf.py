"""Grammars as llama.cpp and vLLM know them (GBNF: `root ::= "yes" | "no"`), in the Lark that the grammar library reads.

It reads each character once, and leaves it to the library whether what comes out makes sense. One thing differs there:
a rule without recursion takes as much text as it can, and leaves nothing of it to what follows.
"""

import json
import re
from collections.abc import Iterator
from typing import Final

from gateway.errors import ApiError, bad_input

_RULE: Final = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)
_TOKEN: Final = re.compile(
    r"""(?P<blank>(?:\s|\#[^\n]*)+)
    | (?P<begin>[A-Za-z][\w-]*)[ \t]*::=
    | (?P<name>[A-Za-z][\w-]*)
    | "(?P<text>(?:[^"\\\n]|\\.)*)"
    | \[(?P<set>\^?(?:[^\]\\\n]|\\.)+)\]
    | (?P<times>\{\s*\d{1,6}\s*(?:,\s*(?:\d{1,6}\s*)?)?\})
    | (?P<sign>[|()*+?.])""",
    re.VERBOSE | re.ASCII,
)
_CHARACTER: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in "\"'\\[]-^/"}}
_ANY: Final = "/(?s:.)/"


def is_gbnf(source: str) -> bool:
    """Lark writes a rule as `name:`."""
    return _RULE.search(source) is not None


def gbnf_to_lark(source: str) -> str:
    """Raises ApiError, saying where it is no grammar, or which rule is not there."""
    rules: dict[str, list[_Piece]] = {}
    for kind, text, line in _tokens(source):
        if kind == "begin":
            if text in rules:
                raise _fault(line, f"the rule {text[:64]!r} is there twice")
            pieces = rules[text] = []
        elif not rules:
            raise _fault(line, "a rule begins with its name and ::=")
        else:
            pieces.append(_piece(kind, text, line))
    named = {piece for pieces in rules.values() for piece in pieces if isinstance(piece, _Rule)} | {"root"}
    if missing := named - rules.keys():
        raise _fault(1 + source.count("\n"), f"there is no rule {min(missing)[:64]!r}")
    names = _lark_names(rules)
    written = [
        f"{names[rule]}: {' '.join(names[piece] if isinstance(piece, _Rule) else piece for piece in pieces)}"
        for rule, pieces in rules.items()
    ]
    return "\n".join(["start: answer", f"answer: {names['root']}", *written]) + "\n"


class _Rule(str):
    """A rule by its name, among pieces that are Lark already."""


_Piece = _Rule | str


def _piece(kind: str, text: str, line: int) -> _Piece:
    match kind:
        case "name":
            return _Rule(text)
        case "text":
            return json.dumps("".join(character for character, _ in _characters(text, line)), ensure_ascii=False)
        case "set":
            return _set(text, line)
        case _:
            return _ANY if text == "." else "".join(text.split())


def _lark_names(rules: dict[str, list[_Piece]]) -> dict[str, str]:
    """What Lark calls each. Rules that lead back to none are terminals, in capitals: the library makes one automaton of
    each and takes as much by it as it can. Character by character a mask would cost milliseconds, and not microseconds.
    """
    needs = {rule: {piece for piece in pieces if isinstance(piece, _Rule)} for rule, pieces in rules.items()}
    needed_by: dict[str, list[str]] = {rule: [] for rule in rules}
    for rule, needed in needs.items():
        for piece in needed:
            needed_by[piece].append(rule)
    terminals, ready = set(), [rule for rule, needed in needs.items() if not needed]
    while ready:
        rule = ready.pop()
        terminals.add(rule)
        for other in needed_by[rule]:
            needs[other].discard(rule)
            if not needs[other]:
                ready.append(other)
    spelled = {rule: f"r{i}_{rule.lower().replace('-', '_')}" for i, rule in enumerate(rules)}
    return {rule: name.upper() if rule in terminals else name for rule, name in spelled.items()}


def _tokens(source: str) -> Iterator[tuple[str, str, int]]:
    """Kind, text and line of all but white space and comments."""
    at, line = 0, 1
    while at < len(source):
        token = _TOKEN.match(source, at)
        if token is None or token.lastgroup is None:
            raise _fault(line, f"{source[at : at + 16]!r} is no part of a grammar")
        if token.lastgroup != "blank":
            yield token.lastgroup, token[token.lastgroup], line
        at, line = token.end(), line + token[0].count("\n")


def _characters(text: str, line: int) -> Iterator[tuple[str, bool]]:
    """Each with whether it was escaped."""
    for two, four, eight, escaped, plain in _CHARACTER.findall(text):
        if plain:
            yield plain, False
        elif escaped:
            if escaped not in _ESCAPED:
                raise _fault(line, f"\\{escaped} escapes nothing")
            yield _ESCAPED[escaped], True
        else:
            code = int(two or four or eight, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise _fault(line, f"{code:X} is no character")
            yield chr(code), True


def _set(text: str, line: int) -> str:
    """`[a-z]` as a regular expression; nothing in it but ranges has a meaning of its own."""
    characters = list(_characters(text.removeprefix("^"), line))
    last = len(characters) - 1
    written = [
        "-" if (character, escaped) == ("-", False) and 0 < i < last else f"\\x{{{ord(character):X}}}"
        for i, (character, escaped) in enumerate(characters)
    ]
    return f"/[{'^' if text.startswith('^') else ''}{''.join(written)}]/"


def _fault(line: int, problem: str) -> ApiError:
    return bad_input(f"'guided_grammar', line {line}: {problem}", "guided_grammar")
