"""What accounts lose where their plan changes, in words. It changes none."""

from collections.abc import Iterator
from typing import Final

from gateway.commands.terminal.output import format_amount
from tenants.records.accounts import Plan
from tenants.records.limits import NO_LIMITS, RANGES, Limits

# Of a plan's own numbers: None is as much as one likes, but for a floor, which is then none at all.
_MOST: Final = ("sequences", "kv_blocks", "cap_blocks", "wait_s")
_AMOUNTS: Final = ("weight", "floor_blocks")


def reductions(before: Plan, after: Plan) -> list[str]:
    """`requests_per_minute 600 -> 60` for each number by which the accounts of a plan may do less than before."""
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in _MOST]
    pairs += _limits(before.limits, after.limits)
    lost = [(name, old, new) for name, old, new in pairs if new is not None and (old is None or new < old)]
    amounts = [(name, getattr(before, name) or 0, getattr(after, name) or 0) for name in _AMOUNTS]
    lost += [(name, old, new) for name, old, new in amounts if new < old]
    return [f"{name} {_text(old)} -> {_text(new)}" for name, old, new in lost]


def _limits(before: Limits, after: Limits) -> Iterator[tuple[str, float | None, float | None]]:
    for name in RANGES:
        yield name, _amount(before, name), _amount(after, name)
    for class_name in sorted({*before.classes, *after.classes}):
        pair = before.classes.get(class_name, NO_LIMITS), after.classes.get(class_name, NO_LIMITS)
        for name, old, new in _limits(*pair):
            yield f"{class_name}: {name}", old, new


def _amount(limits: Limits, name: str) -> float | None:
    amount: float | None = limits.at_once if name == "burst" else getattr(limits, name)
    return amount


def _text(number: float | None) -> str:
    return "unlimited" if number is None else format_amount(number)
