"""`hearth models warm`: has the engine prepare what a model's first start on a device would have to find out. It knows
neither kernels nor measurements.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec
from tqdm import tqdm

from engine.hostinfo.gpus import KERNEL_CACHE_VARIABLE
from engine.protocol.reports import WarmupReport
from engine.protocol.specs import ModelSpec
from gateway.catalogue.catalogue import model_entries, spec_of
from gateway.commands.output import add_action, fail, print_json
from gateway.config import Config, SettingsError

_TEACHING: Final = """\
examples:
  hearth models warm @cf/acme/assistant                before its first start, or after an upgrade
  hearth models warm --all --device cuda:1
  hearth models warm --all --check                     what is there, without opening anything

The first start of a model on a kind of GPU compiles its kernels and measures what its steps take, some half a minute;
all later ones take that over. It lies beside the weights, in MODEL/.hearth, and goes with them to other hosts with such
a GPU; where that folder cannot be written, in the state folder, which serves models of the same sizes alike. Another
GPU, driver, torch or version of Hearth needs its own: what does not fit is never used. On a CPU nothing is compiled,
and only the number type that a model is fastest with is kept. A GPU needs room for the model beside what runs on it.
"""


class WarmError(Exception):
    """A model that could not be opened: what the engine says of it."""


def add(actions: Any) -> None:
    parser = add_action(actions, "warm", "prepare what a model's first start would have to compile and measure")
    parser.epilog, parser.formatter_class = _TEACHING, argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="models of the catalogue, like @cf/hearth/ember")
    parser.add_argument("--all", action="store_true", help="every model of the catalogue")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: machine.device)")
    parser.add_argument("--check", action="store_true", help="only say what is there and fits")


def warm_models(config: Config, options: argparse.Namespace) -> int:
    """1 where a model could not be opened, or with --check where one is not prepared."""
    try:
        specs = _chosen(config, options.names, options.all)
    except SettingsError as error:
        return fail(str(error))
    told: list[dict[str, Any]] = []
    silent = options.json or not sys.stderr.isatty()
    with tqdm(total=len(specs), unit=" models", file=sys.stderr, disable=silent) as bar:
        for spec in specs:
            bar.set_description(spec.name)
            told.append(_told(config, spec, options.check, bar.set_postfix_str))
            if not options.json:
                bar.write(_line(told[-1]), file=sys.stderr if told[-1]["problem"] else sys.stdout)
            bar.update()
    if options.json:
        print_json(told)
    return int(any(document["problem"] for document in told))


def _chosen(config: Config, names: Sequence[str], every: bool) -> list[ModelSpec]:
    """Raises ConfigError."""
    known = {entry.name: entry for entry in model_entries(config)}
    if every == bool(names):
        raise SettingsError("say which models to warm: their names, or --all")
    if unknown := [name for name in names if name not in known]:
        raise SettingsError(f"the catalogue has no {', '.join(unknown)}; `hearth models list` shows what it has")
    return [spec_of(config, entry) for name, entry in known.items() if every or name in names]


def _told(config: Config, spec: ModelSpec, checking: bool, report: Callable[[str], object]) -> dict[str, Any]:
    document: dict[str, Any] = {"name": spec.name, "problem": ""}
    try:
        warmed = _warm(config, spec, checking, report)
    except WarmError as error:
        return {**document, "problem": str(error)}
    if checking and warmed.needed and not warmed.found:
        document["problem"] = "nothing that fits this device and this version: `hearth models warm` prepares it"
    elif not checking and warmed.needed and not warmed.files:
        document["problem"] = "neither its folder nor the state folder can be written, so each start begins anew"
    return {**document, **msgspec.to_builtins(warmed), "seconds": round(warmed.seconds, 1)}


def _warm(config: Config, spec: ModelSpec, checking: bool, report: Callable[[str], object]) -> WarmupReport:
    """Raises WarmError. It runs in a process of its own, as replicas do: they alone load torch."""
    device = config.machine.device
    command = [sys.executable, "-P", "-m", "engine.execution.warmup", msgspec.json.encode(spec).decode(), device]
    environment = {KERNEL_CACHE_VARIABLE: str(config.kernels_folder), **os.environ}
    process = subprocess.Popen(
        [*command, "look"] if checking else command, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        last = _follow(process.stderr, report)
        said = process.stdout.read()
    if process.returncode:
        raise WarmError(last or f"the engine ended with status {process.returncode} and said nothing")
    return msgspec.json.decode(said, type=WarmupReport)


def _follow(lines: IO[str], report: Callable[[str], object]) -> str:
    """Reports what a process says, and gives its last line."""
    last: deque[str] = deque(maxlen=1)
    for line in lines:
        last.append(line.strip())
        report(_in_short(line))
    return last[0] if last else ""


def _in_short(line: str) -> str:
    try:
        said = json.loads(line)
        return f"{said['event']} {said['percent']} %" if "percent" in said else str(said["event"])
    except (ValueError, TypeError, KeyError):
        return line.strip()[:80]


def _line(document: dict[str, Any]) -> str:
    name, seconds = document["name"], document.get("seconds")
    if document["problem"]:
        return f"{name}: {document['problem']}"
    if not document["needed"]:
        return f"{name}: nothing to prepare, its starts measure and compile nothing on this device"
    what = "was prepared already" if document["found"] else "prepared"
    return f"{name}: {what}, {seconds:.1f} s, in {' and '.join(str(Path(file).parent) for file in document['files'])}"
