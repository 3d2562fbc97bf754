"""A program that serves beside another process of its host, such as a porter: it is started, watched and started
again. What it does is not known here."""

import subprocess
from collections.abc import Sequence
from typing import Final

from engine.log import log
from engine.process.supervised import Backoff, start_child

_BACKOFF_S: Final = (0.2, 10.0)
_STABLE_S: Final = 60.0  # one that lived this long starts again without a long pause


class CompanionProcess:
    """At most one process of this command; none without a command. `name` is what logs call it."""

    def __init__(self, name: str, command: Sequence[str] | None) -> None:
        self._name = name
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._start_at = 0.0
        self._backoff = Backoff(*_BACKOFF_S)

    def poll(self, now: float) -> None:
        """Starts the program where it does not run."""
        if self._command is None:
            return
        if self._process is not None and (status := self._process.poll()) is not None:
            self._process = None
            if now - self._started_at >= _STABLE_S:
                self._backoff.reset()
            self._start_at = now + self._backoff.fail()
            log(f"{self._name}_lost", level="error", status=status)
        if self._process is None and now >= self._start_at:
            self._started_at = now
            try:
                self._process = start_child(self._command)
            except OSError as error:
                self._start_at = now + self._backoff.fail()
                log(f"{self._name}_cannot_start", level="error", error=str(error))

    def close(self) -> None:
        """Leaves no process behind."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
