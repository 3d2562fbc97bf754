"""Grammars as llama.cpp and vLLM know them (GBNF: `root ::= "yes" | "no"`), in the Lark that the grammar library reads.

It reads each character once, and leaves it to the library whether what comes out makes sense.
"""

import json
import re
from collections.abc import Iterator
from typing import Final

from gateway.errors import Refusal, bad_input

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


def is_ebnf(source: str) -> bool:
    """Lark writes a rule as `name:`."""
    return _RULE.search(source) is not None


def to_lark(source: str) -> str:
    """Raises Refusal, saying where it is no grammar, or which rule is not there."""
    rules = {"root": "start"}
    begun: set[str] = set()
    written: list[str] = []
    for kind, found, line in _tokens(source):
        match kind:
            case "begin":
                if found in begun:
                    raise _fault(line, f"the rule {found[:64]!r} is there twice")
                begun.add(found)
                written.append(f"\n{_rule(rules, found)}:")
            case "name":
                written.append(_rule(rules, found))
            case "text":
                text = "".join(character for character, _ in _characters(found, line))
                written.append(json.dumps(text, ensure_ascii=False))
            case "set":
                written.append(_set(found, line))
            case _:
                written.append(_ANY if found == "." else "".join(found.split()))
    if missing := rules.keys() - begun:
        raise _fault(1 + source.count("\n"), f"there is no rule {min(missing)[:64]!r}")
    return " ".join(written).strip() + "\n"


def _tokens(source: str) -> Iterator[tuple[str, str, int]]:
    """Kind, text and line of all but white space and comments."""
    at, line = 0, 1
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None or found.lastgroup is None:
            raise _fault(line, f"{source[at : at + 16]!r} is no part of a grammar")
        if found.lastgroup != "blank":
            yield found.lastgroup, found[found.lastgroup], line
        at, line = found.end(), line + found[0].count("\n")


def _rule(rules: dict[str, str], name: str) -> str:
    """Lark's name for a rule: lower case, and another one for each."""
    if name not in rules:
        rules[name] = f"{name.lower().replace('-', '_')}_{len(rules)}"
    return rules[name]


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


def _fault(line: int, problem: str) -> Refusal:
    return bad_input(f"'guided_grammar', line {line}: {problem}", "guided_grammar")
