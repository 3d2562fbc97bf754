"""How models are shared out to this host's GPUs, and why, as an agent does it. It starts nothing."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from engine.hostinfo import gpus
from engine.hostinfo.memory import device_budgets
from engine.protocol.rank_layout import RankLayout, layout_on
from gateway.catalogue.catalogue import spec_of
from gateway.settings.config import Config, ModelEntryConfig


def is_shared_out(entry: ModelEntryConfig) -> bool:
    """Whether a model may be on several GPUs at once."""
    return entry.gpus != 1 or entry.stages != 1


def layouts_on(
    config: Config, entries: Sequence[ModelEntryConfig], usable: list[gpus.Gpu]
) -> Iterator[tuple[ModelEntryConfig, RankLayout]]:
    """The layout of each of those that may be on several of these GPUs; none without a GPU."""
    shared = [entry for entry in entries if is_shared_out(entry)]
    if not shared or not usable:
        return
    rooms = [budget.budget_bytes for budget in device_budgets(config.machine.device_bytes, usable)]
    link = gpus.weakest_link(gpus.gpu_pairs([gpu.index for gpu in usable]))
    for entry in shared:
        yield entry, layout_on(spec_of(config, replace(entry, public_prefixes=[])), rooms, link)


def layout_text(layout: RankLayout) -> str:
    return f"{layout.text}: {layout.reason or 'as its settings say'}"


def layout_here(config: Config, entry: ModelEntryConfig) -> str:
    """The text of one model; empty where it is on one device."""
    if not is_shared_out(entry):
        return ""
    usable = gpus.usable_gpus(config.machine.device, gpus.installed_gpus())
    return "".join(layout_text(layout) for _, layout in layouts_on(config, [entry], usable))
