"""What each owner is to be told next: one Progress in the making for each of them. It does not know who owners are."""

from array import array
from dataclasses import dataclass, field

from engine.protocol.frames import PoolingOutput, SequenceFinished, SequenceStarted, StepOutputs, TokenLogprobs


@dataclass(slots=True)
class PendingOutputs:
    """What one owner has not been told yet."""

    ids: list[int] = field(default_factory=list)  # one for each token
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    started: list[SequenceStarted] = field(default_factory=list)
    finished: list[SequenceFinished] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    vectors: list[PoolingOutput] = field(default_factory=list)

    def progress(self) -> StepOutputs:
        counts = [1] * len(self.ids)
        tokens = self.tokens.tobytes()
        return StepOutputs(self.ids, counts, tokens, self.started, self.finished, self.logprobs, self.vectors)


class OutputCollector:
    def __init__(self) -> None:
        self._untold: dict[int, PendingOutputs] = {}

    def of(self, owner: int) -> PendingOutputs:
        """To be added to, until it is taken."""
        untold = self._untold.get(owner)
        if untold is None:
            untold = self._untold[owner] = PendingOutputs()
        return untold

    def forget(self, owner: int) -> None:
        """There is nobody to tell any more."""
        self._untold.pop(owner, None)

    def take(self) -> dict[int, StepOutputs]:
        """All of it, by owner; it counts as told now."""
        told = {owner: untold.progress() for owner, untold in self._untold.items()}
        self._untold.clear()
        return told
