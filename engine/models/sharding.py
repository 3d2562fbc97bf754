"""How a decoder is cut for several ranks and stages: what each computes, as a config of its own, and which rows and
columns of each parameter are its own. It knows neither tensors nor processes.

The method is Megatron-LM's (Shoeybi et al. 2019): q, k, v, gate and up are cut along their outputs, by heads and by the
MLP's width; the layers behind them along their inputs, so that what ranks give are parts of one sum. Norms are whole on
each rank; the head is cut along the vocabulary, on GPUs the embedding too. Experts are cut as dense MLPs are, or each
rank has whole ones: the parts of the sum are then those of some experts.

Stages share out its layers before. The first one has embedding, last norm and head too: a row that is sampled comes
back to it, so that a tied embedding is there once, and what is sampled is known where steps are planned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from engine.layers.rank_shard import RankShard
from engine.models.decoder_config import MixtureConfig, ModelConfig, ModelConfigError
from engine.models.parameter_entries import ParameterEntry
from engine.protocol.expert_cut import ExpertCut, expert_cut

_LAYER_PREFIX: Final = "layers."


class CannotShard(ModelConfigError):
    """The model does not divide into so many ranks or stages; the message names what does not."""


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """Which rows of a parameter are a rank's, in this order, and which of their columns; None: all."""

    rows: tuple[range, ...]
    columns: range | None


def shard_config(config: ModelConfig, ranks: int, cut: ExpertCut | None = None) -> ModelConfig:
    """What each of so many ranks computes, with experts that are `cut` so; None: as their number and size alone say.
    Raises CannotShard."""
    mixture = config.mixture
    counts = [("num_attention_heads", config.heads), ("num_key_value_heads", config.kv_heads)]
    if mixture is None or not all(mixture.layers):
        counts.append(("intermediate_size", config.intermediate))
    if mixture is not None:
        counts.append(("shared expert's size", mixture.shared))
        mixture = _shard_mixture(mixture, ranks, cut)
    for name, count in counts:
        if count % ranks:
            raise CannotShard(f"{name} {count} is no multiple of {ranks}: the model cannot be cut into {ranks} ranks")
    return replace(
        config, heads=config.heads // ranks, kv_heads=config.kv_heads // ranks,
        intermediate=config.intermediate // ranks, mixture=mixture,
        mxfp4=False, fp8=None,  # they are cut as they are expanded
    )  # fmt: skip


def _shard_mixture(mixture: MixtureConfig, ranks: int, cut: ExpertCut | None) -> MixtureConfig:
    experts, inner, shared = mixture.rule.experts, mixture.intermediate, mixture.shared // ranks
    cut = cut or expert_cut(ranks, experts, inner)
    if cut is None:
        raise CannotShard(
            f"experts' intermediate size {inner} is no multiple of {ranks}, nor is their number {experts}: the model "
            f"cannot be cut into {ranks} ranks"
        )
    if cut is ExpertCut.EXPERTS:
        return replace(mixture, shared=shared, local=experts // ranks)
    return replace(mixture, intermediate=inner // ranks, shared=shared)


def shard_parameters(
    whole: Sequence[ParameterEntry], own: Sequence[ParameterEntry], shard: RankShard, cut_embedding: bool = False,
    whole_experts: bool = False,
) -> Iterator[tuple[str, ParameterShard]]:  # fmt: skip
    """Compares a model's entries with those of its shard_config: each parameter, and what of it is this rank's. A
    parameter that is the same in both is whole on each rank, but for a head, an embedding where that is asked for, and
    experts where ranks have whole ones. Each run of rows lies within one source."""
    by_vocabulary = ("head.weight", "embedding") if cut_embedding else ("head.weight",)
    for entry, part in zip(whole, own, strict=True):
        assert entry.parameter == part.parameter
        if entry.parameter in by_vocabulary:
            yield entry.parameter, ParameterShard((shard.of(entry.sources[0].placed[0]),), None)
            continue
        if whole_experts and entry.is_of_experts:
            yield entry.parameter, ParameterShard(_runs(entry, shard), None)
            continue
        rows, columns, first = [], None, 0
        for source, source_part in zip(entry.sources, part.sources, strict=True):
            cut = source.placed[0] != source_part.placed[0]
            for section in source.sections or (source.placed[0],):
                run = shard.of(section) if cut else range(section)
                rows.append(range(first + run.start, first + run.stop))
                first += section
            if source.placed[1:] != source_part.placed[1:]:
                columns = shard.of(source.placed[1])
        yield entry.parameter, ParameterShard(tuple(rows), columns)


def _runs(entry: ParameterEntry, shard: RankShard) -> tuple[range, ...]:
    """The rows of this rank's whole experts, source by source."""
    own, first, runs = shard.of(sum(source.placed[0] for source in entry.sources)), 0, []
    for source in entry.sources:
        rows = range(max(own.start, first), min(own.stop, first + source.placed[0]))
        runs += [rows] if rows else []
        first += source.placed[0]
    return tuple(runs)


def layer_costs(config: ModelConfig) -> list[int]:
    """What a row multiplies by in each layer, in numbers; attention's keys, which are alike, left out."""
    attention = config.hidden * config.head_dim * 2 * (config.heads + config.kv_heads)
    costs = []
    for layer in range(config.layers):
        mixture = config.mixture
        width = config.intermediate
        if mixture is not None and config.has_experts(layer):
            width = mixture.rule.chosen * mixture.intermediate + mixture.shared
        costs.append(attention + 3 * config.hidden * width)
    return costs


def head_cost(config: ModelConfig) -> int:
    """The same of the head."""
    return 0 if config.vectors else config.hidden * config.vocabulary


def balance(costs: Sequence[int], first_cost: int, stages: int) -> list[range]:
    """Runs of layers, at least one for each of so many stages, so that the dearest stage is as cheap as can be; the
    first one has first_cost beside its layers."""
    sums = [0, *accumulate(costs)]
    # best[n]: the dearest of the stages so far, and where the last of them begins, for the first n layers
    best = {end: (sums[end] + first_cost, 0) for end in range(1, len(costs) + 1)}
    begins = [best]
    for stage in range(1, stages):
        best = {
            end: min((max(best[start][0], sums[end] - sums[start]), start) for start in range(stage, end))
            for end in range(stage + 1, len(costs) + 1)
        }
        begins.append(best)
    layers, end = [], len(costs)
    for best in reversed(begins):
        start = best[end][1]
        layers.append(range(start, end))
        end = start
    return layers[::-1]


def stage_layers(config: ModelConfig, stages: int) -> list[range]:
    """The layers of each stage. Raises CannotShard."""
    if stages > config.layers:
        raise CannotShard(f"stages = {stages}, and the model has {config.layers} layers: set stages to fewer")
    layers = balance(layer_costs(config), head_cost(config), stages)
    spans = [group.span for group in config.kv_groups]
    for stage, own in enumerate(layers):
        if [group.span for group in stage_config(config, own).kv_groups] != spans:
            raise CannotShard(
                f"stages = {stages}: layers {own.start} to {own.stop - 1}, those of stage {stage}, are not of all "
                f"{len(spans)} kinds of attention that the model has: set stages to fewer"
            )
    return layers


def stage_config(config: ModelConfig, layers: range) -> ModelConfig:
    """What a stage of these layers computes, counted from 0."""
    own, mixture = slice(layers.start, layers.stop), config.mixture
    if mixture is not None:
        mixture = replace(mixture, layers=mixture.layers[own])
    return replace(config, layers=len(layers), spans=config.spans[own], ropes=config.ropes[own], mixture=mixture)


def stage_name(parameter: str, layers: range) -> str | None:
    """What a parameter is called in a stage of these layers; None where it is none of its own."""
    if not parameter.startswith(_LAYER_PREFIX):
        return parameter if layers.start == 0 else None
    number, _, rest = parameter.removeprefix(_LAYER_PREFIX).partition(".")
    return f"{_LAYER_PREFIX}{int(number) - layers.start}.{rest}" if int(number) in layers else None
