"""Processes that end with the one that started them, however that ends. It knows nothing of what they do."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent: int, death: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A function to call in a child, also between fork and exec: on Linux the kernel sends it `death` when its parent
    ends, even in the middle of a step."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def die() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, death)
        if os.getppid() != parent:  # the parent ended before the kernel was asked
            os._exit(1)

    return die
