"""A JWT's compact form and its JSON, read strictly. It knows neither keys nor what the claims mean."""

import base64
import json
import re
from typing import Any, Final, NamedTuple

import msgspec

JWT_BYTES_MAX: Final = 8 << 10
_SHAPE: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
# These would have a reader fetch keys, take them from the sender, or read the rest by other rules.
_DANGEROUS: Final = ("crit", "jku", "jwk", "x5u", "x5c", "b64", "cty", "enc", "zip")
_TYPES: Final = ("jwt", "at+jwt", "application/jwt", "application/at+jwt")

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class InvalidJwt(Exception):
    """A JWT that opens nothing here. The message is for tests and operators; callers are not told it."""


class Jwt(NamedTuple):
    """The parts of a JWT's text. Nothing of it is proven yet."""

    algorithm: object
    kid: str
    claims: dict[str, Any]


def is_jwt(text: str) -> bool:
    """Whether it has a JWT's form: three parts of base64url. No ApiToken has."""
    return _SHAPE.fullmatch(text) is not None


def read_jwt(text: str) -> Jwt:
    """Raises InvalidJwt. Costs are bounded by JWT_BYTES_MAX."""
    if len(text) > JWT_BYTES_MAX:
        raise InvalidJwt(f"it has {len(text)} characters; the most is {JWT_BYTES_MAX}")
    if not is_jwt(text):
        raise InvalidJwt("it is not three parts of base64url")
    try:
        first, second, signature = (_decoded(part) for part in text.split("."))
        header, claims = parse_object(first), parse_object(second)
    except ValueError as error:
        raise InvalidJwt(str(error)) from None
    if not signature:
        raise InvalidJwt("it has no signature")
    for name in _DANGEROUS:
        if name in header:
            raise InvalidJwt(f"its header has '{name}'")
    typ = header.get("typ", "JWT")
    if not isinstance(typ, str) or typ.lower() not in _TYPES:
        raise InvalidJwt("its header's 'typ' is another kind of token's")
    kid = header.get("kid")
    if not isinstance(kid, str):
        raise InvalidJwt("its header names no key by 'kid'")
    return Jwt(header.get("alg"), kid, claims)


def parse_object(text: bytes) -> dict[str, Any]:
    """JSON in UTF-8 without NaN, lone surrogates, numbers out of range or repeated keys. Raises ValueError."""
    try:
        document = _decode_object(text)
        json.loads(text, object_pairs_hook=_unrepeated)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"its JSON is wrong: {error}") from None
    return document


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("its JSON has a key twice")
    return document


def _decoded(part: str) -> bytes:
    """Decodes base64url. Raises ValueError for a text that no encoder writes."""
    decoded = base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
    if base64.urlsafe_b64encode(decoded).rstrip(b"=").decode() != part:
        raise ValueError("its base64url is not as an encoder writes it")
    return decoded
