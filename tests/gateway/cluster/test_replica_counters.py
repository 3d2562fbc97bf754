from engine.protocol.frames import PROTOCOL_VERSION, Hello, ReplicaLoad
from gateway.cluster.replica_counters import COUNTER_NAMES, RECENT_S, RecentLoad, ReplicaCounters


def hello(boot: int = 1, model: str = "@cf/a/b", pid: int = 5) -> Hello:
    return Hello(PROTOCOL_VERSION, model, "r", str(boot), pid, 4096, 1000, 16, 64)


def load(hits: int, shared_blocks: int = 0, **counters: int) -> ReplicaLoad:
    return ReplicaLoad(0, 0, 0, 0, 0, 0, counters={"hit_tokens": hits, **counters}, shared_blocks=shared_blocks)


def hits(tally: ReplicaCounters, model: str = "@cf/a/b") -> int:
    return tally.sums()[model]["hit_tokens"]


def test_replicas_of_a_model_are_summed_and_models_are_not() -> None:
    tally = ReplicaCounters()
    tally.take("unix:1", hello(), load(10, 2))
    tally.take("unix:2", hello(), load(5, 1))
    tally.take("unix:3", hello(model="@cf/c/d"), load(7))
    assert (hits(tally), hits(tally, "@cf/c/d")) == (15, 7)
    assert tally.shared_blocks() == {"@cf/a/b": 3, "@cf/c/d": 0}


def test_the_same_word_twice_counts_once_also_on_another_connection() -> None:
    tally = ReplicaCounters()
    for count in (10, 10, 12):
        tally.take("unix:1", hello(), load(count))
        tally.lost("unix:1")
    assert hits(tally) == 12


def test_a_replica_that_starts_again_adds_to_what_it_had_counted() -> None:
    tally = ReplicaCounters()
    tally.take("unix:1", hello(boot=1), load(10))
    tally.take("unix:1", hello(boot=2), load(3))
    assert hits(tally) == 13
    tally.take("unix:1", hello(boot=2, pid=6), load(3))  # of a new machine, which counts its boots from 1 again
    assert hits(tally) == 16


def test_what_is_gone_keeps_its_count_and_holds_nothing() -> None:
    tally = ReplicaCounters()
    tally.take("unix:1", hello(), load(10, 4))
    tally.lost("unix:1")
    assert tally.shared_blocks() == {"@cf/a/b": 0}
    tally.forget("unix:1")
    tally.forget("unix:1")
    tally.lost("unix:1")
    assert hits(tally) == 10


def test_only_known_counters_are_kept() -> None:
    tally = ReplicaCounters()
    tally.take("unix:1", hello(), load(1, **{f"made up {number}": 1 for number in range(100)}))
    assert set(tally.sums()["@cf/a/b"]) == set(COUNTER_NAMES)


def test_a_replica_that_begins_anew_is_counted_and_one_that_is_new_or_only_reconnects_is_not() -> None:
    tally = ReplicaCounters()
    for boot, pid in ((1, 5), (1, 5), (2, 6), (2, 7)):
        tally.take("unix:1", hello(boot, pid=pid), load(1))
        tally.lost("unix:1")
    tally.take("unix:2", hello(), load(1))
    tally.take("unix:3", hello(model="@cf/c/d"), load(1))
    assert tally.restarts() == {"@cf/a/b": 2, "@cf/c/d": 0}


def test_what_a_replica_did_lately_is_of_its_last_seconds_alone() -> None:
    lately = RecentLoad()
    assert (lately.tokens_per_s, lately.hit_ratio) == (0.0, None)
    for second in range(20):
        counters = {"computed_tokens": 100 * second, "lookup_tokens": 40 * second}
        lately.take(1000.0 + second, load(10 * second, **counters))
    assert (lately.tokens_per_s, lately.hit_ratio) == (100.0, 0.25)
    for second in range(20, 27):
        lately.take(1000.0 + second, load(10 * 19, **counters))
    assert (lately.tokens_per_s, lately.hit_ratio) == (0.0, None)
    assert len(lately._marks) <= RECENT_S + 1
