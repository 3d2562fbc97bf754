"""The alert rules that Hearth ships for Prometheus, read from their file: names, severities, and what to do. It does
not evaluate their expressions; alert_conditions.py says the same in Python."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

RULES_FILE: Final = Path(__file__).parent / "monitoring" / "hearth.rules.yml"
# The file is our own and has one shape; tests/gateway/observability/test_alert_rules.py compares with a YAML reader.
_RULE: Final = re.compile(
    r"""- alert: (?P<name>\w+)\n +expr: >-\n(?P<expr>(?: {10,}.*\n)+) +for: (?P<lasts>\d+)(?P<unit>[smh])\n"""
    r""" +labels:\n +severity: (?P<severity>\w+)\n"""
    r""" +annotations:\n +summary: "(?P<summary>[^"\n]*)"\n +description: >-\n(?P<description>(?: {12,}.*\n?)+)"""
)
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600}
_PLACE: Final = re.compile(r"\{\{ (\$labels\.(?P<label>\w+)|\$value)(?: \| (?P<form>\w+))? \}\}")


class AlertRule(msgspec.Struct, frozen=True):
    """An alert fires once its condition has held for `for_s` seconds."""

    name: str
    expr: str
    for_s: int
    severity: str
    summary: str
    description: str

    def summary_of(self, labels: Mapping[str, str], value: float) -> str:
        """The summary, with its places filled."""

        def filled(match: re.Match[str]) -> str:
            if match["label"]:
                return labels.get(match["label"], "")
            return _FORMS[match["form"]](value)

        return _PLACE.sub(filled, self.summary)


def shipped_rules() -> list[AlertRule]:
    """All rules of the file, in its order."""
    return [
        AlertRule(
            name=match["name"],
            expr=_unfolded(match["expr"]),
            for_s=int(match["lasts"]) * _UNIT_S[match["unit"]],
            severity=match["severity"],
            summary=match["summary"],
            description=_unfolded(match["description"]),
        )
        for match in _RULE.finditer(RULES_FILE.read_text())
    ]


def _unfolded(text: str) -> str:
    return " ".join(text.split())


def _duration(seconds: float) -> str:
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    days, rest = divmod(int(abs(seconds)), 86_400)
    hours, rest = divmod(rest, 3600)
    parts = [(days, "d"), (hours, "h"), (rest // 60, "m"), (rest % 60, "s")]
    sign = "-" if seconds < 0 else ""
    return sign + " ".join(f"{count}{unit}" for count, unit in parts if count)


def _count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _binary(value: float) -> str:
    for unit in ("", "Ki", "Mi", "Gi"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} Ti"


_FORMS: Final[dict[str | None, Callable[[float], str]]] = {
    None: _count,
    "humanize": _count,
    "humanize1024": _binary,
    "humanizeDuration": _duration,
    "humanizePercentage": lambda value: f"{100 * value:.3g} %",
}
