"""JSON Web Tokens of configured issuers: which are accepted, and what their claims open here. It knows no store.

An accepted JWT is accepted again without computing its signature, as long as the issuer still has the key and the JWT
has not expired.
"""

import asyncio
import hashlib
import ipaddress
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tenants.auth.jwt import InvalidJwt, read_jwt
from tenants.records.grants import Grant, Permission
from tenants.records.tokens import ApiToken
from tenants.store.protocol import Clock, StoreUnavailable

if TYPE_CHECKING:
    from tenants.auth.jwks import JwksCache, PublicKey

log = logging.getLogger(__name__)

PROVEN_MAX: Final = 10_000  # JWTs whose signatures are remembered
LOGGED_MAX: Final = 100  # reasons that are logged
REASON_MAX: Final = 200
NAME_MAX: Final = 255  # of `sub` and `jti`
_URL: Final = re.compile(r"https?://[!-~]+")
_ACCOUNT_ID: Final = re.compile(r"[0-9a-f]{32}")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._:@|/-]+")
_TOKEN_ID_MAX: Final = 64
_JWT_ID: Final = "jwt:"

_Text = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
_Seconds = Annotated[int, Meta(ge=0, le=1 << 40)] | Annotated[float, Meta(ge=0, le=float(1 << 40))]


class IssuerUnavailable(StoreUnavailable):
    """The issuer's keys were never fetched and cannot be fetched now: nobody knows whether the JWT is good."""


class Issuer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[issuers]]: who may sign JWTs for accounts here, and what their claims mean. Raises ValueError."""

    name: Annotated[str, Meta(description="short name, in token ids and logs", pattern="^[a-z0-9][a-z0-9-]{0,15}$")]
    issuer: Annotated[str, Meta(description="the `iss` of its JWTs, exactly", min_length=1, max_length=500)]
    audience: Annotated[str, Meta(description="what `aud` must name: this server", min_length=1, max_length=500)]
    algorithm: Annotated[
        Literal["EdDSA", "ES256", "RS256"], Meta(description="the one algorithm of its signatures: EdDSA, ES256, RS256")
    ]
    jwks_url: Annotated[str | None, Meta(description="https url of its public keys; http on loopback alone")] = None
    jwks_file: Annotated[str | None, Meta(description="file of its public keys (a JWKS), instead of jwks_url")] = None
    ca_file: Annotated[
        str | None, Meta(description="certificates that jwks_url's server is trusted by; default: the system's")
    ] = None
    account_claim: Annotated[_Text, Meta(description="claim that names the account")] = "hearth_account"
    accounts: Annotated[
        dict[str, str], Meta(description="account_claim's values and their account ids; empty: the claim is the id")
    ] = {}
    permissions_claim: Annotated[_Text, Meta(description="claim of permissions, a list or words with spaces")] = (
        "hearth_permissions"
    )
    permissions: Annotated[
        tuple[str, ...], Meta(description="permissions where the claim is missing; empty: such JWTs are refused")
    ] = ()
    permissions_max: Annotated[
        tuple[str, ...], Meta(description="the most that its JWTs may do; operator only where it is named here")
    ] = ("inference", "usage:read", "account:admin")
    models_claim: Annotated[_Text, Meta(description="claim of model patterns, a list or words with spaces")] = (
        "hearth_models"
    )
    models: Annotated[tuple[str, ...], Meta(description="model patterns where the claim is missing")] = ("*",)
    leeway_s: Annotated[
        float, Meta(description="how far ahead its clock may be, for `iat` and `nbf`", ge=0, le=120)
    ] = 10
    token_s_max: Annotated[int, Meta(description="longest life of a JWT, from `iat` to `exp`", ge=1, le=86400)] = 3600

    def __post_init__(self) -> None:
        if (self.jwks_url is None) == (self.jwks_file is None):
            raise ValueError(f"issuer {self.name} needs its keys from one place: jwks_url or jwks_file")
        if self.jwks_url is not None and not _is_trusted(self.jwks_url):
            raise ValueError(f"jwks_url of issuer {self.name} must be https://HOST/PATH; http is for loopback alone")
        for account_id in self.accounts.values():
            if _ACCOUNT_ID.fullmatch(account_id) is None:
                raise ValueError(
                    f"issuer {self.name}: {account_id!r} is no account id; `hearth accounts list` shows them"
                )
        if unknown := {*self.permissions, *self.permissions_max} - set(Permission):
            raise ValueError(f"issuer {self.name}: {unknown} are no permissions; these are: {', '.join(Permission)}")
        if above := set(self.permissions) - set(self.permissions_max):
            raise ValueError(f"issuer {self.name}: {above} are not in its permissions_max")
        Grant(models=self.models)


class _Claims(msgspec.Struct):
    """The registered ones. All but `nbf` must be there."""

    aud: _Text | Annotated[list[_Text], Meta(max_length=100)]
    sub: _Text
    jti: _Text
    iat: _Seconds
    exp: _Seconds
    nbf: _Seconds = 0


@dataclass(frozen=True, slots=True)
class ProvenJwt:
    """The account and rights of a JWT, as a token that no store has, and the key that signed it."""

    token: ApiToken
    keys: "JwksCache"
    kid: str
    key: "PublicKey"


class JwtVerifier:
    """The issuers of one gateway. `run` keeps their keys fresh; without it `verify` raises IssuerUnavailable."""

    def __init__(self, issuers: Sequence[Issuer], clock: Clock = time.time) -> None:
        self._clock = clock
        self._proven: OrderedDict[bytes, ProvenJwt] = OrderedDict()
        self._logged: set[tuple[str, str]] = set()
        self._by_iss = {issuer.issuer: (issuer, keys_of(issuer)) for issuer in issuers}
        assert len(self._by_iss) == len(issuers), "two issuers have the same `iss`"

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _, keys in self._by_iss.values():
                group.create_task(keys.run())

    async def verify(self, text: str) -> ProvenJwt:
        """Proves a JWT; the id of its token is the same for all JWTs of one issuer and subject. Raises InvalidJwt or
        IssuerUnavailable. Costs one hash for a text that was accepted before."""
        digest = hashlib.sha256(text.encode()).digest()
        proven = self._proven.get(digest)
        if proven is None or (proven.keys.known or {}).get(proven.kid) is not proven.key:
            proven = await self._prove(text)
        if self._clock() >= (proven.token.expires_at or 0):
            raise InvalidJwt("it has expired")
        self._remember(digest, proven)
        return proven

    async def check_key(self, token_id: str, kid: str) -> None:
        """Raises InvalidJwt where the JWTs that such a key signed are refused by now, or IssuerUnavailable."""
        name = token_id.removeprefix(_JWT_ID).partition(":")[0]
        for issuer, keys in self._by_iss.values():
            if issuer.name == name:
                await _key_of(issuer, keys, kid)
                return
        raise InvalidJwt("its issuer is none of this server any more")

    def _remember(self, digest: bytes, proven: ProvenJwt) -> None:
        self._proven[digest] = proven
        self._proven.move_to_end(digest)
        if len(self._proven) > PROVEN_MAX:
            self._proven.popitem(last=False)

    async def _prove(self, text: str) -> ProvenJwt:
        jwt = read_jwt(text)
        iss = jwt.claims.get("iss")
        issuer, keys = self._by_iss.get(iss, (None, None)) if isinstance(iss, str) else (None, None)
        if issuer is None or keys is None:
            raise InvalidJwt("its 'iss' is no issuer's of this server")
        if jwt.algorithm != issuer.algorithm:
            raise InvalidJwt("its 'alg' is not its issuer's")
        key = await _key_of(issuer, keys, jwt.kid)
        if not keys.signed(text, key):
            raise InvalidJwt("its signature is not that key's")
        try:
            return ProvenJwt(token_of(issuer, jwt.claims, self._clock()), keys, jwt.kid, key)
        except InvalidJwt as refused:
            self._log_once(issuer.name, str(refused)[:REASON_MAX])
            raise

    def _log_once(self, issuer: str, reason: str) -> None:
        """Logs each reason once: a signed and refused JWT points at the issuer's settings, here or there."""
        if (issuer, reason) not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add((issuer, reason))
            log.warning("jwt_refused", extra={"fields": {"issuer": issuer, "reason": reason}})


async def _key_of(issuer: Issuer, keys: "JwksCache", kid: str) -> "PublicKey":
    key = await keys.key(kid)
    if keys.known is None:
        raise IssuerUnavailable(f"the keys of issuer {issuer.name} could not be fetched yet: {keys.problem}")
    if key is None:
        raise InvalidJwt("its 'kid' is none of its issuer's keys")
    return key


def keys_of(issuer: Issuer) -> "JwksCache":
    """The issuer's keys, not fetched yet. Importing cryptography takes 0.1 s, which only servers with issuers pay."""
    from tenants.auth.jwks import JwksCache

    return JwksCache(issuer.jwks_url or issuer.jwks_file or "", issuer.algorithm, issuer.ca_file)


def token_of(issuer: Issuer, claims: dict[str, Any], now: float) -> ApiToken:
    """The account and rights in claims that this issuer signed, until they expire. Raises InvalidJwt."""
    try:
        registered = msgspec.convert(claims, _Claims)
    except msgspec.ValidationError as error:
        raise InvalidJwt(f"its claims are wrong: {error}") from None
    if issuer.audience not in ([registered.aud] if isinstance(registered.aud, str) else registered.aud):
        raise InvalidJwt("its 'aud' is not this server")
    if registered.iat > now + issuer.leeway_s:
        raise InvalidJwt("its 'iat' lies in the future")
    if registered.nbf > now + issuer.leeway_s:
        raise InvalidJwt("its 'nbf' lies in the future")
    if registered.exp - registered.iat > issuer.token_s_max:
        raise InvalidJwt(f"it lives for {registered.exp - registered.iat:.0f} s; the most is {issuer.token_s_max}")
    token_id, times = _token_id(issuer.name, registered.sub), (int(registered.iat), int(registered.exp))
    return ApiToken(token_id, _account(issuer, claims), token_id, *times, grant=_grant(issuer, claims))


def _account(issuer: Issuer, claims: dict[str, Any]) -> str:
    value = claims.get(issuer.account_claim)
    if isinstance(value, str):
        account_id = issuer.accounts.get(value, "") if issuer.accounts else value
        if _ACCOUNT_ID.fullmatch(account_id):
            return account_id
    raise InvalidJwt(f"its '{issuer.account_claim}' names no account")


def _grant(issuer: Issuer, claims: dict[str, Any]) -> Grant:
    """Words that are no permissions, or more than the issuer may give, give nothing."""
    words = _words(claims, issuer.permissions_claim, issuer.permissions)
    permissions = tuple(word for word in Permission if word in words and word in issuer.permissions_max)
    if not permissions:
        raise InvalidJwt(f"its '{issuer.permissions_claim}' gives no permission")
    try:
        return Grant(permissions, _words(claims, issuer.models_claim, issuer.models))
    except ValueError as error:
        raise InvalidJwt(f"its '{issuer.models_claim}': {error}") from None


def _words(claims: dict[str, Any], name: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """A list of words, or a text of words with spaces between them, as OAuth's `scope` is."""
    if name not in claims:
        return default
    value = claims[name]
    words = [word for word in value.split(" ") if word] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InvalidJwt(f"its '{name}' is no list of words")
    return tuple(words)


def is_jwt_id(token_id: str) -> bool:
    """Whether it is a JWT's; no ApiToken's id has a colon."""
    return token_id.startswith(_JWT_ID)


def _token_id(name: str, subject: str) -> str:
    """The subject itself where it is short and plain, else its hash; a plain one has no #."""
    plain = f"{_JWT_ID}{name}:{subject}"
    if len(plain) <= _TOKEN_ID_MAX and _PLAIN.fullmatch(subject):
        return plain
    return f"{_JWT_ID}{name}:#{hashlib.sha256(subject.encode()).hexdigest()[:32]}"


def _is_trusted(url: str) -> bool:
    """Whether nobody between here and there can change what it answers."""
    if _URL.fullmatch(url) is None:
        return False
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    if not host or "@" in parts.netloc or parts.fragment:
        return False
    return parts.scheme == "https" or host == "localhost" or _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
