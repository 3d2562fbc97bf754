"""What msgspec found wrong with a file that people write, in words: the place first, then what may stand there.

It knows no file: only the message and the type that was read.
"""

import re
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from gateway.field_hints import allowed_ranges, allowed_words, description_of, similar_field

_PATH: Final = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`")
_TYPES: Final = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_WORDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
_NOTHING: Final = "null"
_NO_WORD: Final = "Invalid enum value "
_NO_SUCH_FIELD: Final = "there is no such field"
_ONE_TABLE: Final = "expected a list, got a table"

T = TypeVar("T")


class DeclaredProblem(NamedTuple):
    """`place` is like models[1].price, empty for the whole; it ends with the field that is unknown or missing."""

    place: str
    problem: str

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}" if self.place else self.problem


def declared_problem(message: str, kind: Any) -> DeclaredProblem:
    """Reads what `msgspec.convert` to this type said. A field that is unknown is told with the one that is like it."""
    path = _PATH.search(message)
    place = path[1] if path is not None else ""
    problem = _PATH.sub("", message)
    if named := _UNKNOWN.match(problem) or _MISSING.match(problem):
        name = named[1]
        full = f"{place}.{name}" if place else name
        if _MISSING.match(problem):
            return DeclaredProblem(full, "is missing" + _documented(kind, full))
        similar = similar_field(kind, place, name)
        return DeclaredProblem(full, _NO_SUCH_FIELD + (f"; did you mean {similar}?" if similar else ""))
    if problem.startswith(_NO_WORD):
        allowed = [words for words in (allowed_ranges(kind, place), *allowed_words(kind, place)) if words]
        problem = f"{problem.removeprefix(_NO_WORD)} is none of {', '.join(allowed)}"
    documented = _documented(kind, place)
    if documented and " matching regex " in problem:
        problem = "it cannot be that"
    elif problem.startswith("Expected "):
        problem = f"expected{_TYPES.sub(_in_words, problem.removeprefix('Expected'))}"
    return DeclaredProblem(place, problem + documented)


def convert_declared(document: Any, kind: type[T]) -> T:
    """`msgspec.convert` to this type. Raises ValueError in words, with the place."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(declared_problem(str(error), kind))) from None


def advised(found: DeclaredProblem) -> str:
    """The problem of hearth.toml, with what helps where no field is like it, or [NAME] stands for [[NAME]]."""
    lists = "; `hearth doctor --settings` lists all settings"
    each = f": write [[{found.place}]], once for each"
    return str(found) + {_NO_SUCH_FIELD: lists, _ONE_TABLE: each}.get(found.problem, "")


def _documented(kind: Any, place: str) -> str:
    description = description_of(kind, place)
    return f" [{description}]" if description else ""


def _in_words(types: re.Match[str]) -> str:
    """`int | null` in words: what may be left out is not said."""
    names = [name for name in types[1].split(" | ") if name != _NOTHING]
    return " or ".join(_WORDS.get(name, name) for name in names) or "nothing"
