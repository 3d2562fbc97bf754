import ast
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gateway.observability import account_usage
from gateway.observability.account_usage import OTHER_ACCOUNTS, AccountUsage
from gateway.observability.metrics import _accounts_text
from tenants.limits.reservation import CallUsage
from tenants.records.accounts import Account, Plan
from tenants.records.limits import NO_LIMITS

A, B, C = "a" * 32, "b" * 32, "c" * 32


def of(account_id: str, plan: str, name: str = "acme") -> Account:
    return Account(account_id, name, NO_LIMITS, 1, plan=Plan(plan))


def test_names_are_those_of_the_last_call_of_accounts_with_rows_of_their_own() -> None:
    counted = AccountUsage(1)
    for account in (of(A, "default", "old"), of(A, "default", 'A "B" \\'), of(B, "default", "too many")):
        counted.finished(account, CallUsage(outcome="done"), 0.0)
    assert counted.names == {A: 'A "B" \\'}
    text = _accounts_text(counted).decode()
    assert f'hearth_account_info{{account="{A}",name="A \\"B\\" \\\\"}} 1\n' in text
    (family,) = [each for each in text_string_to_metric_families(text) if each.name == "hearth_account_info"]
    assert [sample.labels for sample in family.samples] == [{"account": A, "name": 'A "B" \\'}]


def test_accounts_over_the_cap_are_summed_by_plan() -> None:
    counted = AccountUsage(2)
    for account, plan in ((A, "default"), (B, "default"), (C, "default"), ("d" * 32, "team"), (A, "default")):
        counted.finished(of(account, plan), CallUsage(10, 4, 3, "done"), 1.5)
    counted.refused(of("e" * 32, "team"), "neurons_per_day")
    assert set(counted.rows) == {(A, "default"), (B, "default"), (OTHER_ACCOUNTS, "default"), (OTHER_ACCOUNTS, "team")}
    assert counted.rows[A, "default"].tokens == {"prompt": 20, "cached": 8, "completion": 6}
    assert counted.rows[A, "default"].neurons == 3.0
    assert counted.rows[OTHER_ACCOUNTS, "team"].refused == {"neurons_per_day": 1}


def test_a_thousand_accounts_make_no_more_rows_than_the_cap() -> None:
    counted = AccountUsage(200)
    for i in range(1000):
        counted.finished(of(f"{i:032x}", "default"), CallUsage(outcome="done"), 0.0)
    assert len(counted.rows) == 201
    assert len(counted.names) == 200
    assert sum(row.outcomes["done"] for row in counted.rows.values()) == 1000


def test_every_outcome_that_is_named_is_one_that_the_gateway_has() -> None:
    """An unknown outcome counts as a failure of the gateway."""
    folder = Path(__file__).parents[3] / "gateway"
    outcomes = {
        node.value
        for name in ("errors", "inference/lifecycle")
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text()))
        if isinstance(node, ast.Constant)
    }
    assert set(account_usage._ENDING) <= outcomes
    counted = AccountUsage(1)
    counted.finished(of(A, "default"), CallUsage(outcome="made up"), 0.0)
    assert counted.rows[A, "default"].outcomes["failed"] == 1
