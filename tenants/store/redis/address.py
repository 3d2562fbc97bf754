"""Which Redis a store's URL names: one server, or the Sentinels that know a primary by name. It connects to nothing."""

import os
import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from redis.asyncio import Connection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

SENTINEL_PORT: Final = 26379
_EXAMPLE: Final = "sentinel://user:password@a:26379,b:26379,c:26379/NAME/DB, or sentinels:// with TLS"
_HOST: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")

# A connection of redis-py without its retries, which by default stall a request for half a minute. It has no
# socket_timeout either; whoever uses it sets a deadline around the whole use. With one, redis-py 8 wraps every write in
# asyncio.wait_for, which on Python 3.11 loses a cancellation that comes as the write ends.
_PLAIN: Final[dict[str, Any]] = {"socket_timeout": None, "protocol": 2}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """`options` are those of `connection_class`. With `sentinels`, pairs of host and port, `service` is the name that
    they know the primary by, and the options lack a host."""

    connection_class: type[Connection]
    options: dict[str, Any]
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_options: dict[str, Any] | None = None

    @property
    def places(self) -> str:
        """Hosts and ports, for messages."""
        pairs = self.sentinels or ((self.options.get("host", "localhost"), self.options.get("port", 6379)),)
        return self.options.get("path") or ", ".join(f"{host}:{port}" for host, port in pairs)


def read_address(url: str) -> RedisAddress:
    """Raises ValueError in words for operators, where the URL or a file that it names cannot be used."""
    address = _sentinel_address(url) if url.startswith(("sentinel:", "sentinels:")) else _server_address(url)
    for name in _FILES:
        path = address.options.get(name)
        if path is not None and not os.access(path, os.R_OK):
            raise ValueError(f"the store's {name} is {path}, which is no file that can be read")
    return address


def _server_address(url: str) -> RedisAddress:
    if not url.startswith("rediss:") and any(f"{name}=" in url for name in _FILES):
        raise ValueError("the store's url has certificates and no TLS: write rediss:// for redis://")
    try:
        options: dict[str, Any] = {**_PLAIN, **parse_url(url)}
    except ValueError as error:
        raise ValueError(f"the store's url: {error}") from None
    connection_class = options.pop("connection_class", Connection)
    _check_options(connection_class, options)
    return RedisAddress(connection_class, options)


def _sentinel_address(url: str) -> RedisAddress:
    scheme, _, rest = url.partition("://")  # by hand: urllib.parse refuses brackets within a list of hosts
    rest, _, query_string = rest.partition("?")
    netloc, _, path = rest.partition("/")
    user, _, hosts = netloc.rpartition("@")
    service, _, database = path.strip("/").partition("/")
    if not _NAME.fullmatch(service):
        raise ValueError(f"the store's url lacks the name that the Sentinels know the primary by: write {_EXAMPLE}")
    if database and not database.isdecimal():
        raise ValueError(f"the store's url has {database!r} for a database; one is a number: {_EXAMPLE}")
    query = dict(parse_qsl(query_string))
    sentinel_options = {name: query.pop(name) for name in _SENTINEL_OPTIONS if name in query}
    server_scheme = "rediss" if scheme == "sentinels" else "redis"
    options = f"?{urlencode(query)}" if query else ""
    server = _server_address(f"{server_scheme}://{user}{'@' if user else ''}primary/{database or 0}{options}")
    of_server = {name: value for name, value in server.options.items() if name != "host"}
    secrets = {name.removeprefix("sentinel_"): value for name, value in sentinel_options.items()}
    shared = {name: value for name, value in of_server.items() if name not in ("username", "password", "db")}
    sentinels = tuple(_host(host) for host in hosts.split(","))
    return RedisAddress(server.connection_class, of_server, sentinels, service, {**shared, **secrets})


def _host(text: str) -> tuple[str, int]:
    match = _HOST.fullmatch(text)
    port = int(match["port"] or SENTINEL_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise ValueError(f"the store's url has {text!r} for a Sentinel, which is no HOST:PORT: write {_EXAMPLE}")
    return match["host"].strip("[]"), port


def _check_options(connection_class: type[Connection], options: dict[str, Any]) -> None:
    """Raises ValueError for an option that redis-py does not have."""
    try:
        new_connection(connection_class, options)
    except TypeError as error:
        option = str(error).rpartition("argument ")[2]
        raise ValueError(f"the store's url has an option that is not known: {option}") from None


def new_connection(connection_class: type[Connection], options: dict[str, Any]) -> Connection:
    """One that has yet to connect."""
    return connection_class(**options, retry=Retry(NoBackoff(), 0))
