"""A token to join as people copy it: an id, a secret, and the digest of the cluster's authority, which makes the host
sure that it talks to this cluster before it says the secret. It opens no store."""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Final

from tenants.records.cluster import JoinToken

_PREFIX: Final = "hearth-join"
_TEXT: Final = re.compile(rf"{_PREFIX}\.([0-9a-f]{{12}})\.([0-9a-f]{{48}})\.([0-9a-f]{{64}})")


class TokenTextError(ValueError):
    """A text that is no token to join."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """The parts of a token's text."""

    id: str
    secret: str = field(repr=False)
    authority: str

    def __str__(self) -> str:
        return f"{_PREFIX}.{self.id}.{self.secret}.{self.authority}"

    @property
    def digest(self) -> bytes:
        """What the store keeps of the secret: it is long and random, so that a plain hash is enough."""
        return hashlib.sha256(self.secret.encode()).digest()

    def opens(self, token: JoinToken) -> bool:
        return hmac.compare_digest(self.digest, token.digest)


def new_token_text(authority: str) -> TokenText:
    """A new token's text for the authority of this digest."""
    return TokenText(secrets.token_hex(6), secrets.token_hex(24), authority)


def parse_token_text(text: str) -> TokenText:
    """Raises TokenTextError."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise TokenTextError("this is no token to join: `hearth cluster token` on a gateway's host prints one")
    return TokenText(*match.groups())
