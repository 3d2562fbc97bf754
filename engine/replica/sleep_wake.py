"""Carries out a SetPlacement between the turns of a replica's loop: sleeps, wakes, lets the KV cache grow and shrink.

It knows neither sockets nor tensors, nor why a model is to be where.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from typing import Final

import msgspec

from engine.kv_blocks.block_pool import WakeExtents
from engine.log import log
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.protocol.frames import PlacementStatus, SetPlacement
from engine.protocol.types import Residency
from engine.scheduling.encoder_scheduler import EncoderScheduler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_loop import StepLoop
from engine.step.executor import PagedMemory, Sleeper, split_extents
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
        self, sleeper: Sleeper, memories: Items[PagedMemory], scheduler: Scheduler | EncoderScheduler, loop: StepLoop,
        kept_bytes: int, clock: Callable[[], float], reserved_bytes: int = 0,
        leave_device: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`memories`: of each group of the scheduler's blocks. At most kept_bytes of host memory are for KV of system
        prompts while the model sleeps, and reserved_bytes may be taken at any moment for KV of other replicas: they
        count as held. `leave_device` gives back what of the device is not the sleeper's, once the model sleeps."""
        self.residency = Residency.DEVICE
        self._sleeper = sleeper
        self._memories = memories
        self._layouts = [memory.layout for memory in memories]
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._loop = loop
        self._kept_bytes = kept_bytes
        self._reserved_bytes = reserved_bytes
        self._leave_device = leave_device
        self._clock = clock
        self._transition: _Transition | None = None
        self._arriving = False  # the model woke, and not all of it is there yet
        self._extents = self._mapped_counts()  # when it fell asleep

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
        status = PlacementStatus(self.residency, **asdict(self._sleeper.usage()))
        reserved_bytes = self._reserved_bytes
        return msgspec.structs.replace(
            status,
            memory_bytes=status.memory_bytes + reserved_bytes,
            standby_bytes=status.standby_bytes + reserved_bytes,
        )

    # Inside

    def _mapped_counts(self) -> list[int]:
        return [len(memory.mapped) for memory in self._memories]

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
        mapped = [memory.mapped for memory in self._memories]
        extents = self._loop.extents
        keep = [] if extents is None else extents.sleep(self._max_kept_blocks())
        self._loop.zero_freed()
        try:
            transition.moved_bytes += self._sleeper.sleep(keep)
        except OutOfHostMemory as error:
            self._finish_wake([*map(WakeExtents, mapped, keep)])  # all is still where it was
            return self._end(transition, str(error))
        self._leave_device()
        self._extents = [*map(len, mapped)]
        self.residency = Residency.MEMORY
        return self._end(transition)

    def _wake(self, transition: _Transition) -> PlacementStatus | None:
        self._begin(transition)
        self._loop.zero_freed()
        extents, counts = self._loop.extents, self._extents
        if transition.target.device_bytes is not None:
            counts = split_extents(self._layouts, self._more_bytes(transition.target.device_bytes), self._parts(counts))
        plans = [] if extents is None else extents.plan_wake(counts)
        try:
            transition.moved_bytes += self._sleeper.wake(
                [plan.extents for plan in plans], [plan.restore for plan in plans]
            )
        except (OutOfDeviceMemory, CheckpointError) as error:
            return self._end(transition, str(error))
        self._finish_wake(plans)
        self.residency = Residency.DEVICE
        self._arriving = True
        self._admit()
        return None

    def _resize(self, transition: _Transition) -> PlacementStatus | None:
        """Maps or unmaps some extents of one group. The end comes where the model has as many as it may, or no more can
        be had or spared."""
        if self._kv is None or transition.target.device_bytes is None:
            return self._end(transition)
        more_bytes = self._more_bytes(transition.target.device_bytes) - self._held_bytes()
        group = self._group_to_grow(more_bytes) if more_bytes > 0 else self._group_to_shrink(-more_bytes)
        if group is None:
            return self._end(transition)
        self._begin(transition)
        extent_bytes = self._layouts[group].extent_bytes
        if more_bytes < 0:
            plan = self._loop.shrink(min(-(more_bytes // extent_bytes), EXTENTS_AT_ONCE), group)
            transition.moved_bytes += len(plan.sources) * self._layouts[group].block_bytes
            return None if plan.extents else self._end(transition)
        try:
            count = min(more_bytes // extent_bytes, EXTENTS_AT_ONCE)
            self._loop.grow(self._kv.pools[group].extents_to_grow(count), group)
        except OutOfDeviceMemory as error:
            return self._end(transition, str(error))
        return None

    def _group_to_grow(self, more_bytes: int) -> int | None:
        """The group to which an extent can be added that has the smallest part of its blocks available."""
        return min(
            (
                group
                for group, (layout, mapped) in enumerate(zip(self._layouts, self._mapped_counts(), strict=True))
                if mapped < layout.extents and 0 < layout.extent_bytes <= more_bytes
            ),
            key=self._available_part,
            default=None,
        )

    def _group_to_shrink(self, less_bytes: int) -> int | None:
        """The group from which an extent can be taken that has the largest part of its blocks available."""
        return max(
            (
                group
                for group, (layout, mapped) in enumerate(zip(self._layouts, self._mapped_counts(), strict=True))
                if less_bytes and mapped > layout.min_extents and layout.extent_bytes
            ),
            key=self._available_part,
            default=None,
        )

    def _available_part(self, group: int) -> float:
        assert self._kv is not None
        return self._kv.available(group) / max(1, self._kv.pools[group].mapped_blocks)

    def _finish_wake(self, plans: list[WakeExtents]) -> None:
        if self._loop.extents is not None:
            self._loop.extents.finish_wake(plans)

    def _more_bytes(self, device_bytes: int) -> int:
        """What the model may hold of KV beyond what it needs to serve at all."""
        return max(0, device_bytes - self._sleeper.usage().min_bytes)

    def _parts(self, counts: list[int]) -> list[int]:
        """In which proportions the groups have memory with so many extents each, beyond the least; or in those of the
        least, where they have no more."""
        above = [
            (count - layout.min_extents) * layout.extent_bytes
            for count, layout in zip(counts, self._layouts, strict=True)
        ]
        return above if any(above) else [layout.min_extents * layout.extent_bytes for layout in self._layouts]

    def _held_bytes(self) -> int:
        """What it holds of KV beyond that."""
        counts = zip(self._layouts, self._mapped_counts(), strict=True)
        return sum((count - layout.min_extents) * layout.extent_bytes for layout, count in counts)

    def _max_kept_blocks(self) -> int:
        """How many blocks may be kept: no more than fit the extents that the model has at least when it wakes."""
        if not self._layouts:
            return 0
        block_bytes = sum(layout.block_bytes for layout in self._layouts)
        return min(self._kept_bytes // block_bytes, *(layout.min_blocks for layout in self._layouts))

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
