"""The public keys of one issuer: read strictly, fetched again in time, retained while the issuer does not answer.

It checks signatures and does not know what a JWT's claims mean.
"""

import asyncio
import logging
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from tenants import outbound
from tenants.auth.jwt import parse_object

JWKS_BYTES_MAX: Final = 64 << 10
RSA_BITS: Final = range(2048, 8193)
FETCH_S: Final = 2.0  # for a fetch as a whole; a request with an unknown key waits for it
REFRESH_S: Final = 300.0  # a key that the issuer withdrew opens nothing after it
RETRY_S: Final = 5.0  # after a fetch that failed
REFETCH_S: Final = 30.0  # strangers with made-up key ids cause no more than one fetch in it

# The key type and the curve that belong to an algorithm.
_KINDS: Final = {"EdDSA": ("OKP", "Ed25519"), "ES256": ("EC", "P-256"), "RS256": ("RSA", None)}

PublicKey = Ed25519PublicKey | EllipticCurvePublicKey | RSAPublicKey

log = logging.getLogger(__name__)


class JwksCache:
    """The keys at an https url, or in a file, for one algorithm. `run` fetches; everybody else only waits for it.

    `known` are the keys by key id, of the last fetch that succeeded, None before the first; `problem` is why the last
    fetch failed, if it did.
    """

    def __init__(self, location: str, algorithm: str, ca_file: str | None) -> None:
        self._location = location
        self._algorithm = algorithm
        self._ca_file = ca_file
        self._signatures = jwt.PyJWS(algorithms=[algorithm])
        self.known: dict[str, PublicKey] | None = None
        self.problem: str | None = None
        self._refresh_requested = asyncio.Event()
        self._fetched = asyncio.Event()  # not set: a fetch is requested or running
        self._next_request = 0.0

    async def key(self, kid: str) -> PublicKey | None:
        """Returns None if the issuer has no such key, as far as can be known within FETCH_S. One fetch serves all that
        wait."""
        if self.known is None or kid not in self.known:
            self._request_refresh()
            with suppress(TimeoutError):
                async with asyncio.timeout(FETCH_S):
                    await self._fetched.wait()
        return (self.known or {}).get(kid)

    def _request_refresh(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._fetched.is_set() and now >= self._next_request:
            self._next_request = now + REFETCH_S
            self._fetched.clear()
            self._refresh_requested.set()

    def signed(self, text: str, key: PublicKey) -> bool:
        """Whether this JWT's signature is this key's, by the one algorithm that is allowed."""
        options: Any = {"enforce_minimum_key_length": True}
        try:
            self._signatures.decode_complete(text, key, algorithms=[self._algorithm], options=options)
        except jwt.PyJWTError:
            return False
        return True

    async def run(self) -> None:
        """Fetches at once, then every REFRESH_S for ever, or sooner if an unknown key is asked for."""
        while True:
            self._fetched.clear()
            self._refresh_requested.clear()
            before = self.problem
            await self.refresh()
            self._fetched.set()
            self._log_change(before)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self.problem else REFRESH_S):
                    await self._refresh_requested.wait()

    async def refresh(self) -> None:
        """Fetches once. If that fails the last good keys stay. A set without usable keys is good: all are withdrawn."""
        try:
            async with asyncio.timeout(FETCH_S):
                text = await self._read()
            self.known = parse_jwks(text, self._algorithm)
            self.problem = None
        except (OSError, ValueError) as error:
            self.problem = str(error) or f"no whole answer within {FETCH_S:g} s"

    def _log_change(self, before: str | None) -> None:
        if self.problem and not before:
            log.error("issuer_away", extra={"fields": {"keys": self._location, "problem": self.problem}})
        elif before and not self.problem:
            log.info("issuer_back", extra={"fields": {"keys": self._location}})

    async def _read(self) -> bytes:
        """The file, or the body of a 200; no redirect is followed. Raises OSError or ValueError.

        It is asynchronous to the bottom: a thread that waits for a slow issuer could not be ended.
        """
        if not self._location.startswith(("https:", "http:")):
            return await asyncio.to_thread(_read_file, Path(self._location))
        tls = await asyncio.to_thread(_trust, self._ca_file) if self._location.startswith("https:") else None
        async with outbound.send("GET", self._location, tls, headers={"accept": "application/json"}) as response:
            if response.status_code != 200:
                raise ValueError(f"it answers with status {response.status_code} where 200 is expected")
            return await outbound.read_body(response, JWKS_BYTES_MAX)


def parse_jwks(text: bytes, algorithm: str) -> dict[str, PublicKey]:
    """The keys of a JWKS that can check this algorithm, by key id. Raises ValueError.

    Issuers publish keys for other uses beside them, so what is of another kind, too weak or without an id is left
    out; of two with one id none can be trusted, and the whole set is refused.
    """
    entries = parse_object(text).get("keys")
    if not isinstance(entries, list):
        raise ValueError("it is no JWKS: it has no list of keys")
    keys: dict[str, PublicKey] = {}
    for entry in entries:
        if (key := _key(entry, algorithm)) is not None:
            if entry["kid"] in keys:
                raise ValueError("two of its keys have the same kid")
            keys[entry["kid"]] = key
    return keys


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
