"""Accounts by name on the command line: named, renamed, deleted, restored, and never made by accident."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.commands.checks import services
from gateway.settings.config import load_config
from gateway.state_dir import server_secret
from tenants.audit import AuditLog
from tenants.deletion import DeletionSweep
from tenants.records.accounts import Account
from tenants.records.limits import NO_LIMITS
from tests.gateway.commands.test_operations import Shell, on_store, record
from tests.gateway.commands.test_operations import shell as shell  # a fixture

pytestmark = pytest.mark.usefixtures("one_day")


def share_name(shell: Shell) -> list[str]:
    """Two accounts of one name, as an earlier version made them."""
    first, second = shell.account("acme"), "f" * 32
    twin = Account(second, "Acme", NO_LIMITS, 1)
    on_store(lambda store: store.accounts.add(twin, shared_name=True))
    return [second, first]


@pytest.mark.parametrize("written", ["Acme Ltd", "acme  LTD", "its id"])
def test_every_command_takes_a_name_where_it_takes_an_id(shell: Shell, written: str) -> None:
    account = shell.account("Acme Ltd")
    name = account if written == "its id" else written
    assert shell.json("accounts", "show", name)["account_id"] == account
    assert shell.json("tokens", "mint", name)["account_id"] == account
    assert {each["account_id"] for each in shell.json("tokens", "list", name)} == {account}
    ceiling = shell.json("accounts", "limits", name, "--requests-per-minute", "7")["ceiling"]
    assert ceiling["requests_per_minute"] == 7
    for verb in ("suspend", "resume", "purge-cache", "settings"):
        assert shell.json("accounts", verb, name)["account_id"] == account
    assert shell.json("accounts", "plan", name, "default")["plan"] == "default"
    assert shell.json("audit", "verify", name)[0]["account_id"] == account
    assert shell.json("usage", name)["rows"] == []
    assert shell.json("usage", "reconcile", name)["differ"] == []
    assert account in shell.out("accounts", "export", name)


def test_a_sharing_group_is_told_by_names(shell: Shell) -> None:
    ids = [shell.account("Acme Ltd"), shell.account("beta")]
    settings = shell.json("accounts", "settings", "beta", "--sharing", "acme ltd,BETA")["settings"]
    assert settings["sharing"] == ids


def test_an_unknown_name_is_answered_with_names_like_it(shell: Shell) -> None:
    shell.account("Acme Ltd")
    said = shell.refused("accounts", "show", "acme")
    assert "did you mean 'Acme Ltd'?" in said
    assert "hearth accounts list" in said


def test_a_name_is_given_once_and_the_refusal_says_who_has_it(shell: Shell) -> None:
    account = shell.account("acme")
    assert account in shell.refused("accounts", "create", "ACME")
    shell.account("beta")
    assert account in shell.refused("accounts", "rename", "beta", "Acme")
    assert shell.json("accounts", "rename", "acme", "ACME")["name"] == "ACME"
    assert len(shell.json("accounts", "list")) == 2


def test_an_ambiguous_name_is_refused_with_its_ids_and_doctor_lists_it(shell: Shell) -> None:
    ids = share_name(shell)
    said = shell.refused("accounts", "show", "acme")
    assert all(id in said for id in ids)
    (finding,) = [each for each in services.store(load_config()) if each.subject == "names"]
    assert finding.verdict == "note"
    assert all(id in finding.found for id in ids)
    shell.json("accounts", "rename", ids[0], "acme two")
    assert shell.json("accounts", "show", "acme")["account_id"] == ids[1]
    assert not [each for each in services.store(load_config()) if each.subject == "names"]


def test_a_rename_is_in_the_audit_log_with_both_names(shell: Shell) -> None:
    account = shell.account("acme")
    shell.out("accounts", "rename", "acme", "Acme Ltd")
    entry = shell.json("audit", "list", "acme ltd")[-1]
    assert (entry["action"], entry["target"]) == ("account.change", account)
    assert (entry["detail"]["name"], entry["detail"]["name_before"]) == ("Acme Ltd", "acme")
    assert "looks like an account's id" in shell.refused("accounts", "rename", "acme ltd", "a" * 32)


def test_a_deletion_asks_exports_suspends_and_can_be_taken_back(shell: Shell, tmp_path: Path) -> None:
    account = shell.account("acme")
    said = shell.refused("accounts", "delete", "acme")
    assert "--yes" in said
    assert "--export" in said
    assert shell.json("accounts", "show", "acme")["suspended_at"] is None
    deleted = shell.json("accounts", "delete", "acme", "--yes", "--export", "acme.jsonl", "--grace", "2d")
    assert deleted["deletion"]["due_at"] - deleted["deletion"]["asked_at"] == 2 * 86_400
    assert deleted["suspended_at"] is not None
    lines = [json.loads(line) for line in (tmp_path / "acme.jsonl").read_text().splitlines()]
    assert account in {line.get("id") for line in lines}
    assert (tmp_path / "acme.jsonl").stat().st_mode & 0o077 == 0
    assert "restore" in shell.refused("accounts", "resume", "acme")
    assert "removed on" in shell.out("accounts", "list")
    restored = shell.json("accounts", "restore", "acme")
    assert (restored["deletion"], restored["suspended_at"]) == (None, None)
    assert shell.actions("acme")[-2:] == ["account.delete", "account.restore"]
    assert "not to be removed" in shell.refused("accounts", "restore", "acme")


def test_a_person_at_a_terminal_is_asked(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shell.account("acme")
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert "nothing was changed" in shell.refused("accounts", "delete", "acme")
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert shell.json("accounts", "delete", "acme")["deletion"] is not None


def test_the_usage_of_a_removed_account_is_still_billed(shell: Shell) -> None:
    shell.account("other")
    account = shell.account("acme")
    on_store(lambda store: store.quotas.settle([record(account, "r1")]))
    shell.json("accounts", "delete", "acme", "--yes", "--grace", "0s")
    secret = server_secret(load_config())

    async def sweep(store: Any) -> list[str]:
        return await DeletionSweep(store, AuditLog(store.audit, secret), lambda: 1 << 32).look()

    assert on_store(sweep) == [account]
    (row,) = shell.json("usage", "--by", "account")["rows"]
    assert (row["account_id"], row["name"], row["requests"]) == (account, "acme", 1)
    assert shell.json("usage", account, "--by", "model")["total"]["requests"] == 1
    assert shell.json("usage", "--by", "plan")["rows"][0]["plan"] == "(removed)"


def test_usage_is_by_account_and_by_plan_with_names(shell: Shell) -> None:
    shell.out("plans", "set", "gold", "--weight", "2")
    first, second = shell.account("acme"), shell.account("beta", "--plan", "gold")
    records = [record(first, "r1", neurons=1.5), record(first, "r2", neurons=1), record(second, "r3", neurons=4)]
    on_store(lambda store: store.quotas.settle(records))
    rows = {row["name"]: row for row in shell.json("usage", "--by", "account")["rows"]}
    assert {name: (row["requests"], row["neurons"]) for name, row in rows.items()} == {"acme": (2, 2.5), "beta": (1, 4)}
    plans = {row["plan"]: row["neurons"] for row in shell.json("usage", "--by", "plan")["rows"]}
    assert plans == {"default": 2.5, "gold": 4}
    assert shell.json("usage", "acme", "--by", "model")["rows"][0]["name"] == "acme"
    heads, *lines = shell.out("usage", "--by", "account", "--csv").splitlines()
    assert heads == "account_id,requests,prompt_tokens,cached_tokens,completion_tokens,neurons,name"
    assert {line.split(",")[-1] for line in lines} == {"acme", "beta"}


def test_what_is_left_of_each_limit_is_shown(shell: Shell) -> None:
    account = shell.account("acme", "--neurons-per-day", "10", "--concurrent-requests", "3")
    on_store(lambda store: store.quotas.settle([record(account, "r1", neurons=4)]))
    rows = {row["limit"]: row for row in shell.json("usage", "acme", "--left")}
    assert (rows["neurons_per_day"]["allowed"], rows["neurons_per_day"]["left"]) == (10, 6)
    assert rows["concurrent_requests"]["left"] == 3
    assert rows["neurons_per_day"]["name"] == "acme"
    text = shell.out("usage", "--left")
    assert "60%" in text
    assert re.search(r"60% +\d{1,2}:\d\d:\d\d", text), "when it is whole, in hours"


def test_a_command_that_reads_makes_no_store(shell: Shell, tmp_path: Path) -> None:
    commands = (
        "accounts list", "accounts show a", "accounts rename a b", "accounts delete a --yes", "tokens mint a",
        "tokens revoke a", "plans list", "plans remove a", "usage", "usage --left", "usage reconcile", "audit list",
        "audit verify", "accounts export", "top --once", "log some-request",
    )  # fmt: skip
    for words in commands:
        assert str(tmp_path / ".hearth") in shell.refused(*words.split()), words
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_writes_says_where(shell: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("accounts", "create", "acme"), ("tokens", "mint", "acme"), ("plans", "set", "gold")):
        shell_out(words)
        assert f"stored in {tmp_path}/.hearth/hearth.db" in capsys.readouterr().err
    shell_out(("accounts", "list"))
    assert capsys.readouterr().err == ""


def shell_out(words: tuple[str, ...]) -> None:
    assert main(words) == 0


def test_a_plan_with_accounts_shrinks_only_once_somebody_agreed(shell: Shell) -> None:
    shell.out("plans", "set", "gold", "--requests-per-minute", "600")
    shell.out("plans", "set", "gold", "--requests-per-minute", "500")  # nobody has it
    shell.account("acme", "--plan", "gold")
    shell.out("plans", "set", "gold", "--requests-per-minute", "700", "--sequences", "9", "--yes")
    said = shell.refused("plans", "set", "gold", "--requests-per-minute", "60", "--sequences", "10")
    assert "the account acme" in said
    assert "requests_per_minute 700 -> 60" in said
    assert shell.json("plans", "show", "gold")["limits"]["requests_per_minute"] == 700
    shell.out("plans", "set", "gold", "--requests-per-minute", "800")
    shell.out("plans", "set", "gold", "--requests-per-minute", "60", "--yes")
    assert shell.json("plans", "show", "gold")["limits"]["requests_per_minute"] == 60
    assert "wait_s unlimited -> 10" in shell.refused("plans", "set", "gold", "--wait", "10s")


@pytest.mark.parametrize("words", ["accounts list --js", "plans set gold --sequ 3", "usage --le", "accounts sho acme"])
def test_no_option_and_no_command_is_taken_for_its_beginning(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert "Did you mean" in capsys.readouterr().err


def test_a_model_is_shown_in_words_and_never_as_python_writes_it(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "hearth.toml").write_text('[[models]]\nname = "@cf/hearth/ember"\naliases = ["small", "quick"]\n')
    shown = shell.out("models", "show", "small")
    assert re.search("^aliases +small, quick$", shown, re.MULTILINE)
    assert re.search("^neurons per million tokens +input 1,000, cached input 200, output 4,000$", shown, re.MULTILINE)
    assert not set("[]{}") & set(shown)
