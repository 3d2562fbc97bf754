"""The tokens' part of the API, in the shapes of Cloudflare's: verify one's own; list, create, get, change, delete and
roll an account's.

Hearth adds a token's `models` and `limits` to its `policies`, and has its own ids of permission groups
(tenants/records/grants.py). Ids of another account's tokens answer like ids that nobody has.
"""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway import errors
from gateway.admin.operation import (
    ACCOUNT,
    BASE,
    FOR_ADMIN,
    FOR_OPERATOR,
    OPERATOR,
    AdminContext,
    AdminRequest,
    AdminResult,
    Name,
    NoFields,
    Operation,
    ResponseInfo,
    Time,
    time_of,
    values_validated,
)
from gateway.listing.pages import PAGE_MAX, sliced
from tenants.auth.accounts import checked_name
from tenants.auth.errors import NotFound
from tenants.records.grants import BEYOND_ACCOUNT, ENTRIES_MAX, Grant, Permission
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.tokens import ApiToken

GRACE_S_MAX: Final = 7 * 86400
TOKENS_MAX: Final = 1_000  # of one account, revoked ones left out
_SCOPE: Final = "com.cloudflare.api.account"
# Permissions that an account's administrator may grant; the operator's tokens are minted on the server alone.
_OFFERED: Final = (Permission.INFERENCE, Permission.USAGE_READ, Permission.ACCOUNT_ADMIN)


class TokensQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """A page of the tokens, by the time of their creation."""

    page: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 1
    per_page: Annotated[int, Meta(ge=1, le=50)] = 20
    direction: Literal["asc", "desc"] = "asc"


class GroupsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    name: str = ""
    scope: str = ""


class GroupGiven(Struct, frozen=True, forbid_unknown_fields=True):
    id: Literal["inference", "usage:read", "account:admin"]
    name: str = ""


class PolicyGiven(Struct, frozen=True, forbid_unknown_fields=True):
    permission_groups: Annotated[list[GroupGiven], Meta(min_length=1, max_length=len(_OFFERED))]
    effect: Literal["allow"] = "allow"
    resources: dict[str, str] = {}
    id: str = ""


class RequestIp(Struct, frozen=True, forbid_unknown_fields=True):
    in_: Annotated[list[str], Meta(max_length=ENTRIES_MAX)] = msgspec.field(name="in", default_factory=list)


class Condition(Struct, frozen=True, forbid_unknown_fields=True):
    request_ip: RequestIp = msgspec.field(default_factory=RequestIp)


class TokenGiven(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a creation, and of a change, which replaces all fields."""

    name: Name
    policies: Annotated[list[PolicyGiven], Meta(min_length=1, max_length=1)]
    expires_on: Time | None = None
    condition: Condition = msgspec.field(default_factory=Condition)
    models: Annotated[list[str], Meta(max_length=ENTRIES_MAX)] | UnsetType = UNSET
    limits: Limits = NO_LIMITS


class Rolled(Struct, frozen=True, forbid_unknown_fields=True):
    """How long the previous secret stays valid."""

    grace_seconds: Annotated[int, Meta(ge=0, le=GRACE_S_MAX)] = 0


class GroupItem(Struct, frozen=True):
    id: str
    name: str


class GroupOffered(Struct, frozen=True):
    """A permission group that a policy can name."""

    id: str
    name: str
    scopes: tuple[str, ...] = (_SCOPE,)


class PolicyItem(Struct, frozen=True):
    effect: str
    resources: dict[str, str]
    permission_groups: list[GroupItem]


class TokenItem(Struct, frozen=True):
    """`value` is the token's text, only in the answer to its creation."""

    id: str
    name: str
    status: Literal["active", "expired"]
    issued_on: datetime
    expires_on: datetime | None
    policies: list[PolicyItem]
    condition: Condition
    models: list[str]
    limits: Limits
    value: str | UnsetType = UNSET


class VerifiedItem(Struct, frozen=True):
    """What the token that asks stands for and may do; all after `expires_on` is Hearth's own."""

    id: str
    status: Literal["active"]
    expires_on: datetime | None
    account_id: str
    account_name: str
    permissions: list[str]
    models: list[str]


class EndedItem(Struct, frozen=True):
    id: str


async def verify(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[VerifiedItem]:
    """Describes the caller's token; the id of a JWT names its issuer and subject."""
    message = ResponseInfo(10000, "This API Token is valid and active")
    caller = request.caller
    item = VerifiedItem(
        id=caller.token_id,
        status="active",
        expires_on=_time(caller.expires_at),
        account_id=caller.account.id,
        account_name=caller.account.name,
        permissions=list(caller.grant.permissions),
        models=list(caller.grant.models),
    )
    return AdminResult(item, messages=(message,))


async def permission_groups(
    context: AdminContext, request: AdminRequest[GroupsQuery, NoFields]
) -> AdminResult[list[GroupOffered]]:
    """Lists permission groups; `name` and `scope` filter them."""
    groups = [GroupOffered(permission.value, permission.value) for permission in _OFFERED]
    name, scope = request.query.name, request.query.scope
    return AdminResult([group for group in groups if name in ("", group.name) and scope in ("", *group.scopes)])


async def listed(context: AdminContext, request: AdminRequest[TokensQuery, NoFields]) -> AdminResult[list[TokenItem]]:
    """Lists the tokens that are not revoked."""
    query, now = request.query, context.calendar()
    tokens = await _live(context, request.account_id)
    items, page = sliced(tokens if query.direction == "asc" else tokens[::-1], query.page, query.per_page)
    return AdminResult([_item(token, now) for token in items], page=page)


async def _live(context: AdminContext, account_id: str) -> list[ApiToken]:
    return [token for token in await context.accounts.tokens(account_id) if token.revoked_at is None]


async def show(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[TokenItem]:
    token = await own_token(context, request.account_id, request.names["token_id"])
    return AdminResult(_item(token, context.calendar()))


async def create(context: AdminContext, request: AdminRequest[NoFields, TokenGiven]) -> AdminResult[TokenItem]:
    """Mints a token; no other answer holds its text."""
    now = context.calendar()
    content = _content(request, now)
    if len(await _live(context, request.account_id)) >= TOKENS_MAX:
        raise errors.conflict(f"the account has {TOKENS_MAX:,} tokens, which is the most: revoke some first")
    token, text = await context.accounts.mint(request.account_id, *content)
    await context.note(request.caller, request.account_id, "token.create", token.id, **_audit_fields(request.body))
    return AdminResult(msgspec.structs.replace(_item(token, now), value=text))


async def change(context: AdminContext, request: AdminRequest[NoFields, TokenGiven]) -> AdminResult[TokenItem]:
    now = context.calendar()
    token = await _changeable(context, request)
    changed = await context.accounts.update_token(token.id, *_content(request, now))
    await context.note(request.caller, request.account_id, "token.change", token.id, **_audit_fields(request.body))
    return AdminResult(_item(changed, now))


async def end(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[EndedItem]:
    token = await _changeable(context, request)
    await context.accounts.revoke(token.id)
    await context.note(request.caller, request.account_id, "token.revoke", token.id)
    return AdminResult(EndedItem(token.id))


async def roll(context: AdminContext, request: AdminRequest[NoFields, Rolled]) -> AdminResult[str]:
    """Replaces a token's secret, and returns its text, once."""
    token = await _changeable(context, request)
    _, text = await context.accounts.roll(token.id, request.body.grace_seconds)
    await context.note(
        request.caller, request.account_id, "token.roll", token.id, grace_seconds=request.body.grace_seconds
    )
    return AdminResult(text)


async def own_token(context: AdminContext, account_id: str, token_id: str) -> ApiToken:
    """Returns a token of this account. Raises ApiError if there is none, or it is revoked."""
    try:
        token = await context.accounts.token(token_id)
    except NotFound:
        raise errors.not_found("token in this account") from None
    if token.account_id != account_id or token.revoked_at is not None:
        raise errors.not_found("token in this account")
    return token


async def _changeable(context: AdminContext, request: AdminRequest[Any, Any]) -> ApiToken:
    """Returns a token that the caller may change: an administrator who could roll an operator's token would be the
    operator. Raises ApiError."""
    token = await own_token(context, request.account_id, request.names["token_id"])
    if any(map(token.grant.permits, BEYOND_ACCOUNT)) and not request.caller.grant.permits(Permission.OPERATOR):
        raise errors.not_permitted(Permission.OPERATOR)
    return token


def _content(request: AdminRequest[NoFields, TokenGiven], now: float) -> tuple[str, float | None, Grant, Limits]:
    """Returns the name, expiry, grant and limits that a body gives a token. Raises ApiError."""
    body = request.body
    (policy,) = body.policies
    own = _resources(request.account_id)
    if policy.resources not in ({}, own):
        raise errors.bad_input(f"'resources' may name this account alone: {own}", "policies")
    permissions = tuple(Permission(group.id) for group in policy.permission_groups)
    models = ("*",) if body.models is UNSET else tuple(body.models)
    with values_validated():
        grant = Grant(permissions, models, tuple(body.condition.request_ip.in_))
        expires_at = None if body.expires_on is None else body.expires_on.timestamp()
        if expires_at is not None and expires_at <= now:
            raise errors.bad_input("'expires_on' lies in the past", "expires_on")
        return checked_name(body.name), expires_at, grant, body.limits


def _resources(account_id: str) -> dict[str, str]:
    return {f"{_SCOPE}.{account_id}": "*"}


def _audit_fields(body: TokenGiven) -> dict[str, Any]:
    """The fields for the audit log."""
    return {name: value for name, value in msgspec.to_builtins(body).items() if value}


def _item(token: ApiToken, now: float) -> TokenItem:
    expired = token.expires_at is not None and now >= token.expires_at
    groups = [GroupItem(permission.value, permission.value) for permission in token.grant.permissions]
    return TokenItem(
        id=token.id,
        name=token.name,
        status="expired" if expired else "active",
        issued_on=time_of(token.created_at),
        expires_on=_time(token.expires_at),
        policies=[PolicyItem("allow", _resources(token.account_id), groups)],
        condition=Condition(RequestIp(list(token.grant.networks))),
        models=list(token.grant.models),
        limits=token.limits,
    )


def _time(seconds: int | None) -> datetime | None:
    return None if seconds is None else time_of(seconds)


_TOKENS: Final = f"{ACCOUNT}/tokens"
_TOKEN: Final = f"{_TOKENS}/{{token_id}}"
_OPERATOR_TOKENS: Final = f"{OPERATOR}/accounts/{{account_id}}/tokens"
_OPERATOR_TOKEN: Final = f"{_OPERATOR_TOKENS}/{{token_id}}"

OPERATIONS: Final = (
    Operation("GET", f"{BASE}/user/tokens/verify", verify, (), "Whether the token that asks is in force"),
    Operation("GET", f"{_TOKENS}/verify", verify, (), "Whether the token that asks is in force, and this account's"),
    Operation(
        "GET",
        f"{_TOKENS}/permission_groups",
        permission_groups,
        FOR_ADMIN,
        "What a token of the account may be permitted",
    ),
    Operation("GET", _TOKENS, listed, FOR_ADMIN, "The account's tokens that are not revoked"),
    Operation("POST", _TOKENS, create, FOR_ADMIN, "A new token; its text is in this answer alone", creates=True),
    Operation("GET", _TOKEN, show, FOR_ADMIN, "One token"),
    Operation("PUT", _TOKEN, change, FOR_ADMIN, "Say a token anew, in force within 1 s"),
    Operation("DELETE", _TOKEN, end, FOR_ADMIN, "Revoke a token, within 1 s and for good"),
    Operation(
        "PUT",
        f"{_TOKEN}/value",
        roll,
        FOR_ADMIN,
        "A new secret for a token; the one before it may open for a while yet",
        optional=True,
    ),
    Operation("GET", _OPERATOR_TOKENS, listed, FOR_OPERATOR, "An account's tokens that are not revoked"),
    Operation(
        "POST",
        _OPERATOR_TOKENS,
        create,
        FOR_OPERATOR,
        "A new token of an account, its first one for an administrator; its text is in this answer alone",
        creates=True,
    ),
    Operation("DELETE", _OPERATOR_TOKEN, end, FOR_OPERATOR, "Revoke a token of an account, within 1 s and for good"),
)
