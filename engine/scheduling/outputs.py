"""What each owner is sent next: one StepOutputs in the making for each of them. It does not know who owners are."""

from array import array
from dataclasses import dataclass, field

from engine.protocol.frames import PoolingOutput, SequenceFinished, SequenceStarted, StepOutputs, TokenLogprobs


@dataclass(slots=True)
class PendingOutputs:
    """What one owner has not been sent yet."""

    ids: list[int] = field(default_factory=list)  # one for each token
    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    started: list[SequenceStarted] = field(default_factory=list)
    finished: list[SequenceFinished] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    vectors: list[PoolingOutput] = field(default_factory=list)

    def build(self) -> StepOutputs:
        counts = [1] * len(self.ids)
        tokens = self.tokens.tobytes()
        return StepOutputs(self.ids, counts, tokens, self.started, self.finished, self.logprobs, self.vectors)


class OutputCollector:
    def __init__(self) -> None:
        self._pending: dict[int, PendingOutputs] = {}

    def of_owner(self, owner: int) -> PendingOutputs:
        """The owner's outputs, to be added to until they are taken."""
        pending = self._pending.get(owner)
        if pending is None:
            pending = self._pending[owner] = PendingOutputs()
        return pending

    def forget(self, owner: int) -> None:
        """Discards the outputs of an owner that has left."""
        self._pending.pop(owner, None)

    def take(self) -> dict[int, StepOutputs]:
        """All outputs by owner. Each is returned once."""
        outputs = {owner: pending.build() for owner, pending in self._pending.items()}
        self._pending.clear()
        return outputs
