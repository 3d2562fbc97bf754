"""The line of a TOML file that an error about its contents means. It knows the file as text, and no settings."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_HEADER: Final = re.compile(r"^\s*(\[\[?)\s*([A-Za-z0-9_.\"' -]+?)\s*\]\]?\s*(#.*)?$")
_KEY: Final = re.compile(r"^\s*([A-Za-z0-9_-]+)\s*=")
_PLACE: Final = re.compile(r"`\$\.?([^`]*)`$")  # as msgspec ends a message: at `$.models[1].price`
_UNKNOWN: Final = re.compile(r"unknown field `([^`]+)`")

_Place = tuple[str, ...]


def line_of_error(text: str, error: str) -> int | None:
    """The line, from 1, of the value that msgspec found wrong; None where that cannot be told."""
    place, unknown = _PLACE.search(error), _UNKNOWN.search(error)
    if place is None and unknown is None:
        return None
    wanted = re.findall(r"[^.\[\]]+", place[1]) if place is not None else []
    wanted += [unknown[1]] if unknown is not None else []
    shared = [(_shared(found, tuple(wanted)), -number) for number, found in _places(text)]
    length, number = max(shared, default=(0, 0))
    return -number if length else None


def line_of_text(text: str, value: str) -> int | None:
    """The last line on which a value stands in quotes; None where it is on none."""
    lines = [
        number for number, line in enumerate(text.splitlines(), 1) if re.search(f"[\"']{re.escape(value)}[\"']", line)
    ]
    return lines[-1] if lines else None


def readable_part(text: str) -> str:
    """The tables before the one in which the text is no TOML; nothing where it is."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        lines = text.splitlines()[: int(line[1]) if line is not None else None]
        heads = [number for number, each in enumerate(lines) if each.lstrip().startswith("[")]
        return "\n".join(lines[: heads[-1] if heads else 0])
    return ""


def readable_text(file: Path) -> str:
    """The file's text; nothing where it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _places(text: str) -> Iterator[tuple[int, _Place]]:
    """Each line that opens a table or sets a value, with its place: models, 1, price."""
    table: _Place = ()
    counts: dict[_Place, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            names = tuple(name.strip(" \"'") for name in header[2].split("."))
            if header[1] == "[[":
                counts[names] = counts.get(names, -1) + 1
            table = _indexed(names, counts)
            yield number, table
        elif key := _KEY.match(line):
            yield number, (*table, key[1])


def _indexed(names: _Place, counts: dict[_Place, int]) -> _Place:
    """The names with the number behind each that is an array of tables."""
    place: list[str] = []
    for length, name in enumerate(names, 1):
        place.append(name)
        if names[:length] in counts:
            place.append(str(counts[names[:length]]))
    return tuple(place)


def _shared(found: _Place, wanted: _Place) -> int:
    """How much of what is wanted a place names; 0 where it names something else."""
    length = min(len(found), len(wanted))
    return length if found == wanted[:length] else 0
