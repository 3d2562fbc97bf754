"""What of a model is live and what is asked for, as this host's gateways and machines report it, and the wait until
both are the same."""

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Final

from cyclopts import Parameter

from engine.protocol.frames import MachineState, ReplicaState
from engine.protocol.specs import settings_digest
from engine.protocol.types import Residency
from gateway.catalogue.catalogue import spec_of
from gateway.catalogue.report import CatalogueReport, catalogue_reports, settings_text
from gateway.commands.access.residencies import at_rest, machine_reports, replicas_of
from gateway.settings.config import Config, ModelEntryConfig

Wait = Annotated[bool, Parameter(name="--wait", help="until it is so in the server that runs here; shows progress")]
LIVE: Final = "live"
NOT_RUNNING: Final = "no server runs here now: `hearth serve` takes it up as it starts"
_WAIT_S: Final = 900.0
_LOOK_S: Final = 0.1
_FIRST_S: Final = 2.0  # in which what runs takes notice of what was changed


def liveness(
    config: Config, entry: ModelEntryConfig, gateways: Sequence[CatalogueReport], machines: Sequence[MachineState]
) -> str:
    """`live` where all serves the model as it is asked for; else what is on its way, or what is in the way; empty where
    nothing runs."""
    problems = [gateway.problem or gateway.problems.get(entry.name, "") for gateway in gateways]
    problems += [machine.problem for machine in machines]
    if problem := next(filter(None, problems), ""):
        return f"not as asked for: {problem}"
    if any(gateway.models.get(entry.name) != settings_text(entry) for gateway in gateways):
        return "on its way to the gateway"
    if not machines:
        return "no machine runs" if gateways else ""
    wanted = ("", settings_digest(spec_of(config, entry)))  # machines of before do not tell
    replicas = list(replicas_of(entry.name, machines))
    current = [replica for replica in replicas if replica.settings in wanted and not replica.leaving]
    former = [replica for replica in replicas if replica.settings not in wanted]
    ready = [replica for replica in current if _serves(replica)]
    if len(ready) >= entry.replicas and not former:
        return LIVE
    where = next((replica.problem for replica in current if replica.problem and not _serves(replica)), "starting")
    if any(_serves(replica) for replica in former):
        return (
            f"new settings: {where}; the former ones serve" if not ready else "the replica with former settings leaves"
        )
    return where if len(current) - len(ready) or not current else "starting"


def _serves(replica: ReplicaState) -> bool:
    return replica.residency is Residency.DEVICE or at_rest(replica)


def leaving_models(
    entries: Sequence[ModelEntryConfig], gateways: Sequence[CatalogueReport], machines: Sequence[MachineState]
) -> dict[str, str]:
    """Models that are still there although nothing asks for them any more, and what is left of each."""
    wanted = {entry.name for entry in entries}
    left = {name: "a gateway still serves it" for gateway in gateways for name in gateway.models.keys() - wanted}
    for machine in machines:
        for replica in machine.replicas:
            if replica.model not in wanted:
                left.setdefault(replica.model, "removed: its last calls end, then its memory is free")
    return left


def wait_until_live(config: Config, name: str, entry: ModelEntryConfig | None) -> str:
    """Waits until the model is served as `entry` says, or, without one, until it is gone; prints what changes on
    stderr. Returns why that does not become so; empty where it has."""
    began, printed = time.monotonic(), ""
    while (passed_s := time.monotonic() - began) < _WAIT_S:
        gateways, machines = list(catalogue_reports(config)), machine_reports(config)
        if not gateways and not machines:
            return NOT_RUNNING
        if entry is None:
            state = leaving_models([], gateways, machines).get(name, LIVE)
        else:
            state = liveness(config, entry, gateways, machines)
        if state == LIVE:
            return ""
        failed = state.startswith("not as asked for") or any(
            replica.quarantined for replica in replicas_of(name, machines)
        )
        if failed and passed_s > _FIRST_S:
            return state
        if state != printed:
            printed = state
            print(f"{name}: {state}, {passed_s:.1f} s", file=sys.stderr, flush=True)
        time.sleep(_LOOK_S)
    return f"not within {_WAIT_S:.0f} s: {printed}"
