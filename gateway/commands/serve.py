"""`hearth serve`: the gateway and one machine as two children, watched by this process, and the first call printed.

It serves nothing itself. However it ends, its children end: on a signal they drain, and where it is killed the
kernel ends them.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, TextIO

from cyclopts import Parameter

from engine.process.supervised import Backoff, start_child
from engine.protocol import frames
from engine.protocol.types import Residency
from gateway.catalogue.catalogue import model_entries
from gateway.commands.access.first_account import first_call, first_credentials
from gateway.commands.access.gateway_client import base_url, endpoint_answers, free_port
from gateway.commands.access.residencies import MachineWatcher, at_rest
from gateway.commands.machine import machine_command, machine_environment
from gateway.commands.terminal.options import Device, Source, command_app
from gateway.commands.terminal.output import fail
from gateway.config import Config, ServerConfig, SettingsError
from gateway.http.tls import open_certificate
from gateway.privacy.process import scrub_memory
from gateway.state_dir import Credentials, exclusive_state, open_state
from tenants.store.protocol import StoreUnavailable

_TEACHING: Final = """\
examples:
  hearth serve                                         on 127.0.0.1:8787
  hearth serve --host 0.0.0.0 --port 80
  hearth serve --device cpu

The first start makes an account and a token and keeps them in .hearth/credentials.json. A curl line that works is
printed at every start. Logs are gateway.log and machine.log in the state folder. Ctrl-C drains and ends all
processes; a second one does not wait.
"""
_LOOK_S: Final = 0.1
LOG_BYTES_MAX: Final = 8 << 20
_BACKOFF_S: Final = (0.5, 30.0)
_STABLE_S: Final = 60.0  # a child that lived this long starts again without a back-off
_PROGRESS_S: Final = 5.0
_REST_S: Final = 2.0  # a replica that sleeps for so long is on standby
_MACHINE_DRAIN_S: Final = 35.0
_STARTING: Final = re.compile(r"^(not started yet|loading( \d+ %)?)$")  # printed with the time that has passed


app = command_app("serve", "start everything on this host", _TEACHING)


@app.default
def serve(
    *,
    host: Annotated[str | None, Parameter(help="address to listen on (default: 127.0.0.1)")] = None,
    port: Annotated[int | None, Parameter(help="port to listen on (default: 8787; 0 takes a free one)")] = None,
    device: Device = None,
    source: Source,
) -> int:
    """Start everything on this host."""
    config = source.load(host=host, port=port, device=device)
    if config.server.scrub_memory:
        scrub_memory()
    try:
        open_state(config)
        open_certificate(config.server)  # a problem with it is better shown here than in a log
        with exclusive_state(config):
            port = _free_port(config.server)
            credentials = first_credentials(config, base_url(config.server, port))
            return ServeSupervisor(config, source.config, port, credentials, sys.stdout).run()
    except (StoreUnavailable, OSError) as error:
        return fail(str(error))


def _free_port(server: ServerConfig) -> int:
    """The configured port, or a free one for 0. Raises SettingsError where it is taken."""
    try:
        return free_port(server)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {server.host}:{server.port}: {error.strerror}; --port (PORT=) names another"
        ) from error


@dataclass
class ServeProcess:
    """One of the two processes: started, watched, started again with a back-off."""

    name: str
    command: list[str]
    log: Path
    death: signal.Signals
    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    start_at: float = 0.0
    _started_at: float = 0.0
    _backoff: Backoff = field(default_factory=lambda: Backoff(*_BACKOFF_S))

    def start(self, now: float) -> None:
        """Starts it in its own process group: a terminal's Ctrl-C reaches this process alone, which then drains."""
        self._started_at = now
        with open(self.log, "ab") as log:
            self.process = start_child(
                self.command, output=log, environment=self.environment, own_group=True, death=self.death
            )

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

    def log_tail(self) -> str:
        """The end of its log."""
        with open(self.log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
            return log.read().decode("utf-8", "replace").strip()


class ServeSupervisor:
    """The loop of `hearth serve`."""

    def __init__(
        self, config: Config, config_path: str | None, port: int, credentials: Credentials, out: TextIO
    ) -> None:
        self._config = config
        self._port = port
        self._credentials = credentials
        self._out = out
        self._stops = 0
        self._answered = False  # the gateway has lived, so that another start is worth trying
        self._callable: set[str] = set()  # models that were announced as ready or on standby
        self._resting_since: dict[str, float] = {}  # by address
        self._problems: dict[str, str] = {}  # as printed last of each replica that is not callable, by address
        self._progress_at = _PROGRESS_S
        self._watcher = MachineWatcher(config.machine_address)
        settings = ["--config", str(Path(config_path).resolve())] if config_path is not None else []
        settings += ["--state", config.state_folder, "--host", config.server.host, "--port", str(port)]
        gateway = [sys.executable, "-P", "-m", "gateway.cli", "gateway", *settings]
        self._gateway = ServeProcess("gateway", gateway, config.state / "gateway.log", signal.SIGTERM, {})
        machine, environment = machine_command(config), machine_environment(config)
        self._machine = ServeProcess("machine", machine, config.state / "machine.log", signal.SIGKILL, environment)

    def run(self) -> int:
        """Runs until a signal, or until the gateway cannot even start."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        began = time.monotonic()
        if not model_entries(self._config):
            self._print("the catalogue has no model: `hearth pull` brings one, [[models]] in hearth.toml names folders")
        try:
            while not self._stops:
                now = time.monotonic()
                for child in (self._machine, self._gateway):
                    if not self._keep_running(child, now):
                        return 1
                self._report(now - began)
                time.sleep(_LOOK_S)
            self._print("draining; Ctrl-C again ends at once")
            return 0
        finally:
            self._end_children()

    def _stop(self, *_: object) -> None:
        self._stops += 1

    def _keep_running(self, child: ServeProcess, now: float) -> bool:
        """Keeps a child running. False where that makes no sense: the gateway ended before it ever answered."""
        trim(child.log)
        status = child.poll(now)
        if status is not None:
            if child is self._gateway and not self._answered and status > 0:  # not by a signal: by itself
                fail(f"the gateway could not start (status {status}):\n{child.log_tail()}")
                return False
            self._print(f"the {child.name} ended with status {status}; it starts again (see {child.name}.log)")
        if child.process is None and now >= child.start_at:
            child.start(now)
        return True

    def _report(self, elapsed_s: float) -> None:
        """Prints what changed: which models can be called, which cannot and why; the first call once the gateway is
        ready."""
        self._answered = self._answered or self._answers("/healthz")
        state = self._watcher.look()
        for replica in state.replicas if state is not None else []:
            if replica.residency is Residency.DEVICE:
                self._problems.pop(replica.address, None)
                self._announce(replica.model, f"is ready after {elapsed_s:.1f} s")
            elif self._on_standby(replica, elapsed_s):
                self._announce(replica.model, "is on standby: its first call wakes it")
            elif not _STARTING.match(replica.problem):
                if replica.problem not in ("", self._problems.get(replica.address)):
                    self._problems[replica.address] = replica.problem
                    self._print(f"{replica.model}: {replica.problem}")
            elif elapsed_s >= self._progress_at:
                self._progress_at = elapsed_s + _PROGRESS_S
                self._print(f"{replica.model}: {replica.problem}, {elapsed_s:.0f} s so far")

    def _on_standby(self, replica: frames.ReplicaState, elapsed_s: float) -> bool:
        """Whether it has slept for a while: before, its machine may not have decided yet where it is to be."""
        if not at_rest(replica):
            self._resting_since.pop(replica.address, None)
            return False
        return elapsed_s - self._resting_since.setdefault(replica.address, elapsed_s) >= _REST_S

    def _announce(self, model: str, how: str) -> None:
        """Prints once that a model can be called."""
        if model in self._callable or not self._answers("/readyz"):
            return
        if not self._callable:
            self._print(f"Hearth serves on {self._credentials.base_url}")
        self._callable.add(model)
        self._print(f"{model} {how}")
        if len(self._callable) == 1:
            self._print(
                f"\naccount  {self._credentials.account_id}\ntoken    {self._credentials.token}"
                f"\n         (kept in {self._config.credentials_path})\n\nYour first call:\n"
                f"\n{first_call(self._credentials, model)}\n"
            )

    def _answers(self, path: str) -> bool:
        return endpoint_answers(self._config.server, self._port, path)

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal is no reason to stop serving
            print(line, file=self._out, flush=True)

    def _end_children(self) -> None:
        """Ends the gateway first, so that its streams can end while the replicas still answer."""
        stops = max(self._stops, 1)
        for child, drain_s in ((self._gateway, self._config.server.drain_s + 5.0), (self._machine, _MACHINE_DRAIN_S)):
            child.end(drain_s, lambda: self._stops > stops)
        self._watcher.close()


def trim(log: Path) -> None:
    """Moves a long log's lines aside, over the last ones there. Its writer goes on in the same file, at its end."""
    log.touch(mode=0o600)
    if log.stat().st_size > LOG_BYTES_MAX:
        with contextlib.suppress(OSError):  # a full disk is a reason to cut all the more
            shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)
