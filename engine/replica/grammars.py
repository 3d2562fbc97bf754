"""The grammars of a replica's requests: compiled for those that come, and turned into masks where steps are sampled."""

from collections.abc import Callable

from engine.protocol.frames import Submit
from engine.protocol.types import ScopeKind
from engine.scheduling.step_loop import SampleMasked
from engine.sequences.sequence import GrammarMatcher, Sequence
from engine.step.executor import InflightStep, LoadedModel
from engine.step.layout import Int32s
from engine.structured_output.manager import StructuredOutputManager

BeginMasks = Callable[[list[GrammarMatcher | None]], Callable[[], Int32s]]


def compile_grammar(grammars: StructuredOutputManager, submit: Submit, sequences: list[Sequence]) -> None:
    """Compiles a request's grammar, if it has one. It outlives only requests that share something and keep something.
    Raises SubmitRejected."""
    if submit.grammar is None:
        return
    keep = submit.scope.kind != ScopeKind.REQUEST and not submit.terms.erase
    compilation = grammars.compile(submit.grammar, sequences[0].account, keep)
    for sequence in sequences:
        sequence.compilation = compilation


def masked_sampler(model: LoadedModel, begin_masks: BeginMasks) -> SampleMasked | None:
    """What samples masked rows with the masks of their matchers; None where no row can have one."""
    sampler = model.sampler
    if sampler is None:
        return None

    def begin(step: InflightStep, matchers: list[GrammarMatcher | None]) -> Callable[[], None]:
        masks = begin_masks(matchers)
        return lambda: sampler.sample(step, masks())

    return begin
