"""What operators do on the command line, each command as people type it, on a store that others use as well."""

import asyncio
import csv
import io
import json
import os
import pwd
import re
import shlex
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from gateway.cli import main, parse
from gateway.settings.config import load_config
from gateway.state_dir import exclusive_state, server_secret
from tenants.audit import AuditLog
from tenants.auth.accounts import AccountService
from tenants.auth.caller import Caller
from tenants.auth.errors import Unauthenticated
from tenants.open import open_store
from tenants.records.holds import Hold
from tenants.records.usage import MICRO, UsageRecord
from tenants.store.protocol import Store
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("one_day")
ROOT = Path(__file__).parents[3]


class Shell:
    """Runs commands in an empty folder as the current one, with the state below."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def out(self, *words: str, status: int = 0) -> str:
        self._capsys.readouterr()
        assert main(words) == status
        return self._capsys.readouterr().out

    def json(self, *words: str, status: int = 0) -> Any:
        return json.loads(self.out(*words, "--json", status=status))

    def refused(self, *words: str) -> str:
        """What it says as it ends with status 1."""
        assert main(words) == 1
        return self._capsys.readouterr().err

    def account(self, name: str = "acme", *words: str) -> str:
        account_id: str = self.json("accounts", "create", name, *words)["account_id"]
        return account_id

    def actions(self, account_id: str = "") -> list[str]:
        chain = [account_id] if account_id else []
        return [entry["action"] for entry in self.json("audit", "list", *chain)]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys)


def on_store(question: Any) -> Any:
    """Asks the configured store as a gateway would."""

    async def asked() -> Any:
        store = open_store(load_config().store_url)
        try:
            return await question(store)
        finally:
            await store.close()

    return asyncio.run(asked())


def caller(text: str) -> Caller:
    secret = server_secret(load_config())
    found: Caller = on_store(lambda store: AccountService(store, secret).verify(text))
    return found


def today() -> int:
    return int(time.time()) // 86_400


def record(
    account_id: str,
    request_id: str,
    day: int | None = None,
    model: str = "@cf/a/b",
    neurons: float = 1.5,
    tags: str = "",
) -> UsageRecord:
    micro_neurons = round(neurons * MICRO)
    return UsageRecord(
        account_id,
        request_id,
        today() if day is None else day,
        micro_neurons,
        30,
        20,
        5,
        "done",
        "key",
        model,
        7,
        1.5,
        None,
        "token:key",
        tags,
    )


def settle(*records: UsageRecord) -> None:
    on_store(lambda store: store.quotas.settle(records))


def test_every_command_in_the_documents_is_one() -> None:
    parsed = 0
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for line in page.read_text().splitlines():
            if line.startswith("hearth "):
                parse(shlex.split(re.split(" [>|] ", line)[0], comments=True)[1:])
                parsed += 1
    assert parsed >= 60


# ---- accounts -----------------------------------------------------------------------------------------------------


def test_every_limit_is_set_and_taken_back_to_the_plans(shell: Shell) -> None:
    shell.out("plans", "set", "team", "--requests-per-minute", "600", "--burst", "9", "--neurons-per-month", "7")
    id = shell.account("acme", "--plan", "team", "--input-tokens-per-minute", "5")
    given = ("--output-tokens-per-minute", "6", "--neurons-per-day", "0.5", "--requests-per-minute", "60")
    changed = shell.json("accounts", "limits", id, *given, "--concurrent-requests", "3")
    assert changed["limits"] == {
        "requests_per_minute": 60, "burst": 60, "concurrent_requests": 3, "input_tokens_per_minute": 5,
        "output_tokens_per_minute": 6, "neurons_per_day": 0.5, "neurons_per_month": 7.0, "classes": {},
    }  # fmt: skip
    assert shell.json("accounts", "limits", id, "--burst", "3")["limits"]["burst"] == 3
    back = shell.json("accounts", "limits", id, "--requests-per-minute", "none", "--neurons-per-day", "none")
    assert (back["limits"]["requests_per_minute"], back["limits"]["burst"]) == (600, 9)
    assert back["ceiling"]["neurons_per_day"] is None
    assert back["ceiling"]["input_tokens_per_minute"] == 5
    assert shell.json("accounts", "show", id) == back
    table = shell.out("accounts", "limits", id)
    assert "PLAN team" in table
    assert shell.actions(id) == ["account.create", "token.create", *["account.change"] * 3]


def test_a_class_of_models_has_limits_of_its_own(shell: Shell) -> None:
    id = shell.account()
    shell.out("accounts", "limits", id, "--class", "large", "--requests-per-minute", "5", "--neurons-per-day", "2")
    found = shell.json("accounts", "limits", id, "--class", "large", "--neurons-per-day", "none")
    assert found["limits"]["classes"]["large"]["requests_per_minute"] == 5
    assert found["limits"]["classes"]["large"]["neurons_per_day"] is None
    assert "large: requests_per_minute" in shell.out("accounts", "show", id)
    assert (
        shell.json("accounts", "limits", id, "--class", "large", "--requests-per-minute", "none")["limits"]["classes"]
        == {}
    )
    assert "--class needs a limit" in shell.refused("accounts", "limits", id, "--class", "large")
    assert "no class of models" in shell.refused(
        "accounts", "limits", id, "--class", "LARGE", "--concurrent-requests", "1"
    )


def test_what_the_administrators_lowered_stays_lowered(shell: Shell) -> None:
    from msgspec import structs

    from tenants.records.limits import Limits

    id, secret = shell.account(), server_secret(load_config())
    own = Limits(concurrent_requests=2)
    on_store(lambda store: AccountService(store, secret).update(id, lambda account: structs.replace(account, own=own)))
    found = shell.json("accounts", "limits", id, "--concurrent-requests", "50")
    assert (found["limits"]["concurrent_requests"], found["ceiling"]["concurrent_requests"]) == (2, 50)


def test_a_suspended_account_is_shown_and_resumed(shell: Shell) -> None:
    id = shell.account()
    assert abs(shell.json("accounts", "suspend", id)["suspended_at"] - time.time()) < 60
    assert "suspended since" in shell.out("accounts", "list")
    assert shell.json("accounts", "resume", id)["suspended_at"] is None
    assert shell.json("accounts", "purge-cache", id)["cache_epoch"] == 1
    assert shell.actions(id)[2:] == ["account.suspend", "account.resume", "account.purge_cache"]


def test_settings_are_changed_one_by_one(shell: Shell) -> None:
    id, other = shell.account(), shell.account("other")
    shell.out("accounts", "settings", id, "--zero-retention", "yes", "--cache-keep", "5m", "--cache-scope", "user")
    shell.out("accounts", "settings", id, "--notices-url", "https://acme.example/h", "--notices-at", "0.5,1.0")
    found = shell.json("accounts", "settings", id, "--regions", "eu-west,eu-north", "--sharing", f"{id},{other}")
    assert found["settings"] == {
        "zero_retention": True, "cache_keep_s": 300.0, "cache_scope": "user", "sharing": [id, other],
        "regions": ["eu-west", "eu-north"], "notices": {"url": "https://acme.example/h", "at": [0.5, 1.0]},
    }  # fmt: skip
    assert "eu-west,eu-north" in shell.out("accounts", "settings", id)
    back = ("--zero-retention", "no", "--cache-keep", "none", "--sharing", "none", "--regions", "none")
    found = shell.json("accounts", "settings", id, *back, "--notices-url", "none", "--cache-scope", "tenant")
    assert found["settings"] == shell.json("accounts", "show", other)["settings"]
    assert shell.actions(id)[2:] == ["account.settings"] * 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("settings", "ID", "--regions", "Mars!"), "regions"),
        (("settings", "ID", "--sharing", "a" * 32), "this one among them"),
        (("settings", "ID", "--notices-url", "ftp://x"), "no https:// address"),
        (("settings", "ID", "--notices-at", "0.5"), "url"),
        (("settings", "ID", "--cache-keep", "8w"), "cache_keep_s: expected a number <= 604800"),
        (("limits", "ID", "--burst", "0"), "burst"),
        (("limits", "ID", "--neurons-per-day", "nan"), "neurons_per_day"),
        (("limits", "ID", "--requests-per-minute", "-1"), "requests_per_minute"),
        (("limits", "ID", "--input-tokens-per-minute", "99999999999999"), "input_tokens_per_minute"),
        (("plan", "ID", "gold"), "no plan 'gold'"),
        (("create", "acme", "--plan", "gold"), "no plan 'gold'"),
        (("show", "f" * 32), "no account"),
        (("export", "f" * 32), "no account"),
        (("import", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(words: tuple[str, ...], says: str, shell: Shell) -> None:
    id = shell.account()
    before = shell.json("accounts", "list"), shell.actions(id)
    assert says in shell.refused("accounts", *(id if word == "ID" else word for word in words))
    assert (shell.json("accounts", "list"), shell.actions(id)) == before


# ---- tokens, plans --------------------------------------------------------------------------------------------------


def test_a_token_has_limits_of_its_own_and_is_changed(shell: Shell) -> None:
    id = shell.account()
    minted = shell.json(
        "tokens", "mint", id, "--requests-per-minute", "6", "--expires", "30d", "--networks", "10.0.0.0/8"
    )
    assert minted["limits"]["requests_per_minute"] == 6
    changed = shell.json("tokens", "change", minted["token_id"], "--name", "ci", "--concurrent-requests", "2")
    assert (changed["name"], changed["networks"], changed["expires_at"]) == ("ci", ["10.0.0.0/8"], minted["expires_at"])
    assert (changed["limits"]["requests_per_minute"], changed["limits"]["concurrent_requests"]) == (6, 2)
    assert caller(minted["token"]).token_limits.concurrent_requests == 2
    wider = ("--networks", "none", "--expires", "none", "--requests-per-minute", "none", "--permissions", "usage:read")
    changed = shell.json("tokens", "change", minted["token_id"], *wider)
    assert (changed["networks"], changed["expires_at"], changed["permissions"]) == ([], None, ["usage:read"])
    assert changed["limits"]["requests_per_minute"] is None
    assert shell.json("tokens", "change", minted["token_id"]) == changed
    shell.out("tokens", "revoke", minted["token_id"])
    assert "no token in force has the id" in shell.refused("tokens", "change", minted["token_id"], "--name", "x")
    assert shell.actions(id)[2:] == ["token.create", "token.change", "token.change", "token.revoke"]


def test_a_token_that_would_open_nothing_from_the_start_is_not_minted(shell: Shell) -> None:
    id = shell.account()
    assert "revoke" in shell.refused("tokens", "mint", id, "--expires", "0d")
    assert len(shell.json("tokens", "list", id)) == 1


def test_a_detail_too_long_for_the_log_is_kept_as_a_digest(shell: Shell) -> None:
    id = shell.account()
    shell.out("tokens", "mint", id, "--models", ",".join(f"@cf/{n:0150}" for n in range(40)))
    entry = shell.json("audit", "list", id)[-1]
    assert (entry["action"], set(entry["detail"])) == ("token.create", {"os_user", "detail_sha256"})


def test_a_shell_can_take_a_token_as_it_is_minted(shell: Shell) -> None:
    id = shell.account("acme")
    for words in (("mint", id), ("roll", shell.json("tokens", "mint", id)["token_id"])):
        assert re.fullmatch(r"hearth_\w{11}_\w+\n", shell.out("tokens", *words))


def test_plans_are_made_changed_and_removed(shell: Shell) -> None:
    treated = ("--weight", "4", "--sequences", "8", "--kv-blocks", "100", "--floor-blocks", "5", "--cap-blocks", "50")
    made = shell.json("plans", "set", "team", *treated, "--wait", "10s", "--requests-per-minute", "600")
    assert (made["weight"], made["cap_blocks"], made["wait_s"], made["revision"]) == (4.0, 50, 10.0, 1)
    changed = shell.json("plans", "set", "team", "--wait", "none", "--class", "large", "--concurrent-requests", "1")
    assert (changed["wait_s"], changed["weight"], changed["revision"]) == (None, 4.0, 2)
    assert changed["limits"]["requests_per_minute"] == 600
    assert shell.json("plans", "show", "team") == changed == shell.json("plans", "set", "team")
    assert "large: concurrent_requests" in shell.out("plans", "show", "team")
    id = shell.account("acme", "--plan", "team")
    assert [plan["name"] for plan in shell.json("plans", "list")] == ["default", "team"]
    assert f"have the plan team: acme ({id}); give them another first" in shell.refused("plans", "remove", "team")
    shell.account("beta", "--plan", "team")
    assert " and 1 more; give them another first" in shell.refused("plans", "remove", "team")
    shell.out("accounts", "plan", "beta", "default")
    shell.out("accounts", "plan", id, "default")
    shell.out("plans", "remove", "team")
    assert "no plan" in shell.refused("plans", "show", "team")
    assert shell.actions() == ["plan.change", "plan.change", "plan.remove"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--weight", "1000"), "weight: expected a number <= 100"),
        (("--weight", "nan"), "weight"),
        (("--sequences", "0"), "sequences"),
        (("--floor-blocks", "9", "--cap-blocks", "8"), "floor_blocks 9 is above cap_blocks 8"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(words: tuple[str, ...], says: str, shell: Shell) -> None:
    assert says in shell.refused("plans", "set", "team", *words)
    assert "no name of a plan" in shell.refused("plans", "set", "Team!")
    assert len(shell.json("plans", "list")) == 1
    assert shell.actions() == []


# ---- usage, audit ---------------------------------------------------------------------------------------------------


def test_usage_is_summed_by_day_model_and_token(shell: Shell) -> None:
    ann, bob = sorted((shell.account("ann"), shell.account("bob")))  # as they are listed if made in one second
    settle(record(ann, "1"), record(ann, "2", model="@cf/b/c"), record(ann, "3", today() - 1), record(bob, "4"))
    settle(record(ann, "old", today() - 40))
    told = shell.json("usage")
    assert sorted((row["account_id"], row["requests"]) for row in told["rows"]) == [(ann, 1), (ann, 2), (bob, 1)]
    assert told["total"] == {
        "requests": 4, "prompt_tokens": 120, "cached_tokens": 80, "completion_tokens": 20, "neurons": 6.0,
    }  # fmt: skip
    by_model = shell.json("usage", ann, "--by", "model")["rows"]
    assert [(row["model"], row["neurons"]) for row in by_model] == [("@cf/a/b", 3.0), ("@cf/b/c", 1.5)]
    assert shell.json("usage", ann, "--by", "token", "--from", "2020-01-01", "--to", "2020-02-01")["rows"] == []
    rows = csv.DictReader(io.StringIO(shell.out("usage", "--csv", "--by", "token")))
    told_by_token = sorted((row["account_id"], row["token"], row["neurons"]) for row in rows)
    assert told_by_token == [(ann, "key", "4.5"), (bob, "key", "1.5")]
    assert "total" in shell.out("usage", ann)
    assert "may span 400 days" in shell.refused("usage", "--from", "2020-01-01")
    assert "name one account" in shell.refused("usage", ann, bob)


@pytest.mark.parametrize("words", [("--by", "model"), ("--from", "2026-01-31"), ("--to", "2026-01-31"), ("--csv",)])
def test_what_is_left_is_of_now_and_takes_no_days(words: tuple[str, ...], shell: Shell) -> None:
    shell.account()
    assert words[0] in shell.refused("usage", "--left", *words)


def test_usage_by_tag_counts_a_request_with_each_of_its_tags_and_once_in_the_total(shell: Shell) -> None:
    ann = shell.account("ann")
    settle(record(ann, "1", tags="blue\nteam:x"), record(ann, "2", tags="blue"), record(ann, "3"))
    told = shell.json("usage", ann, "--by", "tag")
    assert {row["tag"]: row["requests"] for row in told["rows"]} == {"blue": 2, "team:x": 1, "": 1}
    assert told["total"]["requests"] == 3


def test_counters_that_differ_from_the_records_are_found(shell: Shell) -> None:
    ann, bob = shell.account("ann"), shell.account("bob")
    settle(record(ann, "1"), record(bob, "2"), record(bob, "3", today() - 5))
    assert shell.json("usage", "reconcile") == {
        "from": shell.json("usage")["from"], "to": shell.json("usage")["to"], "compared": 6, "differ": [],
    }  # fmt: skip
    assert "agree" in shell.out("usage", "reconcile", ann)
    lose(bob, today() - 5)
    (differ,) = shell.json("usage", "reconcile", status=1)["differ"]
    assert (differ["account_id"], differ["counted"]["requests"], differ["recorded"]["requests"]) == (bob, 1, 0)
    assert "micro_neurons" in shell.out("usage", "reconcile", bob, status=1)
    assert "agree" in shell.out("usage", "reconcile", ann)


def lose(account_id: str, day: int) -> None:
    """The ledger's records of a day, behind the store's back."""

    async def forget(store: Any) -> None:
        store._file.run("DELETE FROM ledger WHERE account_id = ? AND day = ?", (account_id, day))

    on_store(forget)


def test_the_audit_log_names_who_did_it_and_shows_where_it_was_altered(shell: Shell) -> None:
    id = shell.account()
    head = shell.json("audit", "verify", id)[0]["head"]
    shell.out("tokens", "mint", id, "--name", "ci")
    entry = shell.json("audit", "list", id, "--action", "token.create")[-1]
    assert (entry["actor"], entry["detail"]["os_user"]) == ("command line", pwd.getpwuid(os.getuid()).pw_name)
    assert "whole" in shell.out("audit", "verify", id, "--head", head)
    assert [one["entries"] for one in shell.json("audit", "verify", "--all")] == [0, 3]
    assert "name its account" in shell.refused("audit", "verify", "--all", "--head", head)
    assert "no account" in shell.refused("audit", "list", "f" * 32)
    assert len(shell.json("audit", "list", "--all")) == 3
    alter(id)
    (verdict,) = shell.json("audit", "verify", id, status=1)
    assert (verdict["entries"], verdict["broken_at"]) == (1, 2)
    assert "BROKEN at entry 2" in shell.out("audit", "verify", "--all", status=1)


def alter(account_id: str) -> None:
    """The second entry of an account's audit log, behind the store's back."""

    async def change(store: Any) -> None:
        store._file.run("UPDATE audit SET actor = 'nobody' WHERE seq = 2 AND account_id = ?", (account_id,))

    on_store(change)


def test_a_log_whose_end_was_cut_off_is_found_by_its_head(shell: Shell) -> None:
    id = shell.account()
    head = shell.json("audit", "verify", id)[0]["head"]

    async def cut(store: Any) -> None:
        store._file.run("DELETE FROM audit WHERE seq = 2")

    on_store(cut)
    assert shell.json("audit", "verify", id)[0]["problem"] is None
    assert "cut off" in shell.out("audit", "verify", id, "--head", head, status=1)


# ---- export, import -------------------------------------------------------------------------------------------------


def test_accounts_move_to_another_server_with_the_same_secret(shell: Shell, tmp_path: Path) -> None:
    made = shell.json("accounts", "create", "acme", "--neurons-per-day", "7")
    settle(record(made["account_id"], "1"))
    content = shell.out("accounts", "export", "--usage")
    Path("all.jsonl").write_text(content)
    assert made["token"].split("_")[2] not in content
    other = ("--state", str(tmp_path / "other"))
    assert "another server's secret" in shell.refused("accounts", "import", "all.jsonl", *other)
    (tmp_path / "other" / "secret").write_bytes(Path(".hearth/secret").read_bytes())
    assert shell.json("accounts", "import", "all.jsonl", "--dry-run", *other)["records"] == 1
    assert shell.json("accounts", "list", *other) == []
    assert "added 1 accounts" in shell.out("accounts", "import", "all.jsonl", *other)
    assert "there already" in shell.out("accounts", "import", "all.jsonl", *other)
    assert shell.json("accounts", "list", *other) == shell.json("accounts", "list")
    assert shell.json("usage", "reconcile", *other)["compared"] == 2
    assert [one["action"] for one in shell.json("audit", "list", "--all", *other)] == ["import", "account.import"]
    Path("half.jsonl").write_text(content[: len(content) // 2])
    assert "cut off" in shell.refused("accounts", "import", "half.jsonl", *other)


# ---- backup, restore ------------------------------------------------------------------------------------------------


class Load(threading.Thread):
    """A gateway's share of work: reserves and settles in one thread, and leaves every seventh request open."""

    def __init__(self, account_id: str) -> None:
        super().__init__()
        self._account_id = account_id
        self._ending = threading.Event()
        self.taken = 0
        self.settled = 0

    def run(self) -> None:
        on_store(self._work)

    async def _work(self, store: Store) -> None:
        while not self._ending.is_set():
            done = record(self._account_id, f"r{self.taken}")
            await store.quotas.reserve(Hold(record(self._account_id, done.request_id), 2 * MICRO, 60 * MICRO))
            self.taken += 1
            if self.taken % 7:
                await store.quotas.settle([done])
                self.settled += 1

    def __enter__(self) -> "Load":
        self.start()
        wait_for(lambda: self.settled >= 50)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.join()


def test_a_backup_under_load_is_restored_elsewhere_whole(shell: Shell, tmp_path: Path) -> None:
    made = shell.json("accounts", "create", "acme")
    id = made["account_id"]
    gone = shell.json("tokens", "mint", id)
    shell.out("tokens", "revoke", gone["token_id"])
    head = shell.json("audit", "verify", id)[0]["head"]
    waiting = load_config().outbox_folder / f"{'0' * 32}.outbox"
    waiting.write_text("")
    with Load(id) as load:
        before = load.settled
        told = shell.json("backup", "kept")
        during = load.settled
        wait_for(lambda: load.settled >= during + 20)
    assert told["problems"] == []
    for path in [Path("kept"), *Path("kept").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert set(told["files"]) == {"hearth.db", "secret", f"outbox/{waiting.name}"}

    other = ("--state", str(tmp_path / "other"))
    assert "restored as it was" in shell.out("restore", "kept", *other)
    elsewhere = tmp_path / "other"
    assert stat.S_IMODE((elsewhere / "hearth.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((elsewhere / "secret").stat().st_mode) == 0o600
    assert (elsewhere / "outbox" / waiting.name).exists()
    Path("hearth.toml").write_text('state_folder = "other"')
    assert caller(made["token"]).account.id == id
    with pytest.raises(Unauthenticated):
        caller(gone["token"])
    assert shell.json("usage", "reconcile")["differ"] == []
    assert before <= shell.json("usage")["total"]["requests"] <= load.settled
    assert "whole" in shell.out("audit", "verify", id, "--head", head)
    assert shell.actions() == ["store.restore"]
    with Load(id):  # it goes on from there
        pass
    assert shell.json("usage", "reconcile")["differ"] == []


def test_a_restore_overwrites_nothing_unless_it_is_told_to(shell: Shell) -> None:
    old = shell.account("old")
    shell.out("backup", "kept")
    shell.account("new")
    assert "hearth.db is there already" in shell.refused("restore", "kept")
    assert len(shell.json("accounts", "list")) == 2
    shell.out("restore", "kept", "--force")
    assert [account["account_id"] for account in shell.json("accounts", "list")] == [old]
    (aside,) = Path(".hearth").glob("hearth.db.replaced-*")
    assert aside.read_bytes().startswith(b"SQLite format 3")
    assert not list(Path(".hearth").glob("*.restoring*"))


def test_a_restore_is_refused_while_a_server_runs(shell: Shell) -> None:
    shell.account()
    shell.out("backup", "kept")
    with exclusive_state(load_config()):
        assert "`hearth serve` runs" in shell.refused("restore", "kept", "--force")

    async def beside(store: Store) -> None:
        await store.ping()
        said = await asyncio.to_thread(shell.refused, "restore", "kept", "--force")
        assert "in use: stop the server" in said

    on_store(beside)
    assert len(shell.json("accounts", "list")) == 1
    shell.out("restore", "kept", "--force")


@pytest.mark.parametrize("name", ["hearth.db", "secret", "manifest.json"])
def test_a_backup_that_was_altered_or_cut_is_refused(name: str, shell: Shell) -> None:
    shell.account()
    shell.out("backup", "kept")
    whole = Path("kept", name).read_bytes()
    other = ("--state", "other")
    for content in (whole[: len(whole) // 2], whole[:20] + bytes([whole[20] ^ 1]) + whole[21:], None):
        Path("kept", name).unlink()
        if content is not None:
            Path("kept", name).write_bytes(content)
        assert name in shell.refused("restore", "kept", *other)
        assert not Path("other/hearth.db").exists()
        Path("kept", name).write_bytes(whole)
    shell.out("restore", "kept", *other)


def test_a_damaged_store_is_restored_over(shell: Shell) -> None:
    id = shell.account()
    shell.out("backup", "kept")
    Path(".hearth/hearth.db").write_bytes(b"\xa5" * 30_000)
    assert "hearth:" in shell.refused("accounts", "list")
    shell.out("restore", "kept", "--force")
    assert [account["account_id"] for account in shell.json("accounts", "list")] == [id]


def test_a_manifest_cannot_name_files_elsewhere(shell: Shell) -> None:
    shell.account()
    shell.out("backup", "kept")
    manifest = json.loads(Path("kept/manifest.json").read_text())
    for name in ("../hearth.toml", "outbox/../../x", "/etc/passwd", "outbox/x.outbox"):
        files = {**manifest["files"], name: manifest["files"]["secret"]}
        Path("kept/manifest.json").write_text(json.dumps({**manifest, "files": files}))
        assert "which no backup has" in shell.refused("restore", "kept", "--force")
    Path("kept/manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    assert "format 2" in shell.refused("restore", "kept", "--force")


def test_a_backup_needs_a_new_folder_and_a_store(shell: Shell) -> None:
    assert "no store yet" in shell.refused("backup", "kept")
    shell.account()
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    assert "is there already" in shell.refused("backup", "full")
    Path("empty").mkdir()
    shell.out("backup", "empty")
    assert not [path.name for path in Path().iterdir() if path.name.startswith(".empty")]


def test_a_store_out_of_order_is_backed_up_and_said_to_be(shell: Shell) -> None:
    id = shell.account()
    settle(record(id, "1"))
    lose(id, today())
    alter(id)
    counters, log = shell.json("backup", "kept", status=1)["problems"]
    assert f"account {id}" in counters
    assert f"audit log of {id}, entry 2" in log
    assert "not in order" in shell.refused("restore", "kept", "--state", "other")
    assert len(shell.json("accounts", "list", "--state", "other")) == 1


def test_a_damaged_store_is_not_backed_up(shell: Shell) -> None:
    for n in range(5):
        shell.account(f"a{n}")
    path = Path(".hearth/hearth.db")
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))
    shell.refused("backup", "kept")
    assert not Path("kept").exists()


@pytest.fixture
def on_redis(shell: Shell, redis_url: str) -> Iterator[Shell]:
    """The shell, with an empty Redis as its store."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        Path("hearth.toml").write_text(f'[store]\nurl = "{redis_url}"\n')
        yield shell
        client.flushall()


def test_a_backup_of_redis_is_an_export_that_any_store_takes(on_redis: Shell, redis_url: str) -> None:
    shell = on_redis
    made = shell.json("accounts", "create", "acme")
    settle(record(made["account_id"], "1"))
    told = shell.json("backup", "kept")
    assert (told["store"], set(told["files"])) == ("accounts.jsonl", {"accounts.jsonl", "secret"})
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    for settings in (f'[store]\nurl = "{redis_url}"\n', 'state_folder = "other"\n'):
        Path("hearth.toml").write_text(settings)
        shell.out("restore", "kept")
        assert caller(made["token"]).account.id == made["account_id"]
        assert shell.json("usage", "reconcile")["compared"] == 2
        assert shell.json("usage")["total"]["requests"] == 1
        assert {one["problem"] for one in shell.json("audit", "verify", "--all")} == {None}
        shell.out("restore", "kept")  # adds nothing


def test_an_export_that_the_store_cannot_take_changes_nothing(on_redis: Shell) -> None:
    shell = on_redis
    id = shell.account()
    shell.out("backup", "kept")
    shell.out("accounts", "suspend", id)
    before, secret = shell.json("accounts", "list"), Path(".hearth/secret").read_bytes()
    assert f"account {id} is there already" in shell.refused("restore", "kept", "--force")
    Path(".hearth/secret").write_text("ab" * 32)
    assert "secret is there already" in shell.refused("restore", "kept")
    assert "sealed by another secret" in shell.refused("restore", "kept", "--force")
    assert Path(".hearth/secret").read_text() == "ab" * 32
    Path(".hearth/secret").write_bytes(secret)
    assert shell.json("accounts", "list") == before


def test_a_backup_of_sqlite_is_not_restored_into_redis(shell: Shell, redis_url: str) -> None:
    shell.account()
    shell.out("backup", "kept")
    Path("hearth.toml").write_text(f'[store]\nurl = "{redis_url}"\n')
    assert "accounts import" in shell.refused("restore", "kept")


def test_the_audit_of_a_restored_store_verifies_under_its_own_secret(shell: Shell) -> None:
    shell.account()
    shell.out("backup", "kept")
    shell.out("restore", "kept", "--state", "other")
    config = load_config(state_folder="other")

    async def walk() -> int:
        store = open_store(config.store_url)
        verdict = await AuditLog(store.audit, server_secret(config)).verify("")
        await store.close()
        return verdict.entries if verdict.problem is None else -1

    assert asyncio.run(walk()) == 1


def test_a_backup_names_its_region_and_is_brought_to_another_one_by_name_alone(shell: Shell) -> None:
    shell.account("acme")
    settings = Path("hearth.toml")
    settings.write_text('[server]\nregion = "eu-west"\n')
    assert "of eu-west" in shell.out("backup", "kept")
    settings.write_text(settings.read_text().replace("eu-west", "us-east"))
    refused = shell.refused("restore", "kept", "--state", "other")
    assert "kept is of eu-west, and this host is in us-east" in refused
    assert "eu-west" in shell.refused("restore", "kept", "--state", "other", "--from-region", "mars")
    shell.out("restore", "kept", "--state", "other", "--from-region", "eu-west")
