"""One line of the conformance table, and the table in words."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["pass", "fail", "none", "local"]
WORDS = {"pass": "pass", "fail": "FAIL", "none": "no counterpart", "local": "asks no server"}


@dataclass(frozen=True)
class Row:
    """How one operation of one SDK fares: it works; or it has no counterpart here, and ends with an error that says so
    (`note` has it); or it never asks the server; or it fails.

    `case` is what was tried where an operation was tried in several ways.
    """

    sdk: str
    operation: str
    outcome: Outcome
    note: str = ""
    case: str = ""


def table(rows: Iterable[Row]) -> str:
    """What works or fails line by line; what has no counterpart summed up by its first words and its error."""
    lines, others = [], defaultdict(list)
    for row in rows:
        if row.outcome in ("pass", "fail"):
            case = f" ({row.case})" if row.case else ""
            lines.append(f"{row.sdk:22} {row.operation + case:52} {WORDS[row.outcome]:16} {row.note}".rstrip())
        else:
            others[row.sdk, row.operation.partition(".")[0], row.outcome, row.note].append(row.operation)
    for (sdk, first, outcome, note), operations in others.items():
        named = operations[0] if len(operations) == 1 else f"{first}.* ({len(operations)} operations)"
        lines.append(f"{sdk:22} {named:52} {WORDS[outcome]:16} {note}".rstrip())
    return "\n".join(lines)


def summary(rows: Iterable[Row]) -> str:
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        counts[row.sdk][row.outcome] += 1
    return "\n".join(
        f"{sdk:22} " + ", ".join(f"{its[outcome]} {words}" for outcome, words in WORDS.items())
        for sdk, its in counts.items()
    )
