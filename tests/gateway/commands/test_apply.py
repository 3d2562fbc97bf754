"""`hearth apply`: a store becomes what a file declares, and a second run changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tenants.records.accounts import Account
from tenants.records.limits import NO_LIMITS
from tests.gateway.commands.test_operations import Shell, caller, on_store
from tests.gateway.commands.test_operations import shell as shell  # a fixture

pytestmark = pytest.mark.usefixtures("one_day")

TEAMS = """\
plans:
  team: {weight: 4, limits: {requests_per_minute: 600, neurons_per_month: 5e6}}
accounts:
  acme:
    plan: team
    limits: {requests_per_minute: 900}
    settings: {zero_retention: true, sharing: [Acme, beta]}
    tokens:
      ci: {permissions: [inference], models: ["@cf/*"], expires: 2090-01-31}
      admin: {permissions: ["account:admin", "usage:read"]}
  beta:
    suspended: true
    settings: {sharing: [acme, BETA]}
"""
AS_TOML = """\
[plans.team]
weight = 4
limits = { requests_per_minute = 600, neurons_per_month = 5e6 }
[accounts.acme]
plan = "team"
limits = { requests_per_minute = 900 }
settings = { zero_retention = true, sharing = ["acme", "beta"] }
[accounts.acme.tokens]
ci = { permissions = ["inference"], models = ["@cf/*"], expires = 2090-01-31 }
admin = { permissions = ["account:admin", "usage:read"] }
[accounts.beta]
suspended = true
settings = { sharing = ["acme", "beta"] }
"""


@pytest.fixture
def teams(tmp_path: Path, shell: Shell) -> Path:
    path = tmp_path / "teams.yaml"
    path.write_text(TEAMS)
    return path


def stored() -> Any:
    """The whole store, but for what each moment changes."""

    async def read(store: Any) -> Any:
        accounts = await store.accounts.list()
        tokens = [await store.accounts.tokens(account.id) for account in accounts]
        return accounts, tokens, await store.accounts.plans()

    return on_store(read)


def changes(shell: Shell, *words: str) -> list[str]:
    told: list[str] = shell.json("apply", *words)["changes"]
    return told


def test_a_store_becomes_what_the_file_declares_and_stays_so(shell: Shell, teams: Path) -> None:
    assert len(changes(shell, "teams.yaml")) == 7
    acme = shell.json("accounts", "show", "acme")
    assert (acme["plan"], acme["limits"]["requests_per_minute"]) == ("team", 900)
    assert acme["limits"]["neurons_per_month"] == 5e6
    beta = shell.json("accounts", "show", "beta")
    assert acme["settings"]["sharing"] == [acme["account_id"], beta["account_id"]] == beta["settings"]["sharing"]
    assert beta["suspended_at"] is not None
    before = stored()
    assert changes(shell, "teams.yaml") == []
    assert changes(shell, "teams.yaml", "--prune") == []
    assert stored() == before


def test_new_tokens_are_written_once_for_their_owner_alone(shell: Shell, teams: Path, tmp_path: Path) -> None:
    assert shell.json("apply", "teams.yaml")["tokens_file"] == "teams.yaml.tokens"
    path = tmp_path / "teams.yaml.tokens"
    assert path.stat().st_mode & 0o777 == 0o600
    secrets = {each["name"]: each for each in map(json.loads, path.read_text().splitlines())}
    assert caller(secrets["ci"]["token"]).account.name == "acme"
    assert set(secrets) == {"ci", "admin"}
    teams.write_text(TEAMS + "    tokens: {late: {}}\n")
    assert "teams.yaml.tokens" in shell.refused("apply", "teams.yaml")  # it is not written over
    assert len(shell.json("tokens", "list", "beta")) == 0
    (printed,) = shell.json("apply", "teams.yaml", "--print-tokens")["tokens"]
    assert printed["name"] == "late"
    assert printed["token"].startswith("hearth_")
    assert printed["token"] not in path.read_text()


def test_a_dry_run_says_what_would_change_and_makes_nothing(shell: Shell, teams: Path, tmp_path: Path) -> None:
    told = changes(shell, "teams.yaml", "--dry-run")
    assert told[:2] == ["plan team: new", "account acme: new, of plan team"]
    assert [path.name for path in tmp_path.iterdir()] == ["teams.yaml"]
    shell.out("apply", "teams.yaml")
    before = stored()
    later = TEAMS.replace("900", "950").replace("suspended: true", "suspended: false").replace("2090-01", "2091-03")
    teams.write_text(later)
    assert changes(shell, "teams.yaml", "--dry-run") == [
        "account acme: limits.requests_per_minute 900 -> 950",
        "account beta: served again",
        "token acme/ci: expires 2090-01-31 00:00 UTC -> 2091-03-31 00:00 UTC",
    ]
    teams.write_text(TEAMS.replace('models: ["@cf/*"]', "models: [notes]"))
    assert changes(shell, "teams.yaml", "--dry-run") == ["token acme/ci: models @cf/* -> notes"]
    assert stored() == before


def test_toml_says_the_same(shell: Shell, teams: Path, tmp_path: Path) -> None:
    shell.out("apply", "teams.yaml")
    (tmp_path / "teams.toml").write_text(AS_TOML)
    assert changes(shell, "teams.toml") == []


def test_what_takes_something_away_is_asked_for(shell: Shell, teams: Path) -> None:
    shell.out("apply", "teams.yaml")
    before = stored()
    for less in (
        TEAMS.replace("600", "60"),
        TEAMS.replace("900", "90"),
        TEAMS.replace("plan: team", "suspended: true"),
    ):
        teams.write_text(less)
        assert "--yes does it" in shell.refused("apply", "teams.yaml")
        assert stored() == before
    teams.write_text(TEAMS.replace("600", "60"))
    shell.out("apply", "teams.yaml", "--yes")
    assert shell.json("plans", "show", "team")["limits"]["requests_per_minute"] == 60


def test_what_the_file_does_not_name_ends_only_when_asked(shell: Shell, teams: Path) -> None:
    shell.out("apply", "teams.yaml")
    shell.account("other")
    shell.json("tokens", "mint", "acme", "--name", "by hand")
    shell.out("plans", "set", "unused", "--weight", "2")
    assert changes(shell, "teams.yaml") == []
    told = changes(shell, "teams.yaml", "--prune", "--dry-run")
    assert [text.split(" (")[0] for text in told] == ["token acme/by hand", "account other", "plan unused: removed"]
    assert "--yes" in shell.refused("apply", "teams.yaml", "--prune")
    shell.out("apply", "teams.yaml", "--prune", "--yes", "--grace", "1d")
    other = shell.json("accounts", "show", "other")
    assert other["deletion"]["due_at"] - other["deletion"]["asked_at"] == 86_400
    live = {token["name"] for token in shell.json("tokens", "list", "acme") if token["revoked_at"] is None}
    assert live == {"ci", "admin"}
    assert "no plan 'unused'" in shell.refused("plans", "show", "unused")
    assert changes(shell, "teams.yaml", "--prune") == []


def test_a_file_that_is_not_there_is_said_in_words(shell: Shell) -> None:
    said = shell.refused("apply", "nowhere.yaml")
    assert "nowhere.yaml cannot be read: No such file" in said
    assert "hearth apply --help" in said


def test_an_account_that_is_named_by_its_id_gets_the_files_name(shell: Shell, tmp_path: Path) -> None:
    account = shell.account("old name")
    (tmp_path / "a.yaml").write_text(f"accounts:\n  New Name: {{id: {account}}}\n")
    assert changes(shell, "a.yaml") == ["account New Name: name old name -> New Name"]
    assert shell.json("accounts", "show", "new name")["account_id"] == account
    assert changes(shell, "a.yaml") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accounts:\n  acme: {}\n  ACME: {}\n", "a.yaml:3: 'ACME' is here twice, first in line 2"),
        ("plans:\n  a: {}\n  a: {}\n", "a.yaml:3: 'a' is here twice"),
        ("accounts:\n  acme:\n    plan: a\n    plan: b\n", "a.yaml:4: 'plan' is here twice"),
        ("teams: {}\n", "a.yaml:1: teams: unknown section 'teams'"),
        ("accounts:\n  acme:\n    limit: {}\n", "a.yaml:3: accounts.acme.limit"),
        ("accounts:\n  acme:\n    limits:\n      burst: 3\n", "a.yaml:3: accounts.acme.limits: burst needs"),
        ("accounts:\n  acme:\n    settings:\n      cache_scope: all\n", "a.yaml:4: accounts.acme.settings.cache_scope"),
        ("accounts:\n  acme:\n    tokens:\n      ci: {permissions: [all]}\n", "a.yaml:4: accounts.acme.tokens.ci.perm"),
        ("accounts:\n  acme:\n    tokens:\n      ci: {expires: soon}\n", "write it like 2030-01-31"),
        ("accounts:\n  acme:\n    tokens:\n      ci:\n        networks: [x]\n", "a.yaml:4: 'x' is no network"),
        (
            "accounts:\n  acme:\n    tokens:\n      ci: {expires: 2020-01-31}\n",
            "a.yaml:4: it would have expired already",
        ),
        ("accounts:\n  acme:\n    plan: none such\n", "a.yaml:3: there is no plan 'none such'"),
        ("accounts:\n  acme:\n    settings: {sharing: [acme, gone]}\n", "a.yaml:3: there is no account 'gone'"),
        ("accounts:\n  acme:\n    settings: {sharing: []}\n  b: {settings: {sharing: [acme]}}\n", "b among them"),
        (f"accounts:\n  acme:\n    id: {'a' * 32}\n", "a.yaml:3: there is no account aaaa"),
        (f"accounts:\n  {'a' * 32}: {{}}\n", "looks like an account's id"),
        ("accounts:\n  007: {}\n", "in quotes"),
        ("plans:\n  Team A: {}\n", "a.yaml:2: plans.Team A: 'Team A' is no name of a plan"),
        ("plans:\n  a: {floor_blocks: 5, cap_blocks: 3}\n", "floor_blocks 5 is above cap_blocks 3"),
        ("plans: [a]\n", "'plans' has names"),
        ("- a\n", "expected plans and accounts"),
        (
            "accounts:\n  acme:\n    limits: {request_per_minute: 1}\n",
            "limits.request_per_minute: there is no such field; did you mean requests_per_minute?",
        ),
        (
            "accounts:\n  acme:\n    limits: {requests_per_minute: sixty}\n",
            "a.yaml:3: accounts.acme.limits.requests_per_minute: expected a whole number, got text",
        ),
        ("accounts: {\n", "a.yaml:2: this is not YAML: "),
        ("", "a.yaml declares nothing"),
        ("# {{ accounts }}\n", "a.yaml declares nothing"),
        ("a: &a [x, x]\nb: &b [*a, *a]\n" + "c: [" + "*b, " * 200_000 + "]\n", "aliases"),
    ],
)
def test_a_mistake_is_told_with_its_line_before_anything_is_written(
    shell: Shell, tmp_path: Path, text: str, says: str
) -> None:
    shell.account("other")
    before = stored()
    (tmp_path / "a.yaml").write_text(text)
    said = shell.refused("apply", "a.yaml", "--yes")
    assert says in said
    assert stored() == before
    assert not (tmp_path / "a.yaml.tokens").exists()


def test_all_mistakes_of_a_file_are_told_at_once(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("x: {}\nplans: {a: {weigth: 1}}\naccounts: {b: {plans: c}, b: {}}\n")
    said = shell.refused("apply", "a.yaml")
    assert [line.removeprefix("hearth: ").split(": ")[0] for line in said.splitlines()[:-1]] == [
        "a.yaml:3", "a.yaml:1", "a.yaml:2",
    ]  # fmt: skip
    assert said.rstrip().endswith("nothing was changed")
    assert not (tmp_path / ".hearth").exists()


def test_a_file_that_cannot_be_applied_makes_no_store(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("accounts: {acme: {plan: gone}}\n")
    assert "there is no plan 'gone'" in shell.refused("apply", "a.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


def test_two_accounts_of_one_name_have_to_be_told_apart_by_id(shell: Shell, tmp_path: Path) -> None:
    first = shell.account("acme")
    twin = Account("f" * 32, "Acme", NO_LIMITS, 1)
    on_store(lambda store: store.accounts.add(twin, shared_name=True))
    (tmp_path / "a.yaml").write_text("accounts: {acme: {}}\n")
    said = shell.refused("apply", "a.yaml")
    assert first in said
    assert twin.id in said


def test_an_account_that_is_to_be_removed_is_not_changed(shell: Shell, teams: Path) -> None:
    shell.out("apply", "teams.yaml")
    shell.out("accounts", "delete", "acme", "--yes")
    assert "hearth accounts restore" in shell.refused("apply", "teams.yaml")
