"""How a command asks a gateway what operators may see: over HTTP, with a token that was given or one for the while. It
knows no answer's content."""

import asyncio
import contextlib
import http.client
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from gateway.commands.serve import base_url, reachable_host
from gateway.commands.store_access import StoreAccess, store_access_of
from gateway.config import Config, ServerConfig
from gateway.state_dir import read_credentials, server_secret
from tenants.auth.accounts import Account, Grant, Permission
from tenants.open import open_store
from tenants.store.protocol import StoreUnavailable

_BASE: Final = "/client/v4/operator/"
_ANSWER_S: Final = 3.0
_TOKEN_S: Final = 86_400
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")

T = TypeVar("T")


class OperatorRefused(Exception):
    """The gateway answers, and not what was asked for: trying again makes no sense."""


class GatewayUnreachable(Exception):
    """The gateway does not answer now."""


class _Envelope(msgspec.Struct, frozen=True):
    result: msgspec.Raw


class OperatorClient:
    """Asks one gateway with an operator's token: at `url`, or this host's own, which then has its own certificate."""

    def __init__(self, config: Config, url: str | None, token: str) -> None:
        self.url = url or _own_url(config)
        parts = _parts(self.url)
        assert parts.hostname
        self._named = parts.netloc
        own = url is None and bool(config.server.hosts)  # a name of it need not lead here
        self._host = reachable_host(config.server.host) if own else parts.hostname
        self._port = _port(parts)
        self._context = None
        if parts.scheme == "https":
            self._context = ssl.create_default_context() if url else _own(config.server)
        self._path = parts.path.rstrip("/") + _BASE
        self._token = token

    def ask(self, what: str) -> msgspec.Raw:
        """The document of GET …/operator/WHAT. Raises Away or Refused."""
        try:
            status, body = self._get(what)
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise GatewayUnreachable(f"the gateway at {self.url} does not answer: {why}") from error
        if status in (401, 403, 404):
            raise OperatorRefused(
                f"the gateway at {self.url} answers {status}: the token must be a live one with the permission operator"
                " (`hearth tokens mint ACCOUNT --permissions operator`)"
            )
        if status != 200:
            raise GatewayUnreachable(f"the gateway at {self.url} answers {status}")
        try:
            return msgspec.json.decode(body, type=_Envelope).result
        except msgspec.MsgspecError as error:
            raise OperatorRefused(f"what answers at {self.url} is no Hearth: {error}") from error

    def _get(self, what: str) -> tuple[int, bytes]:
        if self._context is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=_ANSWER_S)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=_ANSWER_S, context=self._context)
        with contextlib.closing(connection):
            headers = {"Host": self._named, "Authorization": f"Bearer {self._token}"}
            connection.request("GET", self._path + what, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()


def _own_url(config: Config) -> str:
    known = read_credentials(config)
    return known.base_url if known else base_url(config.server, config.server.port)


def _parts(url: str) -> SplitResult:
    """Raises Refused where it leads nowhere."""
    with contextlib.suppress(ValueError):  # of a port that is none
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    raise OperatorRefused(f"{url!r} is no address: write it like https://hearth.example.com")


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _own(server: ServerConfig) -> ssl.SSLContext:
    """Believes this host's gateway its own certificate and nobody another one, by whatever name it is reached."""
    context = ssl.create_default_context(cafile=server.certificate or None)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = not server.certificate
    return context


def _is_own(config: Config, url: str) -> bool:
    """Whether it leads to where this configuration's gateway listens, on this host."""
    own, asked = _parts(_own_url(config)), _parts(url)
    return _port(asked) == _port(own) and asked.hostname in (*_LOOPBACK, reachable_host(config.server.host))


@contextlib.contextmanager
def operator_token(config: Config, url: str | None, given: str | None) -> Iterator[str]:
    """The one that was given; else, for this configuration's own gateway, one of its first account that can see all
    machines, revoked at the end. At any other `url` whoever answers could go on with it."""
    if given:
        yield given
        return
    if url is not None and not _is_own(config, url):
        raise OperatorRefused(
            f"{url} is not this configuration's own gateway: give a token of its operator, by --token or HEARTH_TOKEN"
        )
    if not config.secret_path.exists():
        raise OperatorRefused(f"{config.state} is no gateway's state folder: name one by --state, or set HEARTH_TOKEN")
    token_id, text = _with_store(config, lambda tenantry: _mint(tenantry, config))
    try:
        yield text
    finally:
        with contextlib.suppress(StoreUnavailable, OSError):  # it expires by itself
            _with_store(config, lambda tenantry: _revoke(tenantry, token_id))


def _with_store(config: Config, question: Callable[[StoreAccess], Awaitable[T]]) -> T:
    async def asked() -> T:
        store = open_store(config.store_url)
        try:
            return await question(store_access_of(store, server_secret(config)))
        finally:
            await store.close()

    return asyncio.run(asked())


async def _mint(tenantry: StoreAccess, config: Config) -> tuple[str, str]:
    account = await _first(tenantry, config)
    grant, expires_at = Grant(permissions=(Permission.OPERATOR,)), int(time.time()) + _TOKEN_S
    token, text = await tenantry.accounts.mint(account.id, "hearth top", expires_at, grant)
    said = {"name": token.name, "expires_at": token.expires_at, "grant": token.grant}
    await tenantry.note(account.id, "token.create", token.id, **said)
    return token.id, text


async def _first(tenantry: StoreAccess, config: Config) -> Account:
    """The account of the first start where it is still there, else the oldest. Raises Refused where there is none."""
    known = read_credentials(config)
    found = [account for account in await tenantry.accounts.list() if account.suspended_at is None]
    found.sort(key=lambda account: known is None or account.id != known.account_id)
    if not found:
        raise OperatorRefused(
            "there is no account yet whose token could be used: `hearth accounts create NAME` makes one"
        )
    return found[0]


async def _revoke(tenantry: StoreAccess, token_id: str) -> None:
    token = await tenantry.accounts.token(token_id)
    await tenantry.accounts.revoke(token_id)
    await tenantry.note(token.account_id, "token.revoke", token_id)
