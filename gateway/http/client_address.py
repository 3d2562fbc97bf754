"""The caller's address behind trusted proxies, the host names that are served, and whether a head can be read in one
way only. It knows heads alone: no routes, no accounts.

A caller's address is the peer's, unless the peer is one of `[server] proxies`. Then `[server] proxy_header` is read
from right to left, and the first hop that is no proxy is the caller. The other header never counts: a proxy that
writes one of them and passes the other on would let anybody write the caller's address.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.settings.server import ServerConfig

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
RawHeaders = Iterable[tuple[bytes, bytes]]

_ONCE: Final = (b"host", b"authorization", b"x-api-key", b"content-type")
_FORWARDING: Final = frozenset((b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via"))
_HOST: Final = re.compile(rb"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_BRACKETED: Final = re.compile(r"\[([0-9a-fA-F:.]+)\](?::[0-9]{1,5})?")
_WITH_PORT: Final = re.compile(r"([0-9.]+):[0-9]{1,5}")
_BLANKED: Final = bytes.maketrans(b",;", b"  ")


def head_problem(version: str, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Describes, for people, a fault of a head that some proxy before us could read in another way than we do.

    `headers` have lower-case names. Returns None for a good head.
    """
    if version not in ("1.0", "1.1"):
        return "speak HTTP/1.1 or HTTP/1.0"
    if not target.startswith(b"/") or b"#" in target:
        return "the request's target must be a path, without scheme, host and fragment"
    names = [name for name, _ in headers]
    for name in _ONCE:
        if names.count(name) > 1:
            return f"the header {name.decode()} may be there once only"
    host = next((value for name, value in headers if name == b"host"), None)
    if host is None or _HOST.fullmatch(host) is None:
        return "send one Host header, a name or an address with or without a port"
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and (version == "1.0" or len(codings) > 1 or codings[0].lower() != b"chunked"):
        return "the one transfer-encoding is chunked, in HTTP/1.1"
    return None


@dataclass(frozen=True, slots=True)
class ClientAddress:
    """Where a request comes from. `address` is "" if a proxy's header cannot be read. It is `trusted` unless an unknown
    proxy has forwarded the request: then the address is that proxy's, and the caller may be anywhere."""

    address: str
    trusted: bool


class ClientAddressPolicy:
    """What [server] says of proxies, names and metrics, applied to one head after the other."""

    def __init__(self, server: ServerConfig) -> None:
        self._proxies = _networks(server.proxies)
        self._header = server.proxy_header.encode()
        self._metrics = _networks(server.metrics_networks)
        self._names = frozenset(name for name in server.hosts if not name.startswith("*."))
        self._endings = tuple(name.removeprefix("*") for name in server.hosts if name.startswith("*."))
        self._any_name = not server.hosts

    def client_address(self, scope: MutableMapping[str, Any]) -> ClientAddress:
        """Returns the address of the request with this ASGI scope."""
        peer: str = (scope.get("client") or ("",))[0]
        headers: RawHeaders = scope["headers"]
        if not self.trusts(peer):
            return ClientAddress(peer, not any(name in _FORWARDING for name, _ in headers))
        address: IpAddress | None = parse_ip_address(peer)
        for hop in self._hops(headers):
            address = parse_ip_address(hop.decode("latin-1"))
            if address is None or not _within(address, self._proxies):
                break
        return ClientAddress("" if address is None else str(address), True)

    def trusts(self, peer: str) -> bool:
        """Whether the peer of a connection is a trusted proxy."""
        if not self._proxies:
            return False
        address = parse_ip_address(peer)
        return address is not None and _within(address, self._proxies)

    def serves_host(self, host: bytes) -> bool:
        """Whether a well-formed Host header names this gateway."""
        if self._any_name:
            return True
        match = _HOST.fullmatch(host)
        name = "" if match is None else match[1].decode().lower().rstrip(".")
        return name in self._names or name.endswith(self._endings)

    def shows_metrics(self, client: ClientAddress) -> bool:
        """Whether a client there may read /metrics."""
        address = parse_ip_address(client.address)
        return client.trusted and address is not None and _within(address, self._metrics)

    def _hops(self, headers: RawHeaders) -> Iterator[bytes]:
        """The hops that the proxies name, the last one first."""
        header = b",".join(value for name, value in headers if name == self._header)
        if not header:
            return iter(())
        return reversed(_forwarded(header) if self._header == b"forwarded" else header.split(b","))


def parse_ip_address(text: str) -> IpAddress | None:
    """Reads an address with or without a port; IPv4 within IPv6 as IPv4. Returns None for anything else."""
    text = text.strip()
    match = _BRACKETED.fullmatch(text) or _WITH_PORT.fullmatch(text)
    try:
        address = ipaddress.ip_address(match[1] if match else text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def address_group(address: str) -> str:
    """Returns what counts as one address: for IPv6 the 64 bits that a customer is given."""
    if ":" not in address:
        return address
    parsed = parse_ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
    return str(parsed)


def _forwarded(header: bytes) -> list[bytes]:
    """The `for` of each hop of Forwarded headers, in their order; b"" if it has none. Escapes are not understood: no
    address needs them."""
    pieces = header.split(b'"')
    if b"\\" in header or len(pieces) % 2 == 0:
        return [b""]
    pieces[1::2] = [quoted.translate(_BLANKED) for quoted in pieces[1::2]]
    return [_for(hop) for hop in b"".join(pieces).split(b",")]


def _for(hop: bytes) -> bytes:
    pairs = [pair.partition(b"=") for pair in hop.split(b";")]
    values = [value.strip() for name, _, value in pairs if name.strip().lower() == b"for"]
    return values[0] if len(values) == 1 else b""


def _networks(texts: Sequence[str]) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(map(ipaddress.ip_network, texts))


def _within(address: IpAddress, networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    return any(address in network for network in networks)
