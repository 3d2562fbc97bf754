"""The grammars of a replica's requests: compiled for those that come, and turned into masks where steps are sampled."""

from collections.abc import Callable

from engine.protocol.frames import Submit
from engine.protocol.types import ScopeKind
from engine.scheduling.step_loop import SampleMasked
from engine.sequences.sequence import GrammarMatcher, Sequence
from engine.step.executor import LoadedModel
from engine.step.layout import Int32s
from engine.structured_output.manager import StructuredOutputManager

MaskWriter = Callable[[list[GrammarMatcher | None]], Int32s]


def compile_grammar(grammars: StructuredOutputManager, submit: Submit, sequences: list[Sequence]) -> None:
    """Compiles a request's grammar, if it has one. It outlives only requests that share something and keep something.
    Raises SubmitRejected."""
    if submit.grammar is None:
        return
    keep = submit.scope.kind != ScopeKind.REQUEST and not submit.terms.erase
    compilation = grammars.compile(submit.grammar, sequences[0].account, keep)
    for sequence in sequences:
        sequence.compilation = compilation


def masked_sampler(model: LoadedModel, write_masks: MaskWriter) -> SampleMasked | None:
    """What samples masked rows with the masks of their matchers; None where no row can have one."""
    sampler = model.sampler
    if sampler is None:
        return None
    return lambda step, matchers: sampler.sample(step, write_masks(matchers))
