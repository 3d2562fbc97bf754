"""One answer for each Idempotency-Key, stored for a day for requests that repeat it.

It does not know what is asked. An answer may hold a secret that is shown once, so it is stored encrypted under a key
made of the server's secret and of the client's own key, which is stored nowhere: the store alone opens nothing.
"""

import asyncio
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway import errors
from gateway.errors import ApiError
from tenants.store.protocol import ClaimStore

IDEMPOTENCY_TTL_S: Final = 86_400
IDEMPOTENCY_KEY: Final = re.compile(r"[!-~]{1,255}")
_NONCE_BYTES: Final = 12
_AT_ONCE_BYTES: Final = 1 << 20  # a longer request is sealed in a thread: a megabyte takes a millisecond


class _StoredAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`request` is a seal of the request; the answer is empty until there is one."""

    request: bytes
    answer: bytes = b""


@dataclass(frozen=True, slots=True)
class IdempotencyClaim:
    """A key that one request took: it alone answers. It ends with one of `store` and `release`."""

    claims: ClaimStore
    account_id: str
    name: str
    cipher: AESGCM
    request: bytes

    async def store(self, answer: bytes) -> None:
        """Stores the answer for a day. Raises StoreUnavailable."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        stored = _StoredAnswer(self.request, nonce + self.cipher.encrypt(nonce, answer, self.request))
        await self.claims.replace(self.account_id, self.name, msgspec.msgpack.encode(stored), IDEMPOTENCY_TTL_S)

    async def release(self) -> None:
        """Lets a later request take the key. Raises StoreUnavailable."""
        await self.claims.replace(self.account_id, self.name, None, IDEMPOTENCY_TTL_S)


class IdempotencyStore:
    """The keys and answers of one store. `secret` is the server's."""

    def __init__(self, claims: ClaimStore, secret: bytes) -> None:
        self._claims = claims
        self._secret = hmac.digest(secret, b"hearth idempotency", "sha256")

    async def claim(
        self, account_id: str, subject: str, key: str, content: bytes, lifetime_s: int
    ) -> IdempotencyClaim | bytes:
        """Takes the key, for `lifetime_s` if nothing else happens to it; or returns the answer that is stored under it.

        A key belongs to one `subject`, a token and a path; `content` is all that makes requests differ. Raises ApiError
        if the key is malformed, belongs to another request, or is in progress; and StoreUnavailable.
        """
        if not IDEMPOTENCY_KEY.fullmatch(key):
            raise errors.bad_input("the header 'Idempotency-Key' is 1 to 255 visible ASCII characters")
        # One seal names the claim; another one, which is never stored, is the key that the answer is encrypted with.
        identity = f"{account_id}\n{subject}\n{key}".encode()
        name, cipher = self._seal(b"name", identity).hex(), AESGCM(self._seal(b"cipher", identity))
        if len(content) > _AT_ONCE_BYTES:
            request = await asyncio.to_thread(self._seal, b"request", content)
        else:
            request = self._seal(b"request", content)
        claim = msgspec.msgpack.encode(_StoredAnswer(request))
        existing = await self._claims.claim(account_id, name, claim, lifetime_s)
        if existing is None:
            return IdempotencyClaim(self._claims, account_id, name, cipher, request)
        stored = msgspec.msgpack.decode(existing, type=_StoredAnswer)
        if not hmac.compare_digest(request, stored.request):
            raise errors.key_reused()
        if not stored.answer:
            raise errors.key_in_use()
        return cipher.decrypt(stored.answer[:_NONCE_BYTES], stored.answer[_NONCE_BYTES:], stored.request)

    async def answer(
        self, account_id: str, subject: str, key: str, content: bytes, create: Callable[[], Awaitable[bytes]]
    ) -> bytes:
        """Returns what `create` returns, or returned to this key's first request. Raises ApiError and StoreUnavailable.

        If the request is refused, the key is free again. If it broke off, nobody can know whether it had its effect:
        then the key stays taken for a day, so that there is never a second effect.
        """
        claim = await self.claim(account_id, subject, key, content, IDEMPOTENCY_TTL_S)
        if isinstance(claim, bytes):
            return claim
        try:
            answer = await create()
        except ApiError as refusal:
            if refusal.status < 500:
                await claim.release()
            raise
        await claim.store(answer)
        return answer

    def _seal(self, label: bytes, text: bytes) -> bytes:
        seal = hmac.new(self._secret, label + b"\n", "sha256")
        seal.update(text)  # other threads run meanwhile
        return seal.digest()
