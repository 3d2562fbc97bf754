"""The account and rights of a verified credential. It knows neither tokens' secrets nor stores."""

from dataclasses import dataclass

from tenants.records.accounts import Account
from tenants.records.grants import Grant
from tenants.records.limits import NO_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class Caller:
    """The account that a verified credential speaks for, and until when (seconds since 1970).

    limits          those of its account; `token_limits` are the token's own.
    scope           16 bytes that separate the prefix caches which it may share from all others.
    scope_epoch     of these caches: any account that shares them raises it.
    account_scope   the scope of its account alone, whatever it shares.
    key_id          of the key that signed its JWT; "" for an ApiToken.
    """

    account: Account
    token_id: str
    grant: Grant
    expires_at: int | None = None
    limits: Limits = NO_LIMITS
    token_limits: Limits = NO_LIMITS
    scope: bytes = b""
    scope_epoch: int = 0
    account_scope: bytes = b""
    key_id: str = ""
