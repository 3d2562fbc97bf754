"""A file of lines that many processes append to, moved aside when it is long. It does not know what the lines say.

Each line is one write at the file's end, so that lines of several processes stay whole. Whoever finds the file too long
moves it, under a lock; the others, and those whose file logrotate moved, see that its name leads elsewhere and open it
anew: nobody needs a signal.
"""

import contextlib
import fcntl
import os
from pathlib import Path


class RotatedFile:
    """PATH, and beside it PATH.1 (the newest) to PATH.`kept`. A full disk loses lines and ends nobody."""

    def __init__(self, path: Path, max_bytes: int, kept: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._descriptor: int | None = None

    def write(self, line: bytes) -> None:
        """Appends one line, which has no line break."""
        with contextlib.suppress(OSError):
            descriptor = self._opened()
            os.write(descriptor, line + b"\n")
            if os.fstat(descriptor).st_size > self._max_bytes:
                self._rotate()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int:
        if self._descriptor is not None and not self._is_current():
            self.close()
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return self._descriptor

    def _is_current(self) -> bool:
        """Whether the path still leads to the file that is open."""
        assert self._descriptor is not None
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        """Moves the files one place on, unless another process just did."""
        with open(f"{self.path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._is_current():
                for place in range(self._kept, 0, -1):
                    source = self.path if place == 1 else self._aside(place - 1)
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(source, self._aside(place))
                if not self._kept:
                    os.unlink(self.path)
        self.close()

    def _aside(self, place: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{place}")


def log_files(path: Path, kept: int) -> list[Path]:
    """The file and those beside it that exist, the oldest first."""
    places = [path.with_name(f"{path.name}.{place}") for place in range(kept, 0, -1)]
    return [each for each in (*places, path) if each.exists()]
