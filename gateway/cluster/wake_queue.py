"""Requests that wait for a model: in which order they go on, and what machines are told of them. It knows neither
machines nor replicas."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine.protocol.frames import ModelDemand

REPEAT_S: Final = 1.0  # a machine hears of them anew after it
COALESCE_S: Final = 0.005  # what changes within it is told at once
QUEUED_PATIENCE_MS: Final = 3_600_000  # of batches, which give up after a day


@dataclass(eq=False, slots=True)
class _Waiter:
    weight: float
    deadline: float
    turn: asyncio.Future[None]


class WakeQueue:
    """One gateway's, by model. `tell` gets a Wake at each change, the first at once, later ones gathered for some
    milliseconds; `run` repeats it each second. So what they cost does not grow with how many wait.

    Beside them are batches whose model sleeps: they count only while nobody waits for it.
    """

    def __init__(self, tell: Callable[[ModelDemand], None]) -> None:
        self._tell = tell
        self._waiting: dict[str, dict[_Waiter, None]] = {}  # in the order in which they came
        self._queued: dict[str, tuple[int, float]] = {}
        self._told_at: dict[str, float] = {}
        self._gathering: set[str] = set()

    @property
    def models(self) -> list[str]:
        """For which requests or batches wait."""
        return [*self._waiting, *(model for model in self._queued if model not in self._waiting)]

    def count(self, model: str) -> int:
        """Requests that wait, batches left out."""
        return len(self._waiting.get(model, ()))

    async def wait(self, model: str, weight: float, deadline: float) -> None:
        """Until `release`. Raises TimeoutError once the loop's clock shows `deadline`."""
        waiter = _Waiter(weight, deadline, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(model, {})[waiter] = None
        self._changed(model)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter.turn
        finally:
            self._forget(model, waiter)

    def release(self, model: str) -> None:
        """All of them go on: the heavier first, among equals who came first. Batches count no longer."""
        self.queue(model, 0, 0.0)
        released = sorted(self._waiting.pop(model, ()), key=lambda waiter: -waiter.weight)
        for waiter in released:
            if not waiter.turn.done():
                waiter.turn.set_result(None)
        if released:
            self._changed(model)

    def queue(self, model: str, requests: int, weight: float) -> None:
        """So many requests of batches wait for the model; 0: none any more."""
        before = self._queued.pop(model, None)
        if requests:
            self._queued[model] = requests, weight
        if before != self._queued.get(model):
            self._changed(model)

    def wake(self, model: str) -> ModelDemand:
        """What a machine is to know now."""
        if waiting := self._waiting.get(model):
            left_s = min(waiter.deadline for waiter in waiting) - asyncio.get_running_loop().time()
            return ModelDemand(
                model, len(waiting), max(waiter.weight for waiter in waiting), max(1, int(1000 * left_s))
            )
        requests, weight = self._queued.get(model, (0, 1.0))
        return ModelDemand(model, requests, weight, QUEUED_PATIENCE_MS if requests else 0)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(REPEAT_S)
            for model in self.models:
                self._tell(self.wake(model))

    def _forget(self, model: str, waiter: _Waiter) -> None:
        """Of one that left, or whose time was over; who was released is in no list any more."""
        waiting = self._waiting.get(model, {})
        if waiter in waiting:
            del waiting[waiter]
            if not waiting:
                del self._waiting[model]
            self._changed(model)

    def _changed(self, model: str) -> None:
        loop = asyncio.get_running_loop()
        if model in self._gathering:
            return
        left_s = self._told_at.get(model, -math.inf) + COALESCE_S - loop.time()
        if left_s <= 0:
            self._tell_now(model)
        else:
            self._gathering.add(model)
            loop.call_later(left_s, self._tell_now, model)

    def _tell_now(self, model: str) -> None:
        self._gathering.discard(model)
        self._told_at[model] = asyncio.get_running_loop().time()
        self._tell(self.wake(model))
