"""How models are shared out to this host's GPUs, and why, as an agent does it. It starts nothing."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from engine.hostinfo import gpus
from engine.hostinfo.memory import device_budgets
from engine.protocol.expert_cut import ExpertCut, expert_cut
from engine.protocol.rank_layout import RankLayout, layout_on
from gateway.catalogue.bf12_size import read_bf12_size
from gateway.catalogue.catalogue import folder_of, spec_of
from gateway.catalogue.model_config import geometry_of, read_model_config
from gateway.settings.config import Config, ModelEntryConfig
from gateway.text.tokenizer import ModelFolderError

_MXFP4_INPUTS: Final = 64  # that cannot be cut apart in 4 bits a number,
_FP8_INPUTS: Final = 128  # in 8 bits with a factor for each block of 128 × 128,
_BF12_INPUTS: Final = (256, 128)  # and in 12 bits: the first that divides them all


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


def layout_text(config: Config, entry: ModelEntryConfig, layout: RankLayout) -> str:
    cut = _expert_cut(config, entry, layout.gpus) if layout.gpus > 1 else None
    experts = "" if cut is None else f", {cut.text}"
    return f"{layout.text}{experts}: {layout.reason or 'as its settings say'}"


def _expert_cut(config: Config, entry: ModelEntryConfig, ranks: int) -> ExpertCut | None:
    """How GPUs share the experts; None where there are none, or their folder does not say."""
    folder = folder_of(config, entry)
    try:
        document = read_model_config(folder)
        sizes = geometry_of(document).expert_sizes(document)
    except ModelFolderError:
        return None
    if sizes is None:
        return None
    inputs = 1
    if entry.dtype in ("auto", "bfloat16"):
        inputs = _mxfp4_inputs(document, sizes[1])
        inputs = inputs if entry.random_weights else max(inputs, _fp8_inputs(document), _bf12_inputs(folder, sizes[1]))
    return expert_cut(ranks, *sizes, keeps_format=sizes[1] // ranks % inputs == 0)


def _quantization(document: Mapping[str, Any]) -> Mapping[str, Any]:
    entry = document.get("quantization_config") or document.get("compression_config")
    return entry if isinstance(entry, Mapping) else {}


def _mxfp4_inputs(document: Mapping[str, Any], width: int) -> int:
    """How many inputs of an expert's last matrix, which has so many, stay together on a rank that has them in 4
    bits."""
    packed = _quantization(document).get("quant_method") == "mxfp4" and width % _MXFP4_INPUTS == 0
    return _MXFP4_INPUTS if packed else 1


def _fp8_inputs(document: Mapping[str, Any]) -> int:
    """The same in 8 bits."""
    entry = _quantization(document)
    groups = [group.get("weights") or {} for group in (entry.get("config_groups") or {}).values()]
    in_blocks = entry.get("weight_block_size") or any(group.get("strategy") == "block" for group in groups)
    return _FP8_INPUTS if in_blocks else 1


def _bf12_inputs(folder: Path, width: int) -> int:
    """The same in 12 bits."""
    if read_bf12_size(folder) is None:
        return 1
    return next((inputs for inputs in _BF12_INPUTS if width % inputs == 0), 1)


def layout_here(config: Config, entry: ModelEntryConfig) -> str:
    """The text of one model; empty where it is on one device."""
    if not is_shared_out(entry):
        return ""
    usable = gpus.usable_gpus(config.machine.device, gpus.installed_gpus())
    return "".join(layout_text(config, entry, layout) for _, layout in layouts_on(config, [entry], usable))
