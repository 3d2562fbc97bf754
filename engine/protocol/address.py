"""Addresses of processes: `unix:` paths and loopback `tcp:` ports. It opens no socket."""


class AddressError(ValueError):
    """An address string that names no socket, or one that may not be used in plain text."""


def parse_address(address: str) -> str | tuple[str, int]:
    """`unix:/path` → the path; `tcp:host:port` → (host, port). Plain tcp is refused outside loopback."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return rest
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not host or not port.isdigit():
            raise AddressError(f"{address!r} is not tcp:HOST:PORT")
        if host not in ("127.0.0.1", "localhost", "[::1]"):
            raise AddressError(f"{address!r} is outside loopback: plain tcp: would carry prompts in the clear")
        return host.strip("[]"), int(port)
    raise AddressError(f"{address!r} is neither unix:PATH nor tcp:HOST:PORT")
