"""One rank's whole experts, as a checkpoint would have them that has no others: so that a rank reads its own alone.

It reads nothing, and knows no formats.
"""

from collections.abc import Mapping
from dataclasses import replace

from engine.models.parameter_entries import ParameterEntry, TensorSource
from engine.weights.tensor_index import StoredTensor


def expert_part(
    table: list[ParameterEntry], stored: Mapping[str, StoredTensor], own: range, experts: int
) -> tuple[list[ParameterEntry], dict[str, StoredTensor]]:
    """The entries of the experts that are a rank's `own` of so many, where those of the table have all, and where their
    tensors lie: those of single experts as they are, and of stacks the bytes of these experts."""
    entries: list[ParameterEntry] = []
    tensors: dict[str, StoredTensor] = {}
    for entry in table:
        sources, each = [], len(entry.sources) // experts
        if each:
            assert len(entry.sources) == each * experts
            sources = list(entry.sources[own.start * each : own.stop * each])
            tensors |= {form.name: stored[form.name] for source in sources for form in source.stored}
        for source in () if each else entry.sources:
            assert source.stack is not None
            assert source.shape[0] == experts
            sources.append(_source_part(source, len(own)))
            tensors |= {form.name: _tensor_part(stored[form.name], own, experts) for form in source.stored}
        entries.append(replace(entry, sources=tuple(sources)))
    return entries, tensors


def _source_part(source: TensorSource, count: int) -> TensorSource:
    """The source of a stack of so many of the experts."""
    sections = source.sections[: len(source.sections) * count // source.shape[0]]
    return replace(source, shape=(count, *source.shape[1:]), sections=sections)


def _tensor_part(tensor: StoredTensor, own: range, experts: int) -> StoredTensor:
    """Where a stack has these experts. Sums are compared of whole tensors alone."""
    assert tensor.bf12 is None
    assert tensor.shape[0] == experts
    if len(own) == experts:
        return tensor
    each_bytes = (tensor.last - tensor.first) // experts
    return replace(
        tensor, shape=(len(own), *tensor.shape[1:]), first=tensor.first + own.start * each_bytes,
        last=tensor.first + own.stop * each_bytes, sums=None,
    )  # fmt: skip
