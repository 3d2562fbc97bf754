"""Carries out a SetPlacement between the turns of a replica's loop: sleeps, wakes, lets the KV cache grow and shrink.

It knows neither sockets nor tensors, nor why a model is to be where.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

import msgspec

from engine.execution.step_loop import StepLoop
from engine.log import log
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.protocol.frames import PlacementStatus, SetPlacement
from engine.protocol.types import Residency
from engine.scheduling.block_pool import WakeExtents
from engine.scheduling.encoder_scheduler import EncoderScheduler
from engine.scheduling.kv_manager import KVManager
from engine.scheduling.scheduler import Scheduler
from engine.step.executor import PagedMemory, Sleeper
from engine.weights.checkpoint import CheckpointError

EXTENTS_AT_ONCE: Final = 4  # mapped or unmapped between two steps: some 5 ms where there are 32 layers, of any size
_ARRIVAL_LOOK_S: Final = 0.001


@dataclass(slots=True)
class _Transition:
    """A SetPlacement that is carried out: when it came, since when something moves for it, and the bytes copied."""

    target: SetPlacement
    ordered_s: float
    began_s: float | None = None
    moved_bytes: int = 0


class SleepController:
    """`order` takes a SetPlacement, `step` after `step` carries it out; only the newest one counts.

    residency  where the replica is: on DEVICE, or in MEMORY, where nothing is launched and requests wait.
    """

    def __init__(
        self, sleeper: Sleeper, paged: PagedMemory | None, scheduler: Scheduler | EncoderScheduler, loop: StepLoop,
        kept_bytes: int, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """At most kept_bytes of host memory are for KV of system prompts while the model sleeps."""
        self.residency = Residency.DEVICE
        self._sleeper = sleeper
        self._paged = paged
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._loop = loop
        self._kept_bytes = kept_bytes
        self._clock = clock
        self._transition: _Transition | None = None
        self._arriving = False  # the model woke, and not all of it is there yet
        self._extents = len(self._mapped())  # when it fell asleep

    def order(self, target: SetPlacement) -> None:
        """Replaces the order to be carried out from the next step on. A move that cannot be stopped ends before."""
        self._transition = _Transition(target, self._clock())
        self._admit()

    def obeyed(self, target: SetPlacement) -> bool:
        """Whether nothing is left to do for an order: the replica is there, no size is asked for, no other order is
        pending."""
        return self._transition is None and target == SetPlacement(self.residency)

    def stay(self) -> None:
        """Cancels the order that is not carried out yet: the replica stays where it is."""
        self._transition = None
        self._admit()

    def pause_s(self, max_s: float) -> float:
        """For how long `step` has nothing to do, at most max_s."""
        if self._arriving:
            return min(max_s, _ARRIVAL_LOOK_S)
        return max_s if self._transition is None else 0.0

    @property
    def settled(self) -> bool:
        """Whether the replica is on the device, and no move is under way."""
        return self.residency == Residency.DEVICE and self._transition is None and not self._arriving

    def step(self, resting: bool) -> PlacementStatus | None:
        """Does a bounded part of the order. Returns what to report at its end, good or bad. `resting`: the loop's last
        turn found nothing to do."""
        if self._arriving:
            if not self._sleeper.arrived():
                return None
            self._arriving = False
        transition = self._transition
        if transition is None:
            return None
        if transition.target.residency == Residency.MEMORY:
            return self._toward_memory(transition, resting)
        return self._wake(transition) if self.residency == Residency.MEMORY else self._resize(transition)

    def status(self) -> PlacementStatus:
        """Where the replica is, and what it holds there."""
        return PlacementStatus(self.residency, **asdict(self._sleeper.usage()))

    # Inside

    def _mapped(self) -> list[int]:
        return [] if self._paged is None else self._paged.mapped

    def _admit(self) -> None:
        """Lets what waits start, unless the replica sleeps or is to."""
        leaving = self._transition is not None and self._transition.target.residency == Residency.MEMORY
        self._scheduler.intake.admitting = self.residency == Residency.DEVICE and not leaving

    def _toward_memory(self, transition: _Transition, resting: bool) -> PlacementStatus | None:
        if self.residency == Residency.MEMORY:
            return self._end(transition)
        try:
            prepared_bytes = self._sleeper.prepare()  # turn by turn: a host that is slow to give memory takes seconds
        except OutOfHostMemory as error:
            return self._end(transition, str(error))
        if prepared_bytes:
            self._begin(transition)
            transition.moved_bytes += prepared_bytes
            return None
        if not resting and self._clock() < transition.ordered_s + transition.target.drain_ms / 1e3:
            return None
        self._begin(transition)
        self._loop.land_all()
        self._scheduler.preempt_all()
        mapped = self._mapped()
        keep = [] if self._kv is None else self._kv.sleep(self._max_kept_blocks())
        self._loop.zero_freed()
        try:
            transition.moved_bytes += self._sleeper.sleep(keep)
        except OutOfHostMemory as error:
            self._finish_wake(WakeExtents(mapped, keep))  # all is still where it was
            return self._end(transition, str(error))
        self._extents = len(mapped)
        self.residency = Residency.MEMORY
        return self._end(transition)

    def _wake(self, transition: _Transition) -> PlacementStatus | None:
        self._begin(transition)
        self._loop.zero_freed()
        extents = self._target_extents(transition.target)
        plan = WakeExtents([], []) if self._kv is None else self._kv.pool.plan_wake(extents)
        try:
            transition.moved_bytes += self._sleeper.wake(plan.extents, plan.restore)
        except (OutOfDeviceMemory, CheckpointError) as error:
            return self._end(transition, str(error))
        self._finish_wake(plan)
        self.residency = Residency.DEVICE
        self._arriving = True
        self._admit()
        return None

    def _resize(self, transition: _Transition) -> PlacementStatus | None:
        """Maps or unmaps some extents. The end comes where the model has as many as it may, or no more can be had or
        spared."""
        paged, kv = self._paged, self._kv
        if paged is None or kv is None:
            return self._end(transition)
        target, mapped = self._target_extents(transition.target), len(paged.mapped)
        if target == mapped:
            return self._end(transition)
        self._begin(transition)
        if target > mapped:
            extents = kv.pool.extents_to_grow(min(target - mapped, EXTENTS_AT_ONCE))
            try:
                paged.map(extents)
            except OutOfDeviceMemory as error:
                return self._end(transition, str(error))
            kv.grow(extents)
            return None
        shrunk = self._shrink(paged, kv, transition, min(mapped - target, EXTENTS_AT_ONCE))
        return None if shrunk else self._end(transition)

    def _shrink(self, paged: PagedMemory, kv: KVManager, transition: _Transition, count: int) -> bool:
        """Returns False where no extent can be spared."""
        self._loop.land_all()
        plan = kv.shrink(count)
        self._loop.zero_freed()
        if plan.sources:
            paged.copy(plan.sources, plan.targets)
            paged.zero(plan.secret)
            transition.moved_bytes += len(plan.sources) * paged.layout.block_bytes
        if plan.extents:
            paged.unmap(plan.extents)
        return bool(plan.extents)

    def _finish_wake(self, plan: WakeExtents) -> None:
        if self._kv is not None:
            self._kv.finish_wake(plan)

    def _target_extents(self, target: SetPlacement) -> int:
        """How many extents fit into what the model may hold, never fewer than it needs to serve at all."""
        if target.device_bytes is None or self._paged is None:
            return len(self._mapped()) if self.residency == Residency.DEVICE else self._extents
        layout = self._paged.layout
        more = max(0, target.device_bytes - self._sleeper.usage().min_bytes) // layout.extent_bytes
        return min(layout.min_extents + more, layout.extents)

    def _max_kept_blocks(self) -> int:
        """How many blocks may be kept: no more than fit the extents that the model has at least when it wakes."""
        if self._paged is None:
            return 0
        layout = self._paged.layout
        return min(self._kept_bytes // layout.block_bytes, layout.min_extents * layout.extent_blocks)

    def _begin(self, transition: _Transition) -> None:
        """Notes that something moves from now on."""
        if transition.began_s is None:
            transition.began_s = self._clock()

    def _end(self, transition: _Transition, problem: str = "") -> PlacementStatus:
        """The order is carried out, or cannot be. Returns what to report."""
        self._transition = None
        self._admit()
        now, status = self._clock(), self.status()
        if transition.began_s is not None:
            seconds, failure = now - transition.began_s, {"problem": problem} if problem else {}
            log(
                "move_failed" if problem else "moved",
                to=transition.target.residency.name,
                device_bytes=status.device_bytes,
                bytes=transition.moved_bytes,
                seconds=round(seconds, 4),
                gb_s=round(transition.moved_bytes / max(seconds, 1e-9) / 1e9, 2),
                **failure,
            )
        return msgspec.structs.replace(
            status, moved_bytes=transition.moved_bytes, seconds=now - transition.ordered_s, problem=problem
        )
