"""The alert rules and the dashboard, held against what a gateway that has had traffic really exposes.

promtool and Grafana are no Python packages: the fields of both files are checked against the parts of their formats
that the files use, and each expression is read by a parser of PromQL. test_alerts.py fires the rules where promtool is.
"""

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser as promql
import pytest
import uvloop
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tenants.records.grants import Grant, Permission
from tenants.records.limits import Limits
from tests.support.certificates import write_certificate
from tests.support.served_gateway import Served, served
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "gateway" / "observability" / "monitoring"
RULES = FOLDER / "hearth.rules.yml"
DASHBOARD = FOLDER / "hearth.dashboard.json"
SCRAPED = {"job", "instance"}  # labels that Prometheus adds
Exposed = dict[str, set[str]]  # the labels of each series, by its name

_WORDS = {"type": "object", "additionalProperties": {"type": "string", "minLength": 1}}
_DURATION = {"type": "string", "pattern": "^[0-9]+(s|m|h)$"}


def _fields(required: dict[str, Any], **others: Any) -> dict[str, Any]:
    properties = {**required, **others}
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _list(of: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": of, **limits}


_TEXT = {"type": "string", "minLength": 1}
_RULE = _fields(
    {
        "alert": {"type": "string", "pattern": "^Hearth[A-Z][A-Za-z]+$"},
        "expr": _TEXT,
        "for": _DURATION,
        "labels": _fields({"severity": {"enum": ["critical", "warning", "info"]}}),
        "annotations": _fields({"summary": _TEXT, "description": {"type": "string", "minLength": 40}}),
    },
    keep_firing_for=_DURATION,
)
_GROUP = _fields(
    {"name": _TEXT, "rules": _list(_RULE, minItems=1)},
    interval=_DURATION,
    limit={"type": "integer", "minimum": 0},
    query_offset=_DURATION,
    labels=_WORDS,
)
_RULE_FILE = _fields({"groups": _list(_GROUP, minItems=1)})

_ANY = {"type": "object"}
_COUNT = {"type": "integer", "minimum": 0}
_SOURCE = {"const": {"type": "prometheus", "uid": "${datasource}"}}
_PLACE = _fields(
    {"x": _COUNT, "y": _COUNT, "w": {"type": "integer", "minimum": 1}, "h": {"type": "integer", "minimum": 1}}
)
_TARGET = _fields(
    {
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
        "datasource": _SOURCE,
        "expr": _TEXT,
        "legendFormat": _TEXT,
        "range": {"type": "boolean"},
        "instant": {"type": "boolean"},
    }
)
_ROW = _fields(
    {"type": {"const": "row"}, "id": _COUNT, "title": _TEXT, "collapsed": {"const": False}, "gridPos": _PLACE}
    | {"panels": _list(_ANY, maxItems=0)}
)
_CHART = _fields(
    {
        **{"type": {"enum": ["timeseries", "bargauge"]}, "id": _COUNT, "title": _TEXT, "description": _TEXT},
        **{"datasource": _SOURCE, "gridPos": _PLACE, "options": _ANY, "targets": _list(_TARGET, minItems=1)},
        "fieldConfig": _fields(
            {"defaults": _fields({"unit": _TEXT, "min": {"type": "number"}}), "overrides": _list(_ANY)}
        ),
    }
)
_DASHBOARD = _fields(
    {
        **{"uid": _TEXT, "title": _TEXT, "description": _TEXT, "tags": _list(_TEXT), "version": _COUNT},
        "schemaVersion": {"type": "integer", "minimum": 41},
        **{
            "editable": {"type": "boolean"},
            "timezone": _TEXT,
            "graphTooltip": {"enum": [0, 1, 2]},
            "refresh": _DURATION,
        },
        "time": _fields({"from": _TEXT, "to": _TEXT}),
        "annotations": _fields({"list": _list(_ANY)}),
        "links": _list(_ANY),
        "templating": _fields({"list": _list(_ANY, minItems=1)}),
        "panels": _list({"oneOf": [_ROW, _CHART]}, minItems=1),
    }
)


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return document


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Exposed:
    """What the operator reads once there were an answer, a refusal by a limit, a wait for a model, a certificate, a
    prompt that another replica could compute and a replica's word."""
    folder = tmp_path_factory.mktemp("gateway")

    async def scrape() -> Exposed:
        async with served(folder, limits=Limits(requests_per_minute=2)) as gateway:
            gateway.app._serving.context.metrics.watch_certificate(write_certificate(folder)["certificate"])
            for _ in range(3):
                await gateway.run(prompt="hello", max_tokens=3)
            gateway.app._serving.context.metrics.observe_wake_wait(MODEL, 0.3)
            gateway.app._serving.context.fleet.counters.prefills[MODEL]["local"] += 1
            await gateway.settled()
            return await _scraped(gateway)

    return uvloop.run(scrape())


async def _scraped(gateway: Served) -> Exposed:
    _, operator = await gateway.accounts.mint(gateway.account_id, "prometheus", grant=Grant((Permission.OPERATOR,)))

    async def scraped() -> Exposed | None:
        gateway.fleet.replicas[0].load()
        answer = await gateway.call("/metrics", b"", "GET", authorization=f"Bearer {operator}")
        labels: Exposed = {"up": set()}
        for family in text_string_to_metric_families(answer.content.decode()):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
        return labels if "hearth_prefix_lookups_total" in labels else None

    labels: Exposed = await until(scraped)
    return labels


def _parsed(expression: str) -> promql.Expr:
    return promql.parse(expression.replace("$__rate_interval", "5m").replace("$__range", "6h"))


def _selectors(expression: promql.Expr) -> list[promql.VectorSelector]:
    found: list[promql.VectorSelector] = []

    def visit(node: promql.Expr) -> bool:
        if isinstance(node, promql.VectorSelector):
            found.append(node)
        elif isinstance(node, promql.MatrixSelector):
            found.append(node.vector_selector)
        return True

    promql.walk(expression, visit)
    return list({selector.prettify(): selector for selector in found}.values())


def _grouped(expression: str) -> set[str]:
    """The labels that aggregations keep and that two sides are matched by."""
    lists = re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression)
    return {label.strip() for labels in lists for label in labels.split(",")}


def _wrong(expression: str, exposed: Exposed) -> list[str]:
    """What of the expression no gateway has."""
    selectors = _selectors(_parsed(expression))
    assert selectors, expression
    wrong, known = list[str](), set(SCRAPED)
    for selector in selectors:
        name = selector.name or ""
        labels = exposed.get(name, set())
        known |= labels
        wrong += [] if name in exposed else [name]
        wrong += [matcher.name for matcher in selector.matchers.matchers if matcher.name not in labels | SCRAPED]
    return wrong + sorted(_grouped(expression) - known)


def _queries(dashboard: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel, target


def _expressions(rules: list[dict[str, Any]], dashboard: dict[str, Any]) -> list[str]:
    return [rule["expr"] for rule in rules] + [target["expr"] for _, target in _queries(dashboard)]


def test_every_metric_and_label_that_is_asked_for_is_one_that_a_gateway_exposes(
    rules: list[dict[str, Any]], dashboard: dict[str, Any], exposed: Exposed
) -> None:
    wrong = {
        expression: wrong for expression in _expressions(rules, dashboard) if (wrong := _wrong(expression, exposed))
    }
    assert not wrong


def test_a_renamed_metric_or_label_is_found_in_each_expression_that_asks_for_it(
    rules: list[dict[str, Any]], dashboard: dict[str, Any], exposed: Exposed
) -> None:
    for expression in _expressions(rules, dashboard):
        for selector in _selectors(_parsed(expression)):
            assert selector.name is not None
            without = {name: labels for name, labels in exposed.items() if name != selector.name}
            assert selector.name in _wrong(expression, without)
            for matcher in selector.matchers.matchers:
                if matcher.name not in SCRAPED:
                    bare = exposed | {selector.name: exposed[selector.name] - {matcher.name}}
                    assert _wrong(expression, bare)


def test_every_metric_of_ours_is_on_the_dashboard_or_in_an_alert(
    rules: list[dict[str, Any]], dashboard: dict[str, Any], exposed: Exposed
) -> None:
    """But for those that only benchmarks read, and the halves of histograms that quantiles need no more than once."""
    asked = {selector.name for text in _expressions(rules, dashboard) for selector in _selectors(_parsed(text))}
    ours = {
        name for name in exposed if name.startswith("hearth_") and not name.endswith(("_created", "_sum", "_count"))
    }
    assert ours - asked == {
        *("hearth_prefix_lookups_total", "hearth_prefix_duplicate_blocks_total", "hearth_prefix_spared_keys_total"),
    }


def test_values_that_labels_are_compared_with_are_words_that_the_gateway_says(
    rules: list[dict[str, Any]], dashboard: dict[str, Any]
) -> None:
    words = {
        node.value
        for path in (ROOT / "gateway").glob("**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    }
    for expression in _expressions(rules, dashboard):
        for selector in _selectors(_parsed(expression)):
            for matcher in selector.matchers.matchers:
                if matcher.name in ("outcome", "route"):
                    assert set(matcher.value.split("|")) <= words, expression


def test_the_rule_file_has_the_fields_that_prometheus_knows_and_says_what_to_do(rules: list[dict[str, Any]]) -> None:
    document = yaml.safe_load(RULES.read_text())
    jsonschema.validate(document, _RULE_FILE)
    assert len({group["name"] for group in document["groups"]}) == len(document["groups"])
    assert len({rule["alert"] for rule in rules}) == len(rules)


def test_templates_of_an_alert_name_labels_that_its_expression_keeps(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        bare = not re.search(r"\b(sum|max|histogram_quantile)\b", rule["expr"])
        assert used <= _grouped(rule["expr"]) | (SCRAPED if bare else set()), rule["alert"]


def test_every_alert_has_its_text_in_the_runbook(rules: list[dict[str, Any]]) -> None:
    runbook = (FOLDER / "README.md").read_text()
    told = set(re.findall(r"^\| `(Hearth\w+)`", runbook, re.MULTILINE))
    assert told == {rule["alert"] for rule in rules}


def test_the_dashboard_has_only_fields_that_grafana_knows(dashboard: dict[str, Any]) -> None:
    jsonschema.validate(dashboard, _DASHBOARD)
    variables = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource": "datasource", "model": "query"}
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Tenants", "Cache", "Fleet", "Residency", "Store"]


def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]
        names = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(names)) == len(names), panel["title"]
    for one, other in itertools.combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        across = a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"]
        down = a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]
        assert not (across and down), (one["title"], other["title"])


def test_legends_name_labels_that_their_query_keeps(dashboard: dict[str, Any]) -> None:
    for panel, target in _queries(dashboard):
        used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        aggregated = re.search(r"\b(sum|max)\b", target["expr"]) is not None
        assert used <= (_grouped(target["expr"]) if aggregated else SCRAPED), panel["title"]


def test_the_model_that_the_dashboard_chooses_by_is_one_of_the_catalogue(
    dashboard: dict[str, Any], exposed: Exposed
) -> None:
    (variable,) = [one for one in dashboard["templating"]["list"] if one["type"] == "query"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
    assert found is not None
    assert found[2] in exposed[found[1]]
