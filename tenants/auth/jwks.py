"""The public keys of one issuer: read strictly, fetched again in time, kept while the issuer does not answer.

It checks signatures and does not know what a JWT's claims mean.
"""

import asyncio
import logging
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from tenants.auth.jwt import parse_object

JWKS_BYTES_MAX: Final = 64 << 10
HEAD_BYTES_MAX: Final = 16 << 10
RSA_BITS: Final = range(2048, 8193)
FETCH_S: Final = 2.0  # for a fetch as a whole; who asks for an unknown key waits for it
REFRESH_S: Final = 300.0  # a key that the issuer withdrew opens nothing after it
RETRY_S: Final = 5.0  # after a fetch that failed
REFETCH_S: Final = 30.0  # strangers with made-up key ids cause no more than one fetch in it

# The key type and the curve that belong to an algorithm.
_KINDS: Final = {"EdDSA": ("OKP", "Ed25519"), "ES256": ("EC", "P-256"), "RS256": ("RSA", None)}

PublicKey = Ed25519PublicKey | EllipticCurvePublicKey | RSAPublicKey

log = logging.getLogger(__name__)


class JwksCache:
    """The keys at an https url, or in a file, for one algorithm. `run` fetches; everybody else only waits for it."""

    def __init__(self, place: str, algorithm: str, ca_file: str | None) -> None:
        self._place = place
        self._algorithm = algorithm
        self._ca_file = ca_file
        self._signatures = jwt.PyJWS(algorithms=[algorithm])
        self._keys: dict[str, PublicKey] | None = None
        self._problem: str | None = None
        self._wanted = asyncio.Event()
        self._landed = asyncio.Event()  # not set: a fetch is wanted or in the air
        self._next_ask = 0.0

    @property
    def problem(self) -> str | None:
        """Why the last fetch failed, if it did."""
        return self._problem

    @property
    def known(self) -> dict[str, PublicKey] | None:
        """By key id, as of the last fetch that succeeded; None before the first."""
        return self._keys

    async def key(self, kid: str) -> PublicKey | None:
        """None: the issuer has no such key, as far as can be known within FETCH_S. One fetch serves all who wait."""
        if self._keys is None or kid not in self._keys:
            self._ask()
            with suppress(TimeoutError):
                async with asyncio.timeout(FETCH_S):
                    await self._landed.wait()
        return (self._keys or {}).get(kid)

    def _ask(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._landed.is_set() and now >= self._next_ask:
            self._next_ask = now + REFETCH_S
            self._landed.clear()
            self._wanted.set()

    def signed(self, text: str, key: PublicKey) -> bool:
        """Whether this JWT's signature is this key's, by the one algorithm that is allowed."""
        options: Any = {"enforce_minimum_key_length": True}
        try:
            self._signatures.decode_complete(text, key, algorithms=[self._algorithm], options=options)
        except jwt.PyJWTError:
            return False
        return True

    async def run(self) -> None:
        """For ever: fetches at once, then every REFRESH_S, or sooner where an unknown key is asked for."""
        while True:
            self._landed.clear()
            self._wanted.clear()
            before = self._problem
            await self.refresh()
            self._landed.set()
            self._tell(before)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._problem else REFRESH_S):
                    await self._wanted.wait()

    async def refresh(self) -> None:
        """One fetch. Where it fails the last good keys stay. A set without a usable key is good: all were withdrawn."""
        try:
            async with asyncio.timeout(FETCH_S):
                text = await self._read()
            self._keys = parse_jwks(text, self._algorithm)
            self._problem = None
        except (OSError, ValueError) as error:
            self._problem = str(error) or f"no whole answer within {FETCH_S:g} s"

    def _tell(self, before: str | None) -> None:
        if self._problem and not before:
            log.error("issuer_away", extra={"fields": {"keys": self._place, "problem": self._problem}})
        elif before and not self._problem:
            log.info("issuer_back", extra={"fields": {"keys": self._place}})

    async def _read(self) -> bytes:
        if self._place.startswith("https:"):
            return await fetch_jwks(self._place, await asyncio.to_thread(_trust, self._ca_file))
        if self._place.startswith("http:"):
            return await fetch_jwks(self._place, None)
        return await asyncio.to_thread(_read_file, Path(self._place))


def parse_jwks(text: bytes, algorithm: str) -> dict[str, PublicKey]:
    """The keys of a JWKS that can check this algorithm, by key id. Raises ValueError.

    Issuers publish keys for other uses beside them, so what is of another kind, too weak or without an id is left
    out; of two with one id none can be trusted, and the whole set is refused.
    """
    entries = parse_object(text).get("keys")
    if not isinstance(entries, list):
        raise ValueError("it is no JWKS: it has no list of keys")
    found: dict[str, PublicKey] = {}
    for entry in entries:
        key = _key(entry, algorithm)
        if key is not None:
            if entry["kid"] in found:
                raise ValueError("two of its keys have the same kid")
            found[entry["kid"]] = key
    return found


def _key(entry: Any, algorithm: str) -> PublicKey | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("kid"), str):
        return None
    if (entry.get("kty"), entry.get("crv")) != _KINDS[algorithm] or "d" in entry:
        return None
    if entry.get("use", "sig") != "sig" or entry.get("alg", algorithm) != algorithm:
        return None
    uses = entry.get("key_ops", ["verify"])
    if not isinstance(uses, list) or "verify" not in uses:
        return None
    try:
        key: PublicKey = jwt.PyJWK(entry, algorithm).key
    except (jwt.PyJWTError, UnsupportedAlgorithm, ValueError, TypeError):
        return None
    return None if isinstance(key, RSAPublicKey) and key.key_size not in RSA_BITS else key


async def fetch_jwks(url: str, tls: ssl.SSLContext | None) -> bytes:
    """The body of a 200; no redirect is followed. Raises OSError or ValueError. The caller limits the time.

    It is asynchronous to the bottom: a thread that waits for a slow issuer could not be ended.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if tls else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = f"GET {target} HTTP/1.1\r\nhost: {parts.netloc}\r\naccept: application/json\r\nconnection: close\r\n\r\n"
        writer.write(head.encode("ascii"))
        answer = _Answer()
        await answer.read(reader)
    finally:
        writer.transport.abort()
    if answer.status != 200:
        raise ValueError(f"it answers with status {answer.status} where 200 is expected")
    return bytes(answer.body)


def _trust(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ValueError(f"ca_file {ca_file}: {error}") from error


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        text = file.read(JWKS_BYTES_MAX + 1)
    if len(text) > JWKS_BYTES_MAX:
        raise ValueError(f"it has more than {JWKS_BYTES_MAX} bytes")
    return text


class _Answer:
    """What the parser of an HTTP answer calls."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.whole = False
        self._parser = httptools.HttpResponseParser(self)

    async def read(self, reader: asyncio.StreamReader) -> None:
        """To the end of the answer, or of the connection: half of a JWKS is no JSON."""
        received = 0
        while not self.whole and (piece := await reader.read(1 << 14)):
            received += len(piece)
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserError as error:
                raise ValueError(f"it answers something that is no HTTP: {error}") from None
            if len(self.body) > JWKS_BYTES_MAX or received > JWKS_BYTES_MAX + HEAD_BYTES_MAX:
                raise ValueError(f"it answers with more than {JWKS_BYTES_MAX} bytes")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.whole = True
