"""`hearth doctor`: looks at this host and says what it finds, what is wrong, and what to do. It changes nothing."""

import argparse
import asyncio
import enum
import http.client
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from gateway.catalogue import entries, folder_of
from gateway.commands.models import sizes_of
from gateway.commands.words import add_command, in_bytes, print_json, read_settings
from gateway.config import Config, ConfigError, describe
from gateway.state import read_credentials
from gateway.text import FolderError, Text
from tenants.store import StoreUnavailable, open_store

_TEACHING = """\
examples:
  hearth doctor                                        everything, one line each
  hearth doctor --json                                 for scripts
  hearth doctor --settings                             every setting of hearth.toml, with its default

Exit status: 0 when Hearth can serve here, 1 when something is wrong.
"""
_DISK_BYTES_LOW = 1 << 30
_PYTHON = (3, 11)


class Verdict(enum.StrEnum):
    GOOD = "ok"
    NOTE = "note"
    WRONG = "wrong"


class Finding(NamedTuple):
    """One thing that was looked at. `advice` says what to do where it is not good."""

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def add(commands: Any) -> None:
    parser = add_command(commands, "doctor", "say what is here and what is wrong", _TEACHING)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--settings", action="store_true", help="print every setting of hearth.toml and its default")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.settings:
        print(describe())
        return 0
    findings = list(examine(options))
    if options.json:
        print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.verdict:6} {finding.subject:8} {finding.found}")
            if finding.advice:
                print(f"{'':15} -> {finding.advice}")
    return int(any(finding.verdict is Verdict.WRONG for finding in findings))


def examine(options: argparse.Namespace) -> Iterator[Finding]:
    """Every finding; without readable settings there are fewer."""
    yield _python()
    yield from _engine()
    try:
        config = read_settings(options)
    except ConfigError as error:
        yield Finding(
            "settings", Verdict.WRONG, str(error), "correct hearth.toml; `hearth doctor --settings` lists all"
        )
        return
    yield Finding("settings", Verdict.GOOD, f"state in {config.state}")
    yield from _store(config)
    yield from _models(config)
    yield _memory(config)
    yield _disk(config)
    yield _port(config)


def _python() -> Finding:
    found = f"Python {sys.version.split()[0]}, Hearth {importlib.metadata.version('hearth')}"
    if sys.version_info < _PYTHON:
        return Finding("python", Verdict.WRONG, found, "install Python 3.11 or newer and run `make serve` again")
    return Finding("python", Verdict.GOOD, found)


def _engine() -> Iterator[Finding]:
    try:
        yield Finding("engine", Verdict.GOOD, f"torch {importlib.metadata.version('torch')}")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("engine", Verdict.WRONG, "torch is not installed", "pip install hearth again")
        return
    gpus = _gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if gpus:
        yield Finding("gpu", Verdict.GOOD, "; ".join(gpus))
    else:
        advice = "" if cores >= 2 else "one core is shared by gateway and model: expect slow answers"
        verdict = Verdict.GOOD if cores >= 2 else Verdict.NOTE
        yield Finding("gpu", verdict, f"none; models run on {cores} CPU cores", advice)


def _gpus() -> list[str]:
    """As the driver names them; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()]


def _store(config: Config) -> Iterator[Finding]:
    url = config.store_url
    shown = url.split("@")[-1]  # without a password

    async def ask() -> list[str]:
        store = open_store(url)
        try:
            await store.ping()
            return list(await store.advice())
        finally:
            await store.close()

    if url.startswith("sqlite:") and not os.path.exists(url.removeprefix("sqlite:")):
        yield Finding("store", Verdict.GOOD, f"{shown}: made at the first start")
        return
    try:
        advice = asyncio.run(ask())
    except (StoreUnavailable, ValueError) as error:
        yield Finding("store", Verdict.WRONG, f"{shown}: {error}", "start the store, or correct [store] url")
        return
    yield Finding("store", Verdict.GOOD, f"{shown} answers")
    for line in advice:
        yield Finding("store", Verdict.NOTE, f"{shown} answers, but", line)


def _models(config: Config) -> Iterator[Finding]:
    for entry in entries(config):
        folder = folder_of(config, entry)
        sizes = sizes_of(folder)
        if sizes is None or not sizes.weights_bytes:
            missing = "config.json" if sizes is None else "*.safetensors"
            advice = "`hearth pull` it again, or correct [[models]]"
            yield Finding("model", Verdict.WRONG, f"{entry.name}: {folder} has no {missing} that can be read", advice)
            continue
        try:
            text = Text(folder)
        except FolderError as error:
            yield Finding("model", Verdict.WRONG, f"{entry.name}: {error}", "its folder is not complete: get it again")
            continue
        chats = "" if text.chats else ", no chat template: callers must send `prompt`"
        found = f"{entry.name}: {in_bytes(sizes.weights_bytes)}, context {sizes.context_tokens:,}{chats}"
        yield Finding("model", Verdict.GOOD if text.chats else Verdict.NOTE, found)


def _memory(config: Config) -> Finding:
    import psutil  # only here: no other command asks

    sizes = [(entry, sizes_of(folder_of(config, entry))) for entry in entries(config)]
    needed = sum(entry.replicas * known.memory_bytes for entry, known in sizes if known is not None)
    free = psutil.virtual_memory().available
    found = f"{in_bytes(free)} available, the models take about {in_bytes(needed)}"
    if needed > free and not _gpus():
        return Finding("memory", Verdict.WRONG, found, "serve fewer models (`serve = false`), or set `kv_bytes`")
    return Finding("memory", Verdict.GOOD, found)


def _disk(config: Config) -> Finding:
    place = config.state
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{in_bytes(free)} free at {place}"
    if not os.access(place, os.W_OK):
        return Finding("disk", Verdict.WRONG, f"{place} cannot be written", "change its owner, or use --state")
    if free < _DISK_BYTES_LOW:
        return Finding("disk", Verdict.WRONG, found, "make room: accounts and usage are kept there")
    return Finding("disk", Verdict.GOOD, found)


def _port(config: Config) -> Finding:
    host, port = config.server.host, config.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return Finding("port", Verdict.GOOD, f"{host}:{port} is free")
    except OSError as error:
        if _is_hearth(config):
            return Finding("port", Verdict.GOOD, f"Hearth answers on {host}:{port}")
        advice = "another program uses it: start with --port (PORT=)"
        return Finding("port", Verdict.WRONG, f"{host}:{port}: {error.strerror}", advice)


def _is_hearth(config: Config) -> bool:
    known = read_credentials(config)
    if known is None or not known.base_url.endswith(f":{config.server.port}"):
        return False
    host, _, port = known.base_url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
