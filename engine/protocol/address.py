"""Addresses of processes: `unix:` paths and loopback `tcp:` ports on this host, `tls:` sockets behind another host's
porter. It opens no socket."""

import re
from typing import Final, NamedTuple

MACHINE_SOCKET: Final = "machine"  # of an agent, below its folder
FILES_SOCKET: Final = "files"  # of a host that gives models' files to others, below the same folder
HANDOVER_SOCKET: Final = "-kv"  # behind the name of a replica's: where it takes in KV
OUTWARD_SOCKET: Final = "_out.sock"  # of a host's porter: no host can name it from outside
_SOCKET: Final = re.compile(r"[a-z0-9-]{1,63}")
_TLS: Final = re.compile(r"(?P<machine>[a-z0-9.-]{1,63})@(?P<host>[^/@]+):(?P<port>[0-9]{1,5})(/(?P<socket>[^/]+))?")


class AddressError(ValueError):
    """An address string that names no socket, or one that may not be used in plain text."""


class TlsAddress(NamedTuple):
    """A socket of the machine of this name, behind the porter at host and port."""

    machine: str
    host: str
    port: int
    socket: str

    @property
    def server_name(self) -> str:
        """What a client asks the porter for."""
        return f"{self.socket}.{self.machine}"

    def beside(self, local: str) -> str:
        """The address of another socket of the same host, `unix:…` as the host itself calls it."""
        name = local.rpartition("/")[2].removesuffix(".sock")
        return machine_address(self.machine, f"{self.host}:{self.port}", name)


def machine_address(machine: str, porter: str, socket: str = MACHINE_SOCKET) -> str:
    """The `tls:` address of a machine's socket, its porter at HOST:PORT."""
    return f"tls:{machine}@{porter}/{socket}"


def parse_tls_address(address: str) -> TlsAddress | None:
    """`tls:NAME@HOST:PORT` (the agent's socket) or `tls:NAME@HOST:PORT/SOCKET`; None for another scheme."""
    scheme, _, rest = address.partition(":")
    if scheme != "tls":
        return None
    match = _TLS.fullmatch(rest)
    socket = (match["socket"] or MACHINE_SOCKET) if match else ""
    if match is None or not _SOCKET.fullmatch(socket):
        raise AddressError(f"{address!r} is not tls:NAME@HOST:PORT, NAME that of a machine of the cluster")
    return TlsAddress(match["machine"], match["host"], int(match["port"]), socket)


def parse_server_name(server_name: str) -> tuple[str, str]:
    """What a client asked a porter for → (socket, machine)."""
    socket, _, machine = server_name.partition(".")
    if not machine or not _SOCKET.fullmatch(socket):
        raise AddressError(f"{server_name!r} names no socket of a machine")
    return socket, machine


def parse_address(address: str) -> str | tuple[str, int]:
    """A socket of this host: `unix:/path` → the path; `tcp:host:port` → (host, port). Plain tcp is refused outside
    loopback."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return rest
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not host or not port.isdigit():
            raise AddressError(f"{address!r} is not tcp:HOST:PORT")
        if host not in ("127.0.0.1", "localhost", "[::1]"):
            raise AddressError(
                f"{address!r} is outside loopback: plain tcp: would carry prompts in the clear; "
                "join the hosts to a cluster (`hearth cluster --help`), and they speak tls:"
            )
        return host.strip("[]"), int(port)
    raise AddressError(f"{address!r} is neither unix:PATH nor tcp:HOST:PORT")


def require_address(address: str) -> None:
    """Raises AddressError: a wrong address is an error at the start, not a retry for ever."""
    if parse_tls_address(address) is None:
        parse_address(address)
