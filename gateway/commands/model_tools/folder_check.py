"""Whether a model's folder can be served on this host: whole, of a kind that the engine runs, with a tokenizer that
fits, and not larger than a device can ever hold. It reads no weights; a process of the engine reads their headers.
"""

import contextlib
import subprocess
import sys
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.hostinfo.memory import HOST_MEMORY_DEVICE, DeviceBudget
from engine.protocol.rank_layout import RankLayout, layout_on
from engine.protocol.reports import InspectionReport
from engine.protocol.specs import ModelSpec
from gateway.catalogue.catalogue import folder_of, spec_of
from gateway.catalogue.model_config import read_json, read_model_config
from gateway.catalogue.tasks import EmbeddingSpec, ModelTask, read_embedding_spec, task_of
from gateway.commands.model_tools.size import ModelSizes, sizes_of
from gateway.commands.terminal.output import format_bytes
from gateway.settings.config import Config, ModelEntryConfig
from gateway.text.tokenizer import ModelFolderError, ModelTokenizer

_INSPECTION_S: Final = 60.0
_NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_MIN_CONTEXT: Final = 16
_GET_AGAIN: Final = "get the folder again, complete: `hearth pull` does, where the hub has it"
_CORRECT: Final = "correct config.json or the settings, or serve another model"
_OF_A_FILE: Final = "name the folder; of a GGUF file `hearth models import FILE --to FOLDER` makes one"
FOREIGN_TOKENIZER: Final = "tokenizer.json is another model's: get the one that belongs to the weights"
_WRONG_CONFIG_STATUS: Final = 2  # of an inspection: config.json is wrong


class UnservableFolder(ValueError):
    """This folder cannot be served here: the problem, and what to do."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}\n  -> {advice}")
        self.problem = problem
        self.advice = advice


@dataclass(frozen=True, slots=True)
class FolderReport:
    """What is in a folder that can be served. `vectors` is None for a model that writes text."""

    sizes: ModelSizes
    tokenizer: ModelTokenizer
    vectors: EmbeddingSpec | None


def inspect_folder(config: Config, entry: ModelEntryConfig, budgets: list[DeviceBudget]) -> FolderReport:
    """`budgets` are the devices of this host; a replica needs one of them. Raises UnservableFolder."""
    folder = folder_of(config, entry)
    if folder.is_file():
        raise UnservableFolder(f"{folder} is a file", _OF_A_FILE)
    if not folder.is_dir():
        raise UnservableFolder(f"there is no folder {folder}", "correct its path")
    model_config: dict[str, Any] = {}
    with contextlib.suppress(ModelFolderError):  # the engine says below what is wrong with it
        model_config = read_model_config(folder)
    try:
        task = task_of(folder, model_config, entry)
        inspected = None if entry.random_weights else _inspected(folder, entry, task)
        tokenizer, vectors = ModelTokenizer(folder), read_embedding_spec(folder, model_config, entry, task)
    except ModelFolderError as error:
        raise UnservableFolder(str(error), _GET_AGAIN) from error
    sizes = sizes_of(config, entry)
    if sizes is None:
        raise UnservableFolder(f"{folder}/config.json does not say how large the model is", _GET_AGAIN)
    _require_known_ids(folder, tokenizer, int(model_config["vocab_size"]))
    if task is ModelTask.GENERATION:
        _require_known_ends(folder, tokenizer, model_config)
    spec = spec_of(config, msgspec.structs.replace(entry, public_prefixes=[]))
    _require_fit(entry, sizes, inspected, task, budgets, spec)
    return FolderReport(sizes, tokenizer, vectors)


def _inspected(folder: Path, entry: ModelEntryConfig, task: ModelTask) -> InspectionReport:
    """What a replica would load. Raises UnservableFolder with the engine's reason."""
    vectors = task is ModelTask.EMBEDDINGS
    spec = ModelSpec(name=entry.name, folder=str(folder), context_tokens=entry.context_tokens, vectors=vectors)
    command = [sys.executable, "-P", "-m", "engine.weights.validate", msgspec.json.encode(spec).decode()]
    try:
        inspection = subprocess.run(command, capture_output=True, text=True, timeout=_INSPECTION_S)
    except subprocess.TimeoutExpired as error:
        raise UnservableFolder(
            f"{folder} could not be looked through within {_INSPECTION_S:.0f} s", "look at its disk"
        ) from error
    if status := inspection.returncode:
        lines = inspection.stderr.strip().splitlines() or [f"looking at {folder} ended with status {status}"]
        raise UnservableFolder(lines[-1], _CORRECT if status == _WRONG_CONFIG_STATUS else _GET_AGAIN)
    return msgspec.json.decode(inspection.stdout, type=InspectionReport)


def _require_known_ids(folder: Path, tokenizer: ModelTokenizer, vocabulary: int) -> None:
    used = [id for token, id in tokenizer.added_tokens.items() if token in tokenizer.template]
    largest = max(tokenizer.plain_ids - 1, *used, 0)
    if largest >= vocabulary:
        problem = f"{folder}: its tokenizer gives ids up to {largest}, config.json has a vocabulary of {vocabulary}"
        raise UnservableFolder(problem, FOREIGN_TOKENIZER)


def _require_known_ends(folder: Path, tokenizer: ModelTokenizer, model_config: dict[str, Any]) -> None:
    """Tokens that end an answer are control tokens: where one is a piece of text to the tokenizer, or nothing, the
    weights learned another one's."""
    generation = read_json(folder / "generation_config.json", {})
    control = set(tokenizer.added_tokens.values())
    for source in (generation, model_config):
        named = source.get("eos_token_id") if isinstance(source, dict) else None
        ends = [id for id in (named if isinstance(named, list) else [named]) if isinstance(id, int)]
        if foreign := [id for id in ends if id not in control]:
            problem = f"{folder}: answers end with token {foreign[0]}, which is no control token of tokenizer.json"
            raise UnservableFolder(problem, FOREIGN_TOKENIZER)


def _require_fit(
    entry: ModelEntryConfig,
    sizes: ModelSizes,
    inspected: InspectionReport | None,
    task: ModelTask,
    budgets: list[DeviceBudget],
    spec: ModelSpec,
) -> None:
    """Raises UnservableFolder where weights and the KV of one context are more than the devices may hold that it is
    on, or where it does not divide among them."""
    ranks = _require_ranks(spec, budgets)
    roomiest = sorted(budgets, key=lambda budget: -budget.budget_bytes)
    budget = roomiest[ranks - 1]
    if ranks > 1:
        budget = DeviceBudget(f"{ranks} x {budget.device}", *(ranks * count for count in budget[1:]))
    weights = sizes.weights_bytes if inspected is None else _weights_bytes(entry, inspected, task, budget)
    needed = weights + sizes.kv_bytes_of_a_context
    if needed <= budget.budget_bytes:
        return
    kv = format_bytes(sizes.kv_bytes_of_a_context)
    limit = f"{format_bytes(budget.budget_bytes)} of {budget.device}"
    if budget.budget_bytes < budget.max_bytes:
        limit += " that machine.device_bytes leaves them"
    raise UnservableFolder(
        f"{format_bytes(weights)} of weights and {kv} for a context of {sizes.context_tokens:,} tokens are "
        f"{format_bytes(needed - budget.budget_bytes)} more than the {limit}",
        " or ".join(_remedies(entry, sizes, weights, budget)) or "use a smaller model, or a device with more memory",
    )


def _require_ranks(spec: ModelSpec, budgets: list[DeviceBudget]) -> int:
    """How many devices the model is on at once. Raises UnservableFolder where it cannot be on so many."""
    layout = RankLayout(spec.gpus or 1, spec.stages or 1)
    if budgets[0].device != HOST_MEMORY_DEVICE:  # links say how, and not on how many
        layout = layout_on(spec, [budget.budget_bytes for budget in budgets])
    if spec.most_ranks % layout.gpus:
        counts = ", ".join(str(count) for count in range(1, spec.most_ranks + 1) if spec.most_ranks % count == 0)
        raise UnservableFolder(f"it cannot be cut into {layout.gpus} ranks", f"set gpus to one of {counts}")
    if layout.stages > max(1, spec.layers):
        raise UnservableFolder(
            f"stages = {layout.stages}, and the model has {spec.layers} layers", "set stages to fewer"
        )
    if budgets[0].device == HOST_MEMORY_DEVICE:
        return 1  # its ranks share the memory
    if layout.devices > len(budgets):
        stages = f" in {layout.stages} stages" if layout.stages > 1 else ""
        raise UnservableFolder(
            f"gpus = {layout.gpus}{stages}, and models may use {len(budgets)} here",
            "set gpus to fewer" if layout.stages == 1 else "set gpus or stages to fewer",
        )
    return layout.devices


def _weights_bytes(entry: ModelEntryConfig, inspected: InspectionReport, task: ModelTask, budget: DeviceBudget) -> int:
    """Bytes on the device, at least: only GPUs keep weights in 12 bits, and only beside others in bfloat16; a CPU
    measures at each start what the type `auto` means for text, and as one rank has what encodes images beside."""
    on_cpu = budget.device == HOST_MEMORY_DEVICE
    number_bytes = _NUMBER_BYTES.get(entry.dtype, 4 if on_cpu and task is not ModelTask.GENERATION else 2)
    if on_cpu and {entry.gpus, entry.stages} <= {1, "auto"}:
        return (inspected.numbers + inspected.image_numbers) * number_bytes
    if on_cpu or entry.dtype not in ("auto", "bfloat16"):
        return inspected.numbers * number_bytes
    return (inspected.numbers - inspected.coded_numbers) * number_bytes + inspected.coded_bytes


def _remedies(entry: ModelEntryConfig, sizes: ModelSizes, weights: int, budget: DeviceBudget) -> list[str]:
    """Changes that each alone would make the model fit."""
    kv, left = sizes.kv_bytes_of_a_context, budget.budget_bytes - weights
    on_gpu, remedies = budget.device != HOST_MEMORY_DEVICE, []
    fitting = bisect_right(range(1, sizes.context_tokens), left, key=sizes.kv_bytes_of) if kv else 0
    if fitting >= _MIN_CONTEXT:
        remedies.append(f"set context_tokens to at most {fitting}")
    if on_gpu and entry.kv_dtype == "auto" and kv // 2 <= left:
        remedies.append('set kv_dtype = "fp8"')
    if entry.dtype == "float32" and weights // 2 + kv <= budget.budget_bytes:
        remedies.append('set dtype = "bfloat16"')
    if sizes.could_be_compressed and on_gpu and weights * 3 // 4 + kv <= budget.budget_bytes:
        remedies.append("compress it (`hearth models compress`)")
    if weights + kv <= budget.max_bytes:
        remedies.append(f"raise machine.device_bytes to at least {weights + kv}")
    return remedies
