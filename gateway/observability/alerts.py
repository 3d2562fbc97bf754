"""Which of the shipped alerts fire at this gateway now, by its own metrics. It sends nothing to anybody."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import Metric

from gateway.observability.alert_conditions import CONDITIONS, NAMES, Labels, MetricHistory, Series
from gateway.observability.alert_rules import AlertRule, shipped_rules

EVERY_S: Final = 15.0
ALERTS_MAX: Final = 1_000  # that hold at once; of more the first are told


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule whose condition holds for these labels since `since`, in seconds since 1970; once it has held for the
    rule's time it fires."""

    rule: AlertRule
    labels: Mapping[str, str]
    value: float
    since: float
    firing: bool


class AlertWatch:
    """`read` gives the metrics of this gateway, `instance` is its name among gateways, `clock` seconds since 1970."""

    def __init__(
        self, read: Callable[[], Iterable[Metric]], instance: str, clock: Callable[[], float], every_s: float = EVERY_S
    ) -> None:
        self._read = read
        self._instance = instance
        self._clock = clock
        self._every_s = every_s
        self._history = MetricHistory()
        self._since: dict[tuple[str, Labels], float] = {}
        self._values: dict[tuple[str, Labels], float] = {}
        self.rules = shipped_rules()

    async def run(self) -> None:
        """Looks every some seconds, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._every_s)

    def look(self) -> None:
        """Samples the metrics and evaluates all conditions; takes some milliseconds."""
        series: dict[str, Series] = {name: {} for name in NAMES}
        for family in self._read():
            for sample in family.samples:
                if sample.name in series:
                    series[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
        self.take({name: values for name, values in series.items() if values})

    def take(self, series: Mapping[str, Series]) -> None:
        """Evaluates all conditions with one sample more."""
        now = self._clock()
        self._history.take(now, series)
        holding = {
            (rule.name, labels): value
            for rule in self.rules
            if rule.name in CONDITIONS
            for labels, value in CONDITIONS[rule.name](self._history).items()
        }
        self._values = dict(list(holding.items())[:ALERTS_MAX])
        self._since = {key: self._since.get(key, now) for key in self._values}

    def alerts(self) -> list[Alert]:
        """What holds, as of the last look, in the order of the rules."""
        now, rules = self._clock(), {rule.name: rule for rule in self.rules}
        return [
            Alert(
                rules[name],
                {**dict(labels), "instance": self._instance},
                value,
                self._since[name, labels],
                now - self._since[name, labels] >= rules[name].for_s,
            )
            for (name, labels), value in self._values.items()
        ]
