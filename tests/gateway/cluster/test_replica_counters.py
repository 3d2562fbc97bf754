import pytest

from engine.protocol.frames import PROTOCOL_VERSION, Hello, ReplicaLoad
from gateway.cluster.replica_counters import COUNTER_NAMES, RECENT_S, RecentLoad, ReplicaCounters


def hello(boot: int = 1, model: str = "@cf/a/b", pid: int = 5) -> Hello:
    return Hello(PROTOCOL_VERSION, model, "r", str(boot), pid, 4096, 1000, 16, 64)


def load(hits: int, shared_blocks: int = 0, **counters: int) -> ReplicaLoad:
    return ReplicaLoad(0, 0, 0, 0, 0, 0, counters={"hit_tokens": hits, **counters}, shared_blocks=shared_blocks)


def hits(counters: ReplicaCounters, model: str = "@cf/a/b") -> int:
    return counters.sums()[model]["hit_tokens"]


def test_replicas_of_a_model_are_summed_and_models_are_not() -> None:
    counters = ReplicaCounters()
    counters.update("unix:1", hello(), load(10, 2))
    counters.update("unix:2", hello(), load(5, 1))
    counters.update("unix:3", hello(model="@cf/c/d"), load(7))
    assert (hits(counters), hits(counters, "@cf/c/d")) == (15, 7)
    assert counters.shared_blocks() == {"@cf/a/b": 3, "@cf/c/d": 0}


def test_the_same_word_twice_counts_once_also_on_another_connection() -> None:
    counters = ReplicaCounters()
    for count in (10, 10, 12):
        counters.update("unix:1", hello(), load(count))
        counters.disconnected("unix:1")
    assert hits(counters) == 12


def test_a_replica_that_starts_again_adds_to_what_it_had_counted() -> None:
    counters = ReplicaCounters()
    counters.update("unix:1", hello(boot=1), load(10))
    counters.update("unix:1", hello(boot=2), load(3))
    assert hits(counters) == 13
    counters.update("unix:1", hello(boot=2, pid=6), load(3))  # of a new machine, which counts its boots from 1 again
    assert hits(counters) == 16


def test_what_is_gone_keeps_its_count_and_holds_nothing() -> None:
    counters = ReplicaCounters()
    counters.update("unix:1", hello(), load(10, 4))
    counters.disconnected("unix:1")
    assert counters.shared_blocks() == {"@cf/a/b": 0}
    counters.remove("unix:1")
    counters.remove("unix:1")
    counters.disconnected("unix:1")
    assert hits(counters) == 10


def test_only_known_counters_are_kept() -> None:
    counters = ReplicaCounters()
    counters.update("unix:1", hello(), load(1, **{f"made up {number}": 1 for number in range(100)}))
    assert set(counters.sums()["@cf/a/b"]) == set(COUNTER_NAMES)


def test_a_replica_that_begins_anew_is_counted_and_one_that_is_new_or_only_reconnects_is_not() -> None:
    counters = ReplicaCounters()
    for boot, pid in ((1, 5), (1, 5), (2, 6), (2, 7)):
        counters.update("unix:1", hello(boot, pid=pid), load(1))
        counters.disconnected("unix:1")
    counters.update("unix:2", hello(), load(1))
    counters.update("unix:3", hello(model="@cf/c/d"), load(1))
    assert counters.restarts() == {"@cf/a/b": 2, "@cf/c/d": 0}


def test_what_a_replica_did_recent_is_of_its_last_seconds_alone() -> None:
    now = 1000.0
    recent = RecentLoad(lambda: now)
    assert (recent.tokens_per_s, recent.hit_ratio) == (0.0, None)
    for second in range(20):
        now = 1000.0 + second
        counters = {"computed_tokens": 100 * second, "lookup_tokens": 40 * second}
        recent.append(now, load(10 * second, **counters))
    assert (recent.tokens_per_s, recent.hit_ratio) == (100.0, 0.25)
    for second in range(20, 27):
        now = 1000.0 + second
        recent.append(now, load(10 * 19, **counters))
    assert (recent.tokens_per_s, recent.hit_ratio) == (0.0, None)
    assert len(recent._marks) <= RECENT_S + 1


def test_a_replica_that_says_nothing_new_did_nothing_since() -> None:
    now = 1000.0
    recent = RecentLoad(lambda: now)
    for half in range(7):
        now = 1000.0 + half / 2
        recent.append(now, load(0, computed_tokens=100 * half))
    assert recent.tokens_per_s == 200.0
    now = 1000.0 + RECENT_S
    assert recent.tokens_per_s == pytest.approx(600 / (RECENT_S - 0.5))
    now = 1000.0 + 2 * RECENT_S
    assert recent.tokens_per_s == 0.0
    now += 100.0
    recent.append(now, load(0, computed_tokens=650))
    assert recent.tokens_per_s == pytest.approx(50 / RECENT_S), "all of it in the last moment"
    now += RECENT_S
    assert recent.tokens_per_s == 0.0


def test_sums_never_go_back_and_count_what_is_gone_before_anybody_read_it() -> None:
    counters = ReplicaCounters()
    counters.update("unix:1", hello(), load(10))
    counters.update("unix:1", hello(), load(25))
    counters.remove("unix:1")
    assert hits(counters) == 25
    counters.update("unix:2", hello(), load(7))
    counters.update("unix:2", hello(boot=2), load(1))
    assert (hits(counters), hits(counters)) == (33, 33)
    counters.update("unix:2", hello(boot=2), load(4))
    assert hits(counters) == 36
    assert not counters._unread
