"""The tokens' part of the API, in the shapes of Cloudflare's: verify one's own; list, create, get, change, delete and
roll an account's. It does not know how a caller is authenticated.

What is Hearth's own: a token's `models` beside its `policies`, and the ids of permission groups (tenants/grants.py).
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway import errors
from gateway.body import decode, options
from gateway.listing import page_of
from tenants.accounts import Accounts, ApiToken, Caller, NotFound
from tenants.grants import ENTRIES_MAX, Grant, Permission

GRACE_S_MAX: Final = 7 * 86400
TOKEN_BYTES_MAX: Final = 64 * 1024
# By whether the path names a token, and its secret's value.
METHODS: Final = {
    (False, False): ("GET", "POST"),
    (True, False): ("GET", "PUT", "DELETE"),
    (True, True): ("PUT",),
}
_RESOURCE: Final = "com.cloudflare.api.account."
# What an account's administrator may hand on; the operator's tokens are minted on the server alone.
_OFFERED: Final = (Permission.INFERENCE, Permission.USAGE_READ, Permission.ACCOUNT_ADMIN)

Time = Annotated[datetime, Meta(tz=True)]


class _Group(Struct, forbid_unknown_fields=True):
    id: Literal["inference", "usage:read", "account:admin"]
    name: str = ""


class _Policy(Struct, forbid_unknown_fields=True):
    permission_groups: Annotated[list[_Group], Meta(min_length=1, max_length=len(_OFFERED))]
    effect: Literal["allow"] = "allow"
    resources: dict[str, str] = {}
    id: str = ""


class _RequestIp(Struct, forbid_unknown_fields=True):
    in_: Annotated[list[str], Meta(max_length=ENTRIES_MAX)] = msgspec.field(name="in", default_factory=list)


class _Condition(Struct, forbid_unknown_fields=True):
    request_ip: _RequestIp = msgspec.field(default_factory=_RequestIp)


class _Given(Struct, forbid_unknown_fields=True):
    """The body of a creation and of a change, which says all anew."""

    name: str
    policies: Annotated[list[_Policy], Meta(min_length=1, max_length=1)]
    expires_on: Time | None = None
    condition: _Condition = msgspec.field(default_factory=_Condition)
    models: Annotated[list[str], Meta(max_length=ENTRIES_MAX)] | UnsetType = UNSET


class _Rolled(Struct, forbid_unknown_fields=True):
    """For how long the secret before opens yet."""

    grace_seconds: Annotated[int, Meta(ge=0, le=GRACE_S_MAX)] = 0


class Asked(NamedTuple):
    """A request to an account's tokens by its administrator, its path and method known to be right."""

    account_id: str
    token_id: str | None
    value: bool
    method: str
    query: bytes
    body: bytes
    now: float


_given = msgspec.json.Decoder(_Given)
_rolled = msgspec.json.Decoder(_Rolled)


class Tokens:
    """Answers' bodies. Ids of another account's tokens answer like ids that nobody has. Everything raises Refusal."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def verify(self, caller: Caller) -> bytes:
        """Of a JWT too, whose id names its issuer and subject."""
        told = {"code": 10000, "message": "This API Token is valid and active", "type": None}
        result = {"id": caller.token_id, "status": "active", "expires_on": _time(caller.expires_at)}
        return _body(result, messages=[told])

    async def answer(self, asked: Asked) -> bytes:
        if asked.token_id is None:
            return await (self._create(asked) if asked.method == "POST" else self._list(asked))
        token = await self._own(asked.account_id, asked.token_id)
        if asked.value:
            return await self._roll(token, asked)
        if asked.method == "PUT":
            return await self._change(token, asked)
        if asked.method == "DELETE":
            await self._accounts.revoke(token.id)
            return _body({"id": token.id})
        return _body(_item(token, asked.now))

    async def _list(self, asked: Asked) -> bytes:
        """Those that are not revoked, oldest first; past the end a page is empty."""
        tokens = [token for token in await self._accounts.tokens(asked.account_id) if token.revoked_at is None]
        shown, info = page_of(tokens, options(asked.query), per_page=20, most=50)
        return _body([_item(token, asked.now) for token in shown], result_info=info)

    async def _create(self, asked: Asked) -> bytes:
        """The one answer that holds the token's text, as `value`."""
        given = decode(asked.body, _given)
        grant, expires_at = _grant(given, asked.account_id), _expiry(given, asked.now)
        token, text = await self._accounts.mint(asked.account_id, _name(given), expires_at, grant)
        return _body({**_item(token, asked.now), "value": text})

    async def _change(self, token: ApiToken, asked: Asked) -> bytes:
        given = decode(asked.body, _given)
        grant, expires_at = _grant(given, asked.account_id), _expiry(given, asked.now)
        return _body(_item(await self._accounts.change(token.id, _name(given), expires_at, grant), asked.now))

    async def _roll(self, token: ApiToken, asked: Asked) -> bytes:
        """The new secret's text, once."""
        rolled = decode(asked.body or b"{}", _rolled)
        _, text = await self._accounts.roll(token.id, rolled.grace_seconds)
        return _body(text)

    async def _own(self, account_id: str, token_id: str) -> ApiToken:
        try:
            token = await self._accounts.token(token_id)
        except NotFound:
            raise errors.no_such_token() from None
        if token.account_id != account_id or token.revoked_at is not None:
            raise errors.no_such_token()
        return token


def _grant(given: _Given, account_id: str) -> Grant:
    (policy,) = given.policies
    wanted = {f"{_RESOURCE}{account_id}": "*"}
    if policy.resources not in ({}, wanted):
        raise errors.bad_input(f"'resources' may name this account alone: {wanted}", "policies")
    permissions = tuple(Permission(group.id) for group in policy.permission_groups)
    models = ("*",) if given.models is UNSET else tuple(given.models)
    try:
        return Grant(permissions, models, tuple(given.condition.request_ip.in_))
    except ValueError as error:
        raise errors.bad_input(str(error)) from None


def _expiry(given: _Given, now: float) -> float | None:
    if given.expires_on is None:
        return None
    expires_at = given.expires_on.timestamp()
    if expires_at <= now:
        raise errors.bad_input("'expires_on' lies in the past", "expires_on")
    return expires_at


def _name(given: _Given) -> str:
    name = given.name.strip()
    if not 0 < len(name) <= 100 or not name.isprintable():
        raise errors.bad_input("'name' is 1 to 100 printable characters", "name")
    return name


def _item(token: ApiToken, now: float) -> dict[str, Any]:
    expired = token.expires_at is not None and now >= token.expires_at
    groups = [{"id": permission.value, "name": permission.name} for permission in token.grant.permissions]
    return {
        "id": token.id,
        "name": token.name,
        "status": "expired" if expired else "active",
        "issued_on": _time(token.created_at),
        "expires_on": _time(token.expires_at),
        "policies": [
            {
                "effect": "allow",
                "resources": {f"{_RESOURCE}{token.account_id}": "*"},
                "permission_groups": groups,
            }
        ],
        "condition": {"request_ip": {"in": list(token.grant.networks)}},
        "models": list(token.grant.models),
    }


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _body(result: Any, messages: Sequence[Any] = (), **more: Any) -> bytes:
    return msgspec.json.encode({"result": result, "success": True, "errors": [], "messages": messages, **more})
