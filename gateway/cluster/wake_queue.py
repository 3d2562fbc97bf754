"""Requests that wait for a model: the order in which they go on, and the demand that machines are told.

It knows neither machines nor replicas.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine.protocol.frames import ModelDemand

REPEAT_S: Final = 1.0  # demand is sent again after so long
COALESCE_S: Final = 0.005  # changes within it are sent together
QUEUED_PATIENCE_MS: Final = 3_600_000  # of batches, which wait a day


@dataclass(eq=False, slots=True)
class _Waiter:
    weight: float
    deadline: float
    ready: asyncio.Future[None]


class WakeQueue:
    """The waiting requests of one gateway, by model. `send` gets a ModelDemand at each change, the first at once, later
    ones coalesced for some milliseconds; `run` repeats it each second. So the cost does not grow with how many wait.

    Batches whose model sleeps are demand too, but only while no request waits for it.
    """

    def __init__(self, send: Callable[[ModelDemand], None]) -> None:
        self._send = send
        self._waiting: dict[str, dict[_Waiter, None]] = {}  # in the order of arrival
        self._batch_demand: dict[str, tuple[int, float]] = {}
        self._sent_at: dict[str, float] = {}
        self._coalescing: set[str] = set()

    @property
    def models(self) -> list[str]:
        """Models for which requests or batches wait."""
        return [*self._waiting, *(model for model in self._batch_demand if model not in self._waiting)]

    def count(self, model: str) -> int:
        """How many requests wait, batches left out."""
        return len(self._waiting.get(model, ()))

    async def wait(self, model: str, weight: float, deadline: float) -> None:
        """Until `release`. Raises TimeoutError once the loop's clock shows `deadline`."""
        waiter = _Waiter(weight, deadline, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(model, {})[waiter] = None
        self._changed(model)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter.ready
        finally:
            self._remove(model, waiter)

    def release(self, model: str) -> None:
        """Lets all waiting requests go on, the heavier first, equals in order of arrival. Batches count no longer."""
        self.set_batches(model, 0, 0.0)
        released = sorted(self._waiting.pop(model, ()), key=lambda waiter: -waiter.weight)
        for waiter in released:
            if not waiter.ready.done():
                waiter.ready.set_result(None)
        if released:
            self._changed(model)

    def set_batches(self, model: str, requests: int, weight: float) -> None:
        """Sets how many requests of batches wait for the model; 0: none any more."""
        before = self._batch_demand.pop(model, None)
        if requests:
            self._batch_demand[model] = requests, weight
        if before != self._batch_demand.get(model):
            self._changed(model)

    def demand(self, model: str) -> ModelDemand:
        """The demand that a machine must know now."""
        if waiting := self._waiting.get(model):
            left_s = min(waiter.deadline for waiter in waiting) - asyncio.get_running_loop().time()
            weight = max(waiter.weight for waiter in waiting)
            return ModelDemand(model, len(waiting), weight, max(1, int(1000 * left_s)))
        requests, weight = self._batch_demand.get(model, (0, 1.0))
        return ModelDemand(model, requests, weight, QUEUED_PATIENCE_MS if requests else 0)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(REPEAT_S)
            for model in self.models:
                self._send(self.demand(model))

    def _remove(self, model: str, waiter: _Waiter) -> None:
        """Removes a waiter that disconnected or timed out. Released waiters are already gone."""
        waiting = self._waiting.get(model, {})
        if waiter in waiting:
            del waiting[waiter]
            if not waiting:
                del self._waiting[model]
            self._changed(model)

    def _changed(self, model: str) -> None:
        loop = asyncio.get_running_loop()
        if model in self._coalescing:
            return
        left_s = self._sent_at.get(model, -math.inf) + COALESCE_S - loop.time()
        if left_s <= 0:
            self._send_now(model)
        else:
            self._coalescing.add(model)
            loop.call_later(left_s, self._send_now, model)

    def _send_now(self, model: str) -> None:
        self._coalescing.discard(model)
        self._sent_at[model] = asyncio.get_running_loop().time()
        self._send(self.demand(model))
