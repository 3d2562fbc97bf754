"""What people wrote for the corpus, read from the TOML files of this folder: matters of businesses and how guests ask.

Each file says its own form at its top. This module knows no chance and no sentences of its own.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, Final, NamedTuple

FOLDER: Final = Path(__file__).parent


class Fact(NamedTuple):
    """What a prompt may say in any of `sayings`, and the questions that each of them answers, or only some if `mixed`."""

    topic: str
    sayings: tuple[str, ...]
    questions: tuple[str, ...]
    mixed: bool


class Entry(NamedTuple):
    """A row of a list that a business may have: its names, a second column, and questions that do not use its name."""

    names: tuple[str, ...]
    second: tuple[str, ...]
    needs: tuple[str, ...]


def read(name: str) -> dict[str, Any]:
    """The tables of written/NAME.toml."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def split(text: str, mark: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(mark) if part.strip())


def facts(tables: dict[str, str]) -> tuple[Fact, ...]:
    """The facts of each topic, one a line: sayings | questions, both between " / "."""
    found = []
    for topic, text in tables.items():
        for line in split(text, "\n"):
            sayings, questions = line.removeprefix("* ").split(" | ")
            found.append(Fact(topic, split(sayings, " / "), split(questions, " / "), line.startswith("* ")))
    return tuple(found)


def entries(text: str) -> tuple[Entry, ...]:
    """The rows of a list, one a line: names | second column | needs; names and seconds between ";", needs " / "."""
    rows = []
    for line in split(text, "\n"):
        names, second, needs = (*re.split(r"\s*\|\s*", line), "", "")[:3]
        rows.append(Entry(split(names, ";"), split(second, ";"), split(needs, " / ")))
    return tuple(rows)


WORDS: Final[dict[str, tuple[str, ...]]] = {name: split(text, ";") for name, text in read("words").items()}
FRAMES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    kind: {part: split(text, "\n") for part, text in frames.items()} for kind, frames in read("frames").items()
}
LISTS: Final[dict[str, tuple[Entry, ...]]] = {kind: entries(text) for kind, text in read("lists").items()}
FACTS: Final = tuple(
    fact for name in sorted(path.stem for path in FOLDER.glob("facts_*.toml")) for fact in facts(read(name))
)
UNKNOWN: Final[dict[str, tuple[str, ...]]] = {name: split(text, "\n") for name, text in read("unknown").items()}
