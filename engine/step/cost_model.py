"""What a step takes on a device, as measured when its model opened. The scheduler plans by it; it knows no kernels."""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Microseconds, over all layers. A row's keys are counted as its layers see them, on average: where a tenth of them
    sees everything and the rest a window, a key behind the window is a tenth of a key. A segment is read by the layers
    of one KV group, and costs their share of what it would cost were all layers to read it.

    rows            (rows of a step, µs of everything but attention over keys), ascending in both; linear between.
    key_us          a decoding row reads one key of its own.
    shared_key_us   a segment's key is read, once for all its members.
    pair_us         one member's row meets one key of its segment.
    prompt_pair_us  one row of a prompt meets one key.
    segment_us      one segment more in a step.
    groups_us       the first of a step's segments, whichever layers read it and however many follow.
    windows         (the most keys that a row sees, share of the layers) of each group that does not see everything.
    """

    rows: tuple[tuple[int, float], ...]
    key_us: float
    shared_key_us: float
    pair_us: float
    prompt_pair_us: float
    segment_us: float
    groups_us: float
    windows: tuple[tuple[int, float], ...] = ()

    @property
    def full_share(self) -> float:
        """The share of the layers that see everything."""
        return 1.0 - sum(share for _, share in self.windows)

    def seen(self, keys: int) -> float:
        """How many of so many keys a row sees."""
        return keys - sum(share * max(0, keys - most) for most, share in self.windows) if self.windows else keys

    def pairs(self, start: int, rows: int) -> float:
        """How many keys the rows of one sequence from position `start` on see together, each its own included."""
        pairs: float = _sum_to(start + rows) - _sum_to(start)
        for most, share in self.windows:
            pairs -= share * (_sum_to(max(0, start + rows - most)) - _sum_to(max(0, start - most)))
        return pairs

    def rows_us(self, rows: int) -> float:
        """What `rows` rows take; past the last measured point it goes on in the last one's proportion."""
        counts = [count for count, _ in self.rows]
        index = bisect_left(counts, rows)
        if index == len(counts):
            count, took = self.rows[-1]
            return took * rows / count
        count, took = self.rows[index]
        if index == 0 or count == rows:
            return took
        before, took_before = self.rows[index - 1]
        return took_before + (took - took_before) * (rows - before) / (count - before)

    def reads_us(self, start: int, rows: int) -> float:
        """What so many rows of one sequence, from position `start` on, take to read their keys, their own included."""
        return self.seen(start + 1) * self.key_us if rows == 1 else self.pairs(start, rows) * self.prompt_pair_us


def _sum_to(keys: int) -> int:
    """1 + 2 + … + keys."""
    return keys * (keys + 1) // 2
