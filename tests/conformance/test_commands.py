"""The commands of the pages, each run as it stands there, and what it prints judged; and by name those that cannot run
here, with the reason."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from gateway.settings.config import Config, load_config
from tests.conformance.server import EMBER_FOLDER, Target
from tests.end_to_end.conftest import run_hearth, serving
from tests.support import hub

ROOT: Final = Path(__file__).parents[2]
SHELL: Final = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
MODEL: Final = "Qwen/Qwen3-0.6B"
GREETING: Final = "Hello! Who are you?\n"

# Commands that are not run here, by how they begin, and why not.
ELSEWHERE: Final[Mapping[str, str]] = {
    "make image": "it takes a Docker daemon; tests/test_compose.py reads what it would build of",
    "docker run": "it takes a Docker daemon",
    "make ": "it sets up a checkout, and serves without end: benchmarks/gateway/first_answer.py",
    "pip install": "it takes an index, and gigabytes: tests/test_distribution.py installs the wheel",
    "uv tool install": "the same",
    "packages=": "it names what pip installed: tests/end_to_end/test_imported.py goes on with it",
    "hearth serve": "it serves without end: tests/end_to_end does little else",
}
# Pages whose commands others run, and pages of which others run what comes after some blocks.
BY_OTHERS: Final[Mapping[str, str]] = {
    "docs/many-hosts.md": "tests/end_to_end/test_many_hosts.py, on hosts of a network of their own",
    "docs/examples.md": "tests/conformance/test_examples.py",
}
BLOCKS: Final[Mapping[str, int]] = {"docs/models.md": 1}  # the others import GGUF: end_to_end/test_imported.py
BESIDE_A_SERVER: Final = (
    *("README.md", "docs/first-call.md", "docs/first-team.md", "docs/first-model.md", "docs/models.md"),
    *("docs/deploy.md", "docs/install.md"),
)
WITHOUT_A_SERVER: Final = ("docs/tenants.md", "docs/operations.md", "docs/weights.md", "docs/regions.md")
WITH_ITS_OWN_SERVER: Final = ("docs/standby.md",)

# What a command prints, by how it begins; the first that fits is meant.
LIMITS: Final = r"requests_per_minute +600 .*neurons_per_month +5,000,000"
SECRET: Final = r"hearth_\w+\n.*shown this once"
PRINTS: Final[Mapping[str, str]] = {
    'eval "$(': r"^$",
    "curl -sN $HEARTH/client": r"QUILL-4821",
    'curl -sN "$HEARTH/v1': r'"content":"[^"]*Ember',
    "hearth chat": r"Ember.*\d+ prompt tokens",
    "hearth plans set team": LIMITS,
    "hearth accounts create acme": r"account +[0-9a-f]{32}\ntoken +hearth_",
    "hearth accounts limits acme --class large": r"large: concurrent_requests +2 ",
    "hearth accounts limits acme --neurons-per-day 50000": r"neurons_per_day +50,000 ",
    "hearth accounts limits acme --neurons-per-day none": r"neurons_per_day +- ",
    "hearth accounts settings acme": r"zero_retention +yes",
    "hearth accounts suspend acme": r"is suspended",
    "hearth accounts delete acme": r"is suspended, and is removed on \d{4}-",
    "hearth accounts restore acme": r"stays, and is suspended, as it was before",
    "hearth accounts import acme.jsonl": r"all of it is there already",
    "hearth accounts export": r"seals of tokens, no secrets",
    "hearth tokens mint acme --name ci --json": r'"token": "hearth_\w+"',
    "hearth tokens mint acme": SECRET,
    "hearth tokens roll": SECRET,
    "hearth tokens revoke": r"is revoked",
    "hearth tokens change": r"10 requests/min",
    "hearth usage acme --by model": r"MODEL +REQUESTS.*total",
    "hearth usage acme --left": r"requests_per_minute +600 +600 +100%",
    "hearth usage acme --from": r"^account_id,model,requests,",
    "hearth usage --by account": r"ACCOUNT +NAME +REQUESTS.*total",
    "hearth usage reconcile": r"counters and records agree",
    "hearth audit list acme": r"token.create",
    "hearth audit verify --all --json": r'"broken_at": null',
    "hearth audit verify --all": r"whole",
    "hearth audit verify acme": r"whole",
    "hearth apply teams.yaml --dry-run": r"account acme: .*zero_retention False -> True",
    "hearth apply teams.yaml --prune": r"account first .*: suspended, removed in 7 days",
    "hearth apply teams.yaml": r"account acme: .*requests_per_minute none -> 900.*\d changes made",
    "hearth backup": r"2 files",
    "hearth restore /var/backups/hearth-monday --force": r"restored as it was on",
    "hearth restore /var/backups/hearth-monday": r"is there already; --force moves it aside",
    "hearth log": r"outcome +done: it was answered.*cost +[\d.]+ neurons",
    "hearth pull": r"is in the catalogue.*next: `hearth chat Qwen/Qwen3-0.6B`",
    "hearth models add": r"notes: .* of weights, whole; .*; it answered a prompt",
    "hearth models set notes": r"price .*2000.*takes it up within two seconds",
    "hearth models remove notes --wait": r"notes is gone after",
    "hearth models list": r"notes +gpt-4o-mini.*@cf/hearth/ember-chat .* live",
    "hearth models show": r"name +@hf/Qwen/Qwen3-0.6B.*memory +\d",
    "hearth doctor": r"ok +store.*ok +model +@cf/hearth/ember: .*, context 8,192",
    "hearth top": r"replicas on a device.*@cf/hearth/ember +device",
    "hearth systemd --config": r"^$",  # into a file, which the test reads
    "hearth systemd --gateway": r"ExecStart=\S+hearth gateway [^\n]*--state \S+\n",
    "hearth systemd --machine": r"ExecStart=\S+hearth machine [^\n]*--state \S+\n",
    "hearth kubernetes --namespace ml": r"kind: DaemonSet.*namespace: ml.*image: registry.example.com/hearth:1",
    "hearth kubernetes --helm": r"wrote a chart to charts/hearth",
    "hearth cluster init": r"founded the cluster eu; this host is the gateway \S+ \(region eu-west\)",
}
# The same of one page, where others use the command for something else.
PRINTS_OF: Final[Mapping[str, Mapping[str, str]]] = {
    "docs/weights.md": {
        "hearth models compress models/assistant models/assistant-12 --dry-run": r"no matrix.*would be in 12 bits",
        "hearth models compress models/assistant": r"are in 12 bits.*`hearth models add NAME models/assistant-12`",
        "hearth models expand": r"1 file of weights as they were, every sum as it was noted",
        "hearth models add": r"of weights, whole; .*; it answered a prompt",
        "hearth models compress @hf/meta-llama/Llama-3.1-8B-Instruct /srv/models/llama-12 --dry-run": r"would be in 12",
        "hearth models compress @hf/meta-llama/Llama-3.1-8B-Instruct": r"are in 12 bits.*`hearth models add NAME",
        "hearth models show": r"name +@cf/acme/llama.*compressed +12 bits, [\d.]+% of the numbers",
    },
    "docs/standby.md": {
        "hearth top": r"host memory .* of 93.1 GiB.*@cf/acme/assistant +device.*@cf/acme/notes +device",
        "hearth models list": r"@cf/acme/assistant .* live.*@cf/acme/notes .* live",
        "hearth doctor": r"ok +memory +.* for models.*ok +machine +local: @cf/acme/assistant: device",
        "hearth models warm": r"@cf/acme/assistant: .* prepared.*@cf/acme/notes: .* prepared",
    },
}
# What a page calls by name: this Hearth, and in place of what is not here, a program that prints what it is given.
PROGRAMS: Final = f'hearth() {{ {shlex.quote(sys.executable)} -m gateway.cli "$@"; }}\nkubectl() {{ cat; }}'
PLACEHOLDERS: Final = {  # words of the pages, and where they were printed
    "TOKEN_ID": r"hearth_(\w{11})_",
    "SEAL": r'"head": "([0-9a-f]{64})"',
    "REQUEST_ID": r"(?i)x-request-id: (\S+)",
}


@dataclass
class Shell:
    """A shell in a folder, whose `hearth` is this one."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    printed: str = ""

    def walk(self, page: str) -> None:
        """Runs all commands of a page. Fails the test where one fails, or prints something else."""
        own = PRINTS_OF.get(page, {})
        wrong, prints = [], {**own, **PRINTS, **own}  # its own are looked at first
        for command in commands(page, BLOCKS.get(page)):
            printed, status = self.run(command)
            answer = "".join(re.findall(r'"response":"([^"]*)"', printed))  # the pieces of a stream
            expected = next((text for start, text in prints.items() if command.startswith(start)), "nobody judges it")
            refused = "is there already; --force" in expected
            if status != refused or not re.search(expected, printed + answer, re.DOTALL):
                wrong.append(f"{command}{printed}")
        assert not wrong, "\n".join(wrong)

    def run(self, command: str) -> tuple[str, int]:
        """What it printed, errors too, and its status."""
        for name, place in PLACEHOLDERS.items():
            if name in command:
                command = command.replace(name, re.findall(place, self.printed)[-1])
        command = command.replace(".venv/bin/hearth", "hearth").replace("/var/backups", str(self.folder))
        command = re.sub(r"(?<![\w.])/(?=(etc|srv|var/lib)/)", f"{self.folder}/", command)
        if "scripts say --yes" in command:  # there is no terminal that could ask
            command = command.replace("#", "--yes #", 1)
        done = subprocess.run(
            ["bash", "-euc", f"{PROGRAMS}\n{command}"],
            cwd=self.folder, env={**os.environ, **self.variables}, input=GREETING if "hearth chat" in command else "",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        )  # fmt: skip
        self.printed += done.stdout
        return done.stdout, done.returncode


def commands(page: str, blocks: int | None = None) -> Iterator[str]:
    for block in SHELL.findall((ROOT / page).read_text())[:blocks]:
        command = ""
        for line in block.splitlines(keepends=True):
            command += line
            try:
                words = shlex.split(command, comments=True)
            except ValueError:  # a quote goes on
                continue
            if command.endswith("\\\n"):
                continue
            if words and not command.startswith(tuple(ELSEWHERE)):
                yield command
            command = ""


def settings_of(page: str, folder: Path) -> Config:
    """What all settings on a page are together, read as those of a folder."""
    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    path = folder / "hearth.toml"
    path.write_text("\n".join(blocks))
    return load_config(path)


def yaml_of(page: str) -> str:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return str(block)


@pytest.fixture
def shell(hearth_target: Target) -> Iterator[Shell]:
    """Beside a server, with a folder and a hub to take models from; the team and the models of a page end with it."""
    folder = hearth_target.hearth.folder
    shutil.copytree(EMBER_FOLDER, folder / "models" / "notes", dirs_exist_ok=True)
    (folder / "teams.yaml").write_text(yaml_of("docs/tenants.md"))
    with hub.serving() as served:
        served.repositories[MODEL] = {path.name: path.read_bytes() for path in EMBER_FOLDER.iterdir() if path.is_file()}
        names = {"HEARTH": hearth_target.base_url, "ACCOUNT": hearth_target.account_id, "TOKEN": hearth_target.token}
        yield Shell(folder, {**names, "HF_ENDPOINT": served.url})
    for account in json.loads(run_hearth(folder, "accounts", "list", "--json")):
        if account["name"] == "acme":
            run_hearth(folder, "accounts", "rename", "acme", f"acme {account['account_id']}")
    for model in json.loads(run_hearth(folder, "models", "list", "--json")):
        if model["name"].endswith(("notes", MODEL)):
            run_hearth(folder, "models", "remove", model["name"], "--wait")


@pytest.mark.parametrize("page", BESIDE_A_SERVER)
def test_a_page_works_beside_a_server_as_it_is_written(shell: Shell, page: str) -> None:
    if page in ("README.md", "docs/deploy.md"):  # which ask what became of a request
        call = """curl -si "$HEARTH/ai/run/ember" -H "Authorization: Bearer $TOKEN" -d '{"prompt": "Hello!"}'"""
        assert shell.run(call)[1] == 0
    (shell.folder / "etc" / "systemd" / "system").mkdir(parents=True, exist_ok=True)
    shutil.copy(shell.folder / "hearth.toml", shell.folder / "etc")
    shell.walk(page)
    if page == "docs/deploy.md":
        unit = (shell.folder / "etc" / "systemd" / "system" / "hearth.service").read_text()
        assert re.search(r"User=hearth\n", unit)
        assert re.search(r"ExecStart=\S+hearth serve .*--config \S+/etc/hearth.toml", unit)


@pytest.mark.parametrize("page", WITHOUT_A_SERVER)
def test_a_page_works_without_a_server_as_it_is_written(tmp_path: Path, page: str) -> None:
    if "tenants" in page:  # which removes whom teams.yaml does not name
        run_hearth(tmp_path, "accounts", "create", "first")
    (tmp_path / "teams.yaml").write_text(yaml_of("docs/tenants.md"))
    if "weights" in page:  # the built-in model in the place of those that it compresses
        shutil.copytree(EMBER_FOLDER, tmp_path / "models" / "assistant")
        run_hearth(tmp_path, "models", "add", "@hf/meta-llama/Llama-3.1-8B-Instruct", "models/assistant")
        (tmp_path / "srv" / "models").mkdir(parents=True)
        (tmp_path / "srv" / "share").mkdir()
    Shell(tmp_path).walk(page)
    if "weights" in page:
        weights = (EMBER_FOLDER / "model.safetensors").read_bytes()
        for again in ("models/assistant-again", "srv/models/llama"):
            assert (tmp_path / again / "model.safetensors").read_bytes() == weights


def test_models_that_take_turns_are_served_as_the_page_says(tmp_path: Path) -> None:
    (page,) = WITH_ITS_OWN_SERVER
    for name in ("assistant", "notes"):
        shutil.copytree(EMBER_FOLDER, tmp_path / "models" / name)
    config = settings_of(page, tmp_path)
    assert (config.machine.device_bytes, config.machine.memory_bytes) == (40_000_000_000, 100_000_000_000)
    pinned, other = (model for model in config.models if model.name.startswith("@cf/acme/"))
    assert (pinned.pinned, other.pinned, other.priority, other.wake_s) == (True, False, 2.0, 1.0)
    settings = (tmp_path / "hearth.toml").read_text()
    with serving(tmp_path, settings.removeprefix("[machine]\n")):  # which begins with that line itself
        Shell(tmp_path).walk(page)


def test_the_settings_of_pages_say_what_the_pages_say(tmp_path: Path) -> None:
    config = settings_of("docs/deploy.md", tmp_path)
    assert (config.log.format, config.log.level, config.log.files) == ("json", "warning", 9)
    assert config.server.metrics_networks == ("127.0.0.0/8", "10.2.0.0/16")
    (tmp_path / "us").mkdir()
    run_hearth(tmp_path / "us", "cluster", "init", "--cluster", "us", "--region", "us-east")
    shutil.copy(tmp_path / "us" / ".hearth" / "identity" / "authority.pem", tmp_path / "us-authority.pem")
    (cell,) = settings_of("docs/regions.md", tmp_path).cells.others
    assert (cell.name, len(cell.addresses)) == ("us", 2)


def test_each_page_with_commands_is_run_and_each_reason_not_to_run_one_is_of_use() -> None:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    with_commands = {str(path.relative_to(ROOT)) for path in paths if "```sh" in path.read_text()}
    run = {*BESIDE_A_SERVER, *WITHOUT_A_SERVER, *WITH_ITS_OWN_SERVER}
    assert with_commands == run | BY_OTHERS.keys()
    assert not run & BY_OTHERS.keys()
    lines = [line for page in run for block in SHELL.findall((ROOT / page).read_text()) for line in block.splitlines()]
    assert [start for start in ELSEWHERE if not any(line.startswith(start) for line in lines)] == []
