"""Requests that were running when a replica died. One that was there twice is refused for a while.

It keeps fingerprints, never text, and does not know why a replica died.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

CRASHES_MAX: Final = 2
CRASH_MEMORY_S: Final = 600.0
FINGERPRINTS_MAX: Final = 4096


def request_fingerprint(model: str, scope_id: bytes, tokens: bytes) -> bytes:
    """The same for a retry of the same prompt by the same account, whatever its sampling."""
    return hashlib.blake2b(tokens, digest_size=16, key=scope_id, person=model.encode()[-16:]).digest()


class CrashBreaker:
    """Counts crashes per fingerprint; each is remembered for CRASH_MEMORY_S, the latest FINGERPRINTS_MAX of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._crashes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # oldest crash first

    def record_crash(self, suspect: bytes) -> None:
        """It was running in one more crash."""
        crashes = self.crashes(suspect) + 1
        self._crashes[suspect] = (crashes, self._clock())
        self._crashes.move_to_end(suspect)
        while len(self._crashes) > FINGERPRINTS_MAX:
            self._crashes.popitem(last=False)

    def crashes(self, suspect: bytes) -> int:
        """How many of them are remembered."""
        crashes, at = self._crashes.get(suspect, (0, 0.0))
        if crashes and self._clock() - at > CRASH_MEMORY_S:
            del self._crashes[suspect]
            return 0
        return crashes

    def is_open(self, suspect: bytes) -> bool:
        return bool(self._crashes) and self.crashes(suspect) >= CRASHES_MAX
