"""How long the loop's turns hold it, in the processor's time of its thread.

What else a machine does only adds to it: cold caches, new pages of memory, a core that is shared with another machine.
The least of some attempts is what the code itself takes.
"""

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

TURN_S: Final = 0.001
ATTEMPTS: Final = 6  # a bad moment of a busy machine outlasts three


@dataclass
class LoopHolds:
    """The longest time for which one turn of the loop had the processor."""

    longest_ms: float = 0.0


@contextlib.asynccontextmanager
async def loop_holds() -> AsyncIterator[LoopHolds]:
    """Measures while its block runs. As in a server, collections do not go through what was there before: in a process
    of tests that is a lot."""
    gc.freeze()
    holds, loop, before_s = LoopHolds(), asyncio.get_running_loop(), time.thread_time()

    def turn() -> None:
        nonlocal before_s, timer
        now_s = time.thread_time()
        holds.longest_ms, before_s = max(holds.longest_ms, 1000 * (now_s - before_s)), now_s
        timer = loop.call_later(TURN_S, turn)

    timer = loop.call_later(TURN_S, turn)
    try:
        yield holds
    finally:
        timer.cancel()  # else it goes on beside the one that the last turn begins, while a gateway closes
        turn()
        timer.cancel()


async def least_hold_ms(limit_ms: float, attempt: Callable[[int], Awaitable[LoopHolds]]) -> float:
    """The least of the longest turns of up to ATTEMPTS attempts; the first below the limit is the last."""
    least_ms = math.inf
    for number in range(ATTEMPTS):
        least_ms = min(least_ms, (await attempt(number)).longest_ms)
        if least_ms < limit_ms:
            break
    return least_ms
