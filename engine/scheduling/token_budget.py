"""How many rows a step may have, and who gets them. It knows counts and costs, not texts, blocks or why a step failed.

The bound on the time between tokens: while some sequence decodes, a step is predicted to take at most `gap_ms`, unless
its prompts have no more than PROMPT_ROWS_MIN rows beyond one for each: with fewer they would hardly move. What decodes
alone take is nobody's to bound here. Without measured costs `step_tokens` is the only bound.

Costs are measured as a runner opens; under load a GPU's clocks fall with its power, and a host has other work. So steps
are counted as slower than their costs by what the slowest of late turned out to be.
"""

from bisect import bisect_right
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

from engine.scheduling.fair_queue import AccountQueue, fair_shares
from engine.scheduling.sequence import Sequence
from engine.step.cost_model import CostModel

PROMPT_ROWS_MIN: Final = 64
_RECOVERY: Final = 16
_SLOWNESS_MAX: Final = 2.0
_SLOWNESS_FIRST: Final = 1.35  # until there is better to go by
_RISE: Final = 0.25  # of the way to a step that was slower than thought,
_FALL: Final = 0.001  # and to one that was faster: about two of a hundred are slower than what this settles at


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What a scheduler keeps to.

    step_tokens         the most rows of a step in which some sequence decodes,
    prompt_step_tokens  and of one in which none does; no less.
    sequences           running at once.
    waiting             in the queue at once.
    gap_ms              see the module; only where there are costs.
    """

    step_tokens: int
    prompt_step_tokens: int
    sequences: int
    waiting: int
    gap_ms: float = 0.0
    costs: CostModel | None = None


class TokenBudget:
    """The rows of the next step. Where a device had too little memory for a step, the next ones are smaller.

    spared_us   what groups took off the step before, and will off the next one.
    planned_us  what the step shared out last is to take by its costs; 0 where it is not bounded.
    slowness    by how much steps are slower than their costs, 1 … _SLOWNESS_MOST.
    """

    def __init__(self, limits: SchedulerConfig) -> None:
        assert 0 < limits.step_tokens <= limits.prompt_step_tokens
        self._limits = limits
        self._rows_max = limits.prompt_step_tokens
        self.spared_us = 0.0
        self.planned_us = 0.0
        self.slowness = _SLOWNESS_FIRST

    @property
    def rows_max(self) -> int:
        """The most rows that a step may have for its memory's sake."""
        return self._rows_max

    def halve(self, rows: int) -> None:
        """A step of so many rows did not fit: the next has at most half."""
        self._rows_max = max(1, min(self._rows_max, rows) // 2)

    def recover(self) -> None:
        """A step did fit: the next may be a sixteenth larger."""
        if self._rows_max < self._limits.prompt_step_tokens:
            larger = self._rows_max + max(1, self._rows_max // _RECOVERY)
            self._rows_max = min(larger, self._limits.prompt_step_tokens)

    def observe(self, planned_us: float, took_us: float) -> None:
        """A step with such a plan landed so long after the one before it, behind which it had been waiting."""
        ratio = max(1.0, min(took_us / planned_us, _SLOWNESS_MAX))
        self.slowness += (ratio - self.slowness) * (_RISE if ratio > self.slowness else _FALL)

    def rows(self, running: Items[Sequence]) -> int:
        """About how many rows a step of these and of prompts beside them may have, what the prompts read left out."""
        decoding = [sequence for sequence in running if sequence.pending <= 1]
        most, costs = self._most(bool(decoding)), self._limits.costs
        least = len(running) + PROMPT_ROWS_MIN
        if costs is None or not decoding or most <= least:
            return most
        left_us = self._gap_us - self._decoding_us(decoding, costs)
        return least + max(0, bisect_right(range(least, most + 1), left_us, key=costs.rows_us) - 1)

    def share(self, sequences: Items[Sequence]) -> dict[Sequence, int]:
        """How many tokens beyond its first each prompt among these, oldest first, computes in a step of them all.

        Accounts with the lowest levels come first, so that nobody's first token waits for another's long prompts.
        """
        self.planned_us = 0.0
        prompts = [sequence for sequence in sequences if sequence.pending > 1]
        if not prompts:
            return {}
        decoding = [sequence for sequence in sequences if sequence.pending <= 1]
        claims = _Claims(prompts)
        most = min(self._most(bool(decoding)) - len(sequences), claims.wanted)
        costs = self._limits.costs
        if costs is not None and decoding and most > PROMPT_ROWS_MIN:
            starts, decoding_us = [sequence.launched for sequence in claims.order], self._decoding_us(decoding, costs)

            def step_us(extra: int) -> float:
                pairs = sum(map(_query_key_pairs, starts, claims.shares(extra)))
                return costs.rows_us(len(sequences) + extra) + decoding_us + pairs * costs.prompt_pair_us

            fitting = bisect_right(range(PROMPT_ROWS_MIN, most + 1), self._gap_us, key=step_us)
            most = PROMPT_ROWS_MIN + max(0, fitting - 1)
            self.planned_us = step_us(most)
        return dict(zip(claims.order, claims.shares(most), strict=True))

    @property
    def _gap_us(self) -> float:
        """What the costs of a step may add up to."""
        return self._limits.gap_ms * 1e3 / self.slowness

    def _decoding_us(self, decoding: Items[Sequence], costs: CostModel) -> float:
        """What those that decode read."""
        keys = sum(sequence.launched + 1 for sequence in decoding)
        return max(0.0, keys * costs.key_us - self.spared_us)

    def _most(self, decoding: bool) -> int:
        limits = self._limits
        return min(self._rows_max, limits.step_tokens if decoding else limits.prompt_step_tokens)


class _Claims:
    """What prompts want beyond a row for each, by account: its oldest, then its others, the shortest first."""

    def __init__(self, prompts: Items[Sequence]) -> None:
        accounts: dict[AccountQueue[Sequence], list[Sequence]] = {}
        for sequence in prompts:
            accounts.setdefault(sequence.standing, []).append(sequence)
        self._standings = list(accounts)
        orders = [[oldest, *sorted(others, key=_pending)] for oldest, *others in accounts.values()]
        self._wanted = [[sequence.pending - 1 for sequence in order] for order in orders]
        self._sums = [sum(wanted) for wanted in self._wanted]
        self.order = [sequence for order in orders for sequence in order]
        self.wanted = sum(self._sums)

    def shares(self, rows: int) -> list[int]:
        """So many rows, shared out between accounts by what they were served, in `order`."""
        parts = fair_shares(self._standings, self._sums, rows)
        return [
            share for wanted, part in zip(self._wanted, parts, strict=True) for share in _prompt_shares(wanted, part)
        ]


def _query_key_pairs(start: int, extra: int) -> int:
    """How often the rows from `start` on, one and `extra` more, meet a key, their own included."""
    rows = 1 + extra
    return rows * start + rows * (rows + 1) // 2


def _prompt_shares(wanted: list[int], rows: int) -> list[int]:
    """So many rows, shared out between one account's prompts: the oldest, then the others, the shortest first.

    The oldest has a right to half of the rows, the others share the rest in their order: a short prompt is not kept
    waiting by a long one, and a long one is not starved by short ones. No share shrinks where there are more rows.
    """
    oldest, *others = wanted
    left = rows - min(oldest, rows - rows // 2)
    shares = []
    for count in others:
        shares.append(min(count, left))
        left -= shares[-1]
    return [min(oldest, rows - sum(shares)), *shares]


def _pending(sequence: Sequence) -> int:
    return sequence.pending
