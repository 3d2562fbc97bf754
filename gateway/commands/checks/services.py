"""What a server needs beside models: the store, issuers' keys, its certificate, and its port."""

import asyncio
import datetime
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from gateway.commands.access.gateway_client import endpoint_answers, free_port
from gateway.commands.access.store_access import opened_store
from gateway.commands.checks.finding import Finding, good, note, wrong
from gateway.commands.terminal.listening import listen_problem
from gateway.http.tls import expiry, open_certificate
from gateway.identity.host_identity import IdentityError
from gateway.settings.config import Config, SettingsError
from gateway.settings.server import ServerConfig
from gateway.state_dir import read_credentials
from tenants.auth.issuers import keys_of
from tenants.open import safe_url
from tenants.records.accounts import Account, name_key
from tenants.store.protocol import StoreUnavailable

_RENEW_DAYS: Final = 14  # before its end, a certificate should have a successor
_RENEW_LATE_S: Final = 3600  # a host that is asleep renews as it wakes


def store(config: Config) -> Iterator[Finding]:
    url = config.store_url
    display_url = safe_url(url)

    async def ask() -> tuple[list[str], Sequence[Account]]:
        async with opened_store(url) as opened:
            await opened.ping()
            return list(await opened.advice()), await opened.accounts.list()

    if url.startswith("sqlite:") and not os.path.exists(url.removeprefix("sqlite:")):
        yield good("store", f"{display_url}: made at the first start")
        return
    try:
        advice, accounts = asyncio.run(ask())
    except (StoreUnavailable, ValueError) as error:
        yield wrong("store", f"{display_url}: {error}", "start the store, or correct [store] url")
        return
    yield good("store", f"{display_url} answers")
    for line in advice:
        yield note("store", f"{display_url} answers, but", line)
    yield from _shared_names(accounts)


def _shared_names(accounts: Sequence[Account]) -> Iterator[Finding]:
    """Names that several accounts have, from before names were unique; copies of other cells' accounts may have any."""
    holders: defaultdict[str, list[Account]] = defaultdict(list)
    for account in (one for one in accounts if not one.home):
        holders[name_key(account.name)].append(account)
    for of_name in holders.values():
        if len(of_name) > 1:
            ids = ", ".join(account.id for account in of_name)
            text = f"{len(of_name)} accounts have the name {of_name[0].name!r}: {ids}"
            yield note(
                "names", text, "give each its own: `hearth accounts rename ID NAME`; until then only ids name them"
            )


def issuers(config: Config) -> Iterator[Finding]:
    """Fetches the keys of issuers as a gateway does."""
    for issuer in config.issuers:
        origin, keys = issuer.jwks_url or issuer.jwks_file, keys_of(issuer)
        asyncio.run(keys.refresh())
        if keys.problem:
            advice = "its JWTs get 503 until a gateway has its keys: see to its server, or correct [[issuers]]"
            yield wrong("issuer", f"{issuer.name}: {origin}: {keys.problem}", advice)
        elif not keys.known:
            advice = "its JWTs get 401: correct `algorithm`, or have it publish a key with a `kid`"
            yield wrong("issuer", f"{issuer.name}: {origin} has no key for {issuer.algorithm}", advice)
        else:
            text = f"{issuer.name}: {len(keys.known)} keys for {issuer.algorithm} at {origin}"
            yield good("issuer", text)


def identity(config: Config) -> Iterator[Finding]:
    """Says as what this host is in its cluster, where it has joined one, and until when."""
    paths = config.cluster.paths(config.state)
    if not paths.exist and not config.cluster.own_pki:
        return
    from gateway.identity.files import read_credentials  # only here: most hosts have no keys

    again = "correct [cluster] certificate" if config.cluster.own_pki else "join anew: --join with a new --token"
    try:
        found = read_credentials(paths)
    except IdentityError as error:
        yield wrong("cluster", str(error), again)
        return
    until = f"{datetime.datetime.fromtimestamp(found.expires_s, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    text = f"{found.identity} of {found.identity.cluster}, its certificate until {until}"
    late_s = time.time() - found.renew_s
    if time.time() > found.expires_s:
        yield wrong("cluster", f"the certificate of the {found.identity} has expired at {until}", again)
    elif late_s > _RENEW_LATE_S and not config.cluster.own_pki:
        yield note("cluster", text, f"it should have been renewed {late_s / 3600:.0f} h ago: no gateway answers it")
    else:
        yield good("cluster", text)


def certificate(server: ServerConfig) -> Iterator[Finding]:
    """Whether clients accept the certificate, and how long."""
    try:
        if open_certificate(server) is None:
            return
        ends = expiry(server.certificate)
    except SettingsError as error:
        yield wrong("tls", str(error), "correct [server] certificate and key")
        return
    days = (ends - datetime.datetime.now(datetime.UTC)).days
    text = f"{server.certificate} is good until {ends:%Y-%m-%d}, {days} days"
    if days < 0:
        expired = f"{server.certificate} has expired on {ends:%Y-%m-%d}"
        yield wrong("tls", expired, "put a new one there: it is taken up within a second")
    elif days < _RENEW_DAYS:
        yield note("tls", text, "put a new one there in time: it is taken up within a second")
    else:
        yield good("tls", text)
    if os.stat(server.key).st_mode & 0o077:
        yield note("tls", f"{server.key} can be read by others", f"chmod 600 {server.key}")


def port(config: Config) -> Finding:
    host, port = config.server.host, config.server.port
    try:
        free_port(config.server)
        return good("port", f"{host}:{port} is free")
    except OSError as error:
        credentials = read_credentials(config)
        is_own = credentials is not None and credentials.base_url.endswith(f":{port}")
        if is_own and endpoint_answers(config.server, port, "/healthz"):
            return good("port", f"Hearth answers on {host}:{port}; /client/v4/openapi.json says what")
        problem, _, advice = listen_problem(config.server, error).partition("; ")
        return wrong("port", problem, advice)
