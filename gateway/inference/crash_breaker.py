"""Requests that were running when a replica died. A request that was in two crashes is refused for a while.

It stores fingerprints, never text, and does not know why a replica died.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

CRASHES_MAX: Final = 2
CRASH_MEMORY_S: Final = 600.0
FINGERPRINTS_MAX: Final = 4096


def request_fingerprint(model: str, scope_id: bytes, tokens: bytes) -> bytes:
    """A fingerprint that is the same for the same prompt of the same account, whatever its sampling."""
    return hashlib.blake2b(tokens, digest_size=16, key=scope_id, person=model.encode()[-16:]).digest()


class CrashBreaker:
    """Counts crashes per fingerprint; each is remembered for CRASH_MEMORY_S, the latest FINGERPRINTS_MAX of them. One
    replica's death is one crash, however many calls of a prompt ran there."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._crashes: OrderedDict[bytes, tuple[list[object], float]] = OrderedDict()  # oldest crash first

    def watch(self, fingerprint: bytes, crashed: asyncio.Future[bool]) -> None:
        """Counts the loss of a replica at which the request was running, once it is known for the replica's own."""
        crashed.add_done_callback(
            lambda told: None if told.cancelled() or not told.result() else self.record_crash(fingerprint, crashed)
        )

    def record_crash(self, fingerprint: bytes, crash: object) -> None:
        """Counts a crash in which the request was running, once."""
        crashes = self._crashes[fingerprint][0] if self.crashes(fingerprint) else []
        if crash in crashes:
            return
        self._crashes[fingerprint] = ([*crashes, crash][-CRASHES_MAX:], self._clock())
        self._crashes.move_to_end(fingerprint)
        while len(self._crashes) > FINGERPRINTS_MAX:
            self._crashes.popitem(last=False)

    def crashes(self, fingerprint: bytes) -> int:
        """How many crashes of the request are remembered."""
        crashes, at = self._crashes.get(fingerprint, ([], 0.0))
        if crashes and self._clock() - at > CRASH_MEMORY_S:
            del self._crashes[fingerprint]
            return 0
        return len(crashes)

    def is_open(self, fingerprint: bytes) -> bool:
        """Whether the request is refused now."""
        return bool(self._crashes) and self.crashes(fingerprint) >= CRASHES_MAX
