"""Waiting in tests: for a condition, for turns of an event loop, and for time that nobody has to wait out.

A condition is polled for longer than any loaded machine needs, so only a failure waits that long. It knows no product.
"""

import asyncio
import contextlib
import functools
import inspect
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

WITHIN_S: Final = 60.0
POLL_S: Final = 0.005
DAY_S, DAY_LEFT_S = 86_400, 30


def wait_for(condition: Callable[[], Any], within_s: float = WITHIN_S, what: str = "") -> Any:
    """The first true value of `condition`; a file that is not there yet is no value."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if value := condition():
                return value
        time.sleep(POLL_S)
    raise AssertionError(f"not within {within_s} s: {what}")


async def until(condition: Callable[[], Any], within_s: float = WITHIN_S, what: str = "") -> Any:
    """The first true value of `condition`, which may be a coroutine function."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while loop.time() < deadline:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(POLL_S)
    raise AssertionError(f"not within {within_s} s: {what}")


async def holds(condition: Callable[[], Any], for_s: float) -> None:
    """Asserts that `condition` is true and stays so: for what must not happen, which no event can tell of."""
    loop = asyncio.get_running_loop()
    end = loop.time() + for_s
    while loop.time() < end:
        value = condition()
        assert await value if inspect.isawaitable(value) else value
        await asyncio.sleep(POLL_S)


async def turns(count: int = 1) -> None:
    """So many turns of the event loop: what is ready runs, and no time passes."""
    for _ in range(count):
        await asyncio.sleep(0)


async def forever() -> None:
    """Ends when it is cancelled."""
    await asyncio.get_running_loop().create_future()


class StoppedClock:
    """Seconds that pass as a test says."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def wait_for_a_day() -> None:
    """Waits for midnight where less than DAY_LEFT_S are left before it, for a test in which it must not pass."""
    left_s = DAY_S - time.time() % DAY_S
    if left_s < DAY_LEFT_S:
        threading.Event().wait(left_s)


class OffsetClock:
    """The calendar, moved on by as much as a test adds to `offset_s`."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset_s


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits for a timer: it moves the loop's time on to it."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(None if timeout is None else 0)
        if not events and timeout is not None:
            self.now_s += timeout
        return events


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer whenever nothing is ready, so that back-offs, deadlines and
    pauses take no time and end in the order in which they are due, however busy the machine is.

    Sockets must have both their ends in this loop. Time does not wait for threads or other processes.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def in_fake_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on a FakeTimeLoop."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=FakeTimeLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
