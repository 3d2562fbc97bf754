"""`hearth machines`: which machines serve, and taking one out of service without cutting a stream. It asks a gateway as
any operator may."""

import os
import time
from typing import Annotated, Final
from urllib.parse import quote

import msgspec
from cyclopts import Parameter

from gateway.admin.machines import MachineChange, MachineItem, MachinesItem
from gateway.commands.access.gateway_client import GatewayUnreachable, OperatorClient, OperatorRefused, operator_token
from gateway.commands.terminal.options import Json, Source, command_app
from gateway.commands.terminal.output import fail, print_either, print_table
from gateway.settings.config import Config
from tenants.store.protocol import StoreUnavailable

_TEACHING: Final = """\
examples:
  hearth machines list
  hearth machines drain m7                 its streams go on elsewhere; returns when none is left there
  hearth machines drain m7 --wait 0        returns at once
  hearth machines undrain m7               takes work again
  hearth machines drain m7 --url https://hearth.example.com     with an operator's token in HEARTH_TOKEN

A drained machine takes nothing more, over its own restarts too, until it is undrained. Streams go on at other machines
of the same model behind their last token; what no other machine can serve ends where it is. Upgrade a host: drain it,
stop `hearth machine`, install, start it, undrain it.
"""
_LOOK_S: Final = 0.5
_UNDRAIN_S: Final = 5.0  # a machine says at once that it takes work again
app = command_app("machines", "list machines, drain one before it is stopped", _TEACHING)
Url = Annotated[str | None, Parameter(help="of the gateway (default: this host's)")]
Token = Annotated[
    str | None, Parameter(help="of an operator (default: HEARTH_TOKEN; else, for this host's, one is made)")
]
Machine = Annotated[str, Parameter(metavar="NAME", help="of the machine, or its address, as `list` shows it")]


@app.command(name="list")
def list_machines(*, url: Url = None, token: Token = None, json: Json = False, source: Source) -> int:
    """List the machines that the gateway knows."""
    try:
        with operator_token(source.load(), url, token or os.environ.get("HEARTH_TOKEN")) as operator:
            machines = _machines(OperatorClient(source.load(), url, operator))
    except (OperatorRefused, GatewayUnreachable, StoreUnavailable, OSError) as error:
        return fail(str(error))
    rows = [
        [machine.name or "-", machine.address, _state(machine), str(len(machine.replicas)), str(_calls(machine))]
        for machine in machines
    ]
    print_either(
        json,
        msgspec.to_builtins(machines),
        lambda: print_table(["NAME", "ADDRESS", "STATE", "REPLICAS", "CALLS"], rows),
    )
    return 0


@app.command
def drain(
    name: Machine,
    /,
    *,
    wait: Annotated[float, Parameter(metavar="SECONDS", help="until its calls have gone (default: 60)")] = 60.0,
    url: Url = None,
    token: Token = None,
    source: Source,
) -> int:
    """Take a machine out of service: its streams go on elsewhere."""
    return _change(source.load(), name, url, token, wait, drained=True)


@app.command
def undrain(name: Machine, /, *, url: Url = None, token: Token = None, source: Source) -> int:
    """Let a drained machine take work again."""
    return _change(source.load(), name, url, token, _UNDRAIN_S, drained=False)


def _change(config: Config, name: str, url: str | None, token: str | None, wait_s: float, *, drained: bool) -> int:
    try:
        with operator_token(config, url, token or os.environ.get("HEARTH_TOKEN")) as operator:
            gateway = OperatorClient(config, url, operator)
            answer = gateway.change(f"machines/{quote(name, safe='')}", MachineChange(drained))
            machine = msgspec.json.decode(answer, type=MachineItem)
            print(f"{machine.name} is to take {'nothing more' if drained else 'work again'}")
            return _wait(gateway, machine, wait_s, drained=drained) if wait_s else 0
    except (OperatorRefused, GatewayUnreachable, StoreUnavailable, OSError) as error:
        return fail(str(error))


def _wait(gateway: OperatorClient, told: MachineItem, wait_s: float, *, drained: bool) -> int:
    """Until the machine has said that it is drained, and its replicas that they have no calls, or that it is not."""
    until, before = time.monotonic() + wait_s, -1
    while True:
        machine = next((each for each in _machines(gateway) if each.address == told.address), told)
        left = _calls(machine) if drained else 0
        if machine.draining is drained and not left:
            print("it has no calls any more, and can be stopped" if drained else "it does")
            return 0
        if time.monotonic() >= until:
            if left:
                return fail(f"it still has {left} calls, which no other machine takes; they end there, or wait longer")
            return fail(f"it has not answered within {wait_s:g} s; try again")
        if left and left != before:
            print(f"{left} calls are left", flush=True)
        before = left
        time.sleep(_LOOK_S)


def _machines(gateway: OperatorClient) -> list[MachineItem]:
    try:
        return msgspec.json.decode(gateway.ask("machines"), type=MachinesItem).machines
    except msgspec.MsgspecError as error:
        raise OperatorRefused(f"the gateway at {gateway.url} is of another version: {error}") from error


def _state(machine: MachineItem) -> str:
    return machine.problem or ("drained" if machine.draining else "serves")


def _calls(machine: MachineItem) -> int:
    """Calls that run or wait there, of all gateways."""
    loads = [replica.load for replica in machine.replicas if replica.load is not None]
    return sum(load.running + load.waiting + load.background for load in loads)
