import asyncio
import errno
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.process.files import fingerprint
from engine.protocol.reports import MEMORY_REPORT_SUFFIX, MemoryReport
from gateway import __version__
from gateway.catalogue.catalogue import model_entries
from gateway.cli import COMMANDS, main, parse
from gateway.commands.access.first_account import first_call
from gateway.commands.access.gateway_client import base_url
from gateway.commands.checks.models import machines
from gateway.settings.config import load_config
from gateway.settings.server import ServerConfig
from gateway.state_dir import Credentials, read_credentials, server_secret, write_credentials
from tenants.auth.accounts import AccountService
from tenants.auth.errors import Unauthenticated
from tenants.open import open_store
from tests.support.waiting import wait_for


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the current one, with its state below."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".hearth"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(run(capsys, *words, "--json"))


def verify(token: str) -> str:
    """The account that a token opens, asked of the store as a gateway would."""

    async def ask() -> str:
        config = load_config()
        store = open_store(config.store_url)
        try:
            return (await AccountService(store, server_secret(config)).verify(token)).account.id
        finally:
            await store.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert f"hearth {command}" in shown


def test_an_action_teaches_by_its_own_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("accounts limits", "tokens mint", "models show", "usage reconcile"):
        assert main([*words.split(), "--help"]) == 0
        shown = capsys.readouterr().out
        examples = [line for line in shown.splitlines() if line.startswith("  hearth ")]
        assert examples
        assert all(f"{line} ".startswith(f"  hearth {words} ") for line in examples)
    assert main(["accounts", "--help"]) == 0
    assert capsys.readouterr().out.count("  hearth accounts ") > 10


def test_every_example_parses(capsys: pytest.CaptureFixture[str]) -> None:
    """What --help tells people to type is a command line, word for word."""
    parsed = 0
    for command in COMMANDS:
        main([command, "--help"])
        for line in capsys.readouterr().out.splitlines():
            if line.startswith("  hearth "):
                words = shlex.split(line.split("     ")[0])
                parse(words[1:])
                parsed += 1
    assert parsed >= 20


@pytest.mark.parametrize(
    "words", [[], ["cook"], ["tokens"], ["tokens", "mint"], ["tokens", "mint", "a", "--expires", "3"]]
)
def test_wrong_usage_ends_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    message, usage = capsys.readouterr().err.splitlines()
    assert message.startswith("hearth")
    assert usage.startswith("usage: `hearth")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cook"], 'Unknown command "cook"'),
        (["tokens"], "say what to do: mint, list, change, roll, revoke"),
        (["tokens", "mint"], "ACCOUNT"),
        (["tokens", "mint", "a", "--expires", "3"], "write a number and s, m, h, d or w"),
        (["tokens", "mint", "a", "--nmae", "b"], "Did you mean --name?"),
        (["accounts", "create", "a", "--burst", "x"], "--burst"),
        (["usage", "--csv", "--json"], "{--csv, --json}"),
        (["usage", "--by", "colour"], "colour"),
        (["audit", "list", "a", "--all"], "{ACCOUNT, --all}"),
        (["top", "--interval", "0"], "no number of seconds from 0.2 to 3600"),
        (["bench", "--streams", "0"], "--streams"),
        (["bench", "--rate", "-1"], "--rate"),
        (["bench", "--shared", "-1"], "--shared"),
        (["log", "0f7c1d9e", "--days", "9999999"], "--days"),
        (["tokens", "mint", "a", "--expires", "999999w"], "more than 100 years"),
        (["tokens", "mint", "a", "--networks", ""], "`none` says that it is to be so"),
        (["serve", "--device", "gpu"], "'gpu' is no device: write auto, cpu, cuda or cuda:0"),
        (["accounts", "list", "--config"], "--config"),
    ],
)
def test_wrong_usage_says_what_is_wrong(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_settings_and_state_are_named_before_or_behind_the_action(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = said(capsys, "accounts", "--state", str(tmp_path / "a"), "create", "acme")
    for words in (
        ["--state", str(tmp_path / "a"), "accounts", "list"],
        ["accounts", "--state", str(tmp_path / "a"), "list"],
        ["accounts", "list", f"--state={tmp_path / 'a'}"],
    ):
        assert [account["account_id"] for account in said(capsys, *words)] == [made["account_id"]]


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == f"hearth {__version__}\n"


def test_help_is_quick_since_it_imports_no_command() -> None:
    program = "import sys; from gateway.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr.split()
    assert "gateway.cli" in imported
    heavy = {"gateway.commands.serve", "gateway.app", "tenants.open", "redis", "torch", "numpy", "tokenizers"}
    assert not heavy & set(imported)


@pytest.mark.parametrize(
    ("imports", "unneeded"),
    [
        (
            "gateway.cli, gateway.commands.serve",
            {"gateway.app", "starlette", "uvicorn", "opentelemetry", "cryptography"},
        ),
        (
            "engine.host.agent",
            {"engine.replica", "asyncio", "gateway", "psutil", "pynvml", "llguidance", "opentelemetry"},
        ),
    ],
)
def test_what_starts_replicas_imports_nothing_of_theirs_or_the_gateways(imports: str, unneeded: set[str]) -> None:
    program = f"import sys, {imports}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert set(imports.split(", ")) <= set(imported)
    assert not (unneeded | {"torch", "numpy", "triton", "redis", "sqlite3"}) & set(imported)


def test_a_created_account_has_a_token_that_opens_it(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = said(capsys, "accounts", "create", "acme")
    assert len(made["account_id"]) == 32
    assert verify(made["token"]) == made["account_id"]
    assert [account["account_id"] for account in said(capsys, "accounts", "list")] == [made["account_id"]]
    assert "acme" in run(capsys, "accounts", "list")


def test_limits_are_set_at_creation_and_later(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = said(capsys, "accounts", "create", "acme", "--requests-per-minute", "60", "--neurons-per-day", "5.5")
    assert made["limits"]["requests_per_minute"] == 60
    assert made["limits"]["neurons_per_day"] == 5.5
    id = made["account_id"]
    changed = said(capsys, "accounts", "limits", id, "--neurons-per-day", "7", "--burst", "3")
    assert changed["limits"]["burst"] == 3
    assert said(capsys, "accounts", "limits", id)["limits"] == changed["limits"]
    assert changed["limits"]["requests_per_minute"] == 60


def test_a_limit_out_of_range_is_refused_in_words(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accounts", "create", "acme", "--requests-per-minute", "0"]) == 1
    assert "requests_per_minute" in capsys.readouterr().err
    assert said(capsys, "accounts", "list") == []


def test_tokens_are_minted_listed_and_revoked(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    account = said(capsys, "accounts", "create", "acme")["account_id"]
    minted = said(capsys, "tokens", "mint", account, "--name", "ci", "--expires", "30d")
    assert verify(minted["token"]) == account
    assert abs(minted["expires_at"] - time.time() - 30 * 86400) < 60
    listed = said(capsys, "tokens", "list", account)
    assert {token["name"] for token in listed} == {"first", "ci"}
    assert minted["token"] not in json.dumps(listed)
    run(capsys, "tokens", "revoke", minted["token_id"])
    with pytest.raises(Unauthenticated):
        verify(minted["token"])
    assert "ci" in run(capsys, "tokens", "list", account)


def test_a_token_is_minted_narrow_and_rolled(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    account = said(capsys, "accounts", "create", "acme")["account_id"]
    wanted = ("--permissions", "usage:read,account:admin", "--models", "@cf/*", "--networks", "10.0.0.0/8,::1/128")
    minted = said(capsys, "tokens", "mint", account, "--name", "admin", *wanted)
    assert minted["permissions"] == ["usage:read", "account:admin"]
    assert (minted["models"], minted["networks"]) == (["@cf/*"], ["10.0.0.0/8", "::1/128"])
    rolled = said(capsys, "tokens", "roll", minted["token_id"], "--grace", "1h")
    assert rolled["token_id"] == minted["token_id"]
    for text in (minted["token"], rolled["token"]):
        assert verify(text) == account
    last = said(capsys, "tokens", "roll", minted["token_id"])
    for text in (minted["token"], rolled["token"]):
        with pytest.raises(Unauthenticated):
            verify(text)
    assert verify(last["token"]) == account
    assert "usage:read,account:admin" in run(capsys, "tokens", "list", account)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--permissions", "everything"), "no permission"),
        (("--permissions", "none"), "without permissions"),
        (("--networks", "home"), "no network"),
    ],
)
def test_a_grant_that_is_none_is_refused_in_words(
    words: tuple[str, str], says: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    account = said(capsys, "accounts", "create", "acme")["account_id"]
    assert main(["tokens", "mint", account, *words]) == 1
    assert says in capsys.readouterr().err
    assert len(said(capsys, "tokens", "list", account)) == 1


def test_unknown_ids_are_told_and_end_with_status_1(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["tokens", "mint", "0" * 32], ["tokens", "revoke", "none"], ["accounts", "limits", "0" * 32]):
        assert main(words) == 1
        assert "hearth:" in capsys.readouterr().err


def test_commands_say_what_is_wrong_with_the_settings(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hearth.toml").write_text("[server]\nprot = 1")
    for words in (["accounts", "list"], ["models", "list"], ["serve"], ["gateway"], ["machine"]):
        assert main(words) == 1
        assert "prot" in capsys.readouterr().err


def test_models_are_listed_and_shown(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (listed,) = said(capsys, "models", "list")
    assert (listed["name"], listed["context_tokens"], listed["problem"]) == ("@cf/hearth/ember", 8192, "")
    shown = said(capsys, "models", "show", "@cf/hearth/ember")
    assert shown["memory_bytes"] == shown["weights_bytes"] + 8192 * shown["kv_bytes_per_token"]
    weights = Path(shown["folder"]) / "model.safetensors"
    assert shown["weights_bytes"] == weights.stat().st_size
    assert "memory" in run(capsys, "models", "show", "@cf/hearth/ember")
    assert shown["sampling"] == {}
    assert main(["models", "show", "@cf/no/such"]) == 1


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def test_made_up_weights_and_small_kv_are_counted_from_the_config_alone(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("made-up").mkdir()
    Path("made-up", "config.json").write_text(json.dumps(LLAMA_8B))
    Path("hearth.toml").write_text(
        '[[models]]\nname = "@cf/made/up"\nfolder = "made-up"\nrandom_weights = true\n'
        'kv_dtype = "fp8"\ncontext_tokens = 16384\n'
    )
    Path("made-up", "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    shown = said(capsys, "models", "show", "@cf/made/up")
    assert shown["sampling"] == {"temperature": 0.6, "top_k": 20}
    assert re.search(r"^sampling +temperature 0.6, top k 20$", run(capsys, "models", "show", "@cf/made/up"), re.M)
    assert shown["weights_bytes"] == pytest.approx(16.06e9, rel=1e-3)
    assert shown["kv_bytes_per_token"] == 64 << 10
    assert shown["kv_of_a_context_bytes"] == 1 << 30


def test_a_running_replicas_memory_is_shown_and_a_dead_ones_is_not(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = load_config().run_folder
    folder.mkdir(parents=True)
    memory = MemoryReport(
        model="@cf/hearth/ember", pid=os.getpid(), device="NVIDIA H200", device_bytes=140 << 30, weights_bytes=15 << 30,
        kv_blocks=1000, kv_block_tokens=16, kv_bytes=100 << 30, workspace_bytes=2 << 30, free_bytes=20 << 30,
    )  # fmt: skip
    changed = {"a-0": {}, "a-1": {"pid": 2**22 + 1}, "b-0": {"model": "@cf/b/c"}}
    for name, changes in changed.items():
        told = msgspec.structs.replace(memory, **changes)
        (folder / f"{name}{MEMORY_REPORT_SUFFIX}").write_bytes(msgspec.json.encode(told))
    (folder / f"a-2{MEMORY_REPORT_SUFFIX}").write_text("{")
    (running,) = said(capsys, "models", "show", "@cf/hearth/ember")["running"]
    assert (running["kv_pool_tokens"], running["driver_and_others_bytes"]) == (16000, 3 << 30)
    shown = run(capsys, "models", "show", "@cf/hearth/ember")
    assert f"running as process {os.getpid()} on NVIDIA H200, as" in shown
    assert "kv pool 100.0 GiB" in " ".join(shown.split())


def test_what_a_replica_does_otherwise_than_asked_is_said_by_list_show_and_doctor(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, remark = load_config(), "computes in float32: in bfloat16 this processor varies"
    config.run_folder.mkdir(parents=True)
    memory = MemoryReport(
        model="@cf/hearth/ember", pid=os.getpid(), device="cpu", device_bytes=1 << 30, weights_bytes=1, kv_blocks=1,
        kv_block_tokens=16, kv_bytes=1, free_bytes=1, note=remark,
    )  # fmt: skip
    (config.run_folder / f"a-0{MEMORY_REPORT_SUFFIX}").write_bytes(msgspec.json.encode(memory))
    assert remark in run(capsys, "models", "list")
    assert f"note {remark}" in " ".join(run(capsys, "models", "show", "@cf/hearth/ember").split())
    assert f"@cf/hearth/ember {remark}" in [finding.found for finding in machines(config, model_entries(config))]


def test_new_weights_in_the_folder_of_a_model_that_runs_are_said_by_list_show_and_doctor(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = load_config(), state / "weights"
    config.run_folder.mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"first")
    memory = MemoryReport(
        model="@cf/hearth/ember", pid=os.getpid(), device="cpu", device_bytes=1 << 30, weights_bytes=1, kv_blocks=1,
        kv_block_tokens=16, kv_bytes=1, free_bytes=1, folder=str(folder), weights=fingerprint(folder.glob("*")),
    )  # fmt: skip
    (config.run_folder / f"a-0{MEMORY_REPORT_SUFFIX}").write_bytes(msgspec.json.encode(memory))
    commands, stale = (("models", "list"), ("models", "show", "@cf/hearth/ember")), "that its folder had before"
    assert not any(stale in run(capsys, *words) for words in commands)
    (folder / "model.safetensors").write_bytes(b"other")
    assert all(stale in run(capsys, *words) for words in commands)
    (finding,) = (finding for finding in machines(config, model_entries(config)) if stale in finding.found)
    assert "hearth models remove" in finding.advice


def test_secrets_are_for_this_user_alone(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "accounts", "create", "acme")
    config = load_config()
    write_credentials(config, Credentials("http://127.0.0.1:1", "a", "t"))
    for path in (config.secret_path, config.credentials_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(config.state.stat().st_mode) == 0o700
    assert read_credentials(config) == Credentials("http://127.0.0.1:1", "a", "t")
    assert {path.name for path in config.state.iterdir() if path.is_file()} == {
        "secret",
        "credentials.json",
        "hearth.db",
        *(path.name for path in config.state.glob("hearth.db-*")),
    }


def test_the_secret_is_made_once(state: Path) -> None:
    assert server_secret(load_config()) == server_secret(load_config())


def test_base_urls_are_reachable_from_this_host() -> None:
    assert base_url(ServerConfig(host="0.0.0.0"), 80) == "http://127.0.0.1:80"
    assert base_url(ServerConfig(host="::"), 80) == "http://[::1]:80"
    assert base_url(ServerConfig(host="10.1.2.3"), 8787) == "http://10.1.2.3:8787"
    secure = ServerConfig(certificate="a", key="b", hosts=["*.example.com", "ai.example.com"])
    assert base_url(secure, 443) == "https://ai.example.com:443"


def test_the_first_call_survives_the_shell() -> None:
    credentials = Credentials("http://127.0.0.1:8787", "a" * 32, "hearth_x_y")
    line = first_call(credentials, "@cf/hearth/ember")
    assert "\n" not in line
    words = json.loads(
        subprocess.check_output(
            [
                "sh",
                "-c",
                f"set -- {line}; exec {shlex.quote(sys.executable)} -c 'import json,sys; "
                'print(json.dumps(sys.argv[1:]))\' "$@"',
            ]
        )
    )
    assert words[:3] == ["curl", "-N", f"http://127.0.0.1:8787/client/v4/accounts/{'a' * 32}/ai/run/@cf/hearth/ember"]
    assert "Authorization: Bearer hearth_x_y" in words
    assert json.loads(words[-1])["stream"] is True


# ---- hearth serve -----------------------------------------------------------------------------------------------

NO_MODELS = '[[models]]\nname = "@cf/hearth/ember"\nserve = false\n'


class Serving:
    """`hearth serve` without a model, in a folder: its processes can be counted."""

    def __init__(self, folder: Path, *words: str) -> None:
        (folder / "hearth.toml").write_text(NO_MODELS)
        self.folder = folder
        self.log = (folder / "out").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", *words],
            cwd=folder,
            stdout=self.log,
            stderr=self.log,
        )
        self.port = 0

    def out(self) -> str:
        return (self.folder / "out").read_text()

    def until_serving(self) -> list[int]:
        """The pids of all its processes, once gateway and machine run."""
        import psutil

        def running() -> list[int]:
            assert self.process.poll() is None, self.out()
            children = psutil.Process(self.process.pid).children(recursive=True)
            known = read_credentials(load_config(self.folder / "hearth.toml"))
            if len(children) < 2 or known is None or not _answers(known.base_url):
                return []
            return [self.process.pid, *(child.pid for child in children)]

        return list(wait_for(running))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/healthz", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


def alive(pids: list[int]) -> list[int]:
    import psutil

    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_however_it_ends_no_process_stays(tmp_path: Path, number: signal.Signals) -> None:
    if number is signal.SIGKILL and sys.platform != "linux":
        pytest.skip("the kernel's death signal is Linux'")
    serving = Serving(tmp_path)
    try:
        pids = serving.until_serving()
        assert len(pids) >= 3, "this one, gateway, machine, and what replicas are forked from"
        os.kill(serving.process.pid, number)
        serving.process.wait(15)
        wait_for(lambda: not alive(pids))
        assert serving.process.returncode == (-9 if number is signal.SIGKILL else 0)
    finally:
        serving.close()


def test_a_killed_gateway_or_machine_is_started_again(tmp_path: Path) -> None:
    import psutil

    serving = Serving(tmp_path)
    try:
        _, *children = serving.until_serving()
        for pid in children:
            with suppress(ProcessLookupError):  # what a child has started may end with it
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not alive(children))
        again = serving.until_serving()
        assert not set(children) & set(again)
        assert len(psutil.Process(serving.process.pid).children()) == 2, "no zombie either"
    finally:
        serving.close()


def test_a_second_start_keeps_the_credentials_and_a_new_port_changes_only_the_url(tmp_path: Path) -> None:
    config = load_config(state_folder=tmp_path / ".hearth")
    found = []
    for _ in range(2):
        serving = Serving(tmp_path)
        try:
            serving.until_serving()
            found.append(read_credentials(config))
            assert "no model" in serving.out()
            serving.process.terminate()
            assert serving.process.wait(15) == 0
        finally:
            serving.close()
    first, second = found
    assert first is not None
    assert second is not None
    assert (first.account_id, first.token) == (second.account_id, second.token)
    assert first.base_url != second.base_url


def test_a_taken_port_and_a_second_serve_are_refused_in_words(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        asked = subprocess.run(
            [sys.executable, "-m", "gateway.cli", "serve", "--port", port], cwd=tmp_path, capture_output=True, text=True
        )
        assert asked.returncode == 1
        assert f"127.0.0.1:{port}: another program does; --port (PORT= of make) names another port" in asked.stderr
    serving = Serving(tmp_path)
    try:
        serving.until_serving()
        again = subprocess.run(
            [sys.executable, "-m", "gateway.cli", "serve", "--port", "0"], cwd=tmp_path, capture_output=True, text=True
        )
        assert again.returncode == 1
        assert "runs already" in again.stderr
    finally:
        serving.close()


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_a_port_that_cannot_be_is_refused_as_an_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--port", "99999"]) == 2
    assert 'Invalid value "99999" for --port. Must be <= 65535.' in capsys.readouterr().err


@pytest.mark.parametrize("host", ["198.51.100.9", "300.1.1.1"])
def test_an_address_of_another_host_is_refused_in_words(
    state: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    assert main(["serve", "--host", host, "--port", "8799"]) == 1
    said = rf"hearth: cannot listen on {host}:8799: [A-Z][a-z ]+; --host .* names an address of this host\n"
    assert re.fullmatch(said, capsys.readouterr().err)


@pytest.mark.parametrize("url", ["postgres://there", "redis://there:port/0", "sentinel://there"])
def test_a_stores_url_that_is_none_is_refused_in_words(
    state: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    (Path.cwd() / "hearth.toml").write_text(f"[store]\nurl = '{url}'\n")
    for words in (["serve", "--port", "0"], ["accounts", "create", "acme"]):
        assert main(words) == 1
        assert re.fullmatch(r"hearth: \[store\] of hearth.toml: .*\n", capsys.readouterr().err)


def test_a_limit_is_shown_exactly(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "accounts", "create", "acme", "--neurons-per-day", "1234567")
    assert "1,234,567" in run(capsys, "accounts", "list")


def test_a_gateway_whose_port_is_taken_says_what_to_do(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [sys.executable, "-m", "gateway.cli", "gateway", "--port", str(taken.getsockname()[1])]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "another program does; --port" in ended.stderr


def test_a_state_folder_that_cannot_be_made_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    for words in (["accounts", "create", "acme"], ["serve"]):
        assert main([*words, "--state", str(tmp_path / "file" / "state")]) == 1
        assert "--state names another folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["credentials", "doctor", "chat", "log 0f7c1d9e", "models list", "accounts list"])
def test_files_of_another_user_are_named_with_what_helps(
    command: str, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {name: getattr(Path, name) for name in ("stat", "read_bytes", "open")}

    def refusing(name: str) -> Any:
        def refuse(path: Path, *rest: Any, **named: Any) -> Any:
            if path.is_relative_to(state.name) or path.is_relative_to(state):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return kept[name](path, *rest, **named)

        return refuse

    for name in kept:
        monkeypatch.setattr(Path, name, refusing(name))
    assert main(command.split()) == 1
    message = capsys.readouterr().err
    assert message.startswith("hearth: ")
    assert ".hearth" in message
    assert message.endswith(
        ": Permission denied; run it as the user that it belongs to, or name others by --config and --state\n"
    )


@pytest.mark.parametrize("command", ["systemd", "accounts list"])
def test_output_that_finds_no_room_is_said_and_ends_with_status_1(
    command: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "accounts", "create", "acme")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "gateway.cli", *command.split()]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (1, "hearth: No space left on device\n")


def test_a_command_that_is_ended_leaves_nothing_half_written(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "accounts", "create", "acme")
    program = (
        "import signal, sys; from gateway import cli; from gateway.commands import backup;"
        "backup._copy = lambda *_: (print('copies', flush=True), signal.pause()); sys.exit(cli.main())"
    )
    words = [sys.executable, "-c", program, "backup", "monday"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "copies\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert os.listdir() == [".hearth"]


def test_a_reader_that_leaves_is_no_problem_of_the_stores(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "accounts", "create", "acme")
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-u", "-m", "gateway.cli", "accounts", "list"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
