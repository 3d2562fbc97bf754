"""Asks before what cannot be taken back, where a person can answer; scripts say --yes."""

import sys
from typing import Annotated, Final

from cyclopts import Parameter

Yes = Annotated[bool, Parameter(help="do it without asking, as scripts must")]
_AGREED: Final = ("y", "yes")


class Declined(ValueError):
    """Nobody agreed. Nothing was changed."""


def confirm(consequence: str, yes: bool) -> None:
    """Raises Declined unless `yes`, or whoever sits at the terminal agrees to the consequence."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Declined(f"{consequence}. Nothing was changed; --yes does it")
    print(f"{consequence}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in _AGREED:
        raise Declined("nothing was changed")
