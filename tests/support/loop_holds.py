"""How long the loop's turns hold it, in the processor's time of its thread: a busy machine changes nothing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

TURN_S: Final = 0.001


@dataclass
class LoopHolds:
    """The longest time for which one turn of the loop had the processor."""

    longest_ms: float = 0.0


@contextlib.asynccontextmanager
async def loop_holds() -> AsyncIterator[LoopHolds]:
    """Measures while its block runs."""
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
        turn()
        timer.cancel()
