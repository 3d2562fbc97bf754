"""A finding of `hearth doctor`: what was looked at, the verdict, and what to do."""

import enum
from typing import NamedTuple


class FindingLevel(enum.StrEnum):
    GOOD = "ok"
    NOTE = "note"
    WRONG = "wrong"


class Finding(NamedTuple):
    """`advice` says what to do where the verdict is not good."""

    subject: str
    verdict: FindingLevel
    found: str
    advice: str = ""


def good(subject: str, text: str) -> Finding:
    return Finding(subject, FindingLevel.GOOD, text)


def note(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, FindingLevel.NOTE, text, advice)


def wrong(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, FindingLevel.WRONG, text, advice)
