import pytest

from tenants.records.holds import DenialReason, window_us_left
from tenants.records.usage import DAY_US, MICRO, Balance, Totals, UsageRecord, day_of


def test_a_day_begins_at_midnight_utc() -> None:
    midnight_us = 20_000 * DAY_US
    assert (day_of(midnight_us - 1), day_of(midnight_us)) == (19_999, 20_000)
    left_us = [window_us_left(DenialReason.NEURONS_PER_DAY, time_us) for time_us in (midnight_us - 1, midnight_us)]
    assert left_us == [1, DAY_US]


def test_a_balance_that_does_not_balance_is_noticed() -> None:
    Balance(Totals(1, 2), Totals(1, 2)).check()
    with pytest.raises(AssertionError, match="counters"):
        Balance(Totals(1, 2), Totals(1, 3)).check()


def test_neurons_are_millionths_counted() -> None:
    record = UsageRecord("a", "r", 1, 3 * MICRO // 2, 0, 0, 0, "done", "k", "m", 0, 0.0)
    assert record.neurons == 1.5
