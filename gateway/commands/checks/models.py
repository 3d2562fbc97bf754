"""The catalogue's models: whether each can be served, whether all fit, and where running machines have them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.hostinfo.memory import HOST_MEMORY_DEVICE, DeviceBudget, available_memory_bytes
from engine.protocol.specs import HOST_MEMORY_SHARE
from gateway.catalogue.catalogue import model_entries
from gateway.commands.access.residencies import machine_reports, replicas_of, residency_text
from gateway.commands.checks.finding import Finding, FindingLevel, good, note, wrong
from gateway.commands.model_tools.folder_check import FolderReport, UnservableFolder, inspect_folder
from gateway.commands.model_tools.size import ModelSizes, sizes_of
from gateway.commands.terminal.output import format_bytes
from gateway.config import Config, ModelEntryConfig


class SizedModel(NamedTuple):
    """A model of the catalogue with its sizes on this host."""

    entry: ModelEntryConfig
    sizes: ModelSizes

    @property
    def device_bytes(self) -> int:
        """Bytes that its replicas take together on devices."""
        return self.entry.replicas * self.sizes.memory_bytes

    @property
    def standby_bytes(self) -> int:
        """Host memory that its replicas take at most while they sleep there."""
        return self.entry.replicas * (self.sizes.weights_bytes + self.entry.kept_kv_bytes)


def models(config: Config, budgets: list[DeviceBudget]) -> Iterator[Finding]:
    for entry in model_entries(config):
        try:
            report = inspect_folder(config, entry, budgets)
        except UnservableFolder as unserved:
            advice = f"{unserved.advice}; `serve = false` in its [[models]] leaves it out"
            yield wrong("model", f"{entry.name}: {unserved.problem}", advice)
            continue
        yield _servable(entry, report)


def _servable(entry: ModelEntryConfig, report: FolderReport) -> Finding:
    sizes, vectors = report.sizes, report.vectors
    if vectors is not None:
        gives = f"vectors of {vectors.dimensions} numbers" if vectors.dimensions else "scores"
        text = f"{entry.name}: {format_bytes(sizes.stored_bytes)}, {gives}, texts of {vectors.tokens_max:,} tokens"
        return good("model", text)
    chats = "" if report.tokenizer.has_chat_template else ", no chat template: callers must send `prompt`"
    text = f"{entry.name}: {format_bytes(sizes.stored_bytes)}, context {sizes.context_tokens:,}{chats}"
    return Finding("model", FindingLevel.GOOD if report.tokenizer.has_chat_template else FindingLevel.NOTE, text)


def memory(config: Config, budgets: list[DeviceBudget]) -> Iterator[Finding]:
    """Whether the models can be on the devices together; where not, whether they can take turns."""
    on_gpus = budgets[0].device != HOST_MEMORY_DEVICE
    sized = [(entry, sizes) for entry in model_entries(config) if (sizes := sizes_of(config, entry)) is not None]
    models = [SizedModel(entry, sizes if on_gpus else sizes.on_a_cpu) for entry, sizes in sized]
    pinned = [model for model in models if model.entry.pinned]
    others = [model for model in models if not model.entry.pinned]
    budget, needed = sum(device.budget_bytes for device in budgets), sum(model.device_bytes for model in models)
    where = f"{len(budgets)} GPU{'s' * (len(budgets) > 1)}" if on_gpus else "memory"
    text = f"{format_bytes(budget)} of {where} for models, which take at least about {format_bytes(needed)}"
    left = fit_on_devices(budgets, pinned)
    largest = max(others, key=lambda model: model.sizes.memory_bytes, default=None)
    if left is None:
        advice = "pin fewer, set smaller contexts, or use more GPUs: what is pinned makes room for nothing"
        yield wrong("memory", f"{text}; those that are pinned do not fit together", advice)
    elif pinned and largest is not None and largest.sizes.memory_bytes > max(left):
        advice = "pin fewer, or set smaller contexts: it can never be on a device"
        yield wrong("memory", f"{text}; what is pinned leaves none to {largest.entry.name}", advice)
    elif fit_on_devices(budgets, models) is not None:
        yield _free(text, needed, budgets)
    else:
        yield good("memory", f"{text}: they take turns")
        if on_gpus:
            yield _standby(config, others)


def _free(text: str, needed: int, budgets: list[DeviceBudget]) -> Finding:
    """Whether host memory is free now; GPUs have findings of their own."""
    if budgets[0].device == HOST_MEMORY_DEVICE and needed > budgets[0].free_bytes:
        text += f"; {format_bytes(budgets[0].free_bytes)} are free now"
        return note("memory", text, "the rest is in use, by Hearth or others")
    return good("memory", f"{text}: all at once")


def _standby(config: Config, others: list[SizedModel]) -> Finding:
    """Whether all that is not pinned can sleep in host memory, from where it wakes soonest."""
    memory = config.machine.memory_bytes or int(HOST_MEMORY_SHARE * available_memory_bytes())
    needed = sum(model.standby_bytes for model in others)
    text = f"{format_bytes(memory)} of host memory for models that sleep, which take up to {format_bytes(needed)}"
    names = exceeding_memory(memory, others)
    if not names:
        return good("standby", text)
    advice = f"raise machine.memory_bytes, or expect {', '.join(names)} to start from disk, which takes seconds"
    return note("standby", text, advice)


def machines(config: Config) -> Iterator[Finding]:
    """Where models are, as running machines report; nothing without one."""
    for machine in machine_reports(config):
        for device in machine.devices:
            usage = f"{format_bytes(device.held_bytes)} of {format_bytes(device.budget_bytes)} held"
            yield good("machine", f"{machine.machine}: {device.name}, {usage}")
        for name in dict.fromkeys(replica.model for replica in machine.replicas):
            replicas = list(replicas_of(name, [machine]))
            problem = next((replica.problem for replica in replicas if replica.quarantined), "")
            advice = f"machine.log in {config.state} says more" if problem else ""
            verdict = FindingLevel.WRONG if problem else FindingLevel.GOOD
            text = f"{machine.machine}: {name}: {residency_text(replicas)}{': ' * bool(problem)}{problem}"
            yield Finding("machine", verdict, text, advice)


def fit_on_devices(budgets: Sequence[DeviceBudget], models: Sequence[SizedModel]) -> list[int] | None:
    """What each device has left once every replica is on one, placed largest first where most is left; None if one does
    not fit."""
    left = [budget.budget_bytes for budget in budgets]
    replicas = [model.sizes.memory_bytes for model in models for _ in range(model.entry.replicas)]
    for needed in sorted(replicas, reverse=True):
        roomiest = max(range(len(left)), key=left.__getitem__)
        if left[roomiest] < needed:
            return None
        left[roomiest] -= needed
    return left


def exceeding_memory(memory_bytes: int, models: Sequence[SizedModel]) -> list[str]:
    """Names of the models that host memory does not hold once all sleep; it holds those of high priority first."""
    names = []
    for model in sorted(models, key=lambda model: (-model.entry.priority, model.standby_bytes)):
        if model.standby_bytes > memory_bytes:
            names.append(model.entry.name)
        else:
            memory_bytes -= model.standby_bytes
    return names
