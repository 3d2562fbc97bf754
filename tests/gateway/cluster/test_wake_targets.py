from collections import Counter

from engine.protocol.frames import DeviceState, MachineState, ModelDemand, ReplicaState
from engine.protocol.types import Residency
from gateway.cluster.connection import MachineConnection
from gateway.cluster.replica_entry import MachineEntry, ReplicaEntry
from gateway.cluster.wake_targets import CALLS_PER_MACHINE, LATE_S, WakeTargets
from tests.support.waiting import in_fake_time

MEMORY, DISK = Residency.MEMORY, Residency.DISK


def machines(*ready_ms: int, residency: Residency = MEMORY) -> dict[str, MachineEntry]:
    """One for each, on all of which the model sleeps."""
    known: dict[str, MachineEntry] = {}
    connections: dict[str, MachineConnection] = {}
    for number, ms in enumerate(ready_ms):
        address = f"unix:/m{number}"
        state = ReplicaState("m", f"unix:/r{number}", residency, 1, toward=residency, ready_ms=ms)
        report = MachineState(f"host-{number}", [state], [DeviceState("gpu", 8, 8, 0)])
        connections[address] = MachineConnection(lambda connection, report: None)
        entry = known[address] = MachineEntry(address, connections, report)
        entry.replicas[state.address] = ReplicaEntry(entry, state)
    return known


def names(chosen: list[MachineEntry]) -> list[str]:
    return [machine.name for machine in chosen]


@in_fake_time
async def test_one_call_wakes_one_machine_which_differs_by_model() -> None:
    there = machines(*[300] * 5)
    first = Counter[str]()
    for number in range(50):
        for entry in there.values():
            for replica in entry.replicas.values():
                replica.state = ReplicaState(
                    f"m{number}", replica.state.address, MEMORY, 1, toward=MEMORY, ready_ms=300
                )
        (chosen,) = WakeTargets().choose(ModelDemand(f"m{number}", 1), there, 0.0)
        first[chosen.name] += 1
    assert len(first) == 5


@in_fake_time
async def test_the_next_one_is_told_where_the_first_cannot_or_is_late_by_its_own_word() -> None:
    targets, there = WakeTargets(), machines(300, 300, 300)
    demand = ModelDemand("m", 3)
    (first,) = targets.choose(demand, there, 10.0)
    assert names(targets.choose(demand, there, 10.2 + LATE_S)) == [first.name]
    late = targets.choose(demand, there, 10.4 + LATE_S)
    assert len(late) == 2
    assert late[0] is first
    (replica,) = late[1].replicas.values()
    replica.state = ReplicaState("m", replica.state.address, MEMORY, 1, "no room", ready_ms=-1)
    third = targets.choose(demand, there, 10.5 + LATE_S)
    assert late[1] not in third
    assert len(third) == 2
    assert targets.choose(ModelDemand("m", 0), there, 12.0) == []
    assert targets.told("m") == []


@in_fake_time
async def test_many_calls_wake_more_machines_and_memory_goes_before_disk() -> None:
    there = machines(300, 300, 300, 300)
    assert len(WakeTargets().choose(ModelDemand("m", 2 * CALLS_PER_MACHINE), there, 0.0)) == 3
    warm = machines(300)["unix:/m0"]
    cold = machines(*[8000] * 6, residency=DISK)
    mixed = {**cold, "unix:/m0": warm}
    assert WakeTargets().choose(ModelDemand("m", 1), mixed, 0.0) == [warm]


@in_fake_time
async def test_only_machines_in_the_calls_regions_are_told_and_a_machine_is_told_of_all_that_it_may_serve() -> None:
    targets, there = WakeTargets(), machines(300, 300, 300, 300)
    for machine, region in zip(there.values(), ("eu", "us", "eu", ""), strict=True):
        machine.region = region
    (bound,) = targets.choose(ModelDemand("m", 5, 2.0, 900), there, 0.0, ("eu",))
    assert bound.name in ("host-0", "host-2")
    assert len(targets.choose(ModelDemand("m", 8 * CALLS_PER_MACHINE), there, 0.0, ("eu", "mars"))) == 2
    assert targets.choose(ModelDemand("m", 1), there, 0.0, ("mars",)) == []
    every = targets.choose(ModelDemand("m", 8 * CALLS_PER_MACHINE, 1.0, 700), there, 0.0)
    assert len(every) == 4
    outside = next(machine for machine in every if machine.region == "us")
    assert targets.demand_at(outside, "m") == ModelDemand("m", 8 * CALLS_PER_MACHINE, 1.0, 700)
    assert targets.demand_at(bound, "m").requests == 5 + 2 * 8 * CALLS_PER_MACHINE
    assert targets.demand_at(bound, "m").weight == 2.0
    targets.choose(ModelDemand("m", 0), there, 1.0)
    assert targets.demand_at(outside, "m") == ModelDemand("m", 0)
    for regions in (("eu",), ("eu", "mars"), ("mars",)):
        targets.choose(ModelDemand("m", 0), there, 1.0, regions)
    assert targets.told("m") == []


@in_fake_time
async def test_a_machine_that_comes_and_goes_is_asked_only_where_no_other_can() -> None:
    there = machines(300, 300)
    (chosen,) = WakeTargets().choose(ModelDemand("m", 1), there, 0.0)
    chosen.unsteady = True
    (steady,) = WakeTargets().choose(ModelDemand("m", 1), there, 0.0)
    assert steady is not chosen
    steady.unsteady = True
    assert WakeTargets().choose(ModelDemand("m", 1), there, 0.0) == [chosen]
