"""Overwrites leftovers in libraries' caches after requests under zero retention. It does not know which requests.

The requests' own memory has been freed by then; [server] scrub_memory says whether that is overwritten too.
"""

import asyncio
import fcntl
import gc
import os
import random
import sys
import time
from typing import Final

import msgspec

SCRUB_INTERVAL_S: Final = 1.0
_COLLECTING_PART: Final = 100
_KEYS: Final = 16_384
_READ_BYTES: Final = 256_000  # what uvloop reads at once, from all sockets into one place
_PIPE_BYTES: Final = 1 << 18


class InternedScrubber:
    """Overwrites leftovers within two rounds of `run` after `mark_dirty`. Reference cycles may stay longer where a
    collection takes long: collections get a hundredth of the time."""

    def __init__(self) -> None:
        self._dirty = self._uncollected = False
        self._collect_at = 0.0

    def mark_dirty(self) -> None:
        self._dirty = True

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SCRUB_INTERVAL_S)
            if self._dirty:
                self._dirty, self._uncollected = False, True
                overwrite_interned_keys()
                await overwrite_read_buffer()
            if self._uncollected and time.monotonic() >= self._collect_at:
                self._collect()

    def _collect(self) -> None:
        began = time.monotonic()
        gc.collect()
        self._uncollected, ended = False, time.monotonic()
        self._collect_at = ended + _COLLECTING_PART * (ended - began)


def overwrite_interned_keys() -> None:
    """msgspec keeps the last short key of an object for each of 512 hashes of keys; so many others meet all of them."""
    keys = [f'"{random.getrandbits(64):x}":0' for _ in range(_KEYS)]
    msgspec.json.decode("{" + ",".join(keys) + "}")


async def overwrite_read_buffer() -> None:
    """Lets the event loop read as many zeros as it can at once. uvloop takes them where it took what sockets sent."""
    if sys.platform != "linux":
        return
    reading, writing = os.pipe()
    loop = asyncio.get_running_loop()
    try:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.write(writing, bytes(_READ_BYTES))
    finally:
        os.close(writing)
    reader = asyncio.StreamReader(limit=_PIPE_BYTES)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb"))
    try:
        await reader.read()
    finally:
        transport.close()
