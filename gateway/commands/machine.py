"""`hearth machine`: this host's replicas alone. It becomes `python -m engine.host.agent`."""

import os
import sys
from typing import Final

import msgspec

from gateway.commands.access.join_options import NO_JOIN, JoinOptions
from gateway.commands.terminal.options import Device, Source, command_app
from gateway.identity.host_identity import HostRole
from gateway.machine_spec import machine_command, machine_environment
from gateway.porter.settings import news_path, read_news, write_news
from gateway.privacy.process import scrub_memory
from gateway.state_dir import open_state

_TEACHING: Final = """\
examples:
  hearth machine                                       all models of the catalogue, on this host's GPUs or its CPU
  hearth machine --device cpu
  hearth machine --join 10.0.0.1:8790 --token …        once, on another host than the gateways' (`hearth cluster token`)
  hearth machine --config /etc/hearth.toml             [[models]] says which, how many replicas and how large

One machine runs per host. It starts replicas, watches them, starts crashed and hung ones again, and tells gateways
where they are. Where not all models fit on its devices at once, those that are called take the place of those that
are not, which sleep in host memory, or on disk; [machine] device_bytes and memory_bytes say how much they may hold,
and [[models]] pinned, priority, resident_s and wake_s who goes first. A replica that dies again and again is left
alone for longer and longer; `hearth top` shows all this. SIGTERM lets running streams end, a second one does not.
"""
app = command_app("machine", "run this host's replicas", _TEACHING)


@app.default
def machine(*, device: Device = None, join: JoinOptions = NO_JOIN, source: Source) -> int:
    """Run this host's replicas."""
    config = source.load(device=device)
    from gateway.commands.access.joining import joined_files  # only here: `hearth serve` does without keys

    if joined_files(config, HostRole.MACHINE, join, config.cluster.porter_listen) is not None and join.join is not None:
        path = news_path(config.state)
        write_news(path, msgspec.structs.replace(read_news(str(path)), joined=join.join))
    if config.server.scrub_memory:
        scrub_memory()
    open_state(config)
    command = machine_command(source.config, source.state, device)
    sys.stdout.flush()
    os.environ.update(machine_environment(config))
    os.execv(command[0], command)
