"""How many rows a step may have, and which sequences get them. It knows counts and costs, not texts, blocks or why a
step failed.

An account whose level is far below another's is not slowed by that one's decodes: where its prompts would get fewer
rows than they have tokens, rows of the other one sit the step out, in turns. Where a step is bound by its rows alone
that is for prompts which an earlier step began: each row gives but one, and places are held longer.

The bound on the time between tokens: while some sequence decodes, a step is predicted to take at most `gap_ms`, unless
its prompts have no more than PROMPT_ROWS_MIN rows beyond one for each: with fewer they would hardly move. Decodes alone
are bounded in step_time.py, between accounts. Without measured costs `step_tokens` is the only bound, and where several
accounts run what step_time.py has learned.

Costs are measured as a model opens, and under load a GPU's clocks fall. So steps are counted as slower by as much as
the slowest of the last runs of steps were: where a busy host sees one end late, the next one only seems faster.
"""

from bisect import bisect_right
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

from engine.scheduling.step_time import StepTime
from engine.sequences.fair_queue import CREDIT, AccountQueue, fair_shares
from engine.sequences.sequence import Sequence
from engine.step.cost_model import CostModel

PROMPT_ROWS_MIN: Final = 64
LEARNED_PROMPT_ROWS_MIN: Final = 16  # where costs are learned: a device without measured ones has less to spare
_FAR: Final = CREDIT / 2  # what an account that arrives is behind by, half of it served
_RECOVERY: Final = 16
_SLOWNESS_MAX: Final = 2.0
_SLOWNESS_FIRST: Final = 1.35  # until there is better to go by
_RUN: Final = 0.1  # what the last step is of a run: it fades out over about ten
_MARGIN: Final = 1.05  # about two of a hundred steps are slower than their run by more
_RISE: Final = 0.25  # of the way to a run that was slower than thought,
_FALL: Final = 0.001  # and to one that was faster


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits that a scheduler keeps.

    step_tokens         the most rows of a step in which some sequence decodes,
    prompt_step_tokens  and of one in which none does; no less.
    max_sequences       running at once.
    max_waiting         in a queue at once.
    gap_ms              see the module; only where there are costs.
    groups              block tables of a slice: those of groups of layers that see alike.
    """

    step_tokens: int
    prompt_step_tokens: int
    max_sequences: int
    max_waiting: int
    gap_ms: float = 0.0
    costs: CostModel | None = None
    groups: int = 1


class TokenBudget:
    """The rows of the next step. Where a device had too little memory for a step, the next ones are smaller.

    max_rows    the most for which a step is expected to find memory.
    saved_us    what groups took off the step before, and will off the next one.
    planned_us  how long the step shared out last is to take by its costs; 0 where it is not bounded.
    time        which rows there is time for where several accounts run.
    slowness    by how much steps are slower than their costs, 1 … _SLOWNESS_MAX.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert 0 < config.step_tokens <= config.prompt_step_tokens
        self._config = config
        self.max_rows = config.prompt_step_tokens
        self.saved_us = 0.0
        self.planned_us = 0.0
        self.slowness, self._run_slowness = _SLOWNESS_FIRST, 1.0
        self.time = StepTime(config.gap_ms, config.costs)
        self._bound_by_time = False  # the rows shared out last

    def halve(self, rows: int) -> None:
        """Halves the next step: one of so many rows did not fit."""
        self.max_rows = max(1, min(self.max_rows, rows) // 2)

    def recover(self) -> None:
        """Lets the next step be a sixteenth larger: one did fit."""
        self.max_rows = min(self.max_rows + max(1, self.max_rows // _RECOVERY), self._config.prompt_step_tokens)

    def observe(self, planned_us: float, took_us: float) -> None:
        """Notes a step planned to take planned_us, which landed took_us after the one that it had waited for."""
        self._run_slowness += (min(took_us / planned_us, _SLOWNESS_MAX) - self._run_slowness) * _RUN
        ratio = max(1.0, min(_MARGIN * self._run_slowness, _SLOWNESS_MAX))
        self.slowness += (ratio - self.slowness) * (_RISE if ratio > self.slowness else _FALL)

    def rows(self, running: Items[Sequence]) -> int:
        """About how many rows a step of these and of prompts beside them may have, without what the prompts read."""
        decoding = [sequence for sequence in running if sequence.decoding]
        high, costs = self._max_step_rows(bool(decoding)), self._config.costs
        low = len(running) + PROMPT_ROWS_MIN
        if costs is None or not decoding or high <= low:
            return high
        left_us = self._gap_us - self._decoding_us(decoding, costs)
        return low + max(0, bisect_right(range(low, high + 1), left_us, key=costs.rows_us) - 1)

    def share(self, sequences: Items[Sequence]) -> dict[Sequence, int]:
        """How many tokens beyond its first each prompt among these, oldest first, computes in a step of them all.

        Accounts with the lowest levels come first, so that nobody's first token waits for another's long prompts.
        """
        self.planned_us, self._bound_by_time = 0.0, False
        prompts = [sequence for sequence in sequences if len(sequence.tokens) - sequence.launched > 1]
        if not prompts:
            return {}
        claims, decoding = _Claims(prompts), [sequence for sequence in sequences if sequence.decoding]
        rows = min(self._max_step_rows(bool(decoding)) - len(sequences), claims.requested)
        costs, min_rows, gap_us = self._config.costs, PROMPT_ROWS_MIN, self._gap_us
        if costs is None:
            costs, min_rows, gap_us = self.time.costs, LEARNED_PROMPT_ROWS_MIN, self.time.limit_us
        if costs is not None and decoding and rows > min_rows:
            starts, decoding_us = [sequence.launched for sequence in claims.order], self._decoding_us(decoding, costs)

            def step_us(extra: int) -> float:
                pairs = sum(map(costs.pairs, starts, (1 + more for more in claims.shares(extra))))
                return costs.rows_us(len(sequences) + extra) + decoding_us + pairs * costs.prompt_pair_us

            fitting, most = bisect_right(range(min_rows, rows + 1), gap_us, key=step_us), rows
            rows = min_rows + max(0, fitting - 1)
            self._bound_by_time = rows < most
            self.planned_us = step_us(rows) if costs is self._config.costs else 0.0
        return dict(zip(claims.order, claims.shares(rows), strict=True))

    def sitting_out(self, sequences: Items[Sequence], extra: dict[Sequence, int]) -> set[Sequence]:
        """Decodes that are to leave their rows of a step of these, in which prompts have so much extra, to prompts of
        accounts far behind theirs; the rest is then shared out anew. One goes on, so that the step stays as short as
        one beside decodes has to be."""
        short = {
            sequence: sequence.wanted_rows - rows
            for sequence, rows in extra.items()
            if sequence.wanted_rows > rows and (self._bound_by_time or sequence.computed > sequence.cached_tokens)
        }
        if not short:
            return set()
        level = min(sequence.account_queue.level for sequence in short) + _FAR
        ahead = [each for each in sequences if each.decoding and each.account_queue.level > level]
        if not ahead:
            return set()
        highest = max(sequence.account_queue.level for sequence in ahead) - _FAR
        rows = sum(count for sequence, count in short.items() if sequence.account_queue.level < highest)
        return self.time.take_turns(ahead, min(rows, len(ahead) - 1))

    @property
    def _gap_us(self) -> float:
        """The most that the costs of a step may add up to."""
        return self._config.gap_ms * 1e3 / self.slowness

    def _decoding_us(self, decoding: Items[Sequence], costs: CostModel) -> float:
        """What decoding sequences read."""
        keys = sum(costs.seen(sequence.launched + 1) for sequence in decoding)
        return max(0.0, keys * costs.key_us - self.saved_us)

    def _max_step_rows(self, decoding: bool) -> int:
        return min(self.max_rows, self._config.step_tokens if decoding else self._config.prompt_step_tokens)


class _Claims:
    """The rows that prompts request beyond one for each, by account: the oldest, then the others by length."""

    def __init__(self, prompts: Items[Sequence]) -> None:
        accounts: dict[AccountQueue[Sequence], list[Sequence]] = {}
        for sequence in prompts:
            accounts.setdefault(sequence.account_queue, []).append(sequence)
        self._accounts = list(accounts)
        orders = [[oldest, *sorted(others, key=lambda prompt: prompt.pending)] for oldest, *others in accounts.values()]
        self._requested = [[sequence.wanted_rows for sequence in order] for order in orders]
        self._sums = [sum(requested) for requested in self._requested]
        self.order = [sequence for order in orders for sequence in order]
        self.requested = sum(self._sums)

    def shares(self, rows: int) -> list[int]:
        """The rows, shared out between accounts by what they were served, in `order`."""
        parts = fair_shares(self._accounts, self._sums, rows)
        return [
            share
            for requested, part in zip(self._requested, parts, strict=True)
            for share in _prompt_shares(requested, part)
        ]


def _prompt_shares(requested: list[int], rows: int) -> list[int]:
    """The rows, shared out between one account's prompts: the oldest, then the others, the shortest first.

    The oldest has a right to half of the rows, the others share the rest in their order: a short prompt is not kept
    waiting by a long one, and a long one is not starved by short ones. No share shrinks where there are more rows.
    """
    oldest, *others = requested
    left = rows - min(oldest, rows - rows // 2)
    shares = []
    for count in others:
        shares.append(min(count, left))
        left -= shares[-1]
    return [min(oldest, rows - sum(shares)), *shares]
