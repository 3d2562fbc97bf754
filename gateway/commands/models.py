"""`hearth models`: the catalogue's models, the memory that they take, where they are, and how a running replica uses
its device."""

import os
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from engine.hostinfo import gpus
from engine.protocol.frames import MachineState
from engine.protocol.reports import MEMORY_REPORT_SUFFIX, MemoryReport
from gateway.catalogue.bf12_size import Bf12Size
from gateway.catalogue.catalogue import folder_of, model_entries, price_of
from gateway.catalogue.model_config import read_model_config
from gateway.catalogue.tasks import ModelTask, read_embedding_spec, task_of
from gateway.commands.access.residencies import machine_reports, replicas_of, residency_text
from gateway.commands.model_tools import add, compress, warm
from gateway.commands.model_tools.size import ModelSizes, sizes_of
from gateway.commands.terminal.options import Json, Source, command_app
from gateway.commands.terminal.output import fail, format_bytes, print_either, print_table
from gateway.config import Config, ModelEntryConfig
from gateway.text.tokenizer import ModelFolderError

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
  hearth pull Qwen/Qwen3-0.6B                          one more, from the hub

`add` refuses a folder that could not be served: incomplete, of an architecture that is not known, larger than any
device here, or other than its SHA256SUMS says, where it has them (sha256sum * > SHA256SUMS). [[models]] in hearth.toml
adds folders too, sets prices and sizes, and leaves models out; what it says goes before what `add` was told.
"""


_NO_CONFIG: Final = "its folder has no config.json that can be read"
app = command_app("models", "list, show, add, remove, warm and compress models", _TEACHING)


@app.command(name="list")
def list_models(*, json: Json = False, source: Source) -> None:
    """Every model of the catalogue."""
    config = source.load()
    machines = machine_reports(config)
    documents = [
        {**_document(config, entry), "replicas": _replicas(entry.name, machines)} for entry in model_entries(config)
    ]
    rows = [
        (
            document["name"],
            document.get("context_tokens", "-"),
            _weights_text(document),
            residency_text(list(replicas_of(document["name"], machines))),
            document["problem"] or next((one["problem"] for one in document["replicas"] if one["problem"]), "ok"),
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
    document = _document(config, entry)
    document |= {
        "replicas": _replicas(name, machines),
        "running": [_parts(one) for one in memory_reports(config, name)],
    }
    print_either(json, document, lambda: _print(document, residency_text(list(replicas_of(name, machines)))))
    return 0


app.command(add.add)
app.command(add.remove)
app.command(warm.app)
app.command(compress.compress_app)
app.command(compress.expand_app)


def memory_reports(config: Config, name: str) -> list[MemoryReport]:
    """What the model's running replicas on this host report of their memory."""
    reports = []
    for path in sorted(config.run_folder.glob(f"*{MEMORY_REPORT_SUFFIX}")):
        try:
            memory = msgspec.json.decode(path.read_bytes(), type=MemoryReport)
        except (OSError, msgspec.MsgspecError):  # it ends just now
            continue
        if memory.model == name and _is_alive(memory.pid):
            reports.append(memory)
    return reports


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _weights_text(document: dict[str, Any]) -> str:
    if "weights_bytes" not in document:
        return "-"
    return format_bytes(document["weights_bytes"]) + (", 12 bits" if document["compressed"] else "")


def _replicas(name: str, machines: list[MachineState]) -> list[dict[str, Any]]:
    """Where each replica is, as its machine reports; empty while no machine runs."""
    return [
        {
            "residency": replica.residency.name,
            "toward": replica.toward.name,
            "ready_ms": replica.ready_ms,
            "quarantined": replica.quarantined,
            "problem": replica.problem,
        }
        for replica in replicas_of(name, machines)
    ]


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


def _parts(memory: MemoryReport) -> dict[str, Any]:
    """Where the device's bytes are; the parts add up to all of them."""
    parts = {
        "weights_bytes": memory.weights_bytes,
        "kv_pool_bytes": memory.kv_bytes,
        "workspace_bytes": memory.workspace_bytes,
        "graphs_bytes": memory.graphs_bytes,
        "free_bytes": memory.free_bytes,
    }
    return {
        "pid": memory.pid,
        "device": memory.device,
        "device_bytes": memory.device_bytes,
        **parts,
        "driver_and_others_bytes": max(0, memory.device_bytes - sum(parts.values())),
        "kv_pool_tokens": memory.kv_blocks * memory.kv_block_tokens,
        **(
            {"weights_in_12_bits_bytes": memory.coded_bytes, "weights_as_bf16_bytes": memory.bf16_bytes}
            if memory.coded_bytes
            else {}
        ),
    }


def _document(config: Config, entry: ModelEntryConfig) -> dict[str, Any]:
    folder, price = folder_of(config, entry), price_of(entry)
    document: dict[str, Any] = {
        "name": entry.name,
        "description": entry.description,
        "task": entry.task,
        "folder": str(folder),
        "replicas": entry.replicas,
        "neurons_per_million_tokens": {
            "input": price.input,
            "cached_input": price.cached_input,
            "output": price.output,
        },
        "problem": "",
    }
    try:
        model_config = read_model_config(folder)
    except ModelFolderError:
        return {**document, "problem": _NO_CONFIG}
    document["task"] = task_of(folder, model_config, entry)
    sizes = sizes_of(config, entry)
    if sizes is None:
        return {**document, "problem": _NO_CONFIG}
    if sizes.weights_bytes == 0:
        return {**document, "problem": "its folder has no *.safetensors"}
    try:
        vectors = read_embedding_spec(folder, model_config, entry, ModelTask(document["task"]))
    except ModelFolderError as error:
        return {**document, "problem": str(error)}
    if vectors is not None:
        document |= {"pooling": vectors.poolings[0], "max_input_tokens": vectors.tokens_max}
        document |= {"dimensions": vectors.dimensions} if vectors.dimensions else {}
    return {
        **document,
        "context_tokens": sizes.context_tokens,
        "layers": sizes.layers,
        "stored_as": sizes.parameters_type,
        "weights_bytes": sizes.stored_bytes,
        "compressed": _compressed(sizes.compressed),
        "kv_bytes_per_token": sizes.kv_bytes_per_token,
        "kv_of_a_context_bytes": sizes.kv_bytes_of_a_context,
        "memory_bytes": _on_device(config, sizes).memory_bytes,
    }


def _compressed(size: Bf12Size | None) -> dict[str, Any] | None:
    return None if size is None else {"level": size.level, "kind": size.kind, "original_bytes": size.original_bytes}


def _on_device(config: Config, sizes: ModelSizes) -> ModelSizes:
    """The sizes on this host's devices."""
    if sizes.compressed is None or gpus.usable_gpus(config.machine.device, gpus.installed_gpus()):
        return sizes
    return sizes.on_a_cpu
