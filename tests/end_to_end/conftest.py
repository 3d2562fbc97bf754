"""A whole Hearth as a user starts it: `hearth serve` in an empty folder, real processes, real sockets, a real model."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.support.sdks import client_of
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    import anthropic
    import cloudflare
    import openai

ROOT = Path(__file__).parents[2]
EMBER = "@cf/hearth/ember"
START_S = 90.0
ONE_THREAD = "[machine]\nthreads = 1\n"  # several tests run at once: threads that wait for each other's cores stall


@dataclass
class Hearth:
    """A running `hearth serve`: where it is, its first account's credentials, and its processes."""

    folder: Path
    process: "subprocess.Popen[str]"
    base_url: str
    account_id: str
    token: str

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def client(self, token: str | None = None) -> httpx.Client:
        return httpx.Client(
            base_url=self.base_url, headers={"Authorization": f"Bearer {token or self.token}"}, timeout=60
        )

    def command(self, *words: str) -> str:
        """Runs another `hearth` command on the same state folder; its standard output."""
        return run_hearth(self.folder, *words)

    def account(self, name: str, *words: str) -> tuple[str, str]:
        """A new account and its token, made by the command line while the server runs."""
        made = json.loads(self.command("accounts", "create", name, "--json", *words))
        return made["account_id"], made["token"]

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def replicas(self) -> list[psutil.Process]:
        """Without the warm parent, which is told their modules' names."""
        lines = {found: " ".join(found.cmdline()) for found in self.processes()}
        return [
            found
            for found, line in lines.items()
            if "engine.replica.server" in line and "engine.replica.zygote" not in line
        ]


def run_hearth(folder: Path, *words: str) -> str:
    """One `hearth` command in `folder`, settings and all; fails the test where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway.cli", *words], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def serving(
    folder: Path,
    settings: str = "",
    command: Sequence[str] = (sys.executable, "-m", "gateway.cli"),
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Hearth]:
    """`hearth serve` in `folder` with `settings` as its hearth.toml, a first model on the device; ended by Ctrl-C."""
    port = free_port()
    (folder / "hearth.toml").write_text(ONE_THREAD + settings)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "serve", "--port", str(port)],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "PYTHONUNBUFFERED": "1"},
        )
    try:
        credentials = folder / ".hearth" / "credentials.json"

        def ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            there = " is ready after " in (folder / "log").read_text()
            return there and credentials.exists() and answers(f"http://127.0.0.1:{port}/readyz")

        wait_for(ready, START_S, f"ready; its log: {(folder / 'log').read_text()}")
        kept = json.loads(credentials.read_text())
        yield Hearth(folder, process, kept["base_url"].rstrip("/"), kept["account_id"], kept["token"])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@contextlib.contextmanager
def serving_broken(name: str, folder: Path, settings: str = "") -> Iterator[Hearth]:
    """`serving` with a fault of broken.py in the gateway."""
    command = [sys.executable, "-m", "tests.end_to_end.broken", name]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # tests are not installed
    with serving(folder, settings, command, {**os.environ, "PYTHONPATH": path}) as running:
        yield running


@pytest.fixture(scope="session")
def hearth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hearth]:
    """One Hearth for all tests that leave it as they found it."""
    with serving(tmp_path_factory.mktemp("hearth")) as running:
        yield running


def events(body: str) -> list[Any]:
    """The `data:` documents of an SSE body, `[DONE]` checked and left out."""
    found = re.findall(r"^data: (.*)$", body, re.MULTILINE)
    assert found[-1] == "[DONE]", body[-500:]
    return [json.loads(document) for document in found[:-1]]


# The SDKs take seconds to import, which those who use this module for something else need not wait for.


@pytest.fixture
def open_ai(hearth: Hearth) -> "openai.OpenAI":
    import openai

    return client_of(openai.OpenAI, hearth.base_url, hearth.token)


@pytest.fixture
def claude(hearth: Hearth) -> "anthropic.Anthropic":
    import anthropic

    return client_of(anthropic.Anthropic, hearth.base_url, hearth.token)


@pytest.fixture
def cloud(hearth: Hearth) -> "cloudflare.Cloudflare":
    import cloudflare

    return client_of(cloudflare.Cloudflare, hearth.base_url, hearth.token)
