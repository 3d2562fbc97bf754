"""What a step takes on a device, as measured when its model opened. The scheduler plans by it; it knows no kernels."""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Microseconds, over all layers.

    rows            (rows of a step, µs of everything but attention over keys), ascending in both; linear between.
    key_us          a decoding row reads one key of its own.
    shared_key_us   a segment's key is read, once for all its members.
    pair_us         one member's row meets one key of its segment.
    prompt_pair_us  one row of a prompt meets one key.
    segment_us      one segment more in a step,
    groups_us       and the first of them, however many follow.
    """

    rows: tuple[tuple[int, float], ...]
    key_us: float
    shared_key_us: float
    pair_us: float
    prompt_pair_us: float
    segment_us: float
    groups_us: float

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
        if rows == 1:
            return (start + 1) * self.key_us
        return (rows * start + rows * (rows + 1) // 2) * self.prompt_pair_us
