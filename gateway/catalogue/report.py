"""What a gateway serves now, in a file of its own beside the sockets, for commands on the same host. It knows no
gateway."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import psutil

from engine.process.files import replace_file
from gateway.settings.config import Config, ModelEntryConfig

_SUFFIX: Final = ".catalogue.json"
_UNLIKE: Final = ".unlike.json"
_LOOK_S: Final = 1.0


class CatalogueReport(msgspec.Struct, frozen=True, kw_only=True):
    """The catalogue of one gateway.

    models    names → settings_text of the entries that it serves.
    problems  names of entries that it cannot serve → why.
    problem   why it does not follow what is asked for now; empty where it does.
    """

    pid: int
    models: dict[str, str]
    problems: dict[str, str] = {}
    problem: str = ""


class UnlikeReport(msgspec.Struct, frozen=True):
    """Replicas that one gateway sends no calls, since most of their name compute with something else: pairs of machine
    and model."""

    pid: int
    unlike: list[tuple[str, str]]


R = TypeVar("R", CatalogueReport, UnlikeReport)


def settings_text(entry: ModelEntryConfig) -> str:
    """A short text that differs where a setting of two entries does."""
    return hashlib.sha256(msgspec.json.encode(entry)).hexdigest()[:12]


def write_report(config: Config, entries: Iterable[ModelEntryConfig], problems: dict[str, str], problem: str) -> None:
    """Replaces this process's report. Raises OSError."""
    models = {entry.name: settings_text(entry) for entry in entries}
    report = CatalogueReport(pid=os.getpid(), models=models, problems=problems, problem=problem)
    replace_file(_path(config), msgspec.json.encode(report))


def remove_report(config: Config) -> None:
    _path(config).unlink(missing_ok=True)


async def report_unlike(config: Config, find: Callable[[], list[tuple[str, str]]]) -> None:
    """Keeps this process's UnlikeReport of what `find` returns, until cancelled."""
    path, before = _path(config, _UNLIKE), list[tuple[str, str]]()
    try:
        while True:
            if (unlike := find()) != before:
                with contextlib.suppress(OSError):  # of a full disk others tell
                    replace_file(path, msgspec.json.encode(UnlikeReport(os.getpid(), unlike)))
                    before = unlike
            await asyncio.sleep(_LOOK_S)
    finally:
        path.unlink(missing_ok=True)


def unlike_replicas(config: Config) -> list[tuple[str, str]]:
    """The pairs of machine and model that this state folder's gateways on this host report."""
    return sorted({pair for report in _reports(config, _UNLIKE, UnlikeReport) for pair in report.unlike})


def catalogue_reports(config: Config) -> Iterator[CatalogueReport]:
    """The reports of this state folder's gateways that run on this host."""
    yield from _reports(config, _SUFFIX, CatalogueReport)


def _reports(config: Config, suffix: str, kind: type[R]) -> Iterator[R]:
    for path in sorted(config.run_folder.glob(f"*{suffix}")):
        try:
            report = msgspec.json.decode(path.read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError):  # it ends just now
            continue
        if psutil.pid_exists(report.pid):
            yield report


def _path(config: Config, suffix: str = _SUFFIX) -> Path:
    return config.run_folder / f"gateway-{os.getpid()}{suffix}"
