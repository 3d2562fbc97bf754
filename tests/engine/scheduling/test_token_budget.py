"""engine/scheduling/token_budget.py: the bound on the time between tokens, whose rows they are, and what too little
memory does."""

import random
from array import array

import pytest

from engine.protocol.types import SamplingParams
from engine.scheduling.token_budget import PROMPT_ROWS_MIN, SchedulerConfig, TokenBudget
from engine.sequences.fair_queue import AccountQueue
from engine.sequences.sequence import Sequence
from engine.step.cost_model import CostModel
from engine.step.layout import unpack_step
from tests.engine.scheduling.simulation.replica import Fault, Simulation
from tests.engine.scheduling.simulation.test_replica import install_broken

COSTS = CostModel(
    rows=((1, 3500.0), (64, 3700.0), (256, 5000.0), (1024, 14000.0), (8192, 112000.0)),
    key_us=0.03,
    shared_key_us=0.03,
    pair_us=0.0002,
    prompt_pair_us=0.0005,
    segment_us=2.0,
    groups_us=0.0,
)

ONE = AccountQueue[Sequence]()


def running(tokens: int, computed: int, standing: AccountQueue[Sequence] = ONE) -> Sequence:
    """One that lacks tokens − computed tokens."""
    prompt = array("I", [1]) * tokens
    sequence = Sequence(1, 1, b"", None, prompt, tokens, tokens + 100, SamplingParams(), frozenset(), 0.0)
    sequence.computed = sequence.launched = computed
    sequence.account_queue = standing
    return sequence


def predicted_us(sequences: list[Sequence], extra: dict[Sequence, int]) -> float:
    """The step's time by the costs, row by row."""
    us = COSTS.rows_us(len(sequences) + sum(extra.values()))
    for sequence in sequences:
        if sequence.pending <= 1:
            us += (sequence.launched + 1) * COSTS.key_us
        else:
            us += sum(sequence.launched + row + 1 for row in range(1 + extra[sequence])) * COSTS.prompt_pair_us
    return us


def limits(**changed: object) -> SchedulerConfig:
    return SchedulerConfig(
        **{**dict(step_tokens=8192, prompt_step_tokens=8192, max_sequences=512, max_waiting=64), **changed}
    )  # type: ignore[arg-type]


def exact(**changed: object) -> TokenBudget:
    """A budget that has seen that steps take what their costs say."""
    budget = TokenBudget(limits(**changed))
    budget.slowness = 1.0
    return budget


@pytest.mark.parametrize("seed", range(60))
def test_a_step_beside_decodes_stays_within_the_gap_or_moves_its_prompts_by_the_least(seed: int) -> None:
    pick = random.Random(seed)
    decodes = [running(length, length - 1) for length in pick.choices(range(1, 9000), k=pick.randint(1, 300))]
    prompts = [running(pick.randint(start + 2, 9000), start) for start in pick.choices([0, 16, 4000], k=3)]
    sequences = pick.sample(decodes + prompts, len(decodes) + len(prompts))
    gap_ms = pick.choice([5.0, 10.0, 20.0, 60.0])
    extra = exact(costs=COSTS, gap_ms=gap_ms).share(sequences)
    took_us = predicted_us(sequences, extra)
    rows = sum(extra.values())
    assert rows >= min(PROMPT_ROWS_MIN, sum(prompt.pending - 1 for prompt in prompts))
    assert took_us <= gap_ms * 1e3 or rows <= PROMPT_ROWS_MIN
    if rows < sum(prompt.pending - 1 for prompt in prompts) and took_us <= gap_ms * 1e3:
        slack_us = COSTS.rows_us(len(sequences) + rows + 1) - COSTS.rows_us(len(sequences) + rows)
        assert took_us + slack_us + 9000 * COSTS.prompt_pair_us > gap_ms * 1e3, "a row more would have fitted"


def test_what_groups_spare_is_left_to_prompts() -> None:
    decodes, prompt = [running(4400, 4399) for _ in range(64)], running(9000, 0)
    budget = exact(costs=COSTS, gap_ms=16.0)
    alone = budget.share([*decodes, prompt])[prompt]
    rows = budget.rows([*decodes, prompt])
    budget.saved_us = 63 * 4096 * COSTS.key_us
    assert budget.share([*decodes, prompt])[prompt] > 2 * alone
    assert budget.rows([*decodes, prompt]) > rows


def test_without_decodes_prompts_have_a_budget_of_their_own() -> None:
    prompts = [running(9000, 0), running(9000, 0)]
    budget = TokenBudget(limits(step_tokens=512, prompt_step_tokens=4096, costs=COSTS, gap_ms=1.0))
    assert sum(budget.share(prompts).values()) + 2 == 4096
    assert sum(budget.share([*prompts, running(9, 8)]).values()) == PROMPT_ROWS_MIN


def test_without_costs_a_step_has_step_tokens() -> None:
    budget = TokenBudget(limits(step_tokens=512, prompt_step_tokens=512))
    assert sum(budget.share([running(9000, 0), running(9, 8)]).values()) + 2 == 512


def test_a_setting_is_never_exceeded_though_the_gap_allows_more() -> None:
    budget = TokenBudget(limits(step_tokens=100, costs=COSTS, gap_ms=1000.0))
    assert sum(budget.share([running(9000, 0), running(9, 8)]).values()) + 2 == 100


def test_the_oldest_prompt_has_half_and_the_shortest_of_the_others_comes_first() -> None:
    oldest, long, short = running(900, 0), running(800, 0), running(20, 0)
    extra = TokenBudget(limits(step_tokens=103, prompt_step_tokens=103)).share([oldest, long, short])
    assert (extra[oldest], extra[long], extra[short]) == (50, 31, 19)


def test_rows_go_to_the_account_that_was_served_least() -> None:
    served, fresh = AccountQueue[Sequence](), AccountQueue[Sequence]()
    served.level = 1000.0
    long, short, more = running(900, 0, served), running(200, 0, fresh), running(20, 0, fresh)
    extra = TokenBudget(limits(step_tokens=103, prompt_step_tokens=103)).share([long, short, more])
    assert (extra[long], extra[short], extra[more]) == (0, 81, 19)
    fresh.level = 990.0  # ten rows more and they are level
    extra = TokenBudget(limits(step_tokens=103, prompt_step_tokens=103)).share([long, short, more])
    assert extra[long] == 45
    assert extra[short] + extra[more] == 55


def test_no_account_gets_more_rows_than_it_wants() -> None:
    fresh, long = running(20, 0, AccountQueue[Sequence]()), running(900, 0)
    assert TokenBudget(limits(step_tokens=100, prompt_step_tokens=100)).share([long, fresh]) == {long: 79, fresh: 19}


def test_a_prompt_whose_blocks_leave_meanwhile_has_no_more_rows_of_a_step_than_it_is_limited_to() -> None:
    leaving, other = running(900, 0), running(400, 0)
    leaving.chunk_limit = 64
    extra = TokenBudget(limits(step_tokens=602, prompt_step_tokens=602)).share([leaving, other])
    assert (extra[leaving], extra[other]) == (63, 399)
    leaving.launched = 880
    assert TokenBudget(limits()).share([leaving]) == {leaving: 19}, "the rest is less than that"


def test_a_step_that_did_not_fit_halves_the_next_and_each_that_fits_lets_it_grow() -> None:
    budget = TokenBudget(limits(step_tokens=512, prompt_step_tokens=512))
    budget.halve(400)
    assert budget.max_rows == 200
    budget.halve(7)
    assert budget.max_rows == 3
    for steps in range(1, 1000):
        budget.recover()
        if budget.max_rows == 512:
            assert 50 < steps < 200
            return
    raise AssertionError("it never recovers")


@pytest.mark.parametrize("depth", [1, 2])
def test_streams_keep_their_gap_while_long_prompts_arrive(depth: int) -> None:
    """The whole way through the scheduler."""
    simulation = Simulation(
        blocks=2048,
        block_tokens=16,
        step_tokens=4096,
        sequences=64,
        vocabulary=5000,
        depth=depth,
        costs=COSTS,
        gap_ms=12.0,
    )
    rows, late_us = list[int](), list[float]()

    def misfortune() -> Fault:
        plan = simulation.scheduler.running.inflight[-1]
        if any(sequence.emitted for sequence in plan.sequences):
            took_us = COSTS.rows_us(sum(plan.chunks))
            for context, chunk in zip(unpack_step(plan.packed).contexts_S.tolist(), plan.chunks, strict=True):
                keys = sum(range(context - chunk + 1, context + 1))
                took_us += keys * (COSTS.key_us if chunk == 1 else COSTS.prompt_pair_us)
            rows.append(sum(plan.chunks))
            if took_us > 12_000 and rows[-1] > len(plan.chunks) + PROMPT_ROWS_MIN:
                late_us.append(took_us)  # an error that is raised here is a step that failed, as any other
        return Fault()

    simulation.misfortune = misfortune
    for id in range(20):
        simulation.submit(id, range(id, id + 30), max_tokens=30)
    for id in range(20, 23):
        simulation.submit(id, range(id, id + 3000), max_tokens=2)
    simulation.run()
    simulation.assert_all_finished()
    assert late_us == []
    assert max(rows) > 400


BREAKS = {
    "a step has no gap to keep": ("return self._config.gap_ms * 1e3 / self.slowness", "return 1e9"),
    "prompts get twice the rows that fit": ("max(0, fitting - 1)\n", "2 * fitting\n"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_streams_lose_their_gap_where_the_budget_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_broken("scheduling.token_budget", *BREAKS[name], monkeypatch)
    with pytest.raises(AssertionError):
        test_streams_keep_their_gap_while_long_prompts_arrive(1)


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.3, 1.7])
def test_the_gap_is_kept_where_steps_are_slower_than_their_costs(slower: float) -> None:
    pick = random.Random(7)
    budget = TokenBudget(limits(costs=COSTS, gap_ms=20.0))
    sequences = [*(running(700, 699) for _ in range(32)), running(8000, 16)]
    late, rows = 0, []
    for step in range(6000):
        extra = budget.share(sequences)
        assert budget.planned_us == pytest.approx(predicted_us(sequences, extra), rel=0.01)
        took_us = budget.planned_us * slower * pick.gauss(1.0, 0.03)
        budget.observe(budget.planned_us, took_us)
        if step >= 3000:
            late += took_us > 20_000
            rows.append(sum(extra.values()))
    assert late <= 0.03 * len(rows)
    wanted = max(
        row for row in range(1, 2000) if max(1.0, slower) * predicted_us(sequences, {sequences[-1]: row}) <= 20e3
    )
    assert sum(rows) / len(rows) >= 0.8 * wanted  # and hardly more cautious than it must be


def test_steps_that_the_host_sees_end_late_take_no_rows_from_prompts() -> None:
    """A twentieth is seen up to half a step late, and the next one seems as much shorter: the device is no slower."""
    pick = random.Random(7)
    budget = TokenBudget(limits(costs=COSTS, gap_ms=20.0))
    sequences = [*(running(700, 699) for _ in range(32)), running(8000, 16)]
    seen_us, rows = 0.0, []
    for step in range(6000):
        extra = budget.share(sequences)
        late_us = pick.uniform(2_000, 10_000) * (pick.random() < 0.05)
        budget.observe(budget.planned_us, 1.1 * budget.planned_us + late_us - seen_us)
        seen_us = late_us
        if step >= 3000:
            rows.append(sum(extra.values()))
    wanted = max(row for row in range(1, 2000) if 1.1 * predicted_us(sequences, {sequences[-1]: row}) <= 20e3)
    assert sum(rows) / len(rows) >= 0.85 * wanted


def test_one_slow_step_is_soon_forgotten() -> None:
    budget = exact(costs=COSTS, gap_ms=20.0)
    budget.observe(10_000, 500_000)
    assert 1.0 < budget.slowness < 1.1
    for _ in range(2000):
        budget.observe(10_000, 9_000)
    assert budget.slowness < 1.04


def _beside_far_ahead(level: float = 600.0, computed: int = 64) -> tuple[list[Sequence], Sequence]:
    """Twenty decodes of an account of this level, and a prompt of one of level 0, of which some is computed."""
    ahead, behind = AccountQueue[Sequence](), AccountQueue[Sequence]()
    ahead.level = level
    prompt = running(200, computed, behind)
    return [*(running(50, 49, ahead) for _ in range(20)), prompt], prompt


def test_decodes_of_an_account_far_ahead_leave_their_rows_to_a_prompt_that_goes_on() -> None:
    budget = TokenBudget(limits(step_tokens=96))
    sequences, prompt = _beside_far_ahead()
    extra = budget.share(sequences)
    assert extra == {prompt: 96 - 21}
    sitting = budget.sitting_out(sequences, extra)
    assert len(sitting) == 19, "it lacks 60 rows"
    assert prompt not in sitting
    left = [sequence for sequence in sequences if sequence not in sitting]
    assert budget.share(left) == {prompt: 94}, "the step stays one beside decodes"


def test_they_keep_their_rows_beside_a_prompt_that_begins_or_is_hardly_behind_or_lacks_nothing() -> None:
    for level, computed, step_tokens in ((600.0, 0, 96), (250.0, 64, 96), (600.0, 64, 256)):
        budget = TokenBudget(limits(step_tokens=step_tokens))
        sequences, _ = _beside_far_ahead(level, computed)
        assert budget.sitting_out(sequences, budget.share(sequences)) == set(), (level, computed, step_tokens)


def test_where_time_is_short_they_leave_them_to_a_prompt_that_begins_too() -> None:
    budget = exact(costs=COSTS, gap_ms=3.9)
    sequences, prompt = _beside_far_ahead(computed=0)
    extra = budget.share(sequences)
    assert extra[prompt] < 199
    assert len(budget.sitting_out(sequences, extra)) == 19


def test_who_sits_a_step_out_has_its_row_in_the_next_one() -> None:
    budget = TokenBudget(limits(step_tokens=170))
    sequences, _ = _beside_far_ahead(computed=40)
    first = budget.sitting_out(sequences, budget.share(sequences))
    second = budget.sitting_out(sequences, budget.share(sequences))
    assert len(first) == len(second) == 10
    assert not first & second
