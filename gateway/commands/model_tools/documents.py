"""Models as documents of JSON, from the catalogue, machines and running replicas. It prints nothing."""

from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from engine.hostinfo import gpus
from engine.process.files import fingerprint
from engine.protocol.frames import MachineState
from engine.protocol.reports import MEMORY_REPORT_SUFFIX, WEIGHT_FILES, MemoryReport
from gateway.catalogue.catalogue import folder_of, price_of
from gateway.catalogue.model_config import read_model_config, read_sampling
from gateway.catalogue.tasks import ModelTask, read_embedding_spec, task_of
from gateway.commands.access.residencies import replicas_of
from gateway.commands.model_tools.layout import layout_here
from gateway.commands.model_tools.size import ModelSizes, sizes_of
from gateway.settings.config import Config, ModelEntryConfig
from gateway.text.tokenizer import ModelFolderError

STALE_WEIGHTS: Final = "serves the weights that its folder had before: the files there are others now"
_NO_CONFIG: Final = "its folder has no config.json that can be read"


def memory_reports(config: Config, name: str) -> list[MemoryReport]:
    """What the model's running replicas on this host report of their memory."""
    reports = []
    for path in sorted(config.run_folder.glob(f"*{MEMORY_REPORT_SUFFIX}")):
        try:
            memory = msgspec.json.decode(path.read_bytes(), type=MemoryReport)
        except (OSError, msgspec.MsgspecError):  # it ends just now
            continue
        if memory.model == name and psutil.pid_exists(memory.pid):
            reports.append(memory)
    return reports


def notes_of(memory: MemoryReport) -> list[str]:
    """What people are to know of a running replica."""
    return [note for note in (memory.note, STALE_WEIGHTS if _has_stale_weights(memory) else "") if note]


def _has_stale_weights(memory: MemoryReport) -> bool:
    now = fingerprint(Path(memory.folder).glob(WEIGHT_FILES)) if memory.weights else ""
    return memory.weights != now


def replicas_json(name: str, machines: list[MachineState]) -> list[dict[str, Any]]:
    """Where each replica is, as its machine reports; empty while no machine runs."""
    return [
        {
            "residency": replica.residency.name,
            "toward": replica.toward.name,
            **{field: getattr(replica, field) for field in ("ready_ms", "quarantined", "problem")},
            "role": replica.role.name,
            "host_kv_bytes": replica.memory.kept_bytes if replica.memory is not None else 0,
        }
        for replica in replicas_of(name, machines)
    ]


def memory_json(memory: MemoryReport) -> dict[str, Any]:
    """Where the device's bytes are; the parts add up to all of them."""
    parts = {
        "weights_bytes": memory.weights_bytes,
        "kv_pool_bytes": memory.kv_bytes,
        "workspace_bytes": memory.workspace_bytes,
        "graphs_bytes": memory.graphs_bytes,
        "free_bytes": memory.free_bytes,
    }
    document = {
        "pid": memory.pid,
        "device": memory.device,
        "device_bytes": memory.device_bytes,
        **parts,
        "driver_and_others_bytes": max(0, memory.device_bytes - sum(parts.values())),
        "kv_pool_tokens": memory.kv_blocks * memory.kv_block_tokens,
    }
    if notes := notes_of(memory):
        document["note"] = "; ".join(notes)
    if memory.coded_bytes:
        document |= {"weights_in_12_bits_bytes": memory.coded_bytes, "weights_as_bf16_bytes": memory.bf16_bytes}
    return document


def model_json(config: Config, entry: ModelEntryConfig) -> dict[str, Any]:
    folder, price = folder_of(config, entry), price_of(entry)
    document: dict[str, Any] = {
        "name": entry.name,
        "description": entry.description,
        "task": entry.task,
        "folder": str(folder),
        "aliases": list(entry.aliases),
        "replicas": entry.replicas,
        "ranks": layout_here(config, entry),
        "neurons_per_million_tokens": {name: getattr(price, name) for name in ("input", "cached_input", "output")},
        "problem": "",
    }
    try:
        model_config = read_model_config(folder)
    except ModelFolderError:
        return {**document, "problem": _NO_CONFIG if folder.is_dir() else f"there is no folder {folder}"}
    document["task"] = task_of(folder, model_config, entry)
    if (sizes := sizes_of(config, entry)) is None:
        return {**document, "problem": _NO_CONFIG}
    if sizes.weights_bytes == 0:
        return {**document, "problem": "its folder has no *.safetensors"}
    try:
        vectors = read_embedding_spec(folder, model_config, entry, ModelTask(document["task"]))
        sampling = read_sampling(folder)
    except ModelFolderError as error:
        return {**document, "problem": str(error)}
    if vectors is not None:
        document |= {"pooling": vectors.poolings[0], "max_input_tokens": vectors.tokens_max}
        document |= {"dimensions": vectors.dimensions} if vectors.dimensions else {}
    compressed = sizes.compressed
    return {
        **document,
        "context_tokens": sizes.context_tokens,
        "layers": sizes.layers,
        "sampling": sampling,
        "stored_as": sizes.parameters_type,
        "weights_bytes": sizes.stored_bytes,
        "compressed": None
        if compressed is None
        else {"level": compressed.level, "kind": compressed.kind, "original_bytes": compressed.original_bytes},
        "kv_bytes_per_token": sizes.kv_bytes_per_token,
        "kv_of_a_context_bytes": sizes.kv_bytes_of_a_context,
        "memory_bytes": _on_device(config, sizes).memory_bytes,
    }


def _on_device(config: Config, sizes: ModelSizes) -> ModelSizes:
    """The sizes on this host's devices."""
    on_gpu = sizes.compressed is None or gpus.usable_gpus(config.machine.device, gpus.installed_gpus())
    return sizes if on_gpu else sizes.on_a_cpu
