"""Child processes that are watched and started again, and end with the one that started them: how one is started, and
how long to wait before the next. It does not know what they do, and imports the standard library alone, so that the
gateway may use it too."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final

_MAX_DOUBLINGS: Final = 16
_PR_SET_PDEATHSIG: Final = 1


class Backoff:
    """A pause that doubles with each failure in a row, from `first_s` up to `max_s`.

    failures  in a row, so far.
    """

    def __init__(self, first_s: float, max_s: float) -> None:
        self.failures = 0
        self._first_s = first_s
        self._max_s = max_s

    def fail(self) -> float:
        """Counts a failure. The seconds to wait before the next attempt."""
        pause_s = self._first_s * 2.0 ** min(self.failures, _MAX_DOUBLINGS)
        self.failures += 1
        return min(pause_s, self._max_s)

    def reset(self) -> None:
        """An attempt succeeded: the next failure is a first one."""
        self.failures = 0


def start_child(
    command: Sequence[str],
    *,
    output: int | IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    own_group: bool = False,
    death: signal.Signals = signal.SIGKILL,
) -> "subprocess.Popen[bytes]":
    """Starts a program that reads nothing and gets `death` when this process ends, however that ends. Raises OSError.

    output       where its stdout and stderr go; None: where this process's go.
    environment  what it has beside this process's own.
    descriptors  it inherits them.
    own_group    a terminal's Ctrl-C does not reach it.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        pass_fds=descriptors,
        process_group=0 if own_group else None,
        preexec_fn=die_with_parent(os.getpid(), death),
    )


def die_with_parent(parent: int, death: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A function to call in a child, also between fork and exec: Linux sends it `death` whenever its parent ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def die() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, death)
        if os.getppid() != parent:  # the parent ended before the kernel was asked
            os._exit(1)

    return die
