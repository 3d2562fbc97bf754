from engine.host.demand import Demand, DemandTracker
from engine.protocol.frames import ModelDemand


def test_what_gateways_want_adds_up_and_counts_from_the_first_of_them() -> None:
    demand = DemandTracker(holds_s=3.0)
    demand.follow(["a", "b"])
    demand.report(1, ModelDemand("a", 2, weight=1.0), now=10.0)
    demand.report(2, ModelDemand("a", 3, weight=4.0), now=11.0)
    assert demand.of("a", 11.5) == Demand(5, 4.0, 10.0)
    assert demand.of("b", 11.5) == Demand()


def test_a_word_that_is_repeated_keeps_its_beginning_and_the_latest_count_holds() -> None:
    demand = DemandTracker(holds_s=3.0)
    demand.follow(["a"])
    for second in range(10):
        demand.report(1, ModelDemand("a", second + 1), now=float(second))
    assert demand.of("a", 9.5) == Demand(10, 1.0, 0.0)


def test_a_word_that_is_not_repeated_ends_and_the_next_begins_anew() -> None:
    demand = DemandTracker(holds_s=3.0)
    demand.follow(["a"])
    demand.report(1, ModelDemand("a", 1), now=0.0)
    assert demand.of("a", 3.1) == Demand()
    demand.report(1, ModelDemand("a", 1), now=5.0)
    assert demand.of("a", 5.0).since == 5.0


def test_zero_ends_it_and_so_does_the_end_of_its_connection() -> None:
    demand = DemandTracker(holds_s=3.0)
    demand.follow(["a"])
    demand.report(1, ModelDemand("a", 1), now=0.0)
    demand.report(2, ModelDemand("a", 1), now=0.0)
    demand.report(1, ModelDemand("a", 0), now=0.1)
    assert demand.of("a", 0.1).requests == 1
    demand.drop(2)
    assert demand.of("a", 0.1) == Demand()


def test_models_of_other_machines_are_no_news() -> None:
    demand = DemandTracker(holds_s=3.0)
    demand.follow(["a"])
    demand.report(1, ModelDemand("elsewhere", 1), now=0.0)
    assert demand.of("a", 0.0) == Demand()


def test_what_is_followed_again_keeps_its_reports_and_what_is_not_loses_them() -> None:
    demand = DemandTracker(holds_s=3.0)
    demand.follow(["a", "b"])
    for model in ("a", "b"):
        demand.report(1, ModelDemand(model, 2), now=10.0)
    demand.follow(["b", "c"])
    demand.report(1, ModelDemand("a", 2), now=10.0)
    assert demand.of("b", 10.0) == Demand(2, 1.0, 10.0)
    demand.follow(["a", "b", "c"])
    assert demand.of("a", 10.0) == demand.of("c", 10.0) == Demand()
