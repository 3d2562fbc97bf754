"""ApiTokens and digests of their secrets."""

import msgspec

from tenants.records.grants import Grant
from tenants.records.limits import NO_LIMITS, Limits


class ApiToken(msgspec.Struct, frozen=True):
    """A credential without its secret. Times are seconds since 1970."""

    id: str
    account_id: str
    name: str
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None
    grant: Grant = Grant()
    limits: Limits = NO_LIMITS


class TokenDigest(msgspec.Struct, frozen=True):
    """The digest of a secret: its HMAC-SHA256, the pepper's version, and until when it opens if it was rolled."""

    digest: bytes
    pepper: int
    until: int | None = None
