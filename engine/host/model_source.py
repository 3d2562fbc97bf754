"""The models that an agent is to serve, as they are asked for now: it looks at files, and has a command print them once
one changed. It knows neither the files' contents nor what becomes of the models.
"""

import subprocess
import tempfile
from typing import IO, Final

import msgspec

from engine.log import log
from engine.process.files import fingerprint
from engine.process.supervised import start_child
from engine.protocol.specs import MachineSpec, ModelSpec, SpecSource

_LOOK_S: Final = 0.15
_SETTLE_S: Final = 0.05  # a file that was still being written at the last look is looked at again first
_COMMAND_S: Final = 60.0
_RETRY_S: Final = 30.0  # a command that failed may have had another reason than the files
_PROBLEM_BYTES: Final = 4096


class ModelSource:
    """Follows one source. `problem` says why what is asked for now is not known, in words; empty where it is."""

    def __init__(self, source: SpecSource | None) -> None:
        self.problem = ""
        self._source = source
        self._seen = ""
        self._look_at = 0.0
        self._retry_at = 0.0
        self._kill_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def poll(self, now: float) -> list[ModelSpec] | None:
        """The models, where they were asked for anew and are known by now."""
        if self._source is None:
            return None
        if self._process is not None:
            return self._collect(self._source, now)
        if now >= self._look_at:
            before, self._seen = self._seen, fingerprint(self._source.paths)
            self._look_at = now + (_LOOK_S if self._seen == before else _SETTLE_S)
            changed = self._seen != self._source.seen and self._seen == before
            if changed or (self.problem and now >= self._retry_at):
                self._start(self._source, now)
        return None

    def close(self) -> None:
        """Leaves no process behind."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self, source: SpecSource, now: float) -> None:
        self._source = msgspec.structs.replace(source, seen=self._seen)
        self._kill_at = now + _COMMAND_S
        try:
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 (it is open as long as the process runs)
            self._process = start_child(source.command, output=self._output)
        except OSError as error:
            self._fail(f"{source.command[0]} cannot be started: {error}", now)

    def _collect(self, source: SpecSource, now: float) -> list[ModelSpec] | None:
        assert self._process is not None
        assert self._output is not None
        if self._process.poll() is None:
            if now >= self._kill_at:
                self._process.kill()
            return None
        self._process = None  # its status tells nothing: whoever collects orphans may have had it
        self._output.seek(0)
        line = (self._output.read().strip().splitlines() or [b"what is asked for was not said"])[-1]
        self._output.close()
        try:
            spec = msgspec.json.decode(line, type=MachineSpec)
        except msgspec.MsgspecError:
            self._fail(line[:_PROBLEM_BYTES].decode("utf-8", "replace"), now)
            return None
        self.problem = ""
        if spec.source is not None:
            self._source = msgspec.structs.replace(spec.source, seen=spec.source.seen or source.seen)
        log("models_read", models=[model.name for model in spec.models])
        return spec.models

    def _fail(self, problem: str, now: float) -> None:
        if problem != self.problem:
            log("models_refused", problem=problem)
        self.problem, self._retry_at = problem, now + _RETRY_S
