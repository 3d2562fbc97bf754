"""Requests that wait for a model: the order in which they go on, and the demand that machines are told.

It knows neither machines nor replicas.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.protocol.frames import ModelDemand

REPEAT_S: Final = 1.0  # demand is sent again after so long
COALESCE_S: Final = 0.005  # changes within it are sent together
SENT_MAX: Final = 4096  # wanted models of which it is known when they were sent last
QUEUED_PATIENCE_MS: Final = 3_600_000  # of batches, which wait a day


class AwaitedModel(NamedTuple):
    """A model that is waited for, and the regions where alone it may then serve; empty: anywhere."""

    model: str
    regions: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class _Waiter:
    weight: float
    deadline: float
    ready: asyncio.Future[None]


class WakeQueue:
    """The waiting requests of one gateway, by what they want. `send` gets that at each change of its demand, the first
    at once, later ones coalesced for some milliseconds, and each second while `run` does. So the cost does not grow
    with how many wait.

    Batches whose model sleeps are demand too, but only while no request waits for it.
    """

    def __init__(self, send: Callable[[AwaitedModel], None]) -> None:
        self._send = send
        self._waiting: dict[AwaitedModel, dict[_Waiter, None]] = {}  # in the order of arrival
        self._batch_demand: dict[AwaitedModel, tuple[int, float]] = {}
        self._sent_at: dict[AwaitedModel, float] = {}
        self._coalescing: set[AwaitedModel] = set()

    @property
    def wanted(self) -> list[AwaitedModel]:
        """What requests or batches wait for."""
        return [*self._waiting, *(wanted for wanted in self._batch_demand if wanted not in self._waiting)]

    def count(self, model: str) -> int:
        """How many requests wait for the model, batches left out."""
        return sum(len(waiting) for wanted, waiting in self._waiting.items() if wanted.model == model)

    async def wait(self, wanted: AwaitedModel, weight: float, deadline: float) -> None:
        """Until `release`. Raises TimeoutError once the loop's clock shows `deadline`."""
        waiter = _Waiter(weight, deadline, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(wanted, {})[waiter] = None
        self._changed(wanted)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter.ready
        finally:
            self._remove(wanted, waiter)

    def release(self, wanted: AwaitedModel) -> None:
        """Lets all waiting requests go on, the heavier first, equals in order of arrival. Batches count no longer."""
        self.set_batches(wanted, 0, 0.0)
        released = sorted(self._waiting.pop(wanted, ()), key=lambda waiter: -waiter.weight)
        for waiter in released:
            if not waiter.ready.done():
                waiter.ready.set_result(None)
        if released:
            self._changed(wanted)

    def set_batches(self, wanted: AwaitedModel, requests: int, weight: float) -> None:
        """Sets how many requests of batches wait for the model; 0: none any more."""
        before = self._batch_demand.pop(wanted, None)
        if requests:
            self._batch_demand[wanted] = requests, weight
        if before != self._batch_demand.get(wanted):
            self._changed(wanted)

    def demand(self, wanted: AwaitedModel) -> ModelDemand:
        """The demand of now."""
        model = wanted.model
        if waiting := self._waiting.get(wanted):
            left_s = min(waiter.deadline for waiter in waiting) - asyncio.get_running_loop().time()
            weight = max(waiter.weight for waiter in waiting)
            return ModelDemand(model, len(waiting), weight, max(1, int(1000 * left_s)))
        requests, weight = self._batch_demand.get(wanted, (0, 1.0))
        return ModelDemand(model, requests, weight, QUEUED_PATIENCE_MS if requests else 0)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(REPEAT_S)
            for wanted in self.wanted:
                self._send(wanted)

    def _remove(self, wanted: AwaitedModel, waiter: _Waiter) -> None:
        """Removes a waiter that disconnected or timed out. Released waiters are already gone."""
        waiting = self._waiting.get(wanted, {})
        if waiter in waiting:
            del waiting[waiter]
            if not waiting:
                del self._waiting[wanted]
            self._changed(wanted)

    def _changed(self, wanted: AwaitedModel) -> None:
        loop = asyncio.get_running_loop()
        if wanted in self._coalescing:
            return
        left_s = self._sent_at.get(wanted, -math.inf) + COALESCE_S - loop.time()
        if left_s <= 0:
            self._send_now(wanted)
        else:
            self._coalescing.add(wanted)
            loop.call_later(left_s, self._send_now, wanted)

    def _send_now(self, wanted: AwaitedModel) -> None:
        self._coalescing.discard(wanted)
        if len(self._sent_at) >= SENT_MAX:
            self._sent_at.clear()
        self._sent_at[wanted] = asyncio.get_running_loop().time()
        self._send(wanted)
