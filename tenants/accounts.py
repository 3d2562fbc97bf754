"""Who is calling: accounts, ApiTokens and the scope that separates prefix caches. It knows no prices and no HTTP.

An ApiToken's text is `hearth_` + key id (11) + `_` + 256 random bits (43) + CRC-32 of all before it (6), in base62.
Only its HMAC under the server's secret is kept.
"""

import hashlib
import hmac
import re
import secrets
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from tenants.grants import Grant, Permission
from tenants.store import Account, ApiToken, Clock, Limits, Seal, Store, StoreUnavailable

__all__ = [
    "Account",
    "Accounts",
    "ApiToken",
    "Caller",
    "Grant",
    "Limits",
    "MalformedToken",
    "NotFound",
    "Permission",
    "Unauthenticated",
    "UnknownToken",
]

PEPPER: Final = 1  # the version of the pepper that seals new tokens
TRUSTED_S: Final = 0.5  # how long a verified token is believed; revocation must be seen within 1 s
VERIFIED_MAX: Final = 10_000  # verified tokens kept in memory
NAME_MAX: Final = 100
SECRET_BYTES_MIN: Final = 32

_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LENGTH, _SECRET_LENGTH, _CHECK_LENGTH = 11, 43, 6
_TEXT: Final = re.compile(r"hearth_([0-9A-Za-z]{11})_[0-9A-Za-z]{43}([0-9A-Za-z]{6})")


class Unauthenticated(Exception):
    """This credential opens nothing."""


class MalformedToken(Unauthenticated):
    """The text is no ApiToken; it was refused without asking the store."""


class UnknownToken(Unauthenticated):
    """A well-formed ApiToken that was never issued here, is revoked, or has expired."""


class NotFound(LookupError):
    """There is no account or token of this id."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a verified credential speaks for."""

    account: Account
    token_id: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class _Verified:
    caller: Caller
    token: ApiToken
    until: int | None  # of a secret that was rolled
    at: float


class Accounts:
    """Accounts and ApiTokens in one store. `secret` is the server's, 32 bytes or more; another opens no old token."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        clock: Clock = time.time,
        entropy: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"the server's secret has {len(secret)} bytes; it needs {SECRET_BYTES_MIN} random ones")
        self._store = store
        self._pepper = hmac.digest(secret, b"hearth ApiToken", "sha256")
        self._scope_key = hmac.digest(secret, b"hearth scope", "sha256")
        self._clock = clock
        self._entropy = entropy
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()

    async def verify(self, credential: str) -> Caller:
        """Raises MalformedToken, UnknownToken or StoreUnavailable. A token revoked anywhere is refused within 1 s.

        Costs one hash for a token seen in the last half second, one look-up else.
        """
        token_id = parse_token(credential)
        key = hashlib.sha256(credential.encode()).digest()
        seen, now = self._verified.get(key), self._clock()
        if seen is None or not 0 <= now - seen.at < TRUSTED_S:
            seen = await self._look_up(token_id, credential, key, seen)
        if seen.token.revoked_at is not None:
            raise UnknownToken(f"ApiToken {token_id} was revoked")
        if seen.token.expires_at is not None and now >= seen.token.expires_at:
            raise UnknownToken(f"ApiToken {token_id} has expired")
        if seen.until is not None and now >= seen.until:
            raise UnknownToken(f"this secret of ApiToken {token_id} was rolled")
        return seen.caller

    async def _look_up(self, token_id: str, credential: str, key: bytes, seen: _Verified | None) -> _Verified:
        asked_at = self._clock()
        try:
            found = await self._store.token(token_id)
        except StoreUnavailable:
            if seen is not None and seen.token.revoked_at is not None:
                return seen  # a revocation that was seen stays in force while the store is away
            raise
        if found is None:
            raise UnknownToken(f"no ApiToken {token_id}")
        token, seals, account = found
        digest = self._digest(credential)
        opened = [seal for seal in seals if hmac.compare_digest(digest, seal.digest) and seal.pepper == PEPPER]
        if not opened:
            raise UnknownToken(f"ApiToken {token_id} has another secret")
        verified = _Verified(Caller(account, token.id, token.grant), token, opened[0].until, asked_at)
        self._verified[key] = verified
        self._verified.move_to_end(key)
        if len(self._verified) > VERIFIED_MAX:
            self._verified.popitem(last=False)
        return verified

    async def create(self, name: str, limits: Limits | None = None) -> Account:
        """A new account. Names are for people and need not differ."""
        account_id = self._entropy(16).hex()
        account = Account(account_id, _named(name), limits or Limits(), int(self._clock()))
        await self._store.add_account(account)
        return account

    async def get(self, account_id: str) -> Account:
        account = await self._store.account(account_id)
        if account is None:
            raise NotFound(f"no account {account_id!r}; `hearth accounts list` shows them")
        return account

    async def set_limits(self, account_id: str, limits: Limits) -> Account:
        """In force for the next request on every gateway."""
        if not await self._store.set_limits(account_id, limits):
            raise NotFound(f"no account {account_id!r}; `hearth accounts list` shows them")
        return await self.get(account_id)

    async def mint(
        self, account_id: str, name: str, expires_at: float | None = None, grant: Grant | None = None
    ) -> tuple[ApiToken, str]:
        """A new ApiToken and its text, shown this once and kept nowhere. `expires_at` is seconds since 1970."""
        text = _token_text(_base62(int.from_bytes(self._entropy(8), "big"), _ID_LENGTH), self._entropy)
        expiry = None if expires_at is None else int(expires_at)
        now = int(self._clock())
        token = ApiToken(parse_token(text), account_id, _named(name), now, expiry, grant=grant or Grant())
        if not await self._store.add_token(token, Seal(self._digest(text), PEPPER)):
            raise NotFound(f"no account {account_id!r}; `hearth accounts list` shows them")
        return token, text

    async def roll(self, token_id: str, grace_s: float = 0.0) -> tuple[ApiToken, str]:
        """A new secret for a token, and its text, shown this once. The one before it opens for `grace_s` seconds yet,
        on every gateway; older ones no more. Raises NotFound, also where the token was revoked."""
        token, seals = await self._kept(token_id)
        text = _token_text(token_id, self._entropy)
        now = int(self._clock())
        before = [structs.replace(seals[0], until=now + int(grace_s))] if grace_s > 0 else []
        await self._store.change_token(token, [Seal(self._digest(text), PEPPER), *before])
        return token, text

    async def change(self, token_id: str, name: str, expires_at: float | None, grant: Grant) -> ApiToken:
        """The token with another name, expiry and grant, in force on every gateway within 1 s. Raises NotFound."""
        token, seals = await self._kept(token_id)
        expiry = None if expires_at is None else int(expires_at)
        changed = structs.replace(token, name=_named(name), expires_at=expiry, grant=grant)
        await self._store.change_token(changed, seals)
        return changed

    async def token(self, token_id: str) -> ApiToken:
        """Raises NotFound."""
        found = await self._store.token(token_id)
        if found is None:
            raise NotFound(f"no ApiToken {token_id!r}; `hearth tokens list ACCOUNT` shows them")
        return found[0]

    async def _kept(self, token_id: str) -> tuple[ApiToken, Sequence[Seal]]:
        found = await self._store.token(token_id)
        if found is None or found[0].revoked_at is not None:
            raise NotFound(f"no live ApiToken {token_id!r}; `hearth tokens list ACCOUNT` shows them")
        return found[0], found[1]

    async def tokens(self, account_id: str) -> Sequence[ApiToken]:
        """All of one account, revoked and expired ones too, oldest first."""
        await self.get(account_id)
        return await self._store.tokens(account_id)

    async def revoke(self, token_id: str) -> None:
        """For good, and on every gateway within 1 s."""
        if not await self._store.revoke(token_id, int(self._clock())):
            raise NotFound(f"no ApiToken {token_id!r}; `hearth tokens list ACCOUNT` shows them")

    async def list(self) -> Sequence[Account]:
        """All accounts, oldest first."""
        return await self._store.accounts()

    def scope(self, account_id: str) -> bytes:
        """16 bytes that separate this account's prefix caches from all others; they reveal nothing about it."""
        return hashlib.blake2b(account_id.encode(), digest_size=16, key=self._scope_key).digest()

    def _digest(self, text: str) -> bytes:
        return hmac.digest(self._pepper, text.encode(), "sha256")


def parse_token(text: str) -> str:
    """The key id of an ApiToken's text. Raises MalformedToken for anything that was not printed by `mint`."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise MalformedToken("an ApiToken looks like hearth_<id>_<secret>; copy all of it")
    if match[2] != _checksum(text[: match.start(2)]):
        raise MalformedToken("this ApiToken has a typing error: its checksum is wrong; copy it again")
    return match[1]


def _token_text(key_id: str, entropy: Callable[[int], bytes]) -> str:
    secret = _base62(int.from_bytes(entropy(32), "big"), _SECRET_LENGTH)
    text = f"hearth_{key_id}_{secret}"
    return text + _checksum(text)


def _checksum(text: str) -> str:
    return _base62(zlib.crc32(text.encode()), _CHECK_LENGTH)


def _base62(number: int, length: int) -> str:
    """Exactly `length` digits."""
    digits = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(_DIGITS[digit])
    assert number == 0, f"needs more than {length} digits"
    return "".join(reversed(digits))


def _named(name: str) -> str:
    """The name as it is kept, or ValueError."""
    name = name.strip()
    if not name or len(name) > NAME_MAX or not name.isprintable():
        raise ValueError(f"a name is 1 to {NAME_MAX} printable characters, not {name!r}")
    return name
