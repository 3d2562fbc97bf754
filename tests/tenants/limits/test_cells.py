"""Five cells in simulated time: nothing is overspent whatever happens, all ledgers agree, and broken builds are caught.

The long runs are benchmarks/tenants/cells.py.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tenants.limits import borrowing, lending
from tenants.limits.lending import QuotaLender
from tenants.records.holds import Cap, Denied, Granted
from tenants.records.leases import LeaseState, QuotaLease
from tenants.store.sqlite.leases import SqliteLeaseStore
from tests.support.cells import NOON_S, Outcome, Scenario, simulate

Patch = Callable[[pytest.MonkeyPatch], None]
DAY_S = 86_400


def scenario(seed: int, **fields: Any) -> Scenario:
    """Two and a half minutes with cuts that outlast a lease's hold at home."""
    shape: dict[str, Any] = {"seconds": 150.0, "budget": 100_000, "tokens": 500, "calls_s": 12.0}
    return Scenario(seed, **{**shape, "cuts": 3, "cut_s": 90.0, "crashes": 3, **fields})


def judged(outcome: Outcome) -> list[str]:
    """What is wrong with a run."""
    passed = [f"overspent by {outcome.overspent}"] if outcome.overspent > 0 else []
    return [*passed, *outcome.complaints]


@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_is_overspent_and_every_ledger_agrees(seed: int, tmp_path: Path) -> None:
    outcome = simulate(scenario(seed), tmp_path)
    assert not judged(outcome), f"seed {seed}"
    assert outcome.refused, "the budget was used up"
    assert outcome.unreachable, "a cell was cut off"


def test_a_slice_of_one_day_is_never_spent_as_the_next_ones(tmp_path: Path) -> None:
    midnight_s = NOON_S + DAY_S // 2
    outcome = simulate(scenario(1, start_s=midnight_s - 60.0, budget=40_000), tmp_path)
    assert not judged(outcome)
    assert outcome.spent > 40_000, "it used budgets of two days"


def test_a_run_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    runs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        runs.append(simulate(scenario(3, seconds=20.0, cuts=1, cut_s=10.0, crashes=1), tmp_path / name))
    assert runs[0] == runs[1]


def _charged_as_nothing(patch: pytest.MonkeyPatch) -> None:
    """A lease that expires at home is charged at nothing."""

    async def lend(lender: QuotaLender, cell: str, request: Any) -> Granted | Denied:
        real = lender._store.quotas.checkpoint

        async def none(*_: Any) -> None: ...

        patch.setattr(lender._store.quotas, "checkpoint", none)
        try:
            return await decide(lender, cell, request)
        finally:
            patch.setattr(lender._store.quotas, "checkpoint", real)

    decide = QuotaLender._decide
    patch.setattr(QuotaLender, "_decide", lend)


def _not_compared(patch: pytest.MonkeyPatch) -> None:
    """A home lends without comparing its budgets."""

    def no_caps(*_: Any) -> tuple[Cap, ...]:
        return ()

    patch.setattr(lending, "caps_of", no_caps)


def _returned_while_open(patch: pytest.MonkeyPatch) -> None:
    """Leases are returned that still take calls."""
    real = SqliteLeaseStore.list

    async def listed(store: SqliteLeaseStore, account_id: str = "") -> Sequence[QuotaLease]:
        leases = await real(store, account_id)
        if account_id:
            return leases
        return [structs.replace(lease, state=max(lease.state, LeaseState.CLOSED)) for lease in leases]

    patch.setattr(SqliteLeaseStore, "list", listed)


def _never_returned(patch: pytest.MonkeyPatch) -> None:
    """Leases are not given back."""

    async def none(_: Any) -> None: ...

    patch.setattr(borrowing.QuotaBorrower, "tick", none)


def _new_question_each_time(patch: pytest.MonkeyPatch) -> None:
    """The same question, said twice, is another lease."""
    real, count = QuotaLender._record, iter(range(1 << 30))

    def record(lender: QuotaLender, cell: str, lease: Any, outcome: str) -> Any:
        made = real(lender, cell, lease, outcome)
        again = isinstance(lease, lending.LeaseRequest) and next(count) % 2
        return made if not again else type(made)(made.account_id, f"{made.request_id}x", *_rest(made))

    patch.setattr(QuotaLender, "_record", record)


def _rest(record: Any) -> list[Any]:
    return [getattr(record, name) for name in record.__struct_fields__[2:]]


@pytest.mark.parametrize(
    "broken", [_charged_as_nothing, _not_compared, _returned_while_open, _never_returned, _new_question_each_time]
)
def test_a_broken_build_is_caught(broken: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    assert judged(simulate(scenario(2), tmp_path))
