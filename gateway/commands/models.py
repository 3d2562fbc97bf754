"""`hearth models`: what is in the catalogue, what memory it takes, where it is, and where a running replica's memory
went."""

import argparse
import os
from typing import Any

import msgspec

from engine.hostinfo import gpus
from engine.protocol.frames import MachineState
from engine.protocol.reports import MEMORY_REPORT_SUFFIX, MemoryReport
from gateway.catalogue.bf12_size import Bf12Size
from gateway.catalogue.catalogue import folder_of, model_entries, price_of
from gateway.catalogue.tasks import ModelTask, read_embedding_spec, task_of
from gateway.commands import models_add, models_compress, models_warm
from gateway.commands.model_size import ModelSizes, read_config, sizes_of
from gateway.commands.output import add_action, add_command, fail, format_bytes, print_json, print_table, read_settings
from gateway.commands.residencies import machine_reports, replicas_of, residency_text
from gateway.config import Config, ModelEntryConfig
from gateway.text.tokenizer import ModelFolderError

_TEACHING = """\
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


def add(commands: Any) -> None:
    parser = add_command(commands, "models", "list, show, add, remove, warm and compress models", _TEACHING)
    named = "list | show | add | remove | warm | compress | expand"
    actions = parser.add_subparsers(dest="action", metavar=named, required=True)
    add_action(actions, "list", "every model of the catalogue")
    show = add_action(actions, "show", "one model in full")
    show.add_argument("name", help="its name, like @cf/hearth/ember")
    models_add.add(actions)
    models_warm.add(actions)
    models_compress.add(actions)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    actions = {
        "list": _list,
        "show": _show,
        "add": models_add.add_model,
        "remove": models_add.remove_model,
        "warm": models_warm.warm_models,
        "compress": models_compress.compress_model,
        "expand": models_compress.expand_model,
    }
    return actions[options.action](read_settings(options), options)


def memory_reports(config: Config, name: str) -> list[MemoryReport]:
    """What the model's replicas on this host say of their memory."""
    found = []
    for path in sorted(config.run_folder.glob(f"*{MEMORY_REPORT_SUFFIX}")):
        try:
            memory = msgspec.json.decode(path.read_bytes(), type=MemoryReport)
        except (OSError, msgspec.MsgspecError):  # it ends just now
            continue
        if memory.model == name and _lives(memory.pid):
            found.append(memory)
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _list(config: Config, options: argparse.Namespace) -> int:
    said = machine_reports(config)
    documents = [{**_document(config, entry), "replicas": _places(entry.name, said)} for entry in model_entries(config)]
    if options.json:
        print_json(documents)
        return 0
    rows = [
        (
            document["name"],
            document.get("context_tokens", "-"),
            _weights_in_words(document),
            residency_text(list(replicas_of(document["name"], said))),
            document["problem"] or next((one["problem"] for one in document["replicas"] if one["problem"]), "ok"),
        )
        for document in documents
    ]
    print_table(("MODEL", "CONTEXT", "WEIGHTS", "WHERE", "STATE"), rows)
    return 0


def _weights_in_words(document: dict[str, Any]) -> str:
    if "weights_bytes" not in document:
        return "-"
    return format_bytes(document["weights_bytes"]) + (", 12 bits" if document["compressed"] else "")


def _places(name: str, said: list[MachineState]) -> list[dict[str, Any]]:
    """Where each replica is, as its machine says; none while no machine runs."""
    return [
        {
            "residency": replica.residency.name,
            "toward": replica.toward.name,
            "ready_ms": replica.ready_ms,
            "quarantined": replica.quarantined,
            "problem": replica.problem,
        }
        for replica in replicas_of(name, said)
    ]


def _show(config: Config, options: argparse.Namespace) -> int:
    entry = next((entry for entry in model_entries(config) if entry.name == options.name), None)
    if entry is None:
        return fail(f"the catalogue has no {options.name}; `hearth models list` shows what it has")
    said, here = machine_reports(config), [_shares(memory) for memory in memory_reports(config, entry.name)]
    document = {**_document(config, entry), "replicas": _places(entry.name, said), "running": here}
    if options.json:
        print_json(document)
        return 0
    for name, value in document.items():
        if name.endswith("_bytes") or name == "kv_bytes_per_token":
            _line(name.replace("_bytes", ""), format_bytes(value))
        elif name == "compressed" and value is not None:
            _line(
                name, f"{value['kind']}; bf16 would be {format_bytes(value['original_bytes'])}; level {value['level']}"
            )
        elif name not in ("running", "replicas") and value not in ("", None):
            _line(name, value)
    if "memory_bytes" in document:
        print(f"{'':24} (weights and the KV of one context, the least there must be; `kv_bytes` sets the pool's size)")
    _line("where", residency_text(list(replicas_of(entry.name, said))))
    for shares in here:
        print(f"\nrunning as process {shares.pop('pid')} on {shares.pop('device')}, as it was when it was loaded:")
        for name, value in shares.items():
            _line(name.replace("_bytes", ""), format_bytes(value) if name.endswith("_bytes") else f"{value:,}")
    return 0


def _line(name: str, value: object) -> None:
    print(f"{name.replace('_', ' '):24} {value}")


def _shares(memory: MemoryReport) -> dict[str, Any]:
    """Where the device's bytes are: the parts add up to it."""
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
        **({} if not memory.coded_bytes else _coded(memory)),
    }


def _coded(memory: MemoryReport) -> dict[str, int]:
    """Of the weights what is in 12 bits a number, and what all of them would take without that."""
    return {"weights_in_12_bits_bytes": memory.coded_bytes, "weights_as_bf16_bytes": memory.bf16_bytes}


def _document(config: Config, entry: ModelEntryConfig) -> dict[str, Any]:
    folder = folder_of(config, entry)
    price = price_of(entry)
    document: dict[str, Any] = {
        "name": entry.name,
        "description": entry.description,
        "task": task_of(folder, said, entry) if (said := read_config(folder)) else entry.task,
        "folder": str(folder),
        "replicas": entry.replicas,
        "neurons_per_million_tokens": {
            "input": price.input,
            "cached_input": price.cached_input,
            "output": price.output,
        },
        "problem": "",
    }
    sizes = sizes_of(config, entry)
    if sizes is None:
        return {**document, "problem": "its folder has no config.json that can be read"}
    if sizes.weights_bytes == 0:
        return {**document, "problem": "its folder has no *.safetensors"}
    try:
        vectors = read_embedding_spec(folder, said, entry, ModelTask(document["task"]))
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


def _compressed(said: Bf12Size | None) -> dict[str, Any] | None:
    return None if said is None else {"level": said.level, "kind": said.kind, "original_bytes": said.original_bytes}


def _on_device(config: Config, sizes: ModelSizes) -> ModelSizes:
    """As the devices of this host have it."""
    if sizes.compressed is None or gpus.usable_gpus(config.machine.device, gpus.installed_gpus()):
        return sizes
    return sizes.on_a_cpu
