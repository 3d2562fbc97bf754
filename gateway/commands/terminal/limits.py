"""Limits on the command line: the options that change them, and how they are shown. It does not know whose they are."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

from cyclopts import Group, Parameter
from msgspec import UNSET, structs

from gateway.commands.terminal.options import NONE, OptionalAmount, OptionalCount, given_fields
from gateway.commands.terminal.output import format_amount
from tenants.records.limits import NO_LIMITS, RANGES, Limits

_GROUP: Final = Group("Limits", help=f"a number, or `{NONE}` to take the limit back", sort_key=10)


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True)
class LimitOptions:
    """`--requests-per-minute 60`, or `none`, and so for every limit; all for one class of models with --class."""

    requests_per_minute: Annotated[OptionalCount, Parameter(help="that may begin")] = UNSET
    burst: Annotated[OptionalCount, Parameter(help="that may come at once (default: a minute's worth)")] = UNSET
    concurrent_requests: Annotated[OptionalCount, Parameter(help="that may run at once")] = UNSET
    input_tokens_per_minute: Annotated[OptionalCount, Parameter(help="of prompts")] = UNSET
    output_tokens_per_minute: Annotated[OptionalCount, Parameter(help="of answers")] = UNSET
    neurons_per_day: Annotated[OptionalAmount, Parameter(help="the budget until midnight UTC")] = UNSET
    neurons_per_month: Annotated[OptionalAmount, Parameter(help="the budget until the month ends in UTC")] = UNSET
    limits_class: Annotated[
        str | None, Parameter(name="--class", metavar="CLASS", help="of calls of these models alone")
    ] = None

    def changed(self, limits: Limits) -> Limits:
        """`limits` with what was given. Raises ValueError in words for people."""
        changes = given_fields(self, _NAMES)
        if changes.get("requests_per_minute", 0) is None:
            changes.setdefault("burst", None)  # the burst belongs to the rate
        if self.limits_class is None:
            return structs.replace(limits, **changes)
        if not changes:
            raise ValueError("--class needs a limit beside it, like --requests-per-minute")
        classes = {**limits.classes}
        class_limits = structs.replace(classes.pop(self.limits_class, NO_LIMITS), **changes)
        if not class_limits.empty:
            classes[self.limits_class] = class_limits
        return structs.replace(limits, classes=classes)


_NAMES: Final = tuple(name for name in LimitOptions.__dataclass_fields__ if name != "limits_class")
NO_CHANGE: Final = LimitOptions()


def limits_json(limits: Limits) -> dict[str, Any]:
    """Every limit, null where it is not set."""
    document: dict[str, Any] = {name: getattr(limits, name) for name in _NAMES}
    return {**document, "classes": {name: limits_json(of_class) for name, of_class in sorted(limits.classes.items())}}


def limits_text(limits: Limits) -> str:
    """In one line: `60 requests/min, 10,000 neurons/day; large: 5 requests/min`."""
    texts = [_limit_text(name, value) for name in _NAMES if (value := getattr(limits, name)) is not None]
    classes = [f"{name}: {limits_text(of_class)}" for name, of_class in sorted(limits.classes.items())]
    return "; ".join([", ".join(texts), *classes] if texts else classes) or "-"


def limits_rows(*columns: Limits) -> list[tuple[str, ...]]:
    """One row for each limit that exists: its name and then its value in each of the columns."""
    rows = [(name, *(format_amount(getattr(limits, name)) for limits in columns)) for name in RANGES]
    for class_name in sorted({name for limits in columns for name in limits.classes}):
        class_rows = limits_rows(*(limits.classes.get(class_name, NO_LIMITS) for limits in columns))
        rows += [(f"{class_name}: {name}", *cells) for name, *cells in class_rows if set(cells) != {"-"}]
    return rows


def _limit_text(name: str, number: float) -> str:
    unit = name.replace("_per_minute", "/min").replace("_per_day", "/day").replace("_per_month", "/month")
    return f"{format_amount(number)} {unit.replace('_', ' ')}"
