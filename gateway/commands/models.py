"""`hearth models`: the catalogue's models, the memory that they take, where they are, and how a running replica uses
its device."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from engine.protocol.frames import MachineState
from gateway.catalogue.catalogue import model_entries
from gateway.catalogue.report import CatalogueReport, catalogue_reports
from gateway.commands.access.residencies import machine_reports, replicas_of, residency_text
from gateway.commands.model_tools import add, compress, import_gguf, warm
from gateway.commands.model_tools.documents import memory_json, memory_reports, model_json, notes_of, replicas_json
from gateway.commands.model_tools.progress import LIVE, leaving_models, liveness
from gateway.commands.model_tools.registration import find_entry
from gateway.commands.model_tools.shared_progress import add_hosts, hosts_text
from gateway.commands.terminal.options import Json, Source, command_app
from gateway.commands.terminal.output import fail, format_amount, format_bytes, print_either, print_table
from gateway.settings.config import Config, ModelEntryConfig, SettingsError

_TEACHING: Final = """\
examples:
  hearth models list                                   every model of the catalogue, and where it is
  hearth models show @cf/hearth/ember                  its folder, context, and where every GiB goes
  hearth models add @cf/acme/assistant models/assistant --pinned
  hearth models add notes models/notes --alias gpt-4o-mini --context-tokens 16384 --wait
  hearth models set notes --price-input 500 --price-output 2000 --no-pinned
  hearth models remove @cf/acme/assistant              out of the catalogue; its folder stays
  hearth models warm --all                             compile and measure ahead, for the first start
  hearth models compress models/notes notes-12         weights in 12 bits each, without loss
  hearth models expand notes-12 notes-again            and back, bit for bit
  hearth models quantize models/notes notes-fp8 --to fp8
  hearth models import notes.gguf --to notes           a GGUF file becomes a folder that `add` takes
  hearth pull Qwen/Qwen3-0.6B                          one more, from the hub

`add` refuses a folder that could not be served: incomplete, of an architecture that is not known, larger than any
device here, or other than its SHA256SUMS says, where it has them (sha256sum * > SHA256SUMS). [[models]] in hearth.toml
adds folders too, sets prices and sizes, and leaves models out; what it says goes before what `add` was told.
On a gateway's host of a cluster `add`, `set` and `remove` are for all its hosts, which fetch the files from each other.
A server that runs takes all this up within two seconds, also edits of hearth.toml: no call is refused or cut for it,
calls that have begun end as they began, and `list` shows what is live. --wait waits until it is.
"""
app = command_app("models", "list, show, add, import, remove, warm and compress models", _TEACHING)


@app.command(name="list")
def list_models(*, json: Json = False, source: Source) -> int:
    """Every model of the catalogue: what is asked for, and what is live of it."""
    refused = ""
    try:
        config = source.load()
        entries = model_entries(config)
    except SettingsError as error:
        refused, config, entries = str(error), source.load_without_models(), []
    machines, gateways = machine_reports(config), list(catalogue_reports(config))
    documents = [_listed(config, entry, gateways, machines) for entry in entries]
    for name, what in leaving_models(entries, gateways, machines).items():
        state = "what is asked for cannot be read" if refused else what
        documents.append({"name": name, "replicas": replicas_json(name, machines), "problem": "", "live": state})
    unknown = add_hosts(config, documents)
    rows = [
        (
            *(document["name"], ", ".join(document.get("aliases", [])), document.get("context_tokens", "-")),
            _weights_text(document),
            residency_text(list(replicas_of(document["name"], machines))),
            document["problem"] or _state_text(config, document),
        )
        for document in documents
    ]
    heads = ("MODEL", "ALIASES", "CONTEXT", "WEIGHTS", "WHERE", "STATE")
    print_either(json, documents, lambda: print_table(heads, rows))
    if unknown:
        print(f"how far other hosts are is not known: {unknown}", file=sys.stderr)
    return fail(f"{refused}\nWhat was asked for before stays in force until that is corrected") if refused else 0


@app.command
def show(name: add.Name, /, *, json: Json = False, source: Source) -> int:
    """One model in full."""
    config = source.load()
    entry, problem = find_entry(config, name)
    if entry is None:
        return fail(problem)
    name, machines = entry.name, machine_reports(config)
    document = model_json(config, entry)
    document |= {
        "replicas": replicas_json(name, machines),
        "running": [memory_json(report) for report in memory_reports(config, name)],
    }
    print_either(json, document, lambda: _print(document, residency_text(list(replicas_of(name, machines)))))
    return 0


app.command(add.add)
app.command(add.change, name="set")
app.command(add.remove)
app.command(warm.app)
app.command(import_gguf.app)
app.command(compress.compress_app)
app.command(compress.expand_app)
app.command(compress.quantize_app)


def _remarks(config: Config, document: dict[str, Any]) -> Iterator[str]:
    """What the model's replicas have to say, each or an empty text: problems first."""
    for replica in document["replicas"]:
        yield replica["problem"]
    for memory in memory_reports(config, document["name"]):
        yield from notes_of(memory)


def _listed(
    config: Config,
    entry: ModelEntryConfig,
    gateways: Sequence[CatalogueReport],
    machines: list[MachineState],
) -> dict[str, Any]:
    live = liveness(config, entry, gateways, machines)
    return {**model_json(config, entry), "replicas": replicas_json(entry.name, machines), "live": live}


def _state_text(config: Config, document: dict[str, Any]) -> str:
    live = hosts_text(document) or document["live"]
    return live if live not in ("", LIVE) else next(filter(None, _remarks(config, document)), live or "ok")


def _weights_text(document: dict[str, Any]) -> str:
    if "weights_bytes" not in document:
        return "-"
    return format_bytes(document["weights_bytes"]) + (", 12 bits" if document["compressed"] else "")


def _print(document: dict[str, Any], residency: str) -> None:
    for name, value in document.items():
        if name.endswith("_bytes") or name == "kv_bytes_per_token":
            _line(name.replace("_bytes", ""), format_bytes(value))
        elif name == "compressed" and value is not None:
            original = format_bytes(value["original_bytes"])
            _line(name, f"{value['kind']}; bf16 would be {original}; level {value['level']}")
        elif name not in ("running", "replicas") and value not in ("", None, [], {}):
            _line(name, _value_text(name, value))
    if "memory_bytes" in document:
        print(f"{'':28} (weights and the KV of one context, the least there must be; `kv_bytes` sets the pool's size)")
    _line("where", residency)
    if in_host := sum(replica["host_kv_bytes"] for replica in document["replicas"]):
        _line("KV in host memory", format_bytes(in_host))
    for parts in document["running"]:
        print(f"\nrunning as process {parts['pid']} on {parts['device']}, as it was when it was loaded:")
        for name, value in parts.items():
            if name not in ("pid", "device"):
                _line(name.replace("_bytes", ""), _value_text(name, value))


def _value_text(name: str, value: object) -> str:
    if isinstance(value, int):
        return format_bytes(value) if name.endswith("_bytes") else f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{part.replace('_', ' ')} {format_amount(amount)}" for part, amount in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)


def _line(name: str, value: object) -> None:
    print(f"{name.replace('_', ' '):28} {value}")
