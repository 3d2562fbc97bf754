"""The commands of the first pages and of those about teams, each run as it stands there, and what it prints judged."""

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

from tests.conformance.server import EMBER_FOLDER, Target
from tests.end_to_end.conftest import run_hearth
from tests.support import hub

ROOT: Final = Path(__file__).parents[2]
SHELL: Final = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
MODEL: Final = "Qwen/Qwen3-0.6B"
GREETING: Final = "Hello! Who are you?\n"
ELSEWHERE: Final = ("make ", "pip ", "packages=", "hearth serve")  # what sets up and serves is tested by those who do

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
}
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

    def walk(self, page: str, blocks: int | None = None) -> None:
        """Runs all commands of a page. Fails the test where one fails, or prints something else."""
        wrong = []
        for command in commands(page, blocks):
            printed, status = self.run(command)
            answer = "".join(re.findall(r'"response":"([^"]*)"', printed))  # the pieces of a stream
            expected = next((text for start, text in PRINTS.items() if command.startswith(start)), "nobody judges it")
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
        if "scripts say --yes" in command:  # there is no terminal that could ask
            command = command.replace("#", "--yes #", 1)
        done = subprocess.run(
            ["bash", "-euc", f'hearth() {{ {shlex.quote(sys.executable)} -m gateway.cli "$@"; }}\n{command}'],
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
            if words and not command.startswith(ELSEWHERE):
                yield command
            command = ""


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


@pytest.mark.parametrize(
    ("page", "blocks"),
    [
        *(("README.md", None), ("docs/first-call.md", None), ("docs/first-team.md", None)),
        *(("docs/first-model.md", None), ("docs/models.md", 1)),  # the others import GGUF: end_to_end/test_imported.py
    ],
)
def test_a_page_works_beside_a_server_as_it_is_written(shell: Shell, page: str, blocks: int | None) -> None:
    if page == "README.md":  # which asks what became of a request
        call = """curl -si "$HEARTH/ai/run/ember" -H "Authorization: Bearer $TOKEN" -d '{"prompt": "Hello!"}'"""
        assert shell.run(call)[1] == 0
    shell.walk(page, blocks)


@pytest.mark.parametrize("page", ["docs/tenants.md", "docs/operations.md"])
def test_a_page_works_without_a_server_as_it_is_written(tmp_path: Path, page: str) -> None:
    if "tenants" in page:  # which removes whom teams.yaml does not name
        run_hearth(tmp_path, "accounts", "create", "first")
    (tmp_path / "teams.yaml").write_text(yaml_of("docs/tenants.md"))
    Shell(tmp_path).walk(page)
