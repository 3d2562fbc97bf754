"""`hearth top`: machines, GPUs, models and tenants as they are now, in a terminal. It asks a gateway, as any operator
may."""

import contextlib
import io
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.live import Live

from gateway.admin.machines import MachinesItem
from gateway.admin.monitoring import TopAccountsItem
from gateway.commands.access.gateway_client import GatewayUnreachable, OperatorClient, OperatorRefused, operator_token
from gateway.commands.terminal.options import Source, command_app, exclusive
from gateway.commands.terminal.output import fail
from gateway.commands.terminal.top_view import MoveRates, TopView
from tenants.store.protocol import StoreUnavailable

_TEACHING: Final = """\
examples:
  hearth top                                           on a gateway's host; q or Ctrl-C ends it
  hearth top --interval 5
  hearth top --once                                    one picture as plain text
  hearth top --json                                    the same for scripts: GET /client/v4/operator/machines
  hearth top --url https://hearth.example.com          from elsewhere, with an operator's token in HEARTH_TOKEN

WHERE is where a model's weights are: device, memory or disk, and where they are moving. RUN and WAIT are its requests
in the replica, HERE those that the gateway holds until it is awake. HIT is the share of prompt tokens that were in the
prefix cache, HOST the part that came back from host memory, KV what the cache takes of the device. TENANT are the
busiest accounts at this gateway in the last minute: calls that run, requests and tokens, and those REFUSED over a
limit. For this host's own gateway no token is needed: one is made that lasts while this command does.
"""
_WHAT: Final = "machines"
_TENANTS: Final = "top?limit=10"
_INTERVAL_S: Final = (0.2, 3600.0)
_WIDTH: Final = 120  # where no terminal says how wide it is
_FORM: Final = exclusive()
app = command_app("top", "watch machines, GPUs and models live", _TEACHING)


def _interval(_: Any, seconds: float) -> None:
    low, high = _INTERVAL_S
    if not low <= seconds <= high:
        raise ValueError(f"{seconds:g} is no number of seconds from {low} to {high:.0f}")


@app.default
def top(
    *,
    url: Annotated[str | None, Parameter(help="of the gateway (default: this host's)")] = None,
    token: Annotated[
        str | None, Parameter(help="of an operator (default: HEARTH_TOKEN; else, for this host's, one is made)")
    ] = None,
    interval: Annotated[
        float, Parameter(validator=_interval, metavar="SECONDS", help="between two looks (default: 1)")
    ] = 1.0,
    once: Annotated[
        bool, Parameter(group=("Parameters", _FORM), help="print one picture as plain text, and end")
    ] = False,
    json: Annotated[bool, Parameter(group=("Parameters", _FORM), help="print JSON once, and end")] = False,
    source: Source,
) -> int:
    """Watch machines, GPUs and models live."""
    config = source.load()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a terminal's encoding has not all letters of a name
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that terminal and token are given back
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with operator_token(config, url, token or os.environ.get("HEARTH_TOKEN")) as operator:
            gateway = OperatorClient(config, url, operator)
            if json:
                print(msgspec.json.format(gateway.ask(_WHAT)).decode())
            elif once or not sys.stdout.isatty():
                width = shutil.get_terminal_size((_WIDTH, 24)).columns
                Console(width=width, color_system=None).print(TopPoller(gateway).look())
            else:
                _watch(gateway, interval)
    except KeyboardInterrupt:
        return 0
    except (OperatorRefused, GatewayUnreachable, StoreUnavailable, OSError) as error:
        return fail(str(error))
    return 0


def _watch(gateway: OperatorClient, interval_s: float) -> None:
    """Until q, or Ctrl-C."""
    poller = TopPoller(gateway)
    with _keyboard() as wait_for_key, Live(console=Console(), screen=True, auto_refresh=False) as live:
        live.update(poller.look_or_wait(), refresh=True)
        while wait_for_key(interval_s) != "q":
            live.update(poller.look_or_wait(), refresh=True)


class TopPoller:
    """Asks a gateway for one frame after the other."""

    def __init__(self, gateway: OperatorClient) -> None:
        self._gateway = gateway
        self._moves = MoveRates()
        self._last: MachinesItem | None = None
        self._tenants: TopAccountsItem | None = None
        self._away_since: float | None = None

    def look(self) -> TopView:
        """Raises GatewayUnreachable or OperatorRefused."""
        try:
            self._last = msgspec.json.decode(self._gateway.ask(_WHAT), type=MachinesItem)
            self._tenants = self._ask_tenants()
        except msgspec.MsgspecError as error:
            raise OperatorRefused(f"the gateway at {self._gateway.url} is of another version: {error}") from error
        self._away_since = None
        self._moves.take(time.monotonic(), self._last.machines)
        return TopView(self._last, self._moves, tenants=self._tenants)

    def _ask_tenants(self) -> TopAccountsItem | None:
        """None where the gateway is an older one, which tells of machines alone."""
        with contextlib.suppress(OperatorRefused, msgspec.MsgspecError):
            return msgspec.json.decode(self._gateway.ask(_TENANTS), type=TopAccountsItem)
        return None

    def look_or_wait(self) -> TopView:
        """As `look`; while the gateway is away, its last answer and since when. Raises OperatorRefused."""
        try:
            return self.look()
        except GatewayUnreachable as away:
            now = time.monotonic()
            self._away_since = now if self._away_since is None else self._away_since
            note = f"{away}; waiting, {now - self._away_since:.0f} s so far"
            return TopView(self._last or MachinesItem([]), self._moves, note, self._tenants)


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and returns it, or nothing. The terminal is left as it was."""
    if not sys.stdin.isatty():
        yield _sleep_without_keys
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _wait_for_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sleep_without_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _wait_for_key(seconds: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") if ready else ""
