"""The gateway's own conditions, over the very series that promtool tests the rules with: each fires where the rule does
and not an evaluation before."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml

from gateway.observability.alert_conditions import CONDITIONS, NAMES, UNSEEN, WINDOWS_S, MetricHistory, Series
from gateway.observability.alert_rules import RULES_FILE, shipped_rules
from gateway.observability.alerts import AlertWatch
from tests.support.waiting import StoppedClock

CASES: Final = yaml.safe_load(Path(__file__).with_name("alerts.yml").read_text())["tests"]
STEP_S: Final = 30
GATEWAY: Final = "g1"  # whose metrics are looked at, where a case has several gateways
_PART: Final = re.compile(r"(?P<start>[0-9.e+]+?)(?:(?P<step>[+-][0-9.e]+))?(?:x(?P<times>\d+))?")


def samples(text: str) -> list[float]:
    """The samples that promtool reads in `0+60x20 1200x40`."""
    found: list[float] = []
    for part in text.split():
        match = _PART.fullmatch(part)
        assert match, part
        start, step, times = float(match["start"]), float(match["step"] or 0), int(match["times"] or 0)
        found += [start + step * i for i in range(times + 1)]
    return found


def seconds(text: str) -> int:
    return sum(int(number) * {"s": 1, "m": 60, "h": 3600}[unit] for number, unit in re.findall(r"(\d+)([smh])", text))


def of_one_gateway(case: dict[str, Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]:
    """Samples by name and labels, without the gateway's own."""
    found = {}
    for series in case["input_series"]:
        name, _, inner = series["series"].partition("{")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', inner))
        if labels.pop("instance", GATEWAY) == GATEWAY:
            found[name, tuple(sorted(labels.items()))] = samples(series["values"])
    return found


def question_of(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for case in CASES:
        for question in case["alert_rule_test"]:
            if question["alertname"] == name:
                yield case, question


def fired(case: dict[str, Any], name: str, until_s: int) -> list[tuple[dict[str, str], str]]:
    """Labels and summaries of the alerts of this name that fire then, looked at all the while."""
    clock, series = StoppedClock(0.0), of_one_gateway(case)
    interval_s = seconds(case.get("interval", "1m"))
    watch = AlertWatch(lambda: (), GATEWAY, clock)
    for now_s in range(0, until_s + 1, STEP_S):
        clock.now_s = float(now_s)
        latest: dict[str, Series] = {}
        for (metric, labels), values in series.items():
            if now_s // interval_s < len(values):
                latest.setdefault(metric, {})[labels] = values[now_s // interval_s]
        watch.take(latest)
    return [
        (dict(alert.labels), alert.rule.summary_of(alert.labels, alert.value))
        for alert in watch.alerts()
        if alert.firing and alert.rule.name == name
    ]


@pytest.mark.parametrize("name", sorted(CONDITIONS))
def test_a_condition_fires_where_the_rule_does_and_not_before(name: str) -> None:
    asked = 0
    for case, question in question_of(name):
        found = fired(case, name, seconds(question["eval_time"]))
        expected = [
            alert["exp_labels"]
            for alert in question.get("exp_alerts", [])
            if alert["exp_labels"].get("instance", GATEWAY) == GATEWAY
        ]
        wanted = [{**labels, "instance": GATEWAY} for labels in expected]
        for labels in wanted:
            del labels["severity"]
        assert [labels for labels, _ in found] == wanted, (question["eval_time"], found)
        asked += 1
    assert asked >= 2


def test_every_shipped_rule_is_evaluated_or_said_not_to_be() -> None:
    rules = [rule.name for rule in shipped_rules()]
    assert len(set(rules)) == len(rules)
    assert {*CONDITIONS, *UNSEEN} == set(rules)
    assert not CONDITIONS.keys() & UNSEEN.keys()


def test_the_rules_are_read_as_a_yaml_reader_reads_them() -> None:
    written = [rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]]
    assert [msgspec.structs.astuple(rule) for rule in shipped_rules()] == [
        (
            rule["alert"],
            " ".join(rule["expr"].split()),
            seconds(rule["for"]),
            rule["labels"]["severity"],
            rule["annotations"]["summary"],
            rule["annotations"]["description"],
        )
        for rule in written
    ]  # fmt: skip


def test_conditions_look_at_the_very_metrics_that_the_rules_name() -> None:
    named = {rule.name: set(re.findall(r"(?:hearth|process)_\w+", rule.expr)) for rule in shipped_rules()}
    for name in UNSEEN:
        del named[name]
    assert set().union(*named.values()) == set(NAMES)


def test_a_history_holds_so_many_samples_and_no_older_ones_than_its_windows() -> None:
    history, name = MetricHistory(), "hearth_store_outages_total"
    for second in range(0, 20_000, 15):
        history.take(float(second), {name: {(): float(second)}})
    past = history._past[name]
    assert len(past) <= 42
    assert past[0][0] >= 19_985 - WINDOWS_S[name] - 100
    assert history.increase(name)[()] == pytest.approx(WINDOWS_S[name], rel=0.05)


def test_summaries_say_the_number_as_people_do() -> None:
    rules = {rule.name: rule for rule in shipped_rules()}
    instance = {"instance": "here", "model": "@cf/a/b"}
    for name, value, said in (
        ("HearthErrors", 0.0317, "3.17 % of calls"), ("HearthOutboxGrowing", 150e6, "143.1 MiB"),
        ("HearthCertificateEnds", 86_400 * 3 + 7200, "3d 2h"), ("HearthSettlementsWaiting", 1234, "1,234 settlements"),
        ("HearthFirstTokenSlow", 7.25, "@cf/a/b take 7.25 s"),
    ):  # fmt: skip
        assert said in rules[name].summary_of(instance, value)
