"""To whom a load is said again, and to whom only news."""

from engine.replica.load_reports import LoadReports

OLD, NEW = b"old", b"new"


def test_a_connection_that_does_not_poll_is_told_whenever_it_is_its_turn() -> None:
    reports = LoadReports()
    for _ in range(3):
        assert reports.choose([1, 2], OLD, idle=True) == [1, 2]


def test_one_that_polls_is_told_at_once_and_then_what_is_news() -> None:
    reports = LoadReports()
    reports.poll(1)
    assert reports.take_polled() == {1}
    assert reports.take_polled() == set()
    assert reports.choose([1, 2], OLD, idle=True) == [1, 2]
    assert reports.choose([1, 2], OLD, idle=True) == [2]
    assert reports.choose([1, 2], NEW, idle=True) == [1, 2]
    reports.poll(1)
    assert reports.choose([1], NEW, idle=True) == [1], "it asks whether somebody is there"


def test_whoever_sent_something_is_told_what_became_of_it_also_where_nothing_did() -> None:
    reports = LoadReports()
    reports.poll(1)
    reports.choose([1], OLD, idle=True)
    reports.hear(1)
    reports.hear(2)
    assert reports.choose([1], OLD, idle=True) == [1]
    assert reports.choose([1], OLD, idle=True) == []


def test_while_something_runs_or_waits_the_same_load_is_news_too() -> None:
    reports = LoadReports()
    reports.poll(1)
    for idle, told in ((False, [1]), (False, [1]), (True, [1]), (True, [])):
        assert reports.choose([1], OLD, idle=idle) == told


def test_nothing_is_kept_of_a_connection_that_has_ended() -> None:
    reports = LoadReports()
    reports.poll(1)
    reports.drop(1)
    reports.drop(2)
    assert reports.take_polled() == set()
    assert not reports._known
