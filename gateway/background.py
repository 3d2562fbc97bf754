"""The jobs that a gateway does beside its requests, each for as long as it lives. One that fails is logged, counted and
begun again after a pause; where it cannot be, the gateway is to end. But for the heap's it does not know what they do.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from typing import Any, Final

from engine.process import allocator
from engine.process.supervised import Backoff

_TRIM_S: Final = 60.0
_BACKOFF_S: Final = (0.5, 15.0)
_STABLE_S: Final = 60.0  # a job that went on for so long is begun again without a long pause

BackgroundJob = Callable[[], Coroutine[Any, Any, None]]
"""Goes on until it is cancelled; one that has nothing to do may end."""

log = logging.getLogger(__name__)


async def keep_heap_trimmed() -> None:
    """Returns the heap's free memory to the system, for ever: requests of many sizes leave holes between what is kept
    of accounts for minutes. Some 3 ms for 100 MB, in which the loop stands still."""
    while True:
        await asyncio.sleep(_TRIM_S)
        allocator.trim_heap()


class BackgroundJobs:
    """`jobs` by their names, `count` hears the name of each that fails.

    failed  the first of the `essential` jobs that did: these are not begun again, and nothing can be served without
            them; empty as long as all go on.
    """

    def __init__(
        self, jobs: Mapping[str, BackgroundJob], essential: Collection[str], count: Callable[[str], None]
    ) -> None:
        assert set(essential) <= jobs.keys()
        self.failed = ""
        self._jobs = jobs
        self._essential = essential
        self._count = count
        self._ending = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All jobs go on within it."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._keep(name, job)) for name, job in self._jobs.items()]
            yield
            self._ending = True
            for task in tasks:
                task.cancel()

    async def _keep(self, name: str, job: BackgroundJob) -> None:
        backoff = Backoff(*_BACKOFF_S)
        while True:
            began_s = time.monotonic()
            try:
                await job()
                return
            except Exception as error:
                ends = self._ending or name in self._essential
                if time.monotonic() - began_s >= _STABLE_S:
                    backoff.reset()
                pause_s = None if ends else backoff.fail()
                log.error("job_failed", exc_info=error, extra={"fields": {"job": name, "again_after_s": pause_s}})
                self._count(name)
            if pause_s is None:
                self.failed = self.failed or ("" if self._ending else name)
                return
            await asyncio.sleep(pause_s)
