"""Carries out a machine's Place between the turns of a replica's loop: sleeps, wakes, lets its KV grow and shrink.

It knows neither sockets nor tensors, nor why it is to be where.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
from engine.step.executor import SleepableExecutor
from engine.weights.checkpoint import CheckpointError

EXTENTS_AT_ONCE: Final = 4  # mapped or unmapped between two steps: some 5 ms where there are 32 layers, of any size
_ARRIVAL_LOOK_S: Final = 0.001


@dataclass(slots=True)
class _PendingPlacement:
    """A Place that is carried out: when it came, since when something moves for it, and how many bytes were copied."""

    place: SetPlacement
    came_s: float
    moves_s: float | None = None
    moved_bytes: int = 0


class SleepController:
    """`order` takes a Place, `step` after `step` carries it out; the newest one alone counts.

    residency  where the replica is: on DEVICE, or in MEMORY, where nothing is launched and requests wait.
    """

    def __init__(
        self, runner: SleepableExecutor, scheduler: Scheduler | EncoderScheduler, loop: StepLoop, kept_bytes: int,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """At most kept_bytes of host memory are for KV of system prompts while it sleeps."""
        self.residency = Residency.DEVICE
        self._runner = runner
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._loop = loop
        self._kept_bytes = kept_bytes
        self._clock = clock
        self._order: _PendingPlacement | None = None
        self._arriving = False  # it woke, and not all of it is there yet
        self._extents = len(runner.mapped)  # when it fell asleep

    def order(self, place: SetPlacement) -> None:
        """From the next step on; a move that cannot be stopped ends before."""
        self._order = _PendingPlacement(place, self._clock())
        self._admit()

    def obeyed(self, place: SetPlacement) -> bool:
        """Whether there is nothing to do for it: it is there, no size is asked for, and nothing else was ordered."""
        return self._order is None and place == SetPlacement(self.residency)

    def stay(self) -> None:
        """Where it is, and obeys no order that was not carried out by now."""
        self._order = None
        self._admit()

    def pause_s(self, most_s: float) -> float:
        """For how long nothing needs to be done about it, at most so long."""
        if self._arriving:
            return min(most_s, _ARRIVAL_LOOK_S)
        return most_s if self._order is None else 0.0

    @property
    def settled(self) -> bool:
        """Whether it is on the device, and no move is under way."""
        return self.residency == Residency.DEVICE and self._order is None and not self._arriving

    def step(self, resting: bool) -> PlacementStatus | None:
        """Does a bounded part of what was ordered; at its end, good or bad, what is to be told. `resting`: the loop's
        last turn found nothing to do."""
        if self._arriving:
            if not self._runner.arrived():
                return None
            self._arriving = False
        order = self._order
        if order is None:
            return None
        if order.place.residency == Residency.MEMORY:
            return self._toward_memory(order, resting)
        return self._wake(order) if self.residency == Residency.MEMORY else self._resize(order)

    def placed(self) -> PlacementStatus:
        """Where it is, and what it holds there."""
        sizes = self._runner.sizes()
        return PlacementStatus(
            self.residency,
            device_bytes=sizes.device_bytes,
            asleep_bytes=sizes.asleep_bytes,
            min_bytes=sizes.least_bytes,
            max_bytes=sizes.most_bytes,
            memory_bytes=sizes.memory_bytes,
            weights_bytes=sizes.weights_bytes,
            kv_bytes=sizes.kv_bytes,
            kept_bytes=sizes.kept_bytes,
            standby_bytes=sizes.standby_bytes,
        )

    # Inside

    def _admit(self) -> None:
        """What waits may start, unless it sleeps or is to."""
        leaving = self._order is not None and self._order.place.residency == Residency.MEMORY
        self._scheduler.intake.admitting = self.residency == Residency.DEVICE and not leaving

    def _toward_memory(self, order: _PendingPlacement, resting: bool) -> PlacementStatus | None:
        if self.residency == Residency.MEMORY:
            return self._end(order)
        try:
            prepared_bytes = self._runner.prepare()  # turn by turn: a host that is slow to give memory takes seconds
        except OutOfHostMemory as error:
            return self._end(order, str(error))
        if prepared_bytes:
            self._begin(order)
            order.moved_bytes += prepared_bytes
            return None
        if not resting and self._clock() < order.came_s + order.place.drain_ms / 1e3:
            return None
        self._begin(order)
        self._loop.land_all()
        self._scheduler.preempt_all()
        mapped = self._runner.mapped
        kept = [] if self._kv is None else self._kv.sleep(self._kept_most())
        self._loop.erase()
        try:
            order.moved_bytes += self._runner.sleep(kept)
        except OutOfHostMemory as error:
            self._finish_wake(WakeExtents(mapped, kept))  # all is still where it was
            return self._end(order, str(error))
        self._extents = len(mapped)
        self.residency = Residency.MEMORY
        return self._end(order)

    def _wake(self, order: _PendingPlacement) -> PlacementStatus | None:
        self._begin(order)
        self._loop.erase()
        plan = WakeExtents([], []) if self._kv is None else self._kv.pool.plan_wake(self._wanted(order.place))
        try:
            order.moved_bytes += self._runner.wake(plan.extents, plan.restore)
        except (OutOfDeviceMemory, CheckpointError) as error:
            return self._end(order, str(error))
        self._finish_wake(plan)
        self.residency = Residency.DEVICE
        self._arriving = True
        self._admit()
        return None

    def _resize(self, order: _PendingPlacement) -> PlacementStatus | None:
        """Some extents more or fewer; the end where it has as many as it may, or no more can be had or spared."""
        wanted, mapped = self._wanted(order.place), len(self._runner.mapped)
        if wanted == mapped or self._kv is None:
            return self._end(order)
        self._begin(order)
        if wanted > mapped:
            extents = self._kv.pool.extents_to_grow(min(wanted - mapped, EXTENTS_AT_ONCE))
            try:
                self._runner.map(extents)
            except OutOfDeviceMemory as error:
                return self._end(order, str(error))
            self._kv.grow(extents)
            return None
        shrunk = self._shrink(order, self._kv, min(mapped - wanted, EXTENTS_AT_ONCE))
        return None if shrunk else self._end(order)

    def _shrink(self, order: _PendingPlacement, kv: KVManager, count: int) -> bool:
        """False where none can be spared."""
        self._loop.land_all()
        plan = kv.shrink(count)
        self._loop.erase()
        if plan.sources:
            self._runner.copy(plan.sources, plan.targets)
            self._runner.erase(plan.secret)
            order.moved_bytes += len(plan.sources) * self._block_bytes()
        if plan.extents:
            self._runner.unmap(plan.extents)
        return bool(plan.extents)

    def _finish_wake(self, plan: WakeExtents) -> None:
        if self._kv is not None:
            self._kv.finish_wake(plan)

    def _wanted(self, place: SetPlacement) -> int:
        """How many extents fit into what it may hold, never fewer than it needs to serve at all."""
        total = -(-self._runner.blocks // self._runner.extent_blocks)
        if place.device_bytes is None or not total:
            return len(self._runner.mapped) if self.residency == Residency.DEVICE else self._extents
        sizes = self._runner.sizes()
        more = max(0, place.device_bytes - sizes.least_bytes) // sizes.extent_bytes
        return min(sizes.extents_least + more, total)

    def _kept_most(self) -> int:
        """No more than fits what it has at the least: more would not fit what it may hold when it wakes."""
        if not self._runner.blocks:
            return 0
        least = self._runner.sizes().extents_least * self._runner.extent_blocks
        return min(self._kept_bytes // self._block_bytes(), least)

    def _block_bytes(self) -> int:
        return self._runner.sizes().extent_bytes // self._runner.extent_blocks

    def _begin(self, order: _PendingPlacement) -> None:
        """From now on something moves."""
        if order.moves_s is None:
            order.moves_s = self._clock()

    def _end(self, order: _PendingPlacement, problem: str = "") -> PlacementStatus:
        """The order is carried out, or cannot be."""
        self._order = None
        self._admit()
        now, told = self._clock(), self.placed()
        if order.moves_s is not None:
            seconds, moved = now - order.moves_s, {"problem": problem} if problem else {}
            log(
                "move_failed" if problem else "moved",
                to=order.place.residency.name,
                device_bytes=told.device_bytes,
                bytes=order.moved_bytes,
                seconds=round(seconds, 4),
                gb_s=round(order.moved_bytes / max(seconds, 1e-9) / 1e9, 2),
                **moved,
            )
        return msgspec.structs.replace(told, moved_bytes=order.moved_bytes, seconds=now - order.came_s, problem=problem)
