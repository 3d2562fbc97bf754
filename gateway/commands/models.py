"""`hearth models`: what is in the catalogue, the memory that it takes, and where a running replica's memory went."""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.wire import MEMORY_SUFFIX, Memory
from gateway.catalogue import entries, folder_of, price_of
from gateway.commands.words import add_action, add_command, fail, in_bytes, print_json, print_table, read_settings
from gateway.config import Config, ModelConfig
from gateway.tasks import Task, context_of, is_encoder, read_vectors, task_of
from gateway.text import FolderError

_TEACHING = """\
examples:
  hearth models list                                   every model of the catalogue
  hearth models show @cf/hearth/ember                  its folder, context, and where every GiB goes
  hearth pull Qwen/Qwen3-0.6B                          one more

[[models]] in hearth.toml adds folders of your own, sets prices and sizes, and leaves models out.
"""


def add(commands: Any) -> None:
    parser = add_command(commands, "models", "list the models that are served", _TEACHING)
    actions = parser.add_subparsers(dest="action", metavar="list | show", required=True)
    add_action(actions, "list", "every model of the catalogue")
    show = add_action(actions, "show", "one model in full")
    show.add_argument("name", help="its name, like @cf/hearth/ember")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a folder's config.json and weights and the entry's settings say. `kv_bytes_per_token` is at 2 bytes a
    number, with fp8 at one. Weights that are made up have no type that they are stored as."""

    weights_bytes: int
    parameters_type: str
    context_tokens: int
    layers: int
    kv_bytes_per_token: int

    @property
    def kv_bytes_of_a_context(self) -> int:
        return self.context_tokens * self.kv_bytes_per_token

    @property
    def memory_bytes(self) -> int:
        """Weights, and the KV of one full context."""
        return self.weights_bytes + self.kv_bytes_of_a_context


def run(options: argparse.Namespace) -> int:
    config = read_settings(options)
    if options.action == "list":
        return _list(config, options.json)
    found = [entry for entry in entries(config) if entry.name == options.name]
    if not found:
        return fail(f"the catalogue has no {options.name}; `hearth models list` shows what it has")
    return _show(config, found[0], options.json)


def sizes_of(config: Config, entry: ModelConfig) -> Sizes | None:
    """None where the entry's folder is no model."""
    folder = folder_of(config, entry)
    said = read_config(folder)
    try:
        heads = int(said["num_attention_heads"])
        width = int(said.get("head_dim") or said["hidden_size"] // heads)
        layers = int(said["num_hidden_layers"])
        kv_heads = int(said.get("num_key_value_heads") or heads)
        made_up = _made_up_bytes(said, layers, width * heads, width * kv_heads) if entry.random_weights else None
    except (ValueError, KeyError, TypeError):
        return None
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    context, keeps = context_of(said), not is_encoder(said)
    return Sizes(
        weights_bytes=stored if made_up is None else made_up,
        parameters_type="" if entry.random_weights else str(said.get("torch_dtype") or said.get("dtype") or "float32"),
        context_tokens=min(context, entry.context_tokens or context),
        layers=layers,
        kv_bytes_per_token=keeps * 2 * layers * kv_heads * width * (1 if entry.kv_dtype == "fp8" else 2),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; empty where there is none that can be read."""
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _made_up_bytes(said: dict[str, Any], layers: int, q: int, kv: int) -> int:
    """At 2 bytes a number: the layers' linear weights, the embedding, and a head of its own."""
    hidden, inner = int(said["hidden_size"]), int(said["intermediate_size"])
    tables = int(said["vocab_size"]) * hidden * (1 if said.get("tie_word_embeddings") else 2)
    return 2 * (tables + layers * hidden * (2 * q + 2 * kv + 3 * inner))


def running(config: Config, name: str) -> list[Memory]:
    """What the model's replicas on this host say of their memory."""
    found = []
    for path in sorted(config.run_folder.glob(f"*{MEMORY_SUFFIX}")):
        try:
            memory = msgspec.json.decode(path.read_bytes(), type=Memory)
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


def _list(config: Config, as_json: bool) -> int:
    documents = [_document(config, entry) for entry in entries(config)]
    if as_json:
        print_json(documents)
        return 0
    rows = [
        (
            document["name"],
            document.get("context_tokens", "-"),
            in_bytes(document["weights_bytes"]) if "weights_bytes" in document else "-",
            document["problem"] or "ok",
        )
        for document in documents
    ]
    print_table(("MODEL", "CONTEXT", "WEIGHTS", "STATE"), rows)
    return 0


def _show(config: Config, entry: ModelConfig, as_json: bool) -> int:
    document = {**_document(config, entry), "running": [_shares(memory) for memory in running(config, entry.name)]}
    if as_json:
        print_json(document)
        return 0
    for name, value in document.items():
        if name.endswith("_bytes") or name == "kv_bytes_per_token":
            _line(name.replace("_bytes", ""), in_bytes(value))
        elif name != "running" and value not in ("", None):
            _line(name, value)
    if "memory_bytes" in document:
        print(f"{'':24} (weights and the KV of one context, the least there must be; `kv_bytes` sets the pool's size)")
    for shares in document["running"]:
        print(f"\nrunning as process {shares.pop('pid')} on {shares.pop('device')}:")
        for name, value in shares.items():
            _line(name.replace("_bytes", ""), in_bytes(value) if name.endswith("_bytes") else f"{value:,}")
    return 0


def _line(name: str, value: object) -> None:
    print(f"{name.replace('_', ' '):24} {value}")


def _shares(memory: Memory) -> dict[str, Any]:
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
    }


def _document(config: Config, entry: ModelConfig) -> dict[str, Any]:
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
        vectors = read_vectors(folder, said, entry, Task(document["task"]))
    except FolderError as error:
        return {**document, "problem": str(error)}
    if vectors is not None:
        document |= {"pooling": vectors.poolings[0], "max_input_tokens": vectors.tokens_max}
        document |= {"dimensions": vectors.dimensions} if vectors.dimensions else {}
    return {
        **document,
        "context_tokens": sizes.context_tokens,
        "layers": sizes.layers,
        "stored_as": sizes.parameters_type,
        "weights_bytes": sizes.weights_bytes,
        "kv_bytes_per_token": sizes.kv_bytes_per_token,
        "kv_of_a_context_bytes": sizes.kv_bytes_of_a_context,
        "memory_bytes": sizes.memory_bytes,
    }
