"""How commands reach a gateway over HTTP: where this host's own one is or may listen, whether it answers, a client of
the operator's API, with a given token or a temporary one, and one of a tenant's. It knows no answer's content."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Generator, Iterator
from typing import Final, Self

import httpx
import msgspec

from gateway.commands.access.store_access import StoreAccess, ask_store
from gateway.commands.terminal.listening import listen_problem
from gateway.settings.config import Config, SettingsError
from gateway.settings.server import ServerConfig
from gateway.state_dir import read_credentials
from tenants.records.grants import Grant, Permission
from tenants.store.protocol import StoreUnavailable

_BASE: Final = "/client/v4/operator/"
_ANSWER_S: Final = 3.0
_STREAM_S: Final = 60.0  # between two events; silence is broken before
_TOKEN_S: Final = 86_400
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


class OperatorRefused(Exception):
    """The gateway answers, but not the question: trying again makes no sense."""


class GatewayRefused(Exception):
    """The gateway answers something else than 200."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.content = content


class GatewayUnreachable(Exception):
    """The gateway does not answer now."""


class _Envelope(msgspec.Struct, frozen=True):
    result: msgspec.Raw


class _Target:
    """Where one gateway is reached, at `url` or as this host's own, whose own certificate is trusted, and how a request
    names its sender."""

    def __init__(self, config: Config, url: str | None, token: str, path: str) -> None:
        self.url = url or _own_url(config)
        address = _parsed(self.url)
        self.headers = {b"Host": address.netloc, b"Authorization": f"Bearer {token}".encode()}
        self.context = ssl.create_default_context() if url else _own_tls(config.server)
        if url is None and config.server.hosts:  # a name of it need not lead here
            address = address.copy_with(host=reachable_host(config.server.host))
        path = address.path.rstrip("/") + path
        # httpx would send a user's name and password in place of the token.
        self.base = address.copy_with(path=path, query=None, fragment=None, userinfo=b"")


class TenantClient:
    """Asks one gateway with a tenant's token, over one connection that lasts as long as it is entered."""

    def __init__(self, config: Config, url: str | None, token: str) -> None:
        target = _Target(config, url, token, "/")
        self.url = target.url
        self._base = target.base
        self._client = httpx.Client(
            headers=target.headers, timeout=_STREAM_S, verify=target.context, trust_env=False, follow_redirects=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str) -> bytes:
        """The answer to GET /PATH. Raises GatewayUnreachable, and GatewayRefused for any other than 200."""
        with self._reached():
            response = self._client.get(self._base.join(path))
        if response.status_code != 200:
            raise GatewayRefused(response.status_code, response.content)
        return response.content

    def events(self, path: str, body: object) -> Generator[bytes, None, None]:
        """The `data:` of each event that POST /PATH answers with, up to [DONE], as they come. Whoever stops to read
        ends the call. Raises as `get`, and GatewayUnreachable where the stream breaks off."""
        with (
            self._reached(),
            self._client.stream("POST", self._base.join(path), content=msgspec.json.encode(body)) as response,
        ):
            if response.status_code != 200:
                raise GatewayRefused(response.status_code, response.read())
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                if line.startswith("data: "):
                    yield data.encode()
            raise GatewayUnreachable(f"the answer of the gateway at {self.url} broke off")

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise GatewayUnreachable(f"the gateway at {self.url} does not answer: {reason}") from error


def tenant_token(config: Config, url: str | None, token: str | None) -> str:
    """The given token; else that of the first start, for this configuration's own gateway alone. Raises
    OperatorRefused."""
    credentials = read_credentials(config)
    if token:
        return token
    if url is not None and not _is_own(config, url):
        raise OperatorRefused(
            f"{url} is not this configuration's own gateway: give a token, by --token or HEARTH_TOKEN"
        )
    if credentials is None:
        raise OperatorRefused(f"{config.state} has no credentials of a first start: give a token, by --token")
    return credentials.token


class OperatorClient:
    """Asks one gateway with an operator's token: at `url`, or this host's own, whose own certificate is trusted."""

    def __init__(self, config: Config, url: str | None, token: str) -> None:
        target = _Target(config, url, token, _BASE)
        self.url = target.url
        self._headers, self._context, self._base = target.headers, target.context, target.base

    def ask(self, path: str) -> msgspec.Raw:
        """The document of GET …/operator/PATH. Raises GatewayUnreachable or OperatorRefused."""
        return self._result("GET", path, b"")

    def change(self, path: str, body: msgspec.Struct) -> msgspec.Raw:
        """The document of PATCH …/operator/PATH. Raises as `ask`."""
        return self._result("PATCH", path, msgspec.json.encode(body))

    def _result(self, method: str, path: str, content: bytes) -> msgspec.Raw:
        url, headers = self._base.join(path), self._headers
        try:
            response = httpx.request(
                method, url, content=content, headers=headers, timeout=_ANSWER_S, verify=self._context, trust_env=False
            )
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise GatewayUnreachable(f"the gateway at {self.url} does not answer: {reason}") from error
        if method != "GET" and response.status_code == 404:
            raise OperatorRefused(_first_error(response.content))
        if response.status_code in (401, 403, 404):
            raise OperatorRefused(
                f"the gateway at {self.url} answers {response.status_code}: the token must be a live one with the "
                "permission operator (`hearth tokens mint ACCOUNT --permissions operator`)"
            )
        if response.status_code != 200:
            raise GatewayUnreachable(f"the gateway at {self.url} answers {response.status_code}")
        try:
            return msgspec.json.decode(response.content, type=_Envelope).result
        except msgspec.MsgspecError as error:
            raise OperatorRefused(f"what answers at {self.url} is no Hearth: {error}") from error


def _first_error(content: bytes) -> str:
    """What an answer says is wrong."""
    try:
        return str(msgspec.json.decode(content)["errors"][0]["message"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return "the gateway knows no such thing"


def endpoint_answers(server: ServerConfig, port: int, path: str) -> bool:
    """Whether a gateway on this host says 200 there. Its certificate need not name this host's address."""
    scheme = "https" if server.certificate else "http"
    url = httpx.URL(scheme=scheme, host=reachable_host(server.host), port=port, path=path)
    try:
        return httpx.get(url, timeout=2, verify=False, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def base_url(server: ServerConfig, port: int) -> str:
    """How a client reaches the server: by the first of its names, or by its address on this host."""
    scheme = "https" if server.certificate else "http"
    name = next((name for name in server.hosts if not name.startswith("*.")), reachable_host(server.host))
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


def reachable_host(host: str) -> str:
    """Where a server that listens there is reached from its own host."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def free_port(server: ServerConfig) -> int:
    """The configured port, or one that the system chose for 0. Raises OSError where it is taken."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.create_server((server.host, server.port), family=family) as probe:
        return int(probe.getsockname()[1])


def usable_port(server: ServerConfig) -> int:
    """As `free_port`, but raises SettingsError, which names the option that helps."""
    try:
        return free_port(server)
    except OSError as error:
        raise SettingsError(listen_problem(server, error)) from error


def _own_url(config: Config) -> str:
    credentials = read_credentials(config)
    return credentials.base_url if credentials else base_url(config.server, config.server.port)


def _parsed(url: str) -> httpx.URL:
    """Raises OperatorRefused where it leads nowhere."""
    with contextlib.suppress(httpx.InvalidURL):
        parsed = httpx.URL(url)
        if parsed.scheme in ("http", "https") and parsed.host and parsed.port != 0:
            return parsed
    raise OperatorRefused(f"{url!r} is no address: write it like https://hearth.example.com")


def _own_tls(server: ServerConfig) -> ssl.SSLContext:
    """Trusts the certificate of this host's gateway and no other one, by whatever name it is reached."""
    context = ssl.create_default_context(cafile=server.certificate or None)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = not server.certificate
    return context


def _is_own(config: Config, url: str) -> bool:
    """Whether it leads to where this configuration's gateway listens, on this host."""
    own, target = _parsed(_own_url(config)), _parsed(url)
    return _port(target) == _port(own) and target.host in (*_LOOPBACK, reachable_host(config.server.host))


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


@contextlib.contextmanager
def operator_token(config: Config, url: str | None, token: str | None) -> Iterator[str]:
    """The given token; else, for this configuration's own gateway, an operator's token of its first account, revoked at
    the end. No token is made for any other `url`: whoever answers there could keep using it."""
    if token:
        yield token
        return
    if url is not None and not _is_own(config, url):
        raise OperatorRefused(
            f"{url} is not this configuration's own gateway: give a token of its operator, by --token or HEARTH_TOKEN"
        )
    if not config.secret_path.exists():
        raise OperatorRefused(f"{config.state} is no gateway's state folder: name one by --state, or set HEARTH_TOKEN")
    token_id, text = asyncio.run(ask_store(config, lambda access: _mint(access, config)))
    try:
        yield text
    finally:
        with contextlib.suppress(StoreUnavailable, OSError):  # it expires by itself
            asyncio.run(ask_store(config, lambda access: _revoke(access, token_id)))


async def _mint(access: StoreAccess, config: Config) -> tuple[str, str]:
    """Returns the id and the text of a token of the first start's account if that still exists, else of the oldest one.
    Raises OperatorRefused without any."""
    credentials = read_credentials(config)
    accounts = [each for each in await access.accounts.list() if each.suspended_at is None and not each.home]
    accounts.sort(key=lambda account: credentials is None or account.id != credentials.account_id)
    if not accounts:
        raise OperatorRefused(
            "there is no account yet whose token could be used: `hearth accounts create NAME` makes one"
        )
    grant, expires_at = Grant(permissions=(Permission.OPERATOR,)), int(time.time()) + _TOKEN_S
    token, text = await access.accounts.mint(accounts[0].id, "hearth top", expires_at, grant)
    detail = {"name": token.name, "expires_at": token.expires_at, "grant": token.grant}
    await access.note(token.account_id, "token.create", token.id, **detail)
    return token.id, text


async def _revoke(access: StoreAccess, token_id: str) -> None:
    token = await access.accounts.token(token_id)
    await access.accounts.revoke(token_id)
    await access.note(token.account_id, "token.revoke", token_id)
