"""What is answered once for each Idempotency-Key, and kept for a day for whoever asks again.

It does not know what is asked. An answer may hold a secret that is shown once, so it is kept encrypted under a key
that is made of the server's secret and of the client's own key, which is kept nowhere: the store alone opens nothing.
"""

import hmac
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway import errors
from gateway.errors import ApiError
from tenants.store.protocol import ClaimStore

IDEMPOTENCY_TTL_S: Final = 86_400
IDEMPOTENCY_KEY: Final = re.compile(r"[!-~]{1,255}")
_NONCE_BYTES: Final = 12


class _StoredAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`request` is a seal of what was asked; the answer is empty until there is one."""

    request: bytes
    answer: bytes = b""


class IdempotencyClaim:
    """A key that this request took: it alone answers. One of `keep` and `free` is called once the answer is known."""

    def __init__(self, claims: ClaimStore, account_id: str, name: str, cipher: AESGCM, request: bytes) -> None:
        self._claims = claims
        self._account_id = account_id
        self._name = name
        self._cipher = cipher
        self._request = request

    async def keep(self, answer: bytes) -> None:
        """For a day. Raises StoreUnavailable."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        kept = _StoredAnswer(self._request, nonce + self._cipher.encrypt(nonce, answer, self._request))
        await self._claims.replace(self._account_id, self._name, msgspec.msgpack.encode(kept), IDEMPOTENCY_TTL_S)

    async def free(self) -> None:
        """Lets a later request take the key. Raises StoreUnavailable."""
        await self._claims.replace(self._account_id, self._name, None, IDEMPOTENCY_TTL_S)


class IdempotencyStore:
    """One store's. `secret` is the server's."""

    def __init__(self, claims: ClaimStore, secret: bytes) -> None:
        self._claims = claims
        self._secret = hmac.digest(secret, b"hearth idempotency", "sha256")

    async def claim(
        self, account_id: str, asker: str, key: str, asked: bytes, lifetime_s: int
    ) -> IdempotencyClaim | bytes:
        """The key, taken for so long where nothing else is done with it; or the answer that is kept under it.

        A key is one asker's, and `asker` names the path too; `asked` is all that makes requests differ. Raises Refusal
        where the key is no key, is another request's, or one with it is in progress; and StoreUnavailable.
        """
        if not IDEMPOTENCY_KEY.fullmatch(key):
            raise errors.bad_input("the header 'Idempotency-Key' is 1 to 255 visible ASCII characters")
        # One seal names the claim, another one, which is never kept, is the key that the answer is encrypted with.
        named = f"{account_id}\n{asker}\n{key}".encode()
        name, cipher = self._seal(b"name", named).hex(), AESGCM(self._seal(b"cipher", named))
        request = self._seal(b"request", asked)
        there = await self._claims.claim(account_id, name, msgspec.msgpack.encode(_StoredAnswer(request)), lifetime_s)
        if there is None:
            return IdempotencyClaim(self._claims, account_id, name, cipher, request)
        kept = msgspec.msgpack.decode(there, type=_StoredAnswer)
        if not hmac.compare_digest(request, kept.request):
            raise errors.key_reused()
        if not kept.answer:
            raise errors.key_in_use()
        return cipher.decrypt(kept.answer[:_NONCE_BYTES], kept.answer[_NONCE_BYTES:], kept.request)

    async def answer(
        self, account_id: str, asker: str, key: str, asked: bytes, create: Callable[[], Awaitable[bytes]]
    ) -> bytes:
        """What `create` returns, or returned to this key's first request. Raises Refusal and StoreUnavailable.

        Where it is refused the key is free again. Where it broke off nobody can know whether it had its effect: then
        the key stays taken for a day, so that there is never a second one.
        """
        claimed = await self.claim(account_id, asker, key, asked, IDEMPOTENCY_TTL_S)
        if isinstance(claimed, bytes):
            return claimed
        try:
            answer = await create()
        except ApiError as refusal:
            if refusal.status < 500:
                await claimed.free()
            raise
        await claimed.keep(answer)
        return answer

    def _seal(self, label: bytes, text: bytes) -> bytes:
        return hmac.digest(self._secret, label + b"\n" + text, "sha256")
