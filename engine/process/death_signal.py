"""Processes that end with the one that started them, however that ends. It knows nothing of what they do."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent: int) -> Callable[[], None]:
    """To be called in a child, also between fork and exec: on Linux the kernel kills it when its parent ends, even in
    the middle of a step."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def die() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)

    return die
