"""Which rows the next step has time for where several accounts run. It knows counts and times, not texts or blocks.

How long a step takes is learned from those before it, their masks apart: as much for each unit of work as in the last
ones, where no costs were measured beyond what a step of few rows takes at least. What a step would take beyond its
limit is taken from the accounts that have most of it for their weight, and of each of these the rows take turns. An
account's masks take MASK_PART of the limit in each step on average: one that takes longer runs, and what it took too
long keeps its masked rows out of later steps. An account that runs alone is not bounded: nobody waits for it.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final

from engine.scheduling.step_costs import StepCosts
from engine.scheduling.step_plan import StepPlan
from engine.sequences.fair_queue import AccountQueue
from engine.sequences.sequence import Sequence
from engine.step.cost_model import CostModel

MASK_PART: Final = 0.2  # of the limit, for the masks of one account
BASE_FACTOR: Final = 2.0  # a step may take so many times as long as one of a single row, if gap_ms is less
_KEPT: Final = 0.75  # of what the steps before count for, when another one lands: those of many rows tell most
# Where no costs were measured, as on a CPU: in decoding rows' keys. What is wrong with them the next steps put right.
_ROW_KEYS: Final = 128.0
_PROMPT_PAIR_KEYS: Final = 0.125
_ROWS: Final = 64  # of which one row's cost is the mean
_FEW_ROWS: Final = 8  # take hardly longer than one


class StepTime:
    """The time of steps as it was learned, and who has how much of the next one.

    costs   how long steps take, as learned: where that is to bound prompts, which it is where no costs were measured
            and several accounts run.
    learned what any step takes by what it computes.
    """

    def __init__(self, gap_ms: float, costs: CostModel | None) -> None:
        """With a gap_ms of 0 nothing is bounded."""
        self.costs: CostModel | None = None
        self.learned = StepCosts()
        self._gap_us = 1e3 * gap_ms
        self._row, self._key, self._base_us = _ROW_KEYS, 1.0, math.inf
        if costs is not None:
            self._base_us = costs.rows_us(1)
            self._row, self._key = max(1.0, (costs.rows_us(_ROWS) - self._base_us) / _ROWS), costs.key_us
        self._seen: Callable[[int], float] = float if costs is None else costs.seen
        self._measured = costs is not None
        self._bounded = False  # several accounts run
        self._turns = 0  # of rows, counted
        self._unit_us = 0.0  # 0 until a step has landed
        self._fixed_us = self._work = self._work_us = 0.0  # of a step, whatever its rows; and of the last steps
        self._debts_us: dict[AccountQueue[Sequence], float] = {}  # what masks took too long

    @property
    def limit_us(self) -> float:
        """How long a step may take while several accounts run."""
        return max(self._gap_us, BASE_FACTOR * self._base_us if self._base_us < math.inf else 0.0)

    def work(self, sequences: Items[Sequence], chunks: Items[int]) -> float:
        """The work of a step in which each of these computes its chunk, before it is launched; 0: not to be counted."""
        if self._measured and not self._bounded:
            return 0.0
        keys = 0.0
        for sequence, chunk in zip(sequences, chunks, strict=True):
            seen = self._seen(sequence.launched + chunk // 2)
            keys += seen if chunk == 1 else _PROMPT_PAIR_KEYS * chunk * seen
        return self._row * sum(chunks) + self._key * keys

    def observe(self, plan: StepPlan, took_us: float) -> None:
        """Notes that a step took so long, its masks included."""
        masks_us = sum(sequence.mask_us for sequence in plan.masked_sequences)
        self.learned.observe(plan.sequences, plan.chunks, took_us - min(masks_us, took_us / 2))
        if few := (not self._measured and sum(plan.chunks) <= _FEW_ROWS):
            self._base_us = min(self._base_us, took_us)
        elif not self._measured and self._base_us < math.inf:
            self._fixed_us = self._base_us
        if plan.work and not (few and self._fixed_us):
            rows_us = max(0.0, took_us - min(masks_us, took_us / 2) - self._fixed_us)
            self._work, self._work_us = _KEPT * self._work + plan.work, _KEPT * self._work_us + rows_us
            self._unit_us = self._work_us / self._work

    def select(self, sequences: list[Sequence], accounts: int) -> list[Sequence]:
        """Returns the sequences that have a row in the next step, where so many accounts run: at least one of these."""
        self.costs, self._bounded = None, accounts > 1 and self._gap_us > 0
        if not self._bounded:
            return sequences
        rows = len(sequences)
        if not self._measured and (unit_us := self._unit_us):
            rows_us = tuple((count, self._fixed_us + count * self._row * unit_us) for count in (1, 1 << 16))
            self.costs = CostModel(rows_us, unit_us, unit_us, 0.0, _PROMPT_PAIR_KEYS * unit_us, 0.0, 0.0)
            rows = sum([max(1, len(each.tokens) - each.launched) for each in sequences])  # as `_wanted` has it
        keys = sum([self._seen(each.launched) for each in sequences])
        masks_us = sum([each.matcher.mask_us for each in sequences if each.matcher is not None])
        step_us = self._fixed_us + self._unit_us * (self._row * rows + self._key * keys) + masks_us
        limit_us = self.limit_us
        if step_us <= limit_us and masks_us <= MASK_PART * limit_us and not self._debts_us:
            return sequences
        fitting = self._fitting(sequences, limit_us)
        return [sequence for sequence in sequences if sequence in fitting] or sequences[:1]

    def take_turns(self, rows: Items[Sequence], count: int) -> set[Sequence]:
        """Which so many of these rows sit the next step out."""
        ordered = sorted(rows, key=lambda each: each.row_turn)
        for sequence in ordered[: len(rows) - count]:
            self._give_turn(sequence)
        return set(ordered[len(rows) - count :])

    def _give_turn(self, sequence: Sequence) -> None:
        self._turns += 1
        sequence.row_turn = self._turns

    def _fitting(self, sequences: list[Sequence], limit_us: float) -> set[Sequence]:
        """The rows that the step has time for."""
        fitting: set[Sequence] = set()
        accounts: dict[AccountQueue[Sequence], list[Sequence]] = {}
        for sequence in sequences:
            accounts.setdefault(sequence.account_queue, []).append(sequence)
        needed_us = {
            account: sum(self._row_us(each, self._wanted(each)) for each in own) for account, own in accounts.items()
        }
        debts_us, left_us = self._debts_us, limit_us - self._fixed_us
        self._debts_us, left_weight = {}, sum(account.terms.weight for account in accounts)
        for account in sorted(accounts, key=lambda each: needed_us[each] / each.terms.weight):
            share_us = left_us * account.terms.weight / left_weight
            masks_us = MASK_PART * limit_us - debts_us.get(account, 0.0)
            took_us, masks_us = self._add_fitting(fitting, accounts[account], share_us, masks_us)
            if masks_us < 0:
                self._debts_us[account] = -masks_us
            left_us -= min(left_us, max(took_us, min(needed_us[account], share_us)))
            left_weight -= account.terms.weight
        return fitting

    def _add_fitting(
        self, fitting: set[Sequence], own: list[Sequence], share_us: float, masks_us: float
    ) -> tuple[float, float]:
        """Adds rows of one account. Returns what they take, and what is left for its masks."""
        took_us = 0.0
        for sequence in sorted(own, key=lambda each: each.row_turn):
            row_us, mask_us = self._row_us(sequence), sequence.mask_us
            if (took_us and took_us + row_us > share_us) or (mask_us and masks_us <= 0):
                continue
            self._give_turn(sequence)
            fitting.add(sequence)
            took_us += row_us
            masks_us -= mask_us
        return took_us, masks_us

    def _wanted(self, sequence: Sequence) -> int:
        """How many rows time is left for: for a prompt as many as it has, where it gets those by what is learned."""
        return 1 if self._measured else max(1, sequence.pending)

    def _row_us(self, sequence: Sequence, rows: int = 1) -> float:
        """What so many rows of the sequence take, the mask included; what a prompt reads left out."""
        return self._unit_us * (self._row * rows + self._key * self._seen(sequence.launched)) + sequence.mask_us
