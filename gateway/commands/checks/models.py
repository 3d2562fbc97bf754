"""The catalogue's models: whether each can be served, whether all fit, and where running machines have them."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from engine.hostinfo import memory as host_memory
from engine.hostinfo.memory import HOST_MEMORY_DEVICE, DeviceBudget
from engine.protocol.rank_layout import layout_on
from engine.protocol.specs import HOST_MEMORY_SHARE
from gateway.catalogue.catalogue import spec_of
from gateway.catalogue.report import catalogue_reports, unlike_replicas
from gateway.commands.access.residencies import machine_reports, replicas_of, residency_text
from gateway.commands.checks.finding import Finding, FindingLevel, good, note, wrong
from gateway.commands.model_tools.documents import STALE_WEIGHTS, memory_reports, notes_of
from gateway.commands.model_tools.folder_check import FolderReport, UnservableFolder, inspect_folder
from gateway.commands.model_tools.size import ModelSizes, sizes_of
from gateway.commands.terminal.output import format_bytes
from gateway.settings.config import Config, ModelEntryConfig

_RENEWED: Final = (
    "`hearth models remove` it with --wait and add it again, or restart; better give new weights a folder of their own"
)
_UNLIKE: Final = "it gets no calls: give it the same files and settings; `hearth models add` on a cluster does"
_AS_BEFORE: Final = "correct it: until then what was asked for before is served"


class SizedModel(NamedTuple):
    """A model of the catalogue with its sizes on this host, and how many devices a replica is on at once."""

    entry: ModelEntryConfig
    sizes: ModelSizes
    ranks: int = 1

    @property
    def device_bytes(self) -> int:
        """Bytes that its replicas take together on devices."""
        return self.entry.replicas * self.sizes.memory_bytes

    @property
    def rank_bytes(self) -> int:
        """Bytes that a replica takes of each of its devices."""
        return -(-self.sizes.memory_bytes // self.ranks)

    def fits_once(self, rooms: Sequence[int]) -> bool:
        """Whether one replica fits on devices of which so many bytes are left."""
        return self.ranks <= len(rooms) and sorted(rooms, reverse=True)[self.ranks - 1] >= self.rank_bytes

    @property
    def standby_bytes(self) -> int:
        """Host memory that its replicas take at most while they sleep there."""
        kept_bytes = (self.entry.host_kv_bytes or self.entry.kept_kv_bytes) + self.entry.handover_bytes
        return self.entry.replicas * (self.sizes.weights_bytes + kept_bytes)


def models(config: Config, entries: Sequence[ModelEntryConfig], budgets: list[DeviceBudget]) -> Iterator[Finding]:
    for entry in entries:
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


def memory(config: Config, entries: Sequence[ModelEntryConfig], budgets: list[DeviceBudget]) -> Iterator[Finding]:
    """Whether the models can be on the devices together; where not, whether they can take turns."""
    on_gpus = budgets[0].device != HOST_MEMORY_DEVICE
    sized = [(entry, sizes) for entry in entries if (sizes := sizes_of(config, entry)) is not None]
    rooms = [device.budget_bytes for device in budgets]
    models = [
        SizedModel(entry, sizes, layout_on(spec_of(config, replace(entry, public_prefixes=[])), rooms).devices)
        if on_gpus
        else SizedModel(entry, sizes.on_a_cpu)
        for entry, sizes in sized
    ]
    pinned = [model for model in models if model.entry.pinned]
    others = [model for model in models if not model.entry.pinned]
    budget, needed = sum(device.budget_bytes for device in budgets), sum(model.device_bytes for model in models)
    where = f"{len(budgets)} GPU{'s' * (len(budgets) > 1)}" if on_gpus else "memory"
    text = f"{format_bytes(budget)} of {where} for models, which take at least about {format_bytes(needed)}"
    left = fit_on_devices(rooms, pinned)
    largest = max(others, key=lambda model: model.rank_bytes, default=None)
    if left is None:
        advice = "pin fewer, set smaller contexts, or use more GPUs: what is pinned makes room for nothing"
        yield wrong("memory", f"{text}; those that are pinned do not fit together", advice)
    elif pinned and largest is not None and not largest.fits_once(left):
        advice = "pin fewer, or set smaller contexts: it can never be on a device"
        yield wrong("memory", f"{text}; what is pinned leaves none to {largest.entry.name}", advice)
    elif fit_on_devices(rooms, models) is not None:
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
    total_bytes, free_bytes = host_memory.host_memory_bytes()
    memory = config.machine.memory_bytes or int(HOST_MEMORY_SHARE * free_bytes)
    if memory > total_bytes:
        text = f"machine.memory_bytes is {format_bytes(memory)}, and this host has {format_bytes(total_bytes)}"
        return wrong("standby", text, "set less, or leave it out: models that sleep would take what is not there")
    needed = sum(model.standby_bytes for model in others)
    text = f"{format_bytes(memory)} of host memory for models that sleep, which take up to {format_bytes(needed)}"
    names = exceeding_memory(memory, others)
    if not names:
        return good("standby", text)
    advice = f"raise machine.memory_bytes, or expect {', '.join(names)} to start from disk, which takes seconds"
    return note("standby", text, advice)


def machines(config: Config, entries: Sequence[ModelEntryConfig]) -> Iterator[Finding]:
    """Where models are, as running machines report, and what replicas do otherwise than asked; nothing without one."""
    for gateway in catalogue_reports(config):
        if gateway.problem:
            yield wrong("gateway", f"what is asked for is not followed: {gateway.problem}", _AS_BEFORE)
    for name, model in unlike_replicas(config):
        what = "its weights, tokenizer, template, KV layout or GPUs are not those of most replicas of its name"
        yield wrong("machine", f"{name}: {model}: {what}", _UNLIKE)
    for machine in machine_reports(config):
        if machine.problem:
            text = f"{machine.machine}: what is asked for is not followed: {machine.problem}"
            yield wrong("machine", text, _AS_BEFORE)
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
    for entry in entries:
        notes = [each for memory in memory_reports(config, entry.name) for each in notes_of(memory)]
        for remark in dict.fromkeys(notes):
            advice = _RENEWED if remark is STALE_WEIGHTS else 'dtype = "auto" takes the fastest that this machine can'
            yield note("machine", f"{entry.name} {remark}", advice)


def fit_on_devices(rooms: Sequence[int], models: Sequence[SizedModel]) -> list[int] | None:
    """What each device has left of its bytes once every replica is on as many as it needs, placed largest first where
    most is left; None if one does not fit."""
    left = list(rooms)
    replicas = [(model.rank_bytes, model.ranks) for model in models for _ in range(model.entry.replicas)]
    for needed, ranks in sorted(replicas, reverse=True):
        roomiest = sorted(range(len(left)), key=left.__getitem__, reverse=True)[:ranks]
        if len(roomiest) < ranks or left[roomiest[-1]] < needed:
            return None
        for device in roomiest:
            left[device] -= needed
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
