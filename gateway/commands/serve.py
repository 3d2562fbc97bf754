"""`hearth serve`: the gateway and one machine as two children, watched by this process, and the first call printed.

It serves nothing itself. However it ends, its children end: on a signal they drain, and where it is killed the
kernel ends them.
"""

import re
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Final, TextIO

from cyclopts import Parameter

from engine.protocol import frames
from engine.protocol.types import Residency
from gateway.catalogue.catalogue import model_entries
from gateway.commands.access.child_process import RELAYED, ChildProcess, child_lines, line_output
from gateway.commands.access.first_account import first_call, first_credentials
from gateway.commands.access.gateway_client import base_url, endpoint_answers, usable_port
from gateway.commands.access.residencies import MachineWatcher, at_rest
from gateway.commands.terminal.options import PORTS, Device, SettingsSource, Source, command_app
from gateway.commands.terminal.output import fail
from gateway.http.tls import open_certificate
from gateway.machine_spec import machine_command, machine_environment
from gateway.privacy.process import scrub_memory
from gateway.settings.config import Config
from gateway.state_dir import Credentials, exclusive_state, open_state
from tenants.store.protocol import StoreUnavailable

_TEACHING: Final = """\
examples:
  hearth serve                                         on 127.0.0.1:8787
  hearth serve --host 0.0.0.0 --port 80
  hearth serve --device cpu

The first start makes an account and a token and keeps them in .hearth/credentials.json. A curl line that works is
printed at every start. The log is on standard output: text on a terminal, else lines of JSON; and in gateway.log and
machine.log in the state folder, for `hearth log REQUEST_ID`; [log] in hearth.toml says more. Ctrl-C drains and ends
all processes; a second one does not wait.
"""
_LOOK_S: Final = 0.1
_PROGRESS_S: Final = 5.0
_REST_S: Final = 2.0  # a replica that sleeps for so long is on standby
_MACHINE_DRAIN_S: Final = 35.0
_STARTING: Final = re.compile(r"^(not started yet|loading( \d+ %)?)$")  # printed with the time that has passed


app = command_app("serve", "start everything on this host", _TEACHING)


@app.default
def serve(
    *,
    host: Annotated[str | None, Parameter(help="address to listen on (default: 127.0.0.1)")] = None,
    port: Annotated[
        int | None,
        Parameter(validator=PORTS, help="port to listen on (default: 8787; 0 takes a free one)"),
    ] = None,
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
            port = usable_port(config.server)
            credentials = first_credentials(config, base_url(config.server, port))
            return ServeSupervisor(config, source, device, port, credentials, sys.stdout).run()
    except (StoreUnavailable, OSError) as error:
        return fail(str(error))


class ServeSupervisor:
    """The loop of `hearth serve`."""

    def __init__(
        self,
        config: Config,
        source: SettingsSource,
        device: str | None,
        port: int,
        credentials: Credentials,
        out: TextIO,
    ) -> None:
        self._config = config
        self._port = port
        self._credentials = credentials
        self._output = line_output(config.log, out)
        self._stops = 0
        self._answered = False  # the gateway has lived, so that another start is worth trying
        self._callable: set[str] = set()  # models that were announced as ready or on standby
        self._known_at: dict[str, float] = {}  # models that its machine reports
        self._machine_seen = False
        self._refused = ""  # why what is asked for is not followed
        self._resting_since: dict[str, float] = {}  # by address
        self._problems: dict[str, str] = {}  # as printed last of each replica that is not callable, by address
        self._progress_at = _PROGRESS_S
        self._watcher = MachineWatcher(config.machine_address)
        settings = ["--config", str(Path(source.config).resolve())] if source.config is not None else []
        settings += ["--state", config.state_folder, "--host", config.server.host, "--port", str(port)]
        gateway = [sys.executable, "-P", "-m", "gateway.cli", "gateway", *settings]
        lines = {name: child_lines(config, name, self._output) for name in ("gateway", "machine")}
        self._gateway = ChildProcess("gateway", gateway, lines["gateway"], signal.SIGTERM, RELAYED)
        machine, environment = machine_command(source.config, source.state, device), machine_environment(config)
        self._machine = ChildProcess("machine", machine, lines["machine"], signal.SIGKILL, environment)

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

    def _keep_running(self, child: ChildProcess, now: float) -> bool:
        """Keeps a child running. False where that makes no sense: the gateway ended before it ever answered."""
        status = child.poll(now)
        if status is not None:
            if child is self._gateway and not self._answered and status > 0:  # not by a signal: by itself
                fail(f"the gateway could not start (status {status}):\n{child.lines.last()}")
                return False
            self._print(f"the {child.name} ended with status {status}; it starts again (see {child.name}.log)")
        if child.process is None and now >= child.start_at:
            child.start(now)
        return True

    def _report(self, elapsed_s: float) -> None:
        """Prints what changed: the first call once the gateway listens; then which models can be called, and which
        cannot and why."""
        if not self._answered and self._answers("/healthz"):
            self._answered = True
            self._greet()
        state = self._watcher.look()
        replicas = state.replicas if state is not None else []
        self._report_changes(state, {replica.model for replica in replicas}, elapsed_s)
        for replica in replicas:
            if replica.residency is Residency.DEVICE:
                self._problems.pop(replica.address, None)
                self._announce(replica.model, f"is ready after {elapsed_s - self._known_at[replica.model]:.1f} s")
            elif self._on_standby(replica, elapsed_s):
                self._announce(replica.model, "is on standby: its first call wakes it")
            elif not _STARTING.match(replica.problem):
                if replica.problem not in ("", self._problems.get(replica.address)):
                    self._problems[replica.address] = replica.problem
                    self._print(f"{replica.model}: {replica.problem}")
            elif elapsed_s >= self._progress_at:
                self._progress_at = elapsed_s + _PROGRESS_S
                waited_s = elapsed_s - self._known_at[replica.model]
                self._print(f"{replica.model}: {replica.problem}, {waited_s:.0f} s so far")

    def _report_changes(self, state: frames.MachineState | None, models: set[str], elapsed_s: float) -> None:
        """Notes since when models are there, those of the start from it on; prints which are gone, and why changed
        settings are not followed."""
        if state is None:
            return
        since_s, self._machine_seen = elapsed_s if self._machine_seen else 0.0, True
        for model in models:
            self._known_at.setdefault(model, since_s)
        for model in self._known_at.keys() - models:
            del self._known_at[model]
            self._callable.discard(model)
            self._print(f"{model} is removed")
        if state.problem != self._refused:
            self._refused = state.problem
            self._print(f"as before: {state.problem}" if state.problem else "what is asked for is followed again")

    def _on_standby(self, replica: frames.ReplicaState, elapsed_s: float) -> bool:
        """Whether it has slept for a while: before, its machine may not have decided yet where it is to be."""
        if not at_rest(replica):
            self._resting_since.pop(replica.address, None)
            return False
        return elapsed_s - self._resting_since.setdefault(replica.address, elapsed_s) >= _REST_S

    def _greet(self) -> None:
        """Prints where Hearth serves and how it is called; a call waits for its model, which is still being loaded. A
        token is for people alone: lines of JSON go to where logs are kept."""
        known = self._credentials
        lines = [f"Hearth serves on {known.base_url}, its console on {known.base_url}/console/"]
        if not self._output.text:
            self._print(f"{lines[0]}; `hearth credentials` prints the first account and its token")
            return
        lines += [
            "",
            f"account  {known.account_id}",
            f"token    {known.token}",
            f"         (kept in {self._config.credentials_path}; `hearth credentials` prints them for a shell)",
            "",
        ]
        if entries := model_entries(self._config):
            lines += ["Your first call, which waits for its model:", "", first_call(known, entries[0].name), ""]
        self._print("\n".join(lines))

    def _announce(self, model: str, how: str) -> None:
        """Prints once that a model can be called."""
        if model in self._callable or not self._answers("/readyz"):
            return
        self._callable.add(model)
        self._print(f"{model} {how}")

    def _answers(self, path: str) -> bool:
        return endpoint_answers(self._config.server, self._port, path)

    def _print(self, line: str) -> None:
        self._output.tell(line)

    def _end_children(self) -> None:
        """Ends the gateway first, so that its streams can end while the replicas still answer."""
        stops = max(self._stops, 1)
        for child, drain_s in ((self._gateway, self._config.server.drain_s + 5.0), (self._machine, _MACHINE_DRAIN_S)):
            child.end(drain_s, lambda: self._stops > stops)
        self._watcher.close()
        self._output.close()
