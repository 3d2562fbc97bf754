"""What a quiet account notices of another one's rows, prompts and masks, on a simulated clock: a step takes as long as
its rows and its masks do, and after each step the time is shared as it should be.

And the proof that it can fail: builds that are broken on purpose are found out.
"""

from collections.abc import Callable

import pytest

from engine.protocol.types import Scope, ScopeKind
from engine.scheduling.step_time import BASE_FACTOR, MASK_PART
from engine.sequences.fair_queue import GENERATED_TOKEN, MASK_US
from engine.step.cost_model import CostModel
from tests.engine.scheduling.simulation.replica import Heard, Simulation
from tests.engine.scheduling.simulation.test_replica import install_broken
from tests.support.stamp_engine import Rule

GAP_MS = 20.0
STEP_US, ROW_US = 2000.0, 1000.0
QUIET, BUSY, THIRD = (Scope(ScopeKind.TENANT, letter * 16, account=letter * 16) for letter in (b"q", b"b", b"c"))
NO_MASK: Callable[[int], float] = lambda written: 0.0  # noqa: E731
COSTS = CostModel(((1, 3000.0), (64, 66_000.0)), 1e-3, 1e-3, 1.0, 1e-3, 0.0, 0.0)


class Timed:
    """A replica of 32 places whose clock goes on with each step's rows and masks; `steps_us` and `masks_us` of each."""

    def __init__(
        self, step_us: float = STEP_US, costs: CostModel | None = None, depth: int = 1, row_us: float = ROW_US
    ) -> None:
        self.simulation = simulation = Simulation(
            blocks=4096, block_tokens=4, step_tokens=256, sequences=32, vocabulary=50, gap_ms=GAP_MS, costs=costs,
            depth=depth,
        )  # fmt: skip
        self.step_us, self.row_us = step_us, row_us
        self.steps_us: list[float] = []
        self.masks_us: list[float] = []
        self._masks_us = 0.0
        simulation.meanwhile, simulation.masking = self._pass_time, self._note_masks
        self._id = 0

    def submit(
        self, scope: Scope, count: int = 1, mask_us: Callable[[int], float] | None = None, prompt: int = 3
    ) -> list[Heard]:
        heard = []
        for _ in range(count):
            self._id += 1
            tokens = [(self._id * 7 + index) % 50 for index in range(prompt)]
            rule = None if mask_us is None else Rule(2000, forcing=False)
            heard += self.simulation.submit(
                self._id, tokens, scope, max_tokens=1200, rule=rule, mask_us=mask_us or NO_MASK
            )
        return heard

    def run(self, steps: int) -> None:
        """Runs so many steps: what came before is forgotten."""
        self.steps_us, self.masks_us = [], []
        while len(self.steps_us) < steps:
            seconds = self.simulation.seconds
            assert self.simulation.step()
            self.simulation.seconds -= 1.0  # which `listen` adds
            assert self.simulation.seconds > seconds, "a step took no time"

    def _note_masks(self, took_us: float) -> None:
        self._masks_us = took_us

    def _pass_time(self) -> None:
        rows = sum(self.simulation.scheduler.running.inflight[0].chunks)
        self.steps_us.append(self.step_us + self.row_us * rows + self._masks_us)
        self.masks_us.append(self._masks_us)
        self.simulation.seconds += self.steps_us[-1] / 1e6
        self._masks_us = 0.0


def tokens(heard: list[Heard]) -> list[int]:
    return [len(each.tokens) for each in heard]


@pytest.mark.parametrize(("costs", "depth"), [(None, 1), (COSTS, 2)])
def test_rows_of_one_account_take_no_longer_than_the_gap_and_take_turns(costs: CostModel | None, depth: int) -> None:
    timed = Timed(costs=costs, depth=depth)
    quiet, busy = timed.submit(QUIET), timed.submit(BUSY, 31)
    timed.run(40)
    before, at = tokens(busy), len(quiet[0].tokens)
    timed.run(120)
    assert max(timed.steps_us) <= 1.15e3 * GAP_MS, "31 rows more would be 34 ms"
    assert sum(timed.steps_us) / 120 >= 0.75e3 * GAP_MS, "and what there is time for is used"
    assert len(quiet[0].tokens) == at + 120, "it is in every step"
    gained = [after - earlier for after, earlier in zip(tokens(busy), before, strict=True)]
    assert max(gained) - min(gained) <= 2, "each has its turn"


def test_an_account_that_runs_alone_has_all_of_its_rows_in_every_step() -> None:
    timed = Timed()
    busy = timed.submit(BUSY, 32, mask_us=lambda written: 3000.0)
    timed.run(30)
    assert set(tokens(busy)) == {30}


def test_the_more_an_accounts_plan_weighs_the_more_of_a_step_it_has() -> None:
    timed = Timed()
    crowds = {scope: timed.submit(scope, 15) for scope in (BUSY, THIRD)}
    for account in timed.simulation.scheduler.running._waiting.live._accounts.values():
        account.set_terms(type(account.terms)(weight=1.0))
    quiet = timed.submit(QUIET)
    timed.run(100)
    done = {scope: sum(tokens(heard)) for scope, heard in crowds.items()}
    assert abs(done[BUSY] - done[THIRD]) <= 0.1 * done[BUSY]
    assert len(quiet[0].tokens) >= 98


def masked_life() -> tuple[Timed, list[Heard], list[Heard]]:
    """Rows whose masks take longer with every token, up to 5 ms each, beside one that has none."""
    timed = Timed()
    quiet = timed.submit(QUIET)
    timed.run(10)
    return timed, quiet, timed.submit(BUSY, 24, mask_us=lambda written: min(5000.0, 100.0 * written))


def assert_masks_bounded(timed: Timed, quiet: list[Heard]) -> None:
    """At each step: masks of one account have had their part of all steps so far, and one mask more."""
    at, part_us = len(quiet[0].tokens), 1e3 * MASK_PART * GAP_MS
    timed.run(300)
    assert len(quiet[0].tokens) == at + 300
    for first in range(0, 300, 50):
        had_us = sum(timed.masks_us[first : first + 50])
        assert had_us <= 50 * part_us + 2 * 5000.0, "masks take more of the steps than their part"
    assert max(timed.steps_us) <= 1e3 * GAP_MS + 5000.0
    assert sum(timed.masks_us) >= 0.6 * 300 * part_us, "and they have that part"


def test_masks_of_one_account_have_their_part_of_the_steps_and_no_more() -> None:
    timed, quiet, busy = masked_life()
    timed.run(150)
    assert_masks_bounded(timed, quiet)
    assert max(tokens(busy)) - min(tokens(busy)) <= 3, "its rows take turns"


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_that_sat_out_come_back_no_more_at_a_time(depth: int) -> None:
    """There is time for all rows, and the step before may have had no masks."""
    timed = Timed(depth=depth)
    timed.submit(QUIET)
    timed.run(10)
    timed.submit(BUSY, 6, mask_us=lambda written: 3000.0)
    timed.run(10)
    timed.run(100)
    assert max(timed.masks_us) <= 1e3 * MASK_PART * GAP_MS + 3000.0, "all of them take 18 ms"


BREAKS = {
    "masks cost nothing": ("scheduling.step_time", "(mask_us and masks_us <= 0)", "False"),
    "what masks took too long is forgotten": ("scheduling.step_time", "if masks_us < 0:", "if False:"),
    "a step takes what it takes": ("scheduling.step_time", "took_us and took_us + row_us > share_us", "False"),
    "the oldest rows go first": ("scheduling.step_time", "sequence.row_turn = self._turns", "pass"),
    "masks that are due do not count": (
        "scheduling.step_time",
        "each.matcher.mask_us for each in sequences",
        "0 for each in sequences",
    ),
    "nothing sits out": ("scheduling.step_time", "if sequence in fitting]", "]"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_build_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_broken(*BREAKS[name], monkeypatch)

    def test() -> None:
        test_rows_of_one_account_take_no_longer_than_the_gap_and_take_turns(None, 1)
        test_masks_of_one_account_have_their_part_of_the_steps_and_no_more()
        test_masks_that_sat_out_come_back_no_more_at_a_time(1)

    with pytest.raises(AssertionError):
        test()


def test_masks_are_charged_to_the_account_that_sent_the_grammar() -> None:
    timed = Timed()
    plain, masked = timed.submit(QUIET), timed.submit(BUSY, mask_us=lambda written: 700.0)
    timed.run(50)
    (one,), (other,) = plain, masked
    served = GENERATED_TOKEN * (len(other.tokens) - len(one.tokens))
    charged = other.sequence.account_queue.level - one.sequence.account_queue.level - served
    assert charged == pytest.approx(len(other.tokens) * 700.0 / MASK_US)


def test_a_prompt_beside_others_rows_is_cut_by_what_steps_took() -> None:
    timed = Timed()
    timed.submit(QUIET)
    timed.run(10)
    (prompt,) = timed.submit(BUSY, prompt=400)
    timed.run(12)
    assert max(timed.steps_us) <= 1.3e3 * GAP_MS, "256 rows at once would be 258 ms"
    timed.run(40)
    assert prompt.tokens, "and it comes to its end"
    alone = Timed()
    alone.submit(BUSY, prompt=400)
    alone.run(3)
    assert max(alone.steps_us) > 250_000


def test_what_a_step_takes_whatever_its_rows_does_not_cut_prompts() -> None:
    """As the built-in model's steps on a CPU: 3 ms, and 0.08 ms a row; rows taken for 3 ms had cut prompts to 17."""
    timed = Timed(step_us=3000.0, row_us=80.0)
    timed.submit(QUIET)
    timed.run(10)
    timed.submit(BUSY, prompt=150)
    timed.run(60)
    (prompt,) = timed.submit(THIRD, prompt=150)
    timed.run(1)
    assert prompt.tokens, "a step of 152 rows takes 15 of the 20 ms"
    timed.submit(THIRD, 8, prompt=150)
    timed.run(20)
    assert max(timed.steps_us) <= 1.15e3 * GAP_MS


def test_a_model_whose_single_row_takes_longer_than_the_gap_still_has_more_rows_in_a_step() -> None:
    timed = Timed(step_us=60_000.0)
    timed.submit(QUIET)
    timed.run(10)
    busy = timed.submit(BUSY, 31)
    timed.run(60)
    assert max(timed.steps_us) <= BASE_FACTOR * 61_000 * 1.1
    assert min(tokens(busy)) > 40
