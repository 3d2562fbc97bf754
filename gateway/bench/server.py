"""A server of its own for a measurement: `hearth serve` in a folder that is gone afterwards, with one model of made-up
weights, a made-up tokenizer and an account without quotas. It measures nothing."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.hostinfo.gpus import KERNEL_CACHE_VARIABLE
from gateway.bench.client import Target
from gateway.bench.load import word_of_id
from gateway.catalogue.catalogue import BUILT_IN
from gateway.settings.config import Config, load_config
from gateway.state_dir import Credentials, open_state, read_credentials, server_secret, write_credentials
from tenants.auth.accounts import AccountService
from tenants.open import open_store
from tenants.records.limits import Limits

_READY_S: Final = 300.0
_END_S: Final = 60.0
_OPEN: Final = Limits(requests_per_minute=6_000_000, neurons_per_day=1e9, concurrent_requests=1_000_000)


class NotServing(RuntimeError):
    """The server did not come up; the message has the end of its logs."""


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A running server: `pid` is that of `hearth serve`, `machine` the address of its machine."""

    target: Target
    vocabulary: int
    pid: int
    machine: str


@contextlib.contextmanager
def own_server(geometry: str, device: str) -> Iterator[OwnServer]:
    """Serves a geometry of `python -m engine.bench` with random weights. Raises NotServing."""
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as name:
        folder, model = Path(name), f"@cf/bench/{geometry}"
        vocabulary = write_model(geometry, folder / "model")
        with running_server(_settings(model, folder / "model"), folder, device) as (config, credentials, pid):
            target = Target(credentials.base_url, credentials.account_id, credentials.token, model)
            yield OwnServer(target, vocabulary, pid, config.machine_address)


@contextlib.contextmanager
def running_server(settings: str, folder: Path, device: str) -> Iterator[tuple[Config, Credentials, int]]:
    """`hearth serve` with these settings, its state in `folder`: its config, an account without quotas, its process id.
    Raises NotServing."""
    path = folder / "hearth.toml"
    path.write_text(settings)
    config = load_config(path, state_folder=folder / "state")
    open_state(config)
    write_credentials(config, asyncio.run(_account(config)))
    command = [sys.executable, "-P", "-m", "gateway.cli", "serve", "--config", str(path)]
    command += ["--state", config.state_folder, "--port", "0", "--device", device]
    kernels = os.environ.get(KERNEL_CACHE_VARIABLE, str(Path.home() / ".triton" / "cache"))  # kept between runs
    with open(folder / "serve.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, KERNEL_CACHE_VARIABLE: kernels})
    try:
        yield config, _await_ready(config, process, folder), process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()


def write_model(geometry: str, folder: Path) -> int:
    """A model folder with config.json and tokenizer.json, no weights; returns the size of its vocabulary."""
    command = [sys.executable, "-P", "-m", "engine.bench", "--model", geometry, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotServing(done.stderr.strip())
    vocabulary: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(vocabulary)))
    return vocabulary


def tokenizer(vocabulary: int) -> dict[str, object]:
    """tokenizer.json of a vocabulary in which every id is a word and a space before it, which a text's first word may
    lack. A text of n such words is n tokens."""
    words = {f"Ġ{word_of_id(id)}": id for id in range(vocabulary)}
    split = {"type": "Split", "pattern": {"Regex": " ?[^ ]+"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}, "post_processor": None,
        "decoder": level, "model": {"type": "WordLevel", "vocab": words, "unk_token": f"Ġ{word_of_id(0)}"},
    }  # fmt: skip


def _settings(model: str, folder: Path) -> str:
    return (
        f'[[models]]\nname = "{model}"\nfolder = "{folder}"\nrandom_weights = true\ncontext_tokens = 4096\n'
        f'waiting = 4096\nprice = {{ input = 0.0, output = 0.0 }}\n\n[[models]]\nname = "{BUILT_IN}"\nserve = false\n'
    )


async def _account(config: Config) -> Credentials:
    store = open_store(config.store_url)
    try:
        accounts = AccountService(store, server_secret(config))
        account = await accounts.create("bench", _OPEN)
        _, token = await accounts.mint(account.id, "bench")
        return Credentials("", account.id, token)
    finally:
        await store.close()


def _await_ready(config: Config, process: subprocess.Popen[bytes], folder: Path) -> Credentials:
    deadline = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < deadline:
        credentials = read_credentials(config)
        if credentials is not None and credentials.base_url:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{credentials.base_url}/readyz", timeout=2):
                return credentials
        time.sleep(0.1)
    logs = (folder / "serve.log", config.state / "machine.log", config.state / "gateway.log")
    ends = "\n".join(path.read_text(errors="replace")[-2000:] for path in logs if path.exists())
    raise NotServing(f"the server was not ready after {_READY_S:.0f} s or ended:\n{ends}")
