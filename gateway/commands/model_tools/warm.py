"""`hearth models warm`: has the engine prepare what a model's first start on a device would have to find out. It knows
neither kernels nor measurements.
"""

import json as json_codec
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
from cyclopts import Parameter
from tqdm import tqdm

from engine.hostinfo import gpus
from engine.hostinfo.gpus import KERNEL_CACHE_VARIABLE
from engine.protocol.rank_layout import RankLayout
from engine.protocol.reports import WarmupReport
from engine.protocol.specs import ModelSpec
from gateway.catalogue.catalogue import model_entries, spec_of
from gateway.commands.model_tools.layout import is_shared_out, layouts_on
from gateway.commands.terminal.options import Json, Source, command_app
from gateway.commands.terminal.output import print_json
from gateway.settings.config import Config, SettingsError

_TEACHING: Final = """\
examples:
  hearth models warm @cf/acme/assistant                before its first start, or after an upgrade
  hearth models warm --all --device cuda:1
  hearth models warm --all --check                     what is there, without opening anything

The first start of a model on a kind of GPU compiles its kernels and measures what its steps take, some half a minute;
all later ones take that over. It lies beside the weights, in MODEL/.hearth, and goes with them to other hosts with such
a GPU; where that folder cannot be written, in the state folder, which serves models of the same sizes alike. Another
GPU, driver, torch or version of Hearth needs its own: what does not fit is never used. A model of several GPUs is
opened on as many. On a CPU nothing is compiled, and only the number type that a model is fastest with is kept. A GPU
needs room for the model beside what runs on it.
"""


app = command_app("warm", "Prepare what a model's first start would have to compile and measure.", _TEACHING)


@app.default
def warm(
    *names: Annotated[str, Parameter(help="models of the catalogue, like @cf/hearth/ember")],
    every: Annotated[bool, Parameter(name="--all", help="every model of the catalogue")] = False,
    device: Annotated[str | None, Parameter(help="auto, cpu, cuda or cuda:N (default: machine.device)")] = None,
    check: Annotated[bool, Parameter(help="only say what is there and fits")] = False,
    json: Json = False,
    source: Source,
) -> int:
    """Prepare what a model's first start would have to compile and measure. Exit status 1: a model could not be opened,
    or, with --check, one is not prepared."""
    config = source.load(device=device)
    specs = _chosen(config, names, every)
    documents: list[dict[str, Any]] = []
    with tqdm(total=len(specs), unit=" models", file=sys.stderr, disable=json or not sys.stderr.isatty()) as bar:
        for spec in specs:
            bar.set_description(spec.name)
            documents.append(_warmed(config, spec, check, bar.set_postfix_str))
            if not json:
                bar.write(_line(documents[-1]), file=sys.stderr if documents[-1]["problem"] else sys.stdout)
            bar.update()
    if json:
        print_json(documents)
    return int(any(document["problem"] for document in documents))


def _chosen(config: Config, names: Sequence[str], every: bool) -> list[ModelSpec]:
    """Raises SettingsError."""
    known = {entry.name: entry for entry in model_entries(config)}
    if every == bool(names):
        raise SettingsError("say which models to warm: their names, or --all")
    if unknown := [name for name in names if name not in known]:
        raise SettingsError(f"the catalogue has no {', '.join(unknown)}; `hearth models list` shows what it has")
    entries = [entry for name, entry in known.items() if every or name in names]
    usable = gpus.usable_gpus(config.machine.device, gpus.installed_gpus()) if any(map(is_shared_out, entries)) else []
    layouts = {entry.name: layout for entry, layout in layouts_on(config, entries, usable)}
    return [_laid_out(spec_of(config, entry), layouts.get(entry.name)) for entry in entries]


def _laid_out(spec: ModelSpec, layout: RankLayout | None) -> ModelSpec:
    """The spec with as many GPUs and stages as an agent here would give it."""
    if layout is None:
        return msgspec.structs.replace(spec, gpus=spec.gpus or 1, stages=spec.stages or 1)
    return msgspec.structs.replace(spec, gpus=layout.gpus, stages=layout.stages)


def _warmed(config: Config, spec: ModelSpec, check: bool, report: Callable[[str], object]) -> dict[str, Any]:
    """What was prepared, or with `check` found, and the problem where there is one. The engine runs in a process of its
    own, as replicas do: only they load torch."""
    document: dict[str, Any] = {"name": spec.name, "problem": ""}
    specification, action = msgspec.json.encode(spec).decode(), ["look"] if check else []
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.replica.warmup", specification, config.machine.device, *action],
        env={KERNEL_CACHE_VARIABLE: str(config.kernels_folder), **os.environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        last = _follow(process.stderr, report)
        output = process.stdout.read()
    if process.returncode:
        problem = last or f"the engine ended with status {process.returncode} and said nothing"
        return {**document, "problem": problem}
    warmed = msgspec.json.decode(output, type=WarmupReport)
    if check and warmed.needed and not warmed.found:
        document["problem"] = "nothing that fits this device and this version: `hearth models warm` prepares it"
    elif not check and warmed.needed and not warmed.files:
        document["problem"] = "neither its folder nor the state folder can be written, so each start begins anew"
    return {**document, **msgspec.to_builtins(warmed), "seconds": round(warmed.seconds, 1)}


def _follow(lines: IO[str], report: Callable[[str], object]) -> str:
    """Reports each line as it comes; returns the last one."""
    line = ""
    for line in lines:
        report(_short_text(line))
    return line.strip()


def _short_text(line: str) -> str:
    try:
        event = json_codec.loads(line)
        return f"{event['event']} {event['percent']} %" if "percent" in event else str(event["event"])
    except (ValueError, TypeError, KeyError):
        return line.strip()[:80]


def _line(document: dict[str, Any]) -> str:
    name, seconds = document["name"], document.get("seconds")
    if document["problem"]:
        return f"{name}: {document['problem']}"
    if not document["needed"]:
        return f"{name}: nothing to prepare, its starts measure and compile nothing on this device"
    state = "was prepared already" if document["found"] else "prepared"
    return f"{name}: {state}, {seconds:.1f} s, in {' and '.join(str(Path(file).parent) for file in document['files'])}"
