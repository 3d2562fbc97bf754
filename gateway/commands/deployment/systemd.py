"""`hearth systemd`: prints a unit that runs this installation with these settings. It installs and starts nothing."""

import getpass
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import Parameter

from gateway.commands.backup import sqlite_path
from gateway.commands.terminal.options import Source, command_app, exclusive
from gateway.settings.config import CONFIG_NAME, Config

_TEACHING: Final = """\
examples:
  hearth systemd                                       for `hearth serve`: everything on this host
  hearth systemd --config /etc/hearth.toml --state /var/lib/hearth --user hearth
  hearth systemd --gateway                             the HTTP side alone, where machines run apart
  hearth systemd --machine                             this host's replicas alone

Keep what it prints as /etc/systemd/system/hearth.service, then `systemctl enable --now hearth`. Stopping drains:
running streams get [server] drain_s to end. Settings belong into hearth.toml; print the unit anew when its place, the
port or the state folder changes.
"""
Part = Literal["serve", "gateway", "machine"]
_DESCRIPTIONS: Final[dict[Part, str]] = {
    "serve": "Hearth: gateway and machine",
    "gateway": "Hearth: gateway",
    "machine": "Hearth: machine of this host's replicas",
}
_PRIVILEGED_PORTS: Final = 1024
_MACHINE_DRAIN_S: Final = 35
_MARGIN_S: Final = 10
_MIN_FILES: Final = 65_536
_PART: Final = exclusive()
# GPUs need what is missing here. PrivateDevices and ProtectClock hide them: both close /dev but for a few files.
# MemoryDenyWriteExecute refuses kernels that are compiled while Hearth runs.
_HARDENING: Final = (
    "UMask=0077",
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "ProtectKernelTunables=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "RestrictSUIDSGID=yes",
    "RestrictRealtime=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "LockPersonality=yes",
    "SystemCallArchitectures=native",
)
app = command_app("systemd", "print a systemd unit for this host", _TEACHING)


@app.default
def systemd(
    *,
    gateway: Annotated[bool, Parameter(group=("Parameters", _PART), help="for `hearth gateway`")] = False,
    machine: Annotated[bool, Parameter(group=("Parameters", _PART), help="for `hearth machine`")] = False,
    user: Annotated[
        str | None, Parameter(metavar="NAME", help="who runs it (default: you, or hearth where you are root)")
    ] = None,
    source: Source,
) -> None:
    """Print a systemd unit for this host."""
    part: Part = "gateway" if gateway else "machine" if machine else "serve"
    default_file = Path(CONFIG_NAME) if Path(CONFIG_NAME).is_file() else None
    file = default_file if source.config is None else Path(source.config)
    user = user or ("hearth" if os.geteuid() == 0 else getpass.getuser())
    print(unit(part, source.load(), file, user))


def unit(part: Part, config: Config, settings_file: Path | None, user: str) -> str:
    """The unit's text. It names files absolutely, so that it does not depend on where it is printed."""
    return "\n".join([*_unit_lines(part, config, settings_file, user), "", "[Install]", "WantedBy=multi-user.target"])


def _unit_lines(part: Part, config: Config, settings_file: Path | None, user: str) -> Iterator[str]:
    state = _quoted(str(config.state))
    yield f"# Once before: install -d -o {user} -m 700 {state}"
    yield "[Unit]"
    yield f"Description={_DESCRIPTIONS[part]}"
    yield "Wants=network-online.target"
    yield "After=network-online.target nvidia-persistenced.service"
    yield ""
    yield "[Service]"
    yield "Type=exec"
    yield f"User={user}"
    yield f"WorkingDirectory={_escaped(str(config.state))}"
    if part != "gateway" and (modprobe := shutil.which("nvidia-modprobe")):
        yield f"ExecStartPre=-+{modprobe} -u -c=0"  # makes the GPUs' device files, which this user may not
    yield f"ExecStart={_command(part, config, settings_file)}"
    yield "Restart=on-failure"
    yield "RestartSec=5"
    yield "RestartPreventExitStatus=2"
    yield "# The first process drains its children; what is left of them after the time is killed."
    yield "KillMode=mixed"
    yield f"TimeoutStopSec={_stop_seconds(part, config)}"
    yield "# A replica that the kernel kills for its memory is started again by its machine."
    yield "OOMPolicy=continue"
    yield f"LimitNOFILE={max(_MIN_FILES, 2 * config.server.connections)}"
    yield "LimitMEMLOCK=infinity"
    if part == "serve":
        yield "# Its output has the first token; gateway.log and machine.log in the state folder say the rest."
        yield "StandardOutput=null"
    folders = _written_folders(config)
    yield f"ReadWritePaths={' '.join(_quoted(str(folder)) for folder in folders)}"
    if not any(folder.is_relative_to(tempfile.gettempdir()) for folder in folders):
        yield "PrivateTmp=yes"
    privileged = part != "machine" and 0 < config.server.port < _PRIVILEGED_PORTS
    capabilities = "CAP_NET_BIND_SERVICE" if privileged else ""
    yield f"CapabilityBoundingSet={capabilities}"
    yield f"AmbientCapabilities={capabilities}"
    yield from _HARDENING


def _command(part: Part, config: Config, settings_file: Path | None) -> str:
    program = Path(sysconfig.get_path("scripts"), "hearth")
    words = [str(program)] if program.exists() else [sys.executable, "-P", "-m", "gateway.cli"]
    words += [part, *(["--config", str(settings_file.resolve())] if settings_file is not None else [])]
    return " ".join(_quoted(word).replace("$", "$$") for word in [*words, "--state", str(config.state)])


def _written_folders(config: Config) -> list[Path]:
    """The state folder, and what the settings put elsewhere: sockets, and SQLite's file."""
    database = sqlite_path(config)
    folders = [config.run_folder, *([database.parent] if database is not None else [])]
    return [config.state, *(folder for folder in folders if not folder.is_relative_to(config.state))]


def _stop_seconds(part: Part, config: Config) -> int:
    gateway_s = 0 if part == "machine" else int(config.server.drain_s) + 5
    return gateway_s + (0 if part == "gateway" else _MACHINE_DRAIN_S) + _MARGIN_S


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """One word of a unit's line."""
    plain = _escaped(word)
    if not any(letter in plain for letter in " \t\"'\\"):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
