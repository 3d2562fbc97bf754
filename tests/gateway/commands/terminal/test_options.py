from types import SimpleNamespace

import pytest
from msgspec import UNSET

from gateway.commands.terminal.options import given_fields, parse_day, parse_duration, split_list


@pytest.mark.parametrize(("text", "seconds"), [("30d", 2_592_000.0), ("5m", 300.0), ("10s", 10.0), ("1w", 604_800.0)])
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["3", "", "d", "-1d", "1.5h", "1y", "9999999d"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="like 30d"):
        parse_duration(text)


def test_a_day_is_counted_from_1970_on() -> None:
    assert parse_day("1970-01-02") == 1
    with pytest.raises(ValueError, match="2026-01-31"):
        parse_day("31.1.2026")


def test_a_list_has_its_parts_and_none_is_empty() -> None:
    assert split_list("a, b,,c") == ("a", "b", "c")
    assert split_list("none") == ()


@pytest.mark.parametrize("text", ["", " ", ",,"])
def test_a_list_of_a_variable_that_is_not_set_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="`none` says that"):
        split_list(text)


@pytest.mark.parametrize("text", ["999999d", "999999w"])
def test_a_duration_ends_on_a_day_that_can_be_printed(text: str) -> None:
    with pytest.raises(ValueError, match="100 years"):
        parse_duration(text)


def test_an_option_that_takes_a_setting_back_is_none_and_one_that_is_not_given_is_absent() -> None:
    options = SimpleNamespace(burst=None, neurons_per_day=UNSET, requests_per_minute=3)
    assert given_fields(options, vars(options)) == {"burst": None, "requests_per_minute": 3}
