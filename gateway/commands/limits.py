"""Limits on the command line: the options that change them, and how they are shown. It does not know whose they are."""

import argparse
from collections.abc import Callable
from typing import Any, Final

from msgspec import UNSET, UnsetType, structs

from gateway.commands.output import NONE
from tenants.records.limits import NO_LIMITS, RANGES, Limits

_HELP: Final = {
    "requests_per_minute": "that may begin",
    "burst": "requests that may come at once (default: a minute's worth)",
    "concurrent_requests": "that may run at once",
    "input_tokens_per_minute": "of prompts",
    "output_tokens_per_minute": "of answers",
    "neurons_per_day": "the budget until midnight UTC",
    "neurons_per_month": "the budget until the month ends in UTC",
}


def add_limits(action: argparse.ArgumentParser) -> None:
    """`--requests-per-minute 60`, or `none`, and so for every limit; all for one class of models with --class."""
    limits = action.add_argument_group("limits", f"a number, or `{NONE}` to take the limit back")
    for name, said in _HELP.items():
        kind = float if name.startswith("neurons") else int
        limits.add_argument(f"--{name.replace('_', '-')}", type=or_none(kind), metavar="N", help=said)
    limits.add_argument("--class", dest="limits_class", metavar="CLASS", help="of calls of these models alone")


def or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse: UNSET for `none`, else what `kind` reads."""

    def read(text: str) -> Any:
        return UNSET if text == NONE else kind(text)

    read.__name__ = getattr(kind, "__name__", "value")  # argparse says it where the text cannot be read
    return read


def given_limits(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of these options that were said, None for those that were taken back."""
    said: dict[str, Any | UnsetType] = {name: getattr(options, name) for name in names}
    return {name: None if value is UNSET else value for name, value in said.items() if value is not None}


def changed_limits(limits: Limits, options: argparse.Namespace) -> Limits:
    """With what the options say. Raises ValueError in words for people."""
    changes = given_limits(options, *_HELP)
    if changes.get("requests_per_minute", 0) is None:
        changes.setdefault("burst", None)  # the burst belongs to the rate
    if options.limits_class is None:
        return structs.replace(limits, **changes)
    if not changes:
        raise ValueError("--class needs a limit beside it, like --requests-per-minute")
    classes = {**limits.classes}
    of_class = structs.replace(classes.pop(options.limits_class, NO_LIMITS), **changes)
    if not of_class.empty:
        classes[options.limits_class] = of_class
    return structs.replace(limits, classes=classes)


def limits_json(limits: Limits) -> dict[str, Any]:
    """Every limit, null where it is not set."""
    said: dict[str, Any] = {name: getattr(limits, name) for name in _HELP}
    return {**said, "classes": {name: limits_json(one) for name, one in sorted(limits.classes.items())}}


def limits_text(limits: Limits) -> str:
    """In one line: `60 requests/min, 10,000 neurons/day; large: 5 requests/min`."""
    said = [_said(name, getattr(limits, name)) for name in _HELP if getattr(limits, name) is not None]
    classes = [f"{name}: {limits_text(one)}" for name, one in sorted(limits.classes.items())]
    return "; ".join([", ".join(said), *classes] if said else classes) or "-"


def limits_rows(*columns: Limits) -> list[tuple[str, ...]]:
    """One row for each limit that there is, its name and then its value in each of the columns."""
    found = [(name, *(format_amount(getattr(one, name)) for one in columns)) for name in RANGES]
    for class_name in sorted({name for one in columns for name in one.classes}):
        of_class = limits_rows(*(one.classes.get(class_name, NO_LIMITS) for one in columns))
        found += [(f"{class_name}: {name}", *cells) for name, *cells in of_class if set(cells) != {"-"}]
    return found


def format_amount(number: float | None) -> str:
    return "-" if number is None else f"{number:,.15g}"


def _said(name: str, number: float) -> str:
    unit = name.replace("_per_minute", "/min").replace("_per_day", "/day").replace("_per_month", "/month")
    return f"{format_amount(number)} {unit.replace('_', ' ')}"
