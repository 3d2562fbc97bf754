"""Which machines are told that calls wait for a model: those that should hold it, and others only where these cannot.
It opens no connection."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from engine.protocol.frames import ModelDemand
from engine.protocol.types import Residency
from gateway.cluster.replica_entry import MachineEntry
from gateway.cluster.route import preference

CALLS_PER_MACHINE: Final = 64  # that wait; for more of them more machines are woken
LATE_S: Final = 0.5  # beyond its own estimate a machine is given so long


@dataclass(frozen=True, slots=True)
class _Asked:
    """A machine that was told, and until when its model should be there by its own word."""

    machine: MachineEntry
    until_s: float


@dataclass(frozen=True, slots=True)
class _Told:
    """A demand, and by address the machines that were told of it."""

    demand: ModelDemand
    asked: dict[str, _Asked]


class WakeTargets:
    """The machines that were told of each model for which calls wait."""

    def __init__(self) -> None:
        self._told: dict[str, dict[tuple[str, ...], _Told]] = {}  # by model, then by where its calls may be served

    def told(self, model: str) -> list[MachineEntry]:
        """The machines that know of calls that wait for the model."""
        every = [asked.machine for told in self._told.get(model, {}).values() for asked in told.asked.values()]
        return list(dict.fromkeys(every))

    def demand_at(self, machine: MachineEntry, model: str) -> ModelDemand:
        """All that a machine is to know of calls that wait for the model."""
        every = self._told.get(model, {}).values()
        demands = [told.demand for told in every if any(asked.machine is machine for asked in told.asked.values())]
        if not demands:
            return ModelDemand(model, 0)
        requests, weight = sum(each.requests for each in demands), max(each.weight for each in demands)
        return ModelDemand(model, requests, weight, min(each.patience_ms for each in demands))

    def choose(
        self, demand: ModelDemand, machines: Mapping[str, MachineEntry], now: float, regions: tuple[str, ...] = ()
    ) -> list[MachineEntry]:
        """The machines to tell of this demand of calls that may be served in these regions: those that know already and
        can still serve it, and the next in the model's order for each that is missing, or later than it said. The order
        is the model's own, but a machine that has it in host memory is before one that would read it from disk."""
        by_regions = self._told.setdefault(demand.model, {})
        told = by_regions.pop(regions, None)
        if not demand.requests:
            if not by_regions:
                del self._told[demand.model]
            return []
        before = {} if told is None else told.asked
        ready_ms = {
            address: _ready_ms(machine, demand.model) if machine.may_serve(regions) else None
            for address, machine in machines.items()
        }
        asked = {
            address: each
            for address, each in before.items()
            if each.machine is machines.get(address) and ready_ms[address] is not None
        }
        missing = 1 + demand.requests // CALLS_PER_MACHINE - sum(now <= each.until_s for each in asked.values())
        others = [address for address, ms in ready_ms.items() if ms is not None and address not in asked]
        others.sort(key=lambda address: _order(machines[address], demand.model), reverse=True)
        for address in others[: max(0, missing)]:
            asked[address] = _Asked(machines[address], now + (ready_ms[address] or 0) / 1000 + LATE_S)
        by_regions[regions] = _Told(demand, asked)
        return [each.machine for each in asked.values()]


def _ready_ms(machine: MachineEntry, model: str) -> int | None:
    """When the model could serve there, if it were asked for now; None: not at all, as far as can be told."""
    if not machine.open:
        return None
    times_ms = [
        entry.state.ready_ms for entry in machine.replicas.values() if entry.state.model == model and not entry.hopeless
    ]
    return min(times_ms, default=None)


def _order(machine: MachineEntry, model: str) -> tuple[bool, bool, float]:
    """The larger, the rather the model is woken there."""
    replicas = [entry.state for entry in machine.replicas.values() if entry.state.model == model]
    warm = any(Residency.DISK not in (state.residency, state.toward) for state in replicas)
    return not machine.unsteady, warm, preference(machine.name, machine.weight, model)
