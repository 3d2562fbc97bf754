"""The alert rules, fired: promtool evaluates them over the series of alerts.yml, and finds each rule that is broken."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

RULES = Path(__file__).parents[3] / "gateway" / "observability" / "monitoring" / "hearth.rules.yml"
CASES = Path(__file__).with_name("alerts.yml")
PROMTOOL = shutil.which("promtool", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not here: `make .venv/.promtool` takes it from Debian's package"
)
Rule = dict[str, Any]


@pytest.fixture(scope="module")
def rules() -> dict[str, Rule]:
    """Each alert's rule, by its name."""
    return {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


@pytest.fixture(scope="module")
def cases(rules: dict[str, Rule]) -> list[dict[str, Any]]:
    """What alerts.yml has: its samples a minute apart, each expected alert with its rule's description."""
    cases = [{"interval": "1m", **case} for case in yaml.safe_load(CASES.read_text())["tests"]]
    for question in questions(cases):
        for alert in question.get("exp_alerts", []):
            alert["exp_annotations"]["description"] = rules[question["alertname"]]["annotations"]["description"]
    return cases


def questions(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [question for case in cases for question in case["alert_rule_test"]]


def write_cases(folder: Path, name: str, rules: list[Rule], cases: list[dict[str, Any]]) -> None:
    """Writes the cases to evaluate these rules over, and the rules beside them."""
    whole, rules_file = yaml.safe_load(CASES.read_text()), f"{name}.rules.yml"
    (folder / rules_file).write_text(yaml.safe_dump({"groups": [{"name": "alerts", "rules": rules}]}))
    (folder / f"{name}.yml").write_text(yaml.safe_dump({**whole, "rule_files": [rules_file], "tests": cases}))


def run_promtool(folder: Path, *names: str) -> "subprocess.CompletedProcess[str]":
    assert PROMTOOL is not None
    files = [f"{name}.yml" for name in names]
    return subprocess.run([PROMTOOL, "test", "rules", *files], cwd=folder, capture_output=True, text=True)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(
    rules: dict[str, Rule], cases: list[dict[str, Any]]
) -> None:
    for expected in (True, False):
        named = {question["alertname"] for question in questions(cases) if bool(question.get("exp_alerts")) is expected}
        assert named == rules.keys()


@needs_promtool
def test_promtool_knows_the_rule_file() -> None:
    assert PROMTOOL is not None
    checked = subprocess.run([PROMTOOL, "check", "rules", str(RULES)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_alerts_fire_when_their_time_is_over_and_not_an_evaluation_before(
    tmp_path: Path, rules: dict[str, Rule], cases: list[dict[str, Any]]
) -> None:
    write_cases(tmp_path, "cases", list(rules.values()), cases)
    evaluated = run_promtool(tmp_path, "cases")
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr


TURNED: Final = {" > ": " <= ", " < ": " >= ", " == ": " != "}


def turned_round(rule: Rule) -> Rule:
    """With the opposite of its first comparison."""
    at, sign = min((rule["expr"].find(sign), sign) for sign in TURNED if sign in rule["expr"])
    return {**rule, "expr": rule["expr"][:at] + TURNED[sign] + rule["expr"][at + len(sign) :]}


def too_late(rule: Rule) -> Rule:
    seconds = int(rule["for"][:-1]) * {"s": 1, "m": 60, "h": 3600}[rule["for"][-1]]
    return {**rule, "for": f"{seconds + 90}s"}


BREAKS: dict[str, Callable[[Rule], Rule]] = {
    "it never fires": lambda rule: {**rule, "expr": f"({rule['expr']}) and vector(0) == 1"},
    "it fires at the opposite": turned_round,
    "it fires too late": too_late,
    "it fires at once": lambda rule: {**rule, "for": "0m"},
    "its summary names no value": lambda rule: {**rule, "annotations": {**rule["annotations"], "summary": "It is bad"}},
    "it is nobody's business": lambda rule: {**rule, "labels": {"severity": "none"}},
}


@needs_promtool
@pytest.mark.parametrize("name", BREAKS)
def test_every_rule_that_is_broken_is_found(
    name: str, tmp_path: Path, rules: dict[str, Rule], cases: list[dict[str, Any]]
) -> None:
    broken = {alert: BREAKS[name](rule) for alert, rule in rules.items()}
    for alert, rule in broken.items():
        own = [
            {**case, "alert_rule_test": asked}
            for case in cases
            if (asked := [question for question in case["alert_rule_test"] if question["alertname"] == alert])
        ]
        write_cases(tmp_path, alert, [rule], own)
    evaluated = run_promtool(tmp_path, *rules)
    assert evaluated.returncode == 1
    failed = set(re.findall(r"alertname: (\w+), time: ", evaluated.stdout + evaluated.stderr))
    assert failed == {alert for alert in rules if broken[alert] != rules[alert]}, f"the others pass although {name}"
