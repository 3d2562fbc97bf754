"""Whether a model's folder can be served on this host: whole, of a kind that the engine runs, with a tokenizer that
fits, and not larger than a device can ever hold. It reads no weights; a process of the engine reads their headers.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from engine.hostinfo.memory import HOST_MEMORY_DEVICE, DeviceBudget
from engine.protocol.reports import InspectionReport
from engine.protocol.specs import ModelSpec
from gateway.catalogue.catalogue import folder_of
from gateway.catalogue.tasks import EmbeddingSpec, ModelTask, read_embedding_spec, task_of
from gateway.commands.model_size import ModelSizes, read_config, sizes_of
from gateway.commands.output import format_bytes
from gateway.config import Config, ModelEntryConfig
from gateway.text.tokenizer import ModelFolderError, ModelTokenizer

_LOOK_S: Final = 60.0
_NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_CONTEXT_LEAST: Final = 16
_COMPLETE: Final = "get the folder again, complete: `hearth pull` does, where the hub has it"
_OTHER: Final = "correct config.json or the settings, or serve another model"
_OF_CONFIG: Final = 2  # the status of an inspection that found config.json to be wrong


class UnservableFolder(ValueError):
    """This folder cannot be served here: what was found, and what to do."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(f"{found}\n  -> {advice}")
        self.found = found
        self.advice = advice


@dataclass(frozen=True, slots=True)
class FolderReport:
    """What is in a folder that can be served. `vectors` is None where it writes text."""

    sizes: ModelSizes
    text: ModelTokenizer
    vectors: EmbeddingSpec | None


def inspect_folder(config: Config, entry: ModelEntryConfig, rooms: list[DeviceBudget]) -> FolderReport:
    """Raises Unserved. `rooms` are the devices of this host, of which a replica needs one."""
    folder = folder_of(config, entry)
    if not folder.is_dir():
        raise UnservableFolder(f"there is no folder {folder}", "correct its path")
    document = read_config(folder)
    try:
        task = task_of(folder, document, entry)
        inspected = None if entry.random_weights else _inspected(folder, entry, task)
        text, vectors = ModelTokenizer(folder), read_embedding_spec(folder, document, entry, task)
    except ModelFolderError as error:
        raise UnservableFolder(str(error), _COMPLETE) from error
    sizes = sizes_of(config, entry)
    if sizes is None:
        raise UnservableFolder(f"{folder}/config.json does not say how large the model is", _COMPLETE)
    _require_ids(folder, text, int(document["vocab_size"]))
    _require_room(entry, sizes, inspected, task, rooms)
    return FolderReport(sizes, text, vectors)


def _inspected(folder: Path, entry: ModelEntryConfig, task: ModelTask) -> InspectionReport:
    """What its replica loads. Raises Unserved with what the engine says of the folder."""
    spec = ModelSpec(
        name=entry.name,
        folder=str(folder),
        context_tokens=entry.context_tokens,
        vectors=task is ModelTask.EMBEDDINGS,
    )
    command = [sys.executable, "-P", "-m", "engine.weights.validate", msgspec.json.encode(spec).decode()]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_S)
    except subprocess.TimeoutExpired as error:
        raise UnservableFolder(
            f"{folder} could not be looked through within {_LOOK_S:.0f} s", "look at its disk"
        ) from error
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or [f"looking at {folder} ended with status {asked.returncode}"]
        raise UnservableFolder(said[-1], _OTHER if asked.returncode == _OF_CONFIG else _COMPLETE)
    return msgspec.json.decode(asked.stdout, type=InspectionReport)


def _require_ids(folder: Path, text: ModelTokenizer, vocabulary: int) -> None:
    spelled = [id for token, id in text.added_tokens.items() if token in text.template]
    largest = max(text.plain_ids - 1, *spelled, 0)
    if largest >= vocabulary:
        found = f"{folder}: its tokenizer gives ids up to {largest}, config.json has a vocabulary of {vocabulary}"
        raise UnservableFolder(found, "tokenizer.json is another model's: get the one that belongs to the weights")


def _require_room(
    entry: ModelEntryConfig,
    sizes: ModelSizes,
    inspected: InspectionReport | None,
    task: ModelTask,
    rooms: list[DeviceBudget],
) -> None:
    """Raises Unserved where weights and the KV of one context are more than the largest device may hold."""
    room = max(rooms, key=lambda room: room.budget_bytes)
    weights = sizes.weights_bytes if inspected is None else _weights_bytes(entry, inspected, task, room)
    needed = weights + sizes.kv_bytes_of_a_context
    if needed <= room.budget_bytes:
        return
    kv = format_bytes(sizes.kv_bytes_of_a_context)
    held = f"{format_bytes(room.budget_bytes)} of {room.device}"
    if room.budget_bytes < room.max_bytes:
        held += " that machine.device_bytes leaves them"
    raise UnservableFolder(
        f"{format_bytes(weights)} of weights and {kv} for a context of {sizes.context_tokens:,} tokens are "
        f"{format_bytes(needed - room.budget_bytes)} more than the {held}",
        " or ".join(_helps(entry, sizes, weights, room)) or "use a smaller model, or a device with more memory",
    )


def _weights_bytes(entry: ModelEntryConfig, inspected: InspectionReport, task: ModelTask, room: DeviceBudget) -> int:
    """On the device: only GPUs have weights in 12 bits, and only beside others in bfloat16."""
    number_bytes = _number_bytes(entry, task, room)
    if room.device == HOST_MEMORY_DEVICE or entry.dtype not in ("auto", "bfloat16"):
        return inspected.numbers * number_bytes
    return (inspected.numbers - inspected.coded_numbers) * number_bytes + inspected.coded_bytes


def _number_bytes(entry: ModelEntryConfig, task: ModelTask, room: DeviceBudget) -> int:
    """Of a weight on the device, at the least: what `auto` chooses for text on a CPU is measured at each start."""
    vectors_on_a_cpu = room.device == HOST_MEMORY_DEVICE and task is not ModelTask.GENERATION
    return _NUMBER_BYTES.get(entry.dtype, 4 if vectors_on_a_cpu else 2)


def _helps(entry: ModelEntryConfig, sizes: ModelSizes, weights: int, room: DeviceBudget) -> list[str]:
    """Each alone would make it fit."""
    kv, left = sizes.kv_bytes_of_a_context, room.budget_bytes - weights
    helps = []
    if kv and left >= _CONTEXT_LEAST * sizes.kv_bytes_per_token:
        helps.append(f"set context_tokens to at most {left // sizes.kv_bytes_per_token}")
    if room.device != HOST_MEMORY_DEVICE and entry.kv_dtype == "auto" and kv // 2 <= left:
        helps.append('set kv_dtype = "fp8"')
    if entry.dtype == "float32" and weights // 2 + kv <= room.budget_bytes:
        helps.append('set dtype = "bfloat16"')
    if sizes.could_be_compressed and room.device != HOST_MEMORY_DEVICE and weights * 3 // 4 + kv <= room.budget_bytes:
        helps.append("compress it (`hearth models compress`)")
    if weights + kv <= room.max_bytes:
        helps.append(f"raise machine.device_bytes to at least {weights + kv}")
    return helps
