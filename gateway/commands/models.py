"""`hearth models`: what is in the catalogue, and the memory that it takes."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.catalogue import entries, folder_of, price_of
from gateway.commands.words import add_action, add_command, fail, in_bytes, print_json, print_table, read_settings
from gateway.config import Config, ModelConfig

_TEACHING = """\
examples:
  hearth models list                                   every model of the catalogue
  hearth models show @cf/hearth/ember                  its folder, context, and the memory that it takes
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
    """What a folder's config.json and weights say. `kv_bytes_per_token` is at 2 bytes a number."""

    weights_bytes: int
    parameters_type: str
    context_tokens: int
    layers: int
    kv_bytes_per_token: int

    @property
    def memory_bytes(self) -> int:
        """Weights, and the KV of one full context."""
        return self.weights_bytes + self.context_tokens * self.kv_bytes_per_token


def run(options: argparse.Namespace) -> int:
    config = read_settings(options)
    if options.action == "list":
        return _list(config, options.json)
    found = [entry for entry in entries(config) if entry.name == options.name]
    if not found:
        return fail(f"the catalogue has no {options.name}; `hearth models list` shows what it has")
    return _show(config, found[0], options.json)


def sizes_of(folder: Path) -> Sizes | None:
    """None where the folder is no model."""
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = int(said["num_attention_heads"])
        width = int(said.get("head_dim") or said["hidden_size"] // heads)
        layers = int(said["num_hidden_layers"])
        kv_heads = int(said.get("num_key_value_heads") or heads)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Sizes(
        weights_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        parameters_type=str(said.get("torch_dtype") or said.get("dtype") or "float32"),
        context_tokens=int(said.get("max_position_embeddings") or 2048),
        layers=layers,
        kv_bytes_per_token=2 * 2 * layers * kv_heads * width,
    )


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
    document = _document(config, entry)
    if as_json:
        print_json(document)
        return 0
    lines = dict(document)
    for name in ("weights_bytes", "kv_bytes_per_token", "memory_bytes"):
        if name in lines:
            lines[name.replace("_bytes", "")] = in_bytes(lines.pop(name))
    for name, value in lines.items():
        if value not in ("", None):
            print(f"{name.replace('_', ' '):18} {value}")
    if "memory_bytes" in document:
        print("                   (memory: weights and the KV of one full context; `kv_bytes` sets more or less)")
    return 0


def _document(config: Config, entry: ModelConfig) -> dict[str, Any]:
    folder = folder_of(config, entry)
    price = price_of(entry)
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
    sizes = sizes_of(folder)
    if sizes is None:
        return {**document, "problem": "its folder has no config.json that can be read"}
    if sizes.weights_bytes == 0:
        return {**document, "problem": "its folder has no *.safetensors"}
    return {
        **document,
        "context_tokens": min(sizes.context_tokens, entry.context_tokens or sizes.context_tokens),
        "layers": sizes.layers,
        "stored_as": sizes.parameters_type,
        "weights_bytes": sizes.weights_bytes,
        "kv_bytes_per_token": sizes.kv_bytes_per_token,
        "memory_bytes": sizes.memory_bytes,
    }
