"""Bodies and results of batches at rest: encrypted under keys that are made of the server's secret, one for each batch.

The store alone opens nothing. This module knows neither what is sealed nor where it is stored.
"""

import hmac
import secrets
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tenants.records.grants import Grant

_NONCE_BYTES: Final = 12


class BatchOrigin(msgspec.Struct, frozen=True, array_like=True):
    """The address that a batch came from, and of its JWT, which no store has, the rights, until when they hold, and the
    key that signed it. `grant` is None for an ApiToken's."""

    address: str
    grant: Grant | None = None
    expires_at: int | None = None
    key_id: str = ""


class StoredRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request of a batch: its body, and what came beside it. One of an earlier version has no origin."""

    body: bytes
    reference: str | None
    tags: tuple[str, ...]
    metadata: str
    origin: BatchOrigin | None = None


class BatchCipher(NamedTuple):
    """The cipher of one batch. What is sealed for a place and a purpose opens for no other."""

    cipher: AESGCM

    def seal_request(self, place: int, request: StoredRequest) -> bytes:
        return self._seal(b"request", place, msgspec.msgpack.encode(request))

    def open_request(self, place: int, sealed: bytes) -> StoredRequest:
        return msgspec.msgpack.decode(self._open(b"request", place, sealed), type=StoredRequest)

    def seal_result(self, place: int, result: bytes) -> bytes:
        return self._seal(b"result", place, result)

    def open_result(self, place: int, sealed: bytes) -> bytes:
        return self._open(b"result", place, sealed)

    def _seal(self, purpose: bytes, place: int, plain: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self.cipher.encrypt(nonce, plain, b"%b %d" % (purpose, place))

    def _open(self, purpose: bytes, place: int, sealed: bytes) -> bytes:
        return self.cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], b"%b %d" % (purpose, place))


class BatchEncryption:
    """Gives each batch its cipher. `secret` is the server's."""

    def __init__(self, secret: bytes) -> None:
        self._secret = hmac.digest(secret, b"hearth batches", "sha256")

    def cipher(self, account_id: str, batch_id: str) -> BatchCipher:
        return BatchCipher(AESGCM(hmac.digest(self._secret, f"{account_id}\n{batch_id}".encode(), "sha256")))


def join_responses(results: Iterable[tuple[int, bytes]]) -> bytes:
    """The JSON list of opened results, each with its place as `id`."""
    return b"[" + b",".join(b'{"id":%d,' % place + result[1:] for place, result in results) + b"]"
