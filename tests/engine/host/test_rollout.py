"""engine/host/rollout.py and engine/host/model_source.py over real processes: models that come, change and go while
their machine runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.protocol.frames import ModelDemand, ReplicaState
from engine.protocol.types import Residency
from tests.support.fake_replica import MIB
from tests.support.machine import Host, gone, hosting, short_folder
from tests.support.waiting import wait_for


@pytest.fixture
def short() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def replicas(host: Host, name: str) -> list[ReplicaState]:
    state = host.state()
    return [] if state is None else [replica for replica in state.replicas if replica.model == name]


def until_alone(host: Host, name: str, settings: str) -> ReplicaState:
    """Waits until one replica of the model serves, with these settings, and there is no other."""

    def alone() -> ReplicaState | None:
        found = replicas(host, name)
        serves = len(found) == 1 and found[0].settings == settings and found[0].residency is Residency.DEVICE
        return found[0] if serves and not found[0].leaving else None

    state: ReplicaState = wait_for(alone)
    return state


def test_a_model_that_is_added_is_started_beside_the_others_which_stay_as_they_are(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        host.ask(host.model("a"), host.model("b"))
        host.until_serving("b")
        assert host.fleet()["a"].boot == 1
        assert [replica.model for replica in host.seen[-1].replicas] == ["a", "b"]


def test_a_model_that_is_removed_serves_its_calls_to_their_end_and_frees_its_memory_then(short: Path) -> None:
    with hosting(short, {"a": "serve", "b": "serve"}) as host:
        host.until_serving("b")
        host.load("b", running=3)
        wait_for(lambda: host.fleet()["b"].residency is Residency.DEVICE)
        host.ask(host.model("a"))
        leaving = host.until("b", lambda state: state.leaving)
        assert leaving.residency is Residency.DEVICE
        wait_for(lambda: host.events("replica_leaves"))
        assert not gone(host.pid("b", 1))
        host.load("b")
        wait_for(lambda: not replicas(host, "b"))
        assert gone(host.pid("b", 1))
        (moved,) = [event for event in host.events("moved") if event["kind"] == "end"]
        assert (moved["model"], moved["why"]) == ("b", "nothing asks for it any more")
        assert host.fleet()["a"].boot == 1


def test_a_model_that_is_asked_for_again_before_it_left_stays(short: Path) -> None:
    with hosting(short, {"a": "serve", "b": "serve"}) as host:
        host.until_serving("b")
        host.load("b", running=1)
        host.ask(host.model("a"))
        host.until("b", lambda state: state.leaving)
        host.ask(host.model("a"), host.model("b"))
        host.until("b", lambda state: not state.leaving)
        assert host.events("replica_stays")
        assert host.fleet()["b"].boot == 1


def test_changed_settings_are_served_by_a_second_replica_before_the_first_leaves(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        first = host.until_serving("a")
        host.ask(host.model("a", context_tokens=512))
        settings = wait_for(
            lambda: next((one.settings for one in replicas(host, "a") if one.settings != first.settings), None)
        )
        until_alone(host, "a", settings)
        reports = [[one for one in state.replicas if one.residency is Residency.DEVICE] for state in host.seen]
        served = [len(report) for report in reports]
        assert set(served[served.index(1) :]) == {1, 2}, "at each moment one serves, and for some both do"


def test_what_the_agent_alone_reads_changes_without_another_replica(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        host.ask(host.model("a", priority=3.0, pinned=True))
        wait_for(lambda: host.events("models_read"))
        host.ask(host.model("a", priority=3.0, pinned=True), host.model("b"))
        host.until_serving("b")
        assert (len(replicas(host, "a")), host.fleet()["a"].boot) == (1, 1)


def test_more_replicas_are_added_and_fewer_are_taken(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        host.ask(host.model("a", replicas=3))
        wait_for(lambda: [one.residency for one in replicas(host, "a")] == [Residency.DEVICE] * 3)
        assert len({one.address for one in replicas(host, "a")}) == 3
        host.ask(host.model("a", replicas=1))
        wait_for(lambda: len(replicas(host, "a")) == 1)
        assert replicas(host, "a")[0].residency is Residency.DEVICE


def test_a_replacement_that_cannot_run_leaves_the_former_serving_and_says_why(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        first = host.until_serving("a")
        host.behave("a", "crash")
        host.ask(host.model("a", context_tokens=512))
        wait_for(lambda: any("shard 7" in one.problem for one in replicas(host, "a")))
        (former,) = [one for one in replicas(host, "a") if one.settings == first.settings]
        assert (former.residency, former.leaving) == (Residency.DEVICE, False)
        host.behave("a", "serve")
        wait_for(lambda: len(replicas(host, "a")) == 1 and replicas(host, "a")[0].settings != first.settings)


def test_settings_that_cannot_be_read_change_nothing_and_are_named_until_they_can(short: Path) -> None:
    with hosting(short, {"a": "serve"}) as host:
        host.until_serving("a")
        (host.folder / "asked").write_text("wrong: line 3")
        wait_for(lambda: (state := host.state()) is not None and "wrong: line 3" in state.problem)
        assert host.fleet()["a"].residency is Residency.DEVICE
        assert "wrong: line 3" in host.events("models_refused")[0]["problem"]
        host.ask(host.model("a"), host.model("b"))
        host.until_serving("b")
        assert host.seen[-1].problem == ""


def test_where_two_have_no_room_the_former_leaves_first_and_that_is_said(short: Path) -> None:
    sizes = {"device_bytes": 500 * MIB, "memory_bytes": 8000 * MIB, "weights_bytes": 400 * MIB}
    with hosting(short, {"a": "serve"}, device="cpu", **sizes) as host:
        first = host.until_serving("a")
        host.load("a", running=1)
        host.ask(host.model("a", context_tokens=512))
        wait_for(lambda: [event for event in host.events("replica_leaves") if "no room" in event["why"]])
        host.load("a")
        wait_for(lambda: len(replicas(host, "a")) == 1 and replicas(host, "a")[0].settings != first.settings)
        host.until_serving("a")


def test_calls_that_wait_for_a_model_as_it_is_removed_are_served_first(short: Path) -> None:
    sizes = {"device_bytes": 800 * MIB, "memory_bytes": 8000 * MIB, "weights_bytes": 400 * MIB}
    with hosting(short, {"a": "serve", "b": "serve"}, device="cpu", **sizes) as host:
        wait_for(
            lambda: (
                host.fleet() and all(one.residency is one.toward is not Residency.DISK for one in host.fleet().values())
            )
        )
        sleeper = next(one.model for one in host.fleet().values() if one.residency is Residency.MEMORY)
        other = "b" if sleeper == "a" else "a"
        host.ask(host.model(other))
        host.send(ModelDemand(sleeper, 1))
        host.until_serving(sleeper)
        host.send(ModelDemand(sleeper, 0))
        wait_for(lambda: not replicas(host, sleeper))
