"""What a server needs beside models: the store, issuers' keys, its certificate, and its port."""

import asyncio
import datetime
import os
from collections.abc import Iterator
from typing import Final

from gateway.commands.access.gateway_client import endpoint_answers, free_port
from gateway.commands.access.store_access import opened_store
from gateway.commands.checks.finding import Finding, good, note, wrong
from gateway.config import Config, ServerConfig, SettingsError
from gateway.http.tls import expiry, open_certificate
from gateway.state_dir import read_credentials
from tenants.auth.issuers import keys_of
from tenants.store.protocol import StoreUnavailable

_RENEW_DAYS: Final = 14  # before its end, a certificate should have a successor


def store(config: Config) -> Iterator[Finding]:
    url = config.store_url
    display_url = url.split("@")[-1]  # without a password

    async def ask() -> list[str]:
        async with opened_store(url) as opened:
            await opened.ping()
            return list(await opened.advice())

    if url.startswith("sqlite:") and not os.path.exists(url.removeprefix("sqlite:")):
        yield good("store", f"{display_url}: made at the first start")
        return
    try:
        advice = asyncio.run(ask())
    except (StoreUnavailable, ValueError) as error:
        yield wrong("store", f"{display_url}: {error}", "start the store, or correct [store] url")
        return
    yield good("store", f"{display_url} answers")
    for line in advice:
        yield note("store", f"{display_url} answers, but", line)


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
        advice = "another program uses it: start with --port (PORT=)"
        return wrong("port", f"{host}:{port}: {error.strerror}", advice)
