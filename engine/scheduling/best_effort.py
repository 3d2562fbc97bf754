"""What background sequences get of a step: what live ones leave free. It knows counts and costs, not queues or blocks.

Beside live sequences they may lengthen a step by STEP_SLACK of its predicted time; where no costs were measured they
get nothing. Alone they get short steps, since a live sequence that arrives meanwhile waits for the steps in flight.
"""

from bisect import bisect_right
from collections.abc import Sequence as Items
from typing import Final

from engine.scheduling.token_budget import SchedulerConfig
from engine.sequences.sequence import Sequence

STEP_SLACK: Final = 0.04  # of a step's time
HOST_US_PER_SEQUENCE: Final = 10.0  # in a step, on the host, which small models wait for; no costs include it
IDLE_STEP_FACTOR: Final = 2.0  # times what a step of one row takes
IDLE_STEP_ROWS: Final = 16  # where no costs are known: about as many as a read of the weights pays for


class BestEffortBudget:
    """max_idle_rows: the most rows of a step of background sequences alone; no more of them run."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._costs = config.costs
        self._step_tokens = config.step_tokens
        self.max_idle_rows = min(IDLE_STEP_ROWS, config.step_tokens)
        if self._costs is not None:
            max_us = IDLE_STEP_FACTOR * self._costs.rows_us(1)
            fitting = bisect_right(range(1, config.step_tokens + 1), max_us, key=self._costs.rows_us)
            self.max_idle_rows = min(max(self.max_idle_rows, fitting), config.step_tokens)

    def chunks(
        self, live: Items[Sequence], live_chunks: Items[int], waiting: Items[Sequence], saved_us: float, max_rows: int
    ) -> list[int]:
        """How many tokens each of `waiting`, oldest first, computes in a step in which each of `live` computes its
        chunk; those beyond the end of the list compute none. saved_us: what groups take off that step; max_rows: what
        the memory has room for."""
        costs = self._costs
        if costs is None:
            return [] if live else _divide_rows(waiting, min(self.max_idle_rows, max_rows))
        rows = sum(live_chunks)
        if live:
            low, high = 0, min(max_rows, self._step_tokens) - rows
            reads_us = sum(map(costs.reads_us, (sequence.launched for sequence in live), live_chunks)) - saved_us
            left_us = STEP_SLACK * (costs.rows_us(rows) + max(0.0, reads_us))
        else:
            low, high = 1, min(max_rows, self.max_idle_rows)
            left_us = (IDLE_STEP_FACTOR - 1) * costs.rows_us(1)

        def added_us(more: int) -> float:
            chunks = _divide_rows(waiting, more)
            reads_us = sum(map(costs.reads_us, (sequence.launched for sequence in waiting), chunks))
            rows_us = costs.rows_us(rows + sum(chunks)) - costs.rows_us(rows)
            masks_us = sum(sequence.mask_us for sequence in waiting[: len(chunks)])
            return rows_us + reads_us + masks_us + HOST_US_PER_SEQUENCE * len(chunks)

        fitting = bisect_right(range(1, high + 1), left_us, key=added_us)
        return _divide_rows(waiting, max(low, fitting))


def _divide_rows(waiting: Items[Sequence], rows: int) -> list[int]:
    """One row for each of the oldest, as far as the rows go, and the rest for their prompts, the oldest first."""
    chunks, left = [1] * min(len(waiting), max(rows, 0)), rows - len(waiting)
    for index, sequence in enumerate(waiting[: len(chunks)]):
        if left <= 0:
            break
        more = min(left, max(0, sequence.pending - 1))
        chunks[index] += more
        left -= more
    return chunks
