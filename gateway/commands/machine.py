"""`hearth machine`: this host's replicas alone. It becomes `python -m engine.host.agent`; nothing of the gateway
stays."""

import os
import sys
from typing import Final

import msgspec

from engine.log import LOG_FORMAT_VARIABLE
from engine.protocol.specs import MachineSpec, TelemetrySpec
from gateway.catalogue.catalogue import model_entries, spec_of
from gateway.commands.terminal.options import Device, Source, command_app
from gateway.config import Config
from gateway.privacy.process import scrub_memory
from gateway.state_dir import open_state

_TEACHING: Final = """\
examples:
  hearth machine                                       all models of the catalogue, on this host's GPUs or its CPU
  hearth machine --device cpu
  hearth machine --config /etc/hearth.toml             [[models]] says which, how many replicas and how large

One machine runs per host. It starts replicas, watches them, starts crashed and hung ones again, and tells gateways
where they are. Where not all models fit on its devices at once, those that are called take the place of those that
are not, which sleep in host memory, or on disk; [machine] device_bytes and memory_bytes say how much they may hold,
and [[models]] pinned, priority, resident_s and wake_s who goes first. A replica that dies again and again is left
alone for longer and longer; `hearth top` shows all this. SIGTERM lets running streams end, a second one does not.
"""
app = command_app("machine", "run this host's replicas", _TEACHING)


@app.default
def machine(*, device: Device = None, source: Source) -> int:
    """Run this host's replicas."""
    config = source.load(device=device)
    if config.server.scrub_memory:
        scrub_memory()
    open_state(config)
    command = machine_command(config)
    sys.stdout.flush()
    os.environ.update(machine_environment(config))
    os.execv(command[0], command)


def machine_environment(config: Config) -> dict[str, str]:
    """What this host's machine has in its environment beside the caller's own."""
    return {LOG_FORMAT_VARIABLE: config.log.format}


def machine_command(config: Config) -> list[str]:
    """The command line of this host's machine."""
    url = config.telemetry.otlp_url
    spec = MachineSpec(
        name=config.machine.name,
        address=config.machine_address,
        folder=str(config.run_folder),
        models=[spec_of(config, entry) for entry in model_entries(config)],
        cache=str(config.kernels_folder),
        device=config.machine.device,
        device_bytes=config.machine.device_bytes,
        memory_bytes=config.machine.memory_bytes,
        threads=config.machine.threads,
        telemetry=TelemetrySpec(otlp_url=url, service=config.telemetry.service) if url is not None else None,
    )
    return [sys.executable, "-P", "-m", "engine.host.agent", msgspec.json.encode(spec).decode()]
