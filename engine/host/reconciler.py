"""Turns the policy's placements into processes and messages, and the reports on them into what the policy sees next.
Where a transition fails it says so, counts it, and lets the policy find another way, so often and no more."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from engine.host.demand import DemandTracker
from engine.host.replica_handle import ReplicaHandle, Transition
from engine.host.supervisor import SupervisionTimeouts
from engine.hostinfo import cpu
from engine.hostinfo.memory import ByteBudget, HostDevice, environment_on
from engine.log import log
from engine.placement.policy import decide_placement, estimate_ready_ms, unplaceable_reason
from engine.placement.roles import RoleBalance, RoleCandidate, assign_roles
from engine.placement.snapshot import MoveAllowance, Placement, PlacementSnapshot
from engine.protocol.frames import MachineState, PlacementStatus
from engine.protocol.specs import MachineSpec, ReplicaSpec
from engine.protocol.types import Residency

_FAILURES_MAX: Final = 4  # wakes in a row that found no memory; then the process ends
_WITHHELD_S: Final = 60.0  # memory that was not there is not counted on for so long
_OUT_OF_MEMORY_WORDS: Final = ("DoesNotFit", "OutOfDeviceMemory", "out of memory")  # of a process with too little
_RETRY_PARTS: Final = 4  # of what a wake that failed needs, one part more is made free before the next


class PlacementReconciler:
    """All replicas of a machine and the memory that they share."""

    def __init__(
        self, spec: MachineSpec, replicas: Mapping[str, ReplicaHandle], devices: Sequence[HostDevice],
        memory: ByteBudget, demand: DemandTracker, timeouts: SupervisionTimeouts,
    ) -> None:  # fmt: skip
        """`replicas` come and go by their names; those on a CPU share its cores."""
        self.replicas = replicas
        self._spec = spec
        self._devices = devices
        self._memory = memory
        self._demand = demand
        self._timeouts = timeouts
        self._cores = cpu.usable_cores()
        self._allowance = MoveAllowance()
        self._balances: dict[str, RoleBalance] = {}
        self._counts: Counter[str] = Counter()

    def forgive(self, lost_s: float, now: float) -> None:
        """Moves all deadlines by a time in which this machine itself did not run."""
        for replica in self.replicas.values():
            replica.forgive(lost_s, now)

    def poll(self, now: float) -> None:
        """Takes in what processes and connections reported, and collects processes that have ended."""
        for replica in self.replicas.values():
            replica.poll(now)
            for status in replica.peer.take_reports():
                self._on_status(replica, status, now)
            if replica.supervisor.reap(now):
                self._on_exit(replica, now)
            transition = replica.transition
            if transition is not None and now > transition.deadline and not replica.supervisor.ending:
                self._on_deadline(replica, transition, now)

    def reconcile(self, now: float, ready: bool) -> None:
        """Asks the policy, and begins what it decides; processes are started where that is `ready`."""
        budgets = [device.budget.at(now) if device.total_bytes else self._unmeasured_bytes for device in self._devices]
        decision = decide_placement(self._snapshot(now, budgets, ready), self._allowance)
        self._allowance = decision.allowance
        for placement in decision.placements:
            self._apply(self.replicas[placement.name], placement, now)

    def give_roles(self, now: float) -> None:
        """Gives the replicas of each model their roles, as its settings or their load want it."""
        by_model: dict[str, list[ReplicaHandle]] = {}
        for replica in self.replicas.values():
            by_model.setdefault(replica.model.name, []).append(replica)
        for model in self._balances.keys() - by_model.keys():
            del self._balances[model]
        for model, replicas in by_model.items():
            present = [
                each for each in replicas if each.ready and each.residency is Residency.DEVICE and not each.leaving(now)
            ]
            prefill = replicas[-1].model.prefill_replicas  # the newest one's settings are those of now
            if prefill < 0:
                counted = [each.counted_ms() for each in present]
                prompts_ms, steps_ms = sum(ms for ms, _ in counted), sum(ms for _, ms in counted)
                balance = self._balances.setdefault(model, RoleBalance())
                prefill = balance.update(now, len(present), prompts_ms, steps_ms)
            candidates = [RoleCandidate(each.name, each.role, each in present, each.running) for each in replicas]
            roles = assign_roles(candidates, prefill)
            for replica in replicas:
                if replica.role is not roles[replica.name]:
                    replica.role = roles[replica.name]
                    log("role", model=model, replica=replica.name, role=replica.role.name.lower())

    def pause_s(self, now: float, max_s: float) -> float:
        """For how long no decision is due by time alone, at most max_s."""
        return min([max_s, *(at - now for replica in self.replicas.values() if (at := replica.handover_at) > now)])

    def conditions(self, now: float) -> list[tuple[object, ...]]:
        """The part of the replicas' state that gateways are to hear at once when it changes."""
        return [replica.condition(now) for replica in self.replicas.values()]

    def machine_state(self, now: float, problem: str) -> MachineState:
        """All that gateways hear of this machine; `problem` is of its settings."""
        snapshot = self._snapshot(now, [self._max_bytes(device) for device in self._devices], True)
        states = []
        for replica, seen in zip(self.replicas.values(), snapshot.replicas, strict=True):
            known = replica.has_reported or replica.device_count > len(self._devices)
            unplaceable = unplaceable_reason(snapshot, seen) if known else ""
            states.append(replica.state(now, unplaceable, estimate_ready_ms(snapshot, seen)))
        used_bytes = [0] * len(self._devices)
        for replica in self.replicas.values():
            for device in replica.devices:
                used_bytes[device] += replica.usage.device_bytes
        return MachineState(
            machine=self._spec.name,
            replicas=states,
            devices=[device.state(count, now) for device, count in zip(self._devices, used_bytes, strict=True)],
            memory_bytes=self._memory_held,
            memory_budget_bytes=self._memory.at(now),
            moves=dict(self._counts),
            problem=problem,
            region=self._spec.region,
        )

    # What the policy sees

    @property
    def _alone(self) -> bool:
        """Whether each replica can have its devices for itself."""
        return sum(replica.device_count for replica in self.replicas.values()) <= len(self._devices)

    def _snapshot(self, now: float, budgets: Sequence[int], ready: bool) -> PlacementSnapshot:
        replicas = tuple(
            replica.snapshot(now, self._demand.of(replica.model.name, now), self._alone, max(budgets), ready)
            for replica in self.replicas.values()
        )
        return PlacementSnapshot(now, replicas, tuple(budgets), self._memory.at(now))

    def _max_bytes(self, device: HostDevice) -> int:
        return device.budget.max_bytes if device.total_bytes else self._unmeasured_bytes

    @property
    def _unmeasured_bytes(self) -> int:
        """Bytes of a device whose size nobody knows: enough for one replica, whichever, that will report it."""
        return max((replica.estimated_bytes for replica in self.replicas.values()), default=0)

    @property
    def _memory_held(self) -> int:
        return sum(replica.usage.memory_bytes for replica in self.replicas.values())

    def _remaining_budget(self, device: int, free_bytes: int) -> int:
        """What replicas claim of a device and so much more, but never less than the replica that needs most there takes
        with all others asleep: with less some could never wake."""
        here = [replica for replica in self.replicas.values() if device in replica.devices]
        awake_bytes = max(replica.min_bytes - replica.asleep_bytes for replica in here)
        reserved_bytes = awake_bytes + sum(replica.asleep_bytes for replica in here)
        return max(sum(replica.claimed_bytes for replica in here) + free_bytes, reserved_bytes)

    # How a transition begins

    def _apply(self, replica: ReplicaHandle, placement: Placement, now: float) -> None:
        if replica.supervisor.process is None:
            self._start(replica, placement, now)
        elif placement.residency is Residency.DISK:
            replica.begin("end", placement, now)
        elif replica.transition is not None and replica.transition.kind == "start":
            replica.cancel_sleep()
        elif replica.accepts_placement(now):
            replica.begin(_transition_kind(replica, placement), placement, now)

    def _start(self, replica: ReplicaHandle, placement: Placement, now: float) -> None:
        if not replica.find_folder(now):
            return
        devices = [self._devices[device] for device in placement.devices]
        whole_device = self._alone or not all(device.total_bytes for device in devices)
        spec = ReplicaSpec(
            model=msgspec.structs.replace(replica.model, gpus=replica.layout.gpus, stages=replica.layout.stages),
            address=replica.supervisor.address,
            pulse=str(replica.supervisor.heartbeat_path),
            boot=replica.supervisor.boot + 1,
            device=self._spec.device.partition(":")[0],
            device_bytes=self._spec.device_bytes if whole_device else placement.device_bytes,
            standby=placement.standby and not self._alone,
            threads=self._spec.threads or max(1, self._cores // len(self.replicas)),
            telemetry=self._spec.telemetry,
            region=self._spec.region,
            fabric=self._spec.fabric,
        )
        replica.devices = placement.devices
        if not replica.supervisor.start(spec, environment_on(devices), now):
            self._counts["start_failed"] += 1
            return
        if whole_device:
            placement = replace(placement, device_bytes=min(map(self._max_bytes, devices)))
        replica.begin("start", placement, now)

    # How it ends

    def _on_status(self, replica: ReplicaHandle, status: PlacementStatus, now: float) -> None:
        for device in replica.devices:  # those of one model are alike
            if not self._devices[device].total_bytes:
                self._devices[device].read_size(replica.supervisor.memory_path)
        for other in self.replicas.values():
            if other.settings == replica.settings:
                other.learn_sizes(status)
        transition = replica.take_status(status, now)
        if transition is None:
            return
        if status.problem:
            self._on_failure(replica, transition, status, now)
            return
        replica.problem = ""
        replica.backoff.reset()
        self._record(replica, transition, now, status)
        placement = transition.placement
        if transition.kind == "start" and placement.residency is Residency.MEMORY:
            replica.begin("sleep", replace(placement, device_bytes=0), now)

    def _on_failure(self, replica: ReplicaHandle, transition: Transition, status: PlacementStatus, now: float) -> None:
        """The policy is shown as much memory as there seems to be, so that it makes more free, or goes another way."""
        kind, needed_bytes = transition.kind, transition.placement.device_bytes
        replica.fail(f"{kind} failed: {status.problem}", now)
        self._record(replica, transition, now, status, status.problem)
        if kind == "sleep":
            self._memory.withhold(self._memory_held, now + _WITHHELD_S)
            replica.no_sleep_before = now + _WITHHELD_S
        elif kind in ("wake", "grow"):
            lacking_bytes = needed_bytes - replica.claimed_bytes if kind == "wake" else 0
            free_bytes = lacking_bytes * (_RETRY_PARTS - 1) // _RETRY_PARTS
            for device in replica.devices:
                budget_bytes = self._remaining_budget(device, free_bytes)
                self._devices[device].budget.withhold(budget_bytes, now + _WITHHELD_S)
        if kind == "wake" and replica.backoff.failures >= _FAILURES_MAX:
            replica.supervisor.kill(f"it could not be woken: {status.problem}")

    def _on_deadline(self, replica: ReplicaHandle, transition: Transition, now: float) -> None:
        late_s = now - max(transition.began_at, replica.placed_at or 0.0)  # what a start loads is no lateness
        replica.supervisor.kill(f"no answer for {late_s:.1f} s to its order to {transition.kind}, so it was killed")
        replica.transition = None
        self._record(replica, transition, now, None, f"no answer for {late_s:.1f} s")

    def _on_exit(self, replica: ReplicaHandle, now: float) -> None:
        transition = replica.on_exit()
        if transition is None:
            return
        problem = replica.supervisor.problem
        self._record(replica, transition, now, None, "" if transition.kind == "end" else problem)
        out_of_memory = any(words in problem for words in _OUT_OF_MEMORY_WORDS)
        if transition.kind == "start" and not replica.has_reported and out_of_memory:
            replica.raise_estimate(max(map(self._max_bytes, self._devices)))

    def _record(
        self, replica: ReplicaHandle, transition: Transition, now: float, status: PlacementStatus | None,
        problem: str = "",
    ) -> None:  # fmt: skip
        """Counts a transition and writes one line of the log, however it ended."""
        self._counts[transition.kind + ("_failed" if problem else "")] += 1
        seconds = now - transition.began_at
        moved_bytes = status.moved_bytes if status is not None else 0
        log(
            "move_failed" if problem else "moved",
            kind=transition.kind,
            model=replica.model.name,
            devices=list(replica.devices),
            bytes=moved_bytes,
            seconds=round(seconds, 3),
            gb_s=round(moved_bytes / max(seconds, 1e-3) / 1e9, 2),
            why=transition.placement.reason,
            **({"problem": problem} if problem else {}),
        )


def _transition_kind(replica: ReplicaHandle, placement: Placement) -> str:
    if placement.residency is Residency.MEMORY:
        return "sleep"
    if replica.residency is Residency.MEMORY:
        return "wake"
    return "grow" if placement.device_bytes > replica.claimed_bytes else "shrink"
