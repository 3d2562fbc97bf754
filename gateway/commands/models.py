"""`hearth models`: the catalogue's models, the memory that they take, where they are, and how a running replica uses
its device."""

from typing import Annotated, Any, Final

from cyclopts import Parameter

from gateway.catalogue.catalogue import model_entries
from gateway.commands.access.residencies import machine_reports, replicas_of, residency_text
from gateway.commands.model_tools import add, compress, import_gguf, warm
from gateway.commands.model_tools.documents import memory_json, memory_reports, model_json, replicas_json
from gateway.commands.terminal.options import Json, Source, command_app
from gateway.commands.terminal.output import fail, format_bytes, print_either, print_table

_TEACHING: Final = """\
examples:
  hearth models list                                   every model of the catalogue, and where it is
  hearth models show @cf/hearth/ember                  its folder, context, and where every GiB goes
  hearth models add @cf/acme/assistant models/assistant --pinned
  hearth models add @cf/acme/notes models/notes --priority 2 --context-tokens 16384
  hearth models remove @cf/acme/assistant              out of the catalogue; its folder stays
  hearth models warm --all                             compile and measure ahead, for the first start
  hearth models compress models/notes notes-12         weights in 12 bits each, without loss
  hearth models expand notes-12 notes-again            and back, bit for bit
  hearth models import notes.gguf --to notes           a GGUF file becomes a folder that `add` takes
  hearth pull Qwen/Qwen3-0.6B                          one more, from the hub

`add` refuses a folder that could not be served: incomplete, of an architecture that is not known, larger than any
device here, or other than its SHA256SUMS says, where it has them (sha256sum * > SHA256SUMS). [[models]] in hearth.toml
adds folders too, sets prices and sizes, and leaves models out; what it says goes before what `add` was told.
"""
app = command_app("models", "list, show, add, import, remove, warm and compress models", _TEACHING)


@app.command(name="list")
def list_models(*, json: Json = False, source: Source) -> None:
    """Every model of the catalogue."""
    config = source.load()
    machines = machine_reports(config)
    documents = [
        {**model_json(config, entry), "replicas": replicas_json(entry.name, machines)}
        for entry in model_entries(config)
    ]
    rows = [
        (
            document["name"],
            document.get("context_tokens", "-"),
            _weights_text(document),
            residency_text(list(replicas_of(document["name"], machines))),
            document["problem"] or next(filter(None, (replica["problem"] for replica in document["replicas"])), "ok"),
        )
        for document in documents
    ]
    print_either(json, documents, lambda: print_table(("MODEL", "CONTEXT", "WEIGHTS", "WHERE", "STATE"), rows))


@app.command
def show(
    name: Annotated[str, Parameter(help="its name, like @cf/hearth/ember")], /, *, json: Json = False, source: Source
) -> int:
    """One model in full."""
    config = source.load()
    entry = next((entry for entry in model_entries(config) if entry.name == name), None)
    if entry is None:
        return fail(f"the catalogue has no {name}; `hearth models list` shows what it has")
    machines = machine_reports(config)
    document = model_json(config, entry)
    document |= {
        "replicas": replicas_json(name, machines),
        "running": [memory_json(report) for report in memory_reports(config, name)],
    }
    print_either(json, document, lambda: _print(document, residency_text(list(replicas_of(name, machines)))))
    return 0


app.command(add.add)
app.command(add.remove)
app.command(warm.app)
app.command(import_gguf.app)
app.command(compress.compress_app)
app.command(compress.expand_app)


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
        elif name not in ("running", "replicas") and value not in ("", None):
            _line(name, value)
    if "memory_bytes" in document:
        print(f"{'':24} (weights and the KV of one context, the least there must be; `kv_bytes` sets the pool's size)")
    _line("where", residency)
    for parts in document["running"]:
        print(f"\nrunning as process {parts['pid']} on {parts['device']}, as it was when it was loaded:")
        for name, value in parts.items():
            if name not in ("pid", "device"):
                _line(name.replace("_bytes", ""), format_bytes(value) if name.endswith("_bytes") else f"{value:,}")


def _line(name: str, value: object) -> None:
    print(f"{name.replace('_', ' '):24} {value}")
