"""One rank's whole experts, as a checkpoint would have them that has no others: so that a rank reads its own alone.

It reads nothing, and knows no formats.
"""

from collections.abc import Mapping
from dataclasses import replace

from engine.models.parameter_entries import ParameterEntry, TensorSource
from engine.models.sharding import ParameterShard
from engine.weights.tensor_index import StoredTensor


def expert_part(
    table: list[ParameterEntry], stored: Mapping[str, StoredTensor], parts: Mapping[str, ParameterShard]
) -> tuple[list[ParameterEntry], dict[str, StoredTensor]]:
    """The entries of a rank's `parts`, where those of the table have all experts, and where their tensors lie: those of
    single experts as they are, and of stacks the bytes of these experts."""
    entries: list[ParameterEntry] = []
    tensors: dict[str, StoredTensor] = {}
    for entry in table:
        sources = []
        for run in parts[entry.parameter].rows:
            source, start = source_at(entry, run.start)
            experts = None
            if len(run) < source.placed[0]:
                outputs = source.placed[0] // source.shape[0]
                experts = range((run.start - start) // outputs, (run.stop - start) // outputs)
            sources.append(source if experts is None else _source_part(source, len(experts)))
            for form in source.stored:
                tensor = stored[form.name]
                tensors[form.name] = tensor if experts is None else _tensor_part(tensor, experts)
        entries.append(replace(entry, sources=tuple(sources)))
    return entries, tensors


def source_at(entry: ParameterEntry, row: int) -> tuple[TensorSource, int]:
    """The source that has a row of a parameter, and the parameter's row that it begins with."""
    first = 0
    for source in entry.sources:
        if row < first + source.placed[0]:
            return source, first
        first += source.placed[0]
    raise AssertionError(f"{entry.parameter} has no row {row}")


def _source_part(source: TensorSource, experts: int) -> TensorSource:
    """The source of a stack of so many of the experts."""
    assert source.stack is not None
    sections = source.sections[: len(source.sections) * experts // source.shape[0]]
    return replace(source, shape=(experts, *source.shape[1:]), sections=sections)


def _tensor_part(tensor: StoredTensor, experts: range) -> StoredTensor:
    """Where a stack has these experts. Sums are compared of whole tensors alone."""
    assert tensor.bf12 is None
    each_bytes = (tensor.last - tensor.first) // tensor.shape[0]
    return replace(
        tensor, shape=(len(experts), *tensor.shape[1:]), first=tensor.first + experts.start * each_bytes,
        last=tensor.first + experts.stop * each_bytes, sums=None,
    )  # fmt: skip
