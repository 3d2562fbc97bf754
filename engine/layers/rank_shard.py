"""Which part of a cut model is a rank's. It knows neither layers nor processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankShard:
    """The part of rank `rank` of `ranks`."""

    rank: int
    ranks: int

    def of(self, count: int) -> range:
        """Which of so many things, cut into runs as even as can be, are its own."""
        return range(self.rank * count // self.ranks, (self.rank + 1) * count // self.ranks)
