"""Turns the policy's moves into processes and Places, and their answers into what the policy sees next. Where a move
fails it says so, counts it, and lets the policy find another way, so often and no more."""

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from engine.host.demand import DemandTracker
from engine.host.replica_handle import ReplicaHandle, Transition
from engine.host.supervisor import SupervisionTimeouts
from engine.hostinfo.memory import ByteBudget, HostDevice
from engine.log import log
from engine.placement.policy import decide_placement, estimate_ready_ms, unplaceable_reason
from engine.placement.snapshot import Move, MoveAllowance, PlacementSnapshot
from engine.protocol.frames import MachineState, PlacementStatus, SetPlacement
from engine.protocol.specs import MachineSpec, ReplicaSpec
from engine.protocol.types import Residency

_FAILURES_MAX: Final = 4  # wakes in a row that found no memory; then the process ends
_WITHHELD_S: Final = 60.0  # memory that was not there is not reckoned with for so long
_OUT_OF_MEMORY_WORDS: Final = (
    "DoesNotFit",
    "OutOfDeviceMemory",
    "out of memory",
)  # what one says that was granted too little
_MORE: Final = 4  # of what a wake that failed needs, one part more is made free before the next


class ReplicaCondition(NamedTuple):
    """What of a replica's state its callers wait for."""

    residency: Residency
    toward: Residency
    boot: int
    quarantined: bool
    problem: str


class PlacementReconciler:
    """All replicas of a machine and the memory that they share."""

    def __init__(
        self, spec: MachineSpec, lodgers: Sequence[ReplicaHandle], devices: Sequence[HostDevice], memory: ByteBudget,
        demand: DemandTracker, patience: SupervisionTimeouts, threads: int,
    ) -> None:  # fmt: skip
        """`threads` are those of each replica on a CPU."""
        self.lodgers = {lodger.name: lodger for lodger in lodgers}
        self._spec = spec
        self._devices = devices
        self._memory = memory
        self._demand = demand
        self._patience = patience
        self._threads = threads
        self._alone = len(lodgers) <= len(devices)
        self._allowance = MoveAllowance()
        self._counts: Counter[str] = Counter()

    def forgive(self, lost_s: float, now: float) -> None:
        for lodger in self.lodgers.values():
            lodger.forgive(lost_s, now)

    def look(self, now: float) -> None:
        """Takes in what processes and links said, and collects who has ended."""
        for lodger in self.lodgers.values():
            lodger.look(now)
            for placed in lodger.link.taken():
                self._answered(lodger, placed, now)
            if lodger.child.reap(now):
                self._gone(lodger, now)
            order = lodger.order
            if order is not None and now > order.until and not lodger.child.ending:
                self._late(lodger, order, now)

    def decide(self, now: float, ready: bool) -> None:
        """Asks the policy, and begins what it says; processes are started where that is `ready`."""
        budgets = [device.budget.at(now) if device.total_bytes else self._unknown for device in self._devices]
        decision = decide_placement(self._view(now, budgets, ready), self._allowance)
        self._allowance = decision.allowance
        for move in decision.moves:
            self._begin(self.lodgers[move.name], move, now)

    def whereabouts(self, now: float) -> list[ReplicaCondition]:
        """What gateways are to hear at once when it changes."""
        return [
            ReplicaCondition(
                lodger.residency, lodger.toward, lodger.child.boot, lodger.child.quarantined(now), lodger.said
            )
            for lodger in self.lodgers.values()
        ]

    def fleet(self, now: float) -> MachineState:
        view = self._view(now, [self._whole(device) for device in self._devices], True)
        states = []
        for lodger in self.lodgers.values():
            never = unplaceable_reason(view, lodger.name) if lodger.known else ""
            states.append(lodger.state(now, never, estimate_ready_ms(view, lodger.name)))
        held = [0] * len(self._devices)
        for lodger in self.lodgers.values():
            if lodger.told is not None:
                held[lodger.device] += lodger.told.device_bytes
        return MachineState(
            machine=self._spec.name,
            replicas=states,
            devices=[device.state(bytes_held, now) for device, bytes_held in zip(self._devices, held, strict=True)],
            memory_bytes=self._memory_held,
            memory_budget_bytes=self._memory.at(now),
            moves=dict(self._counts),
        )

    # What the policy sees

    def _view(self, now: float, budgets: Sequence[int], ready: bool) -> PlacementSnapshot:
        residents = tuple(
            lodger.resident(now, self._demand.of(lodger.model.name, now), self._alone, max(budgets), ready)
            for lodger in self.lodgers.values()
        )
        return PlacementSnapshot(now, residents, tuple(budgets), self._memory.at(now))

    def _whole(self, device: HostDevice) -> int:
        return device.budget.max_bytes if device.total_bytes else self._unknown

    @property
    def _unknown(self) -> int:
        """Of a device whose size nobody knows: enough for one replica, whichever, who will say it."""
        return max((lodger.guess_bytes for lodger in self.lodgers.values()), default=0)

    @property
    def _memory_held(self) -> int:
        return sum(lodger.told.memory_bytes for lodger in self.lodgers.values() if lodger.told is not None)

    def _claimed(self, device: int) -> int:
        return sum(lodger.claim_bytes for lodger in self.lodgers.values() if lodger.device == device)

    def _floor(self, device: int) -> int:
        """Enough for whoever needs most there, with all others asleep: with less some could never be woken."""
        here = [lodger for lodger in self.lodgers.values() if lodger.device == device]
        return max(lodger.least_bytes - lodger.asleep_bytes for lodger in here) + sum(
            lodger.asleep_bytes for lodger in here
        )

    # What it says

    def _begin(self, lodger: ReplicaHandle, move: Move, now: float) -> None:
        place = SetPlacement(move.to, move.device_bytes, int(1e3 * move.drain_s))
        if lodger.child.process is None:
            self._start(lodger, move, place, now)
        elif move.to is Residency.DISK:
            lodger.begin("end", place, move.why, now)
        elif lodger.order is not None and lodger.order.kind == "start":
            lodger.stay()
        elif lodger.obeys(now):
            lodger.begin(_transition_kind(lodger, move), place, move.why, now)

    def _start(self, lodger: ReplicaHandle, move: Move, place: SetPlacement, now: float) -> None:
        device = self._devices[move.device]
        all_of_it = self._alone or not device.total_bytes
        spec = ReplicaSpec(
            model=lodger.model,
            address=lodger.child.address,
            pulse=str(lodger.child.pulse_path),
            boot=lodger.child.boot + 1,
            device=self._spec.device.partition(":")[0],
            device_bytes=self._spec.device_bytes if all_of_it else move.device_bytes,
            standby=move.standby and not self._alone,
            threads=self._threads,
            telemetry=self._spec.telemetry,
        )
        lodger.device = move.device
        if not lodger.child.start(spec, device.environment, now):
            self._counts["start_failed"] += 1
            return
        if all_of_it:
            place = msgspec.structs.replace(place, device_bytes=self._whole(device))
        lodger.begin("start", place, move.why, now)

    # How it ends

    def _answered(self, lodger: ReplicaHandle, placed: PlacementStatus, now: float) -> None:
        device = self._devices[lodger.device]
        if not device.total_bytes:
            device.read_size(lodger.child.memory_path)
        for other in self.lodgers.values():
            if other.model.name == lodger.model.name:
                other.learn_from(placed)
        order = lodger.answered(placed, now)
        if order is None:
            return
        if placed.problem:
            self._failed(lodger, order, placed, now)
            return
        lodger.succeeded()
        self._count(lodger, order, now, placed)
        if order.kind == "start" and order.place.residency is Residency.MEMORY:
            lodger.begin("sleep", SetPlacement(Residency.MEMORY), order.why, now)

    def _failed(self, lodger: ReplicaHandle, order: Transition, placed: PlacementStatus, now: float) -> None:
        """The policy is shown as much memory as there seems to be, so that it makes more free, or goes another way."""
        wanted = order.place.device_bytes or 0
        lodger.failed(f"{order.kind} failed: {placed.problem}", now)
        self._count(lodger, order, now, placed, placed.problem)
        if order.kind == "sleep":
            self._memory.withhold(self._memory_held, now + _WITHHELD_S)
            lodger.sleepless_until = now + _WITHHELD_S
        elif order.kind in ("wake", "grow"):
            more = (wanted - lodger.claim_bytes) * (_MORE - 1) // _MORE if order.kind == "wake" else 0
            found = max(self._claimed(lodger.device) + more, self._floor(lodger.device))
            self._devices[lodger.device].budget.withhold(found, now + _WITHHELD_S)
        if order.kind == "wake" and lodger.failures >= _FAILURES_MAX:
            lodger.child.kill(f"it could not be woken: {placed.problem}")

    def _late(self, lodger: ReplicaHandle, order: Transition, now: float) -> None:
        late_s = now - max(order.begun_at, lodger.arrived_at or 0.0)  # of a start what it loads is no lateness
        lodger.child.kill(f"no answer for {late_s:.1f} s to its order to {order.kind}, so it was killed")
        lodger.forget_order()
        self._count(lodger, order, now, None, f"no answer for {late_s:.1f} s")

    def _gone(self, lodger: ReplicaHandle, now: float) -> None:
        order = lodger.ended()
        if order is None:
            return
        asked = order.kind == "end"
        self._count(lodger, order, now, None, "" if asked else lodger.child.problem)
        if (
            order.kind == "start"
            and not lodger.known
            and any(word in lodger.child.problem for word in _OUT_OF_MEMORY_WORDS)
        ):
            lodger.needs_more(max(map(self._whole, self._devices)))

    def _count(
        self, lodger: ReplicaHandle, order: Transition, now: float, placed: PlacementStatus | None, problem: str = ""
    ) -> None:
        """One line in the log for each move, however it ended."""
        self._counts[order.kind + ("_failed" if problem else "")] += 1
        seconds = now - order.begun_at
        moved = placed.moved_bytes if placed is not None else 0
        log(
            "move_failed" if problem else "moved",
            kind=order.kind,
            model=lodger.model.name,
            device=lodger.device,
            bytes=moved,
            seconds=round(seconds, 3),
            gb_s=round(moved / max(seconds, 1e-3) / 1e9, 2),
            why=order.why,
            **({"problem": problem} if problem else {}),
        )


def _transition_kind(lodger: ReplicaHandle, move: Move) -> str:
    if move.to is Residency.MEMORY:
        return "sleep"
    if lodger.residency is Residency.MEMORY:
        return "wake"
    return "grow" if move.device_bytes > lodger.claim_bytes else "shrink"
