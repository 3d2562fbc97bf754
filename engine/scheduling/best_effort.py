"""What background sequences get of a step: what live ones leave free. It knows counts and costs, not queues or blocks.

Beside live sequences they may lengthen a step by SLACK of what that is predicted to take; where no costs were measured
nobody can tell, and they get nothing. Alone they get short steps, since a live one that comes meanwhile waits for the
end of what is in the air.
"""

from bisect import bisect_right
from collections.abc import Sequence as Items
from typing import Final

from engine.scheduling.sequence import Sequence
from engine.scheduling.token_budget import SchedulerConfig

STEP_SLACK: Final = 0.04  # of a step's time
HOST_US_PER_SEQUENCE: Final = (
    10.0  # of one sequence in a step, on the host, which small models wait for; no costs tell of it
)
IDLE_STEP_FACTOR: Final = 2.0  # times what a step of one row takes
IDLE_STEP_ROWS: Final = 16  # where no costs are known: about what the weights are read for in any case


class BestEffortBudget:
    """`rows_alone` is how many rows a step of background sequences alone may have at most: no more of them run."""

    def __init__(self, limits: SchedulerConfig) -> None:
        self._costs = limits.costs
        self._step_tokens = limits.step_tokens
        self.rows_alone = min(IDLE_STEP_ROWS, limits.step_tokens)
        if self._costs is not None:
            most_us = IDLE_STEP_FACTOR * self._costs.rows_us(1)
            fitting = bisect_right(range(1, limits.step_tokens + 1), most_us, key=self._costs.rows_us)
            self.rows_alone = min(max(self.rows_alone, fitting), limits.step_tokens)

    def chunks(
        self, live: Items[Sequence], taken: Items[int], waiting: Items[Sequence], spared_us: float, rows_max: int
    ) -> list[int]:
        """How many tokens each of `waiting`, oldest first, computes in a step in which each of `live` computes so many;
        those beyond the end of what is returned none. `spared_us` is what groups take off that step, `rows_max` what
        the memory has room for."""
        costs = self._costs
        if costs is None:
            return [] if live else _divide_rows(waiting, min(self.rows_alone, rows_max))
        rows = sum(taken)
        if live:
            least, most = 0, min(rows_max, self._step_tokens) - rows
            reads_us = sum(map(costs.reads_us, (each.launched for each in live), taken)) - spared_us
            left_us = STEP_SLACK * (costs.rows_us(rows) + max(0.0, reads_us))
        else:
            least, most = 1, min(rows_max, self.rows_alone)
            left_us = (IDLE_STEP_FACTOR - 1) * costs.rows_us(1)

        def added_us(more: int) -> float:
            chunks = _divide_rows(waiting, more)
            reads_us = sum(costs.reads_us(each.launched, chunk) for each, chunk in zip(waiting, chunks, strict=False))
            return (
                costs.rows_us(rows + sum(chunks)) - costs.rows_us(rows) + reads_us + HOST_US_PER_SEQUENCE * len(chunks)
            )

        fitting = bisect_right(range(1, most + 1), left_us, key=added_us)
        return _divide_rows(waiting, max(least, fitting))


def _divide_rows(waiting: Items[Sequence], rows: int) -> list[int]:
    """A row for each of the oldest, as far as they go, and what is left to their prompts, the oldest first."""
    chunks, left = [1] * min(len(waiting), max(rows, 0)), rows - len(waiting)
    for index, sequence in enumerate(waiting[: len(chunks)]):
        if left <= 0:
            break
        more = min(left, max(0, sequence.pending - 1))
        chunks[index] += more
        left -= more
    return chunks
