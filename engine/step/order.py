"""What of a step is launched, once that is decided: all ranks of a model do it alike. It knows neither processes nor
what is computed."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine.step.layout import Int32s


class StepOrder(NamedTuple):
    """A step's sizes, and how each part of it runs: as a graph of so many rows, or without one where that is 0.

    wide    it has wide tiles.
    shared  it names tokens of the step before, which rank 0 drew.
    whole   rank 0 needs all logits, as it does where rows have more than a temperature, and always in stages; else each
            rank draws from its own.
    """

    rows: int
    body_size: int
    sampled_rows: int
    head_size: int
    wide: bool
    shared: bool
    whole: bool


class StepAnnouncer(Protocol):
    """Says to the other ranks what rank 0 is about to do."""

    def launch(self, order: StepOrder, words: Int32s, *, more: bool = False) -> None:
        """Rank 0 launches the step that lies in these words, its attention plan among them; or a micro-batch, behind
        which `more` of its step come."""
        ...

    def head(self) -> None:
        """Rank 0 launches the head for the oldest micro-batch whose rows were to come back."""
        ...

    def capture(self, graphs: int, size: int, capture: Callable[[], None], drop: Callable[[], None]) -> None:
        """Captures a size of the graphs of this number on all ranks, here by `capture`; or on none, taking it back by
        `drop`. Raises OutOfDeviceMemory then."""
        ...

    def prepare(self) -> None:
        """Rank 0 copies a little of its weights to the host."""
        ...
