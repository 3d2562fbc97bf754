"""A child process that is started, watched and started again, and its lines on the standard output of its parent and in
files. It does not know what the child is for.

Whoever reads standard output may stop: lines that find no room are lost and counted, and no child ever waits for it.
"""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TextIO

from engine.log import relayed_line, render
from engine.process.rotated_file import RotatedFile
from engine.process.supervised import Backoff, start_child
from gateway.observability.log_files import log_file
from gateway.observability.logging import LOG_RELAYED_VARIABLE
from gateway.settings.config import Config
from gateway.settings.telemetry import LogConfig

RELAYED: Final = {LOG_RELAYED_VARIABLE: "1"}  # for the environment of a child that knows [log] file itself
_WAITING_MAX: Final = 10_000  # lines
_LINE_BYTES_MAX: Final = 64 << 10  # a longer one is cut in pieces
_TAIL: Final = 30  # lines that are kept for whoever asks why a process ended
_END: Final = None
_BACKOFF_S: Final = (0.5, 30.0)
_STABLE_S: Final = 60.0  # a child that lived this long starts again without a back-off


class LineOutput:
    """One stream for the lines of many threads. `text` is for people, else every line is one of JSON."""

    def __init__(self, to: TextIO, text: bool) -> None:
        self.text = text
        self._to = to
        self._lost = 0
        self._waiting: queue.Queue[str | None] = queue.Queue(_WAITING_MAX)
        self._writer = threading.Thread(target=self._write, name="stdout", daemon=True)
        self._writer.start()

    def tell(self, event: str) -> None:
        """Writes what this process has to say itself."""
        fields = {"time": round(time.time(), 3), "level": "info", "event": event, "process": "serve"}
        self.put(event if self.text else render(fields, False))

    def put(self, line: str) -> None:
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self, patience_s: float = 2.0) -> None:
        """Returns once all was written, or nobody reads it."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(_END)
        self._writer.join(patience_s)

    def _write(self) -> None:
        while (line := self._waiting.get()) is not _END:
            lost, self._lost = self._lost, 0
            with contextlib.suppress(OSError, ValueError):  # a closed terminal is no reason to stop serving
                if lost:
                    self._to.write(relayed_line(f"{lost} lines were lost: nobody read them", "serve", self.text) + "\n")
                self._to.write(f"{line}\n")
                self._to.flush()


def line_output(log: LogConfig, to: TextIO) -> LineOutput:
    """For people where [log] says so, or it says nothing and a person reads."""
    return LineOutput(to, log.format == "text" or (log.format == "auto" and to.isatty()))


class ChildLines:
    """The lines of one child: into its file as it wrote them, and onto the output in its form."""

    def __init__(self, name: str, file: RotatedFile, output: LineOutput) -> None:
        self._name = name
        self._file = file
        self._output = output
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._reader: threading.Thread | None = None

    def open(self) -> int:
        """A descriptor for a child to write to; close it here once the child has it. What it writes is read until all
        that have it have ended."""
        reading, writing = os.pipe()
        self._tail.clear()
        self._reader = threading.Thread(target=self._read, args=(reading,), name=f"{self._name} lines", daemon=True)
        self._reader.start()
        return writing

    def last(self, patience_s: float = 1.0) -> str:
        """The last lines of a child that has ended."""
        if self._reader is not None:
            self._reader.join(patience_s)
        return "\n".join(self._tail)

    def _read(self, descriptor: int) -> None:
        partial, piece = b"", bytearray(_LINE_BYTES_MAX)  # one piece for all: else each leaves a hole in the heap
        with open(descriptor, "rb", buffering=0) as pipe:
            while count := pipe.readinto(piece):
                *lines, partial = (partial + piece[:count]).split(b"\n")
                if len(partial) > _LINE_BYTES_MAX:
                    lines, partial = [*lines, partial], b""
                for line in lines:
                    self._take(line)
        self._take(partial)

    def _take(self, line: bytes) -> None:
        if line := line.rstrip():
            text = line.decode("utf-8", "replace")
            self._file.write(line)
            self._tail.append(text)
            self._output.put(relayed_line(text, self._name, self._output.text))


def child_lines(config: Config, name: str, output: LineOutput) -> ChildLines:
    """The lines of one of LOG_NAMES, into its file."""
    return ChildLines(name, log_file(config, name), output)


@dataclass
class ChildProcess:
    """One process: started, watched, started again with a back-off."""

    name: str
    command: list[str]
    lines: ChildLines
    death: signal.Signals
    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    start_at: float = 0.0
    _started_at: float = 0.0
    _backoff: Backoff = field(default_factory=lambda: Backoff(*_BACKOFF_S))

    def start(self, now: float) -> None:
        """Starts it in its own process group: a terminal's Ctrl-C reaches this process alone, which then drains."""
        self._started_at = now
        output = self.lines.open()
        try:
            self.process = start_child(
                self.command, output=output, environment=self.environment, own_group=True, death=self.death
            )
        finally:
            os.close(output)

    def poll(self, now: float) -> int | None:
        """The status of a process that ended since the last look; `start_at` says when to start the next."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        if now - self._started_at >= _STABLE_S:
            self._backoff.reset()
        self.start_at = now + self._backoff.fail()
        self.process = None
        return status

    def end(self, drain_s: float, hurried: Callable[[], bool]) -> None:
        """Lets it drain and waits until it ended; kills it after `drain_s`, or as soon as `hurried`."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + drain_s
        while self.process.poll() is None:
            if time.monotonic() >= deadline or hurried():
                self.process.kill()
            time.sleep(0.02)
        self.process = None
