"""One account asks for fifty times as much as each of four others: what they notice of it, on a simulated clock.

A step takes as long as its rows say; the stamp engine checks every slot, and all pools are checked after every step.
Everything follows from the seed. The same arrivals under one account are first come, first served: what that gives is
what the bars are seen to fail on, and the throughput to compare with.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from engine.protocol.types import SchedulingTerms, Scope, ScopeKind
from engine.sequences.fair_queue import GENERATED_TOKEN, PROMPT_TOKEN
from engine.sequences.validation import SubmitRejected
from tests.engine.scheduling.simulation.replica import Heard, Simulation
from tests.engine.scheduling.simulation.test_replica import install_broken

AGGRESSOR, *OTHERS = b"ABCDE"
STEP_S, ROW_S = 0.004, 0.0001
WARM_S, END_S = 0.5, 4.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that comes at a time."""

    at_s: float
    account: int
    prompt_tokens: int
    max_tokens: int


@dataclass(slots=True)
class Life:
    """What came of all requests: when the first token of each came, and what each account was served when."""

    first_token_s: dict[int, list[float]] = field(default_factory=dict)
    served: Counter[int] = field(default_factory=Counter)
    refused: Counter[int] = field(default_factory=Counter)
    simulation: Simulation = field(default_factory=Simulation)

    def p95_s(self) -> float:
        """95th percentile of the first tokens of accounts that request little."""
        waits = [wait for account in OTHERS for wait in self.first_token_s.get(account, [])]
        waits += [END_S] * sum(self.refused[account] for account in OTHERS)
        waits.sort()
        return waits[len(waits) * 95 // 100]


def asks(seed: int, rates: dict[int, float], longest: int = 40) -> list[Ask]:
    """Poisson arrivals, so many a second of each account."""
    found = []
    for account, rate in rates.items():
        pick, at_s = random.Random(f"{seed} {account}"), 0.0
        while (at_s := at_s + pick.expovariate(rate)) < END_S:
            found.append(Ask(at_s, account, pick.randint(24, 72), pick.randint(8, longest)))
    return sorted(found, key=lambda ask: ask.at_s)


def live(
    arrivals: list[Ask],
    terms: dict[int, SchedulingTerms] | None = None,
    fifo: bool = False,
    depth: int = 1,
    waiting: int = 96,
) -> Life:
    simulation = Simulation(
        blocks=512, block_tokens=8, step_tokens=64, sequences=16, waiting=waiting, vocabulary=4000, depth=depth
    )
    life, left, id = Life(simulation=simulation), iter(arrivals), 0
    following = next(left, None)
    open_: dict[int, tuple[Ask, Heard]] = {}
    told: dict[int, int] = {}
    while simulation.seconds < END_S:
        while following is not None and following.at_s <= simulation.seconds:
            id += 1
            scope = Scope(
                ScopeKind.TENANT,
                bytes([following.account]) * 16,
                account=bytes([0 if fifo else following.account]) * 16,
            )
            pick = random.Random(id)
            prompt = [pick.randrange(4000) for _ in range(following.prompt_tokens)]
            try:
                (heard,) = simulation.submit(
                    id,
                    prompt,
                    scope,
                    following.max_tokens,
                    terms=(terms or {}).get(following.account, SchedulingTerms()),
                )
                open_[id] = following, heard
            except SubmitRejected:
                life.refused[following.account] += 1
            following = next(left, None)
        began_s, rows = simulation.seconds, simulation.scheduler.intake.counters["computed_tokens"]
        simulation.step()
        rows = simulation.scheduler.intake.counters["computed_tokens"] - rows
        simulation.seconds = began_s + STEP_S + ROW_S * rows
        for number in list(open_):
            ask, heard = open_[number]
            new = len(heard.tokens) - told.get(number, 0)
            if new and not told.get(number):
                if ask.at_s >= WARM_S:
                    life.first_token_s.setdefault(ask.account, []).append(simulation.seconds - ask.at_s)
                if simulation.seconds >= WARM_S:
                    life.served[ask.account] += PROMPT_TOKEN * ask.prompt_tokens
            if simulation.seconds >= WARM_S:
                life.served[ask.account] += GENERATED_TOKEN * new
            told[number] = len(heard.tokens)
            if heard.finish is not None or heard.reject is not None:
                life.refused[ask.account] += heard.reject is not None
                del open_[number]
    return life


def jain(parts: list[float]) -> float:
    return sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts))


def due(asked: dict[int, float], weights: dict[int, float], total: float) -> dict[int, float]:
    """What each account is due of so much: what it asks for, up to an equal level for its weight (max-min)."""
    due, left = dict[int, float](), dict(asked)
    while left:
        level = (total - sum(due.values())) / sum(weights[account] for account in left)
        content = [account for account in left if left[account] <= level * weights[account]]
        if not content:
            return due | {account: level * weights[account] for account in left}
        due |= {account: left.pop(account) for account in content}
    return due


def asked_for(arrivals: list[Ask]) -> dict[int, float]:
    asked: Counter[int] = Counter()
    for ask in arrivals:
        if ask.at_s >= WARM_S:
            asked[ask.account] += PROMPT_TOKEN * ask.prompt_tokens + GENERATED_TOKEN * ask.max_tokens
    return dict(asked)


def fairness(life: Life, arrivals: list[Ask], weights: dict[int, float]) -> float:
    """Jain's index of what accounts were served over what they were due."""
    dues = due(asked_for(arrivals), weights, sum(life.served.values()))
    return jain([life.served[account] / dues[account] for account in dues])


CALM = dict.fromkeys(OTHERS, 7.0)
EVEN = dict.fromkeys([AGGRESSOR, *OTHERS], 1.0)


def attack(calm: list[Ask], longest: int) -> list[Ask]:
    return sorted(calm + asks(1, {AGGRESSOR: 50 * CALM[OTHERS[0]]}, longest), key=lambda ask: ask.at_s)


@pytest.mark.parametrize(("longest", "depth"), [(40, 1), (300, 2)])
def test_an_aggressor_at_fifty_times_the_load_is_hardly_noticed(longest: int, depth: int) -> None:
    calm = asks(1, CALM)
    arrivals = attack(calm, longest)
    alone, attacked, fifo = live(calm, depth=depth), live(arrivals, depth=depth), live(arrivals, depth=depth, fifo=True)
    assert attacked.p95_s() <= 2 * alone.p95_s()
    assert fairness(attacked, arrivals, EVEN) >= 0.95
    assert sum(attacked.served.values()) >= 0.95 * sum(fifo.served.values())
    # And first come, first served passes neither of the first two.
    assert fifo.p95_s() > 2 * alone.p95_s()
    assert fairness(fifo, arrivals, EVEN) < 0.95


BREAKS = {
    "whoever came first goes on": (
        "sequences.fair_queue",
        "return self.level + self.pending_tokens * self.prompt_cost",
        "return 0.0",
    ),
    "places are never given up": ("scheduling.preemption", "if richest is account or", "if True or"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_an_aggressor_is_noticed_where_fairness_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = asks(1, CALM)
    arrivals = attack(calm, 300)
    alone = live(calm)
    install_broken(*BREAKS[name], monkeypatch)
    attacked = live(arrivals)
    assert attacked.p95_s() > 2 * alone.p95_s() or fairness(attacked, arrivals, EVEN) < 0.95


WEIGHTS = dict(zip(EVEN, (1.0, 1.0, 2.0, 4.0, 0.5), strict=True))


def weighted() -> tuple[list[Ask], Life]:
    """Everybody asks for more than there is, some for long answers and some for short ones."""
    found = [ask for account in EVEN for ask in asks(2, {account: 60.0}, 10 + 60 * (account % 2))]
    arrivals = sorted(found, key=lambda ask: ask.at_s)
    return arrivals, live(
        arrivals, {account: SchedulingTerms(weight=weight) for account, weight in WEIGHTS.items()}, waiting=400
    )


def test_an_account_that_always_waits_is_served_by_weight_whatever_it_requests() -> None:
    _, life = weighted()
    assert jain([life.served[account] / weight for account, weight in WEIGHTS.items()]) >= 0.95


def test_service_is_not_by_weight_where_generated_tokens_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    install_broken(
        "scheduling.scheduler",
        "sequence.account_queue.level += sequence.account_queue.generated_cost",
        "pass",
        monkeypatch,
    )
    _, life = weighted()
    assert jain([life.served[account] / weight for account, weight in WEIGHTS.items()]) < 0.95
