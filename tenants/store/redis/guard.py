"""Stops this process's grants where a primary is cut off from all its replicas, sooner than the server itself does.

A server counts lag in whole seconds and looks once a second, so with `min-replicas-max-lag 1` it may write on for three
seconds; this looks twice a second. It asks nothing of a server that is not set to stop.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from redis.exceptions import RedisError

from tenants.store.protocol import StoreUnavailable
from tenants.store.redis.errors import unavailable
from tenants.store.redis.pipeline import CommandPipeline

PROBE_S: Final = 0.5  # between two writes that a replica must acknowledge
FOLLOWED_S: Final = 1.5  # so old may the last one be that a replica has
PROBE: Final = ("SET", "hearth:probe", "")


class FollowGuard:
    """`pipeline` answers once one replica has what it was asked to write; `guarded`: whether the server is set to stop
    without replicas."""

    def __init__(
        self,
        pipeline: CommandPipeline,
        guarded: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipeline = pipeline
        self._guarded = guarded
        self._clock = clock
        self._followed_s = float("-inf")  # when a write began that a replica has
        self._probing: asyncio.Task[None] | None = None  # goes on when the caller leaves that began it

    async def require_followed(self) -> None:
        """Raises StoreUnavailable where no replica had any write of the last FOLLOWED_S. It waits only then."""
        if not self._guarded():
            return
        if self._clock() - self._followed_s > PROBE_S and (self._probing is None or self._probing.done()):
            self._probing = asyncio.get_running_loop().create_task(self._probe())
        if self._clock() - self._followed_s > FOLLOWED_S:
            assert self._probing is not None
            await asyncio.shield(self._probing)
            if self._clock() - self._followed_s > FOLLOWED_S:
                raise unavailable(RedisError(f"NOREPLICAS none has acknowledged anything for {FOLLOWED_S:g} s"))

    async def _probe(self) -> None:
        began_s = self._clock()
        with suppress(StoreUnavailable):
            (answer,) = await self._pipeline.ask(PROBE)
            if not isinstance(answer, RedisError):
                self._followed_s = began_s
