"""One replica's process: started, watched by its heartbeat, listened to, collected, and started again after a pause
that grows with its failures. It knows files and clocks, and neither what a replica serves nor where its weights are.
"""

import contextlib
import os
import selectors
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from engine.hostinfo.gpus import VISIBLE_DEVICES_VARIABLE
from engine.log import LOG_FORMAT_VARIABLE, LOG_LEVEL_VARIABLE, as_text, is_wanted, log, relayed_line, write
from engine.process.heartbeat import Heartbeat, ReplicaPhase
from engine.process.supervised import Backoff, start_child
from engine.protocol.connection import remove_socket
from engine.protocol.reports import loading_percent, memory_report_path
from engine.protocol.specs import ReplicaSpec

_LINE_BYTES_MAX: Final = 4096
_SERVING: Final = (ReplicaPhase.IDLE, ReplicaPhase.STEP)


@dataclass(frozen=True, slots=True)
class SupervisionTimeouts:
    """How long a replica may be silent in each phase, and how its agent waits. Seconds, but for `deaths`."""

    step_s: float = 4.0  # IDLE and STEP: a beat per layer, twice a second when idle
    starting_s: float = 300.0  # imports from a cold disk
    loading_s: float = 300.0  # LOADING and COMPILING: between two beats, not in all
    stopping_s: float = 30.0
    look_s: float = 0.2  # between two looks at the heartbeats
    backoff_s: float = 0.5  # before the first restart, doubled for each further one
    backoff_s_max: float = 30.0
    stable_s: float = 60.0  # a replica that served this long starts again without back-off
    drain_s: float = 30.0  # from SIGTERM to SIGKILL
    deaths: int = 5  # so many of them within window_s, the lives of its processes left out,
    window_s: float = 180.0  # or once after that before it was stable,
    quarantine_s: float = 60.0  # and a replica is quarantined: for so long at first, doubled each further time
    quarantine_s_max: float = 1800.0
    connect_s: float = 2.0  # until a replica has taken a connection; also the longest pause between two attempts
    move_s: float = 30.0  # a move may take so long, beside what its bytes take; a first report, once it serves
    retry_s: float = 1.0  # before a move that failed is tried again, doubled for each further one up to backoff_s_max
    demand_s: float = 3.0  # a gateway's report of its demand holds for so long

    def for_phase(self, phase: ReplicaPhase) -> float:
        if phase in _SERVING:
            return self.step_s
        if phase is ReplicaPhase.STARTING:
            return self.starting_s
        return self.stopping_s if phase is ReplicaPhase.STOPPING else self.loading_s


class ReplicaProcess(Protocol):
    """A started process, as the agent needs it. Its stdout and stderr are one pipe."""

    @property
    def pid(self) -> int: ...

    @property
    def output(self) -> int:
        """The pipe's end to read from; it is open until `close`."""
        ...

    def poll(self) -> int | None:
        """None while it runs; then its status, or the negative number of the signal that ended it."""
        ...

    def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None:
        """Closes the pipe of a process that has ended, and was polled."""
        ...


class ReplicaLauncher(Protocol):
    """Whatever can make a process of a ReplicaSpec."""

    def start(self, spec: ReplicaSpec, environment: Mapping[str, str]) -> ReplicaProcess:
        """A process that dies with this one; `environment` is what it has beyond this process's own. Raises OSError
        where there is no program, no memory, no room on the disk."""
        ...

    def ready(self, now: float) -> bool:
        """Whether a replica that is started now serves as soon as one that is started a moment later. To be asked each
        turn, whether or not there is one to start."""
        ...

    def close(self) -> None:
        """To be called once all that was started has ended."""
        ...


ReplicaCommand = Callable[[ReplicaSpec], Sequence[str]]


class SubprocessLauncher:
    """Starts replicas as programs: a new interpreter for each."""

    def __init__(self, command: ReplicaCommand) -> None:
        self._command = command

    def start(self, spec: ReplicaSpec, environment: Mapping[str, str]) -> ReplicaProcess:
        return _Subprocess(start_child(self._command(spec), output=subprocess.PIPE, environment=environment))

    def ready(self, now: float) -> bool:
        return True

    def close(self) -> None:
        """Nothing: programs leave nothing behind."""


class _Subprocess:
    """A Popen as a ReplicaProcess: its pipe is a file descriptor."""

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        assert popen.stdout is not None
        self.pid = popen.pid
        self.output = popen.stdout.fileno()
        self.poll, self.wait = popen.poll, popen.wait
        self.terminate, self.kill = popen.terminate, popen.kill
        self.close = popen.stdout.close


class ReplicaSupervisor:
    """At most one process at a time, and what is known of it and of those before.

    boot      counts the starts.
    problem   why it does not serve, in words, or empty: nobody wants it to; while it serves the text means nothing.
    """

    def __init__(
        self, name: str, address: str, heartbeat: Path, timeouts: SupervisionTimeouts, launcher: ReplicaLauncher,
        selector: selectors.BaseSelector,
    ) -> None:  # fmt: skip
        """`name` begins its lines in the log, `heartbeat` is where the file of its heartbeat is to be, `selector` the
        loop's, in which its output is waited for."""
        self.name = name
        self.address = address
        self.heartbeat_path = heartbeat
        self.boot = 0
        self.problem = "not started yet"
        self.process: ReplicaProcess | None = None
        self.serving_since: float | None = None
        self.ending = False
        self.killed = False
        self._timeouts = timeouts
        self._launcher = launcher
        self._selector = selector
        self._backoff = Backoff(timeouts.backoff_s, timeouts.backoff_s_max)
        self._quarantine = Backoff(timeouts.quarantine_s, timeouts.quarantine_s_max)
        self._start_at = 0.0
        self._quarantined_until = 0.0
        self._deaths: deque[float] = deque(maxlen=timeouts.deaths)  # on a clock that stood still while it lived
        self._lived_s = 0.0  # by all processes that died
        self._started_at = 0.0
        self._heartbeat: Heartbeat | None = None
        self._last_beat = (ReplicaPhase.STARTING, 0)
        self._beat_at = 0.0
        self._kill_at: float | None = None
        self._partial_line = b""
        self._lines: deque[str] = deque(maxlen=3)

    @property
    def serving(self) -> bool:
        """Whether its process has begun to serve, and has not begun to stop."""
        stopping = self._last_beat[0] is ReplicaPhase.STOPPING
        return self.process is not None and self.serving_since is not None and not stopping

    @property
    def starting(self) -> bool:
        """Whether it may begin to serve at any moment, which nothing but its heartbeat says."""
        return self.process is not None and self.serving_since is None

    @property
    def memory_path(self) -> Path:
        """The file in which its process reports where its memory went."""
        return memory_report_path(self.heartbeat_path)

    def startable(self, now: float) -> bool:
        return self.process is None and now >= self.startable_at

    @property
    def startable_at(self) -> float:
        """When the next process may be started."""
        return max(self._start_at, self._quarantined_until)

    def pardon(self, now: float) -> None:
        """Lets the next process start now: what the ones before died of is mended."""
        self._start_at = self._quarantined_until = now
        self._backoff.reset()
        self._quarantine.reset()
        self._deaths.clear()

    def quarantined(self, now: float) -> bool:
        return now < self._quarantined_until

    def pause_s(self, now: float) -> float:
        """The time until it may be started."""
        return 0.0 if self.process is not None else max(0.0, self.startable_at - now)

    def start(self, spec: ReplicaSpec, environment: Mapping[str, str], now: float) -> bool:
        """Starts a process. False where there is none after all: then it is tried again like one that ended."""
        assert self.process is None
        assert spec.boot == self.boot + 1
        self.boot = spec.boot
        self._started_at = now
        self._remove_files()
        if self._heartbeat is not None:
            self._heartbeat.close()
        self.serving_since = self._kill_at = None
        self.ending = self.killed = False
        self._partial_line = b""
        self._lines.clear()
        self.problem = "loading"
        try:
            self._heartbeat = Heartbeat.create(self.heartbeat_path)
            self._last_beat, self._beat_at = self._heartbeat.read(), now
            # Its lines are read here, and turned into text or left out as they are passed on, where that is wanted.
            lines = {LOG_FORMAT_VARIABLE: "json", LOG_LEVEL_VARIABLE: "info"}
            self.process = self._launcher.start(spec, {**environment, **lines})
        except OSError as error:
            pause_s = self._pause(now)
            self.problem = f"cannot be started, tried again after {pause_s:g} s: {error}"
            log("replica_not_started", level="warning", model=self.name, error=str(error), again_after_s=pause_s)
            return False
        os.set_blocking(self.process.output, False)
        self._selector.register(self.process.output, selectors.EVENT_READ, self._read_output)
        gpu = {"gpu": environment[VISIBLE_DEVICES_VARIABLE]} if VISIBLE_DEVICES_VARIABLE in environment else {}
        log("replica_started", model=self.name, pid=self.process.pid, boot=self.boot, **gpu)
        return True

    def poll(self, now: float) -> None:
        """Reads the heartbeat, and kills a process that is silent for longer than its phase allows, or does not end."""
        if self.process is None or self._heartbeat is None:
            return
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            log("replica_not_ended", level="warning", model=self.name, pid=self.process.pid)
            self.process.kill()
        beat = self._heartbeat.read()
        if beat != self._last_beat:
            self._last_beat, self._beat_at = beat, now
            if beat[0] in _SERVING and self.serving_since is None:
                self.serving_since = now
                log("replica_ready", model=self.name, pid=self.process.pid, boot=self.boot)
            return
        silent_s = now - self._beat_at
        if silent_s > self._timeouts.for_phase(beat[0]):
            log(
                "replica_hung",
                level="error",
                model=self.name,
                pid=self.process.pid,
                phase=beat[0].name,
                silent_s=silent_s,
            )
            self._beat_at = now
            self.kill(f"silent for {silent_s:.1f} s in phase {beat[0].name}, so it was killed")

    def forgive(self, lost_s: float, now: float) -> None:
        """Moves deadlines by a time in which this machine itself did not run: nobody is judged by that time."""
        self._beat_at = now
        if self._kill_at is not None:
            self._kill_at += lost_s

    def kill(self, reason: str) -> None:
        """Kills the process; `reason` is what its problem will say."""
        assert self.process is not None
        self._lines.append(reason)
        self.killed = True
        self.process.kill()

    def end(self, now: float) -> None:
        """Asks the process to end, which is no failure, and kills it after drain_s."""
        assert self.process is not None
        self.ending, self._kill_at = True, now + self._timeouts.drain_s
        self.process.terminate()

    def reap(self, now: float) -> bool:
        """Whether the process has ended; then it is collected, and `startable` says when the next one may start."""
        if self.process is None or (status := self.process.poll()) is None:
            return False
        self._read_output()
        self._stop_reading()
        self.process.close()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        if self.ending:
            self._start_at, self.problem = now, ""
            log("replica_ended", model=self.name, pid=self.process.pid, how=how, asked=True)
        else:
            self._on_death(how, now)
        self._remove_files()
        self.process = None
        return True

    def _on_death(self, how: str, now: float) -> None:
        assert self.process is not None
        pause_s = self._pause(now)
        line = self._lines[-1] if self._lines else "it said nothing"
        if self.quarantined(now):
            self.problem = f"died {len(self._deaths)} times in a short while, left alone for {pause_s:g} s: {line}"
        else:
            self.problem = f"ended with {how}, starts again after {pause_s:g} s: {line}"
        log("replica_ended", level="warning", model=self.name, pid=self.process.pid, how=how, again_after_s=pause_s)

    def _pause(self, now: float) -> float:
        """Sets when the next process may start; the seconds until then."""
        if self.serving_since is not None and now - self.serving_since >= self._timeouts.stable_s:
            self.pardon(now)
        self._lived_s += now - self._started_at
        self._deaths.append(now - self._lived_s)
        pause_s = self._backoff.fail()
        passed_s = self._deaths[-1] - self._deaths[0]
        often = len(self._deaths) == self._timeouts.deaths and passed_s <= self._timeouts.window_s
        if often or self._quarantine.failures:
            pause_s = self._quarantine.fail()
            self._quarantined_until = now + pause_s
            log("replica_quarantined", level="error", model=self.name, deaths=len(self._deaths), for_s=pause_s)
        self._start_at = now + pause_s
        return pause_s

    def _read_output(self) -> None:
        """Passes on what the process wrote, each line behind the model's name."""
        assert self.process is not None
        try:
            while written := os.read(self.process.output, 1 << 16):
                *lines, self._partial_line = (self._partial_line + written).split(b"\n")
                for line in lines:
                    self._pass_on(line)
                if len(self._partial_line) > _LINE_BYTES_MAX:
                    self._pass_on(self._partial_line)
                    self._partial_line = b""
        except BlockingIOError:
            return
        self._pass_on(self._partial_line)
        self._partial_line = b""
        self._stop_reading()

    def _stop_reading(self) -> None:
        assert self.process is not None
        with contextlib.suppress(KeyError):
            self._selector.unregister(self.process.output)

    def _pass_on(self, written: bytes) -> None:
        line = written[:_LINE_BYTES_MAX].decode("utf-8", "replace").rstrip()
        if line:
            percent = loading_percent(line)
            if percent is not None:
                self.problem = f"loading {percent} %"
            self._lines.append(line)
            if is_wanted(line):
                write(relayed_line(line, self.name, as_text()))

    def close(self) -> None:
        """Leaves no file behind."""
        assert self.process is None
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        self._remove_files()

    def _remove_files(self) -> None:
        """Removes what an earlier process left, or this one."""
        remove_socket(self.address)
        self.memory_path.unlink(missing_ok=True)
