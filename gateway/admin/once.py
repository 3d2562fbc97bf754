"""Answers to creations that are sent again with the same Idempotency-Key: one effect, one answer, for a day.

It does not know what is created. An answer may hold a secret that is shown once, so it is kept encrypted under a key
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
from gateway.errors import Refusal
from tenants.store import Store

KEPT_S: Final = 86_400
KEY: Final = re.compile(r"[!-~]{1,255}")
_NONCE_BYTES: Final = 12


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """`request` is a seal of what was asked; the answer is empty until there is one."""

    request: bytes
    answer: bytes = b""


class Once:
    """One store's. `secret` is the server's."""

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store = store
        self._secret = hmac.digest(secret, b"hearth idempotency", "sha256")

    async def answer(
        self, account_id: str, asker: str, key: str, body: bytes, create: Callable[[], Awaitable[bytes]]
    ) -> bytes:
        """What `create` returns, or returned to this key's first request. Raises Refusal and StoreUnavailable.

        A key is one asker's, and `asker` names the path too. Only one call of those with the same key acts. Where it
        is refused the key is free again. Where it broke off nobody can know whether it had its effect: then the key
        stays taken for a day, so that there is never a second one.
        """
        if not KEY.fullmatch(key):
            raise errors.bad_input("the header 'Idempotency-Key' is 1 to 255 visible ASCII characters")
        # One seal names the claim, another one, which is never kept, is the key that the answer is encrypted with.
        named = f"{account_id}\n{asker}\n{key}".encode()
        name, cipher = self._seal(b"name", named).hex(), AESGCM(self._seal(b"cipher", named))
        asked = _Kept(self._seal(b"request", body))
        there = await self._store.claim(account_id, name, msgspec.msgpack.encode(asked), KEPT_S)
        if there is not None:
            return _again(asked, msgspec.msgpack.decode(there, type=_Kept), cipher)
        try:
            answer = await create()
        except Refusal as refusal:
            if refusal.status < 500:
                await self._store.reclaim(account_id, name, None, KEPT_S)
            raise
        nonce = secrets.token_bytes(_NONCE_BYTES)
        kept = _Kept(asked.request, nonce + cipher.encrypt(nonce, answer, asked.request))
        await self._store.reclaim(account_id, name, msgspec.msgpack.encode(kept), KEPT_S)
        return answer

    def _seal(self, label: bytes, text: bytes) -> bytes:
        return hmac.digest(self._secret, label + b"\n" + text, "sha256")


def _again(asked: _Kept, kept: _Kept, cipher: AESGCM) -> bytes:
    if not hmac.compare_digest(asked.request, kept.request):
        raise errors.key_reused()
    if not kept.answer:
        raise errors.key_in_use()
    nonce, sealed = kept.answer[:_NONCE_BYTES], kept.answer[_NONCE_BYTES:]
    return cipher.decrypt(nonce, sealed, kept.request)
