"""An account's own limits, which its administrators may set below its ceiling, and what is left of them now."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta, structs

from gateway import errors
from gateway.admin.account import LimitsItem, limits_item
from gateway.admin.operation import (
    ACCOUNT,
    FOR_ADMIN,
    FOR_READER,
    AdminContext,
    AdminRequest,
    AdminResult,
    NoFields,
    Operation,
)
from gateway.admin.tokens import own_token
from gateway.inference import rate_limit_headers
from tenants.limits.caps import LimitStatus
from tenants.records.accounts import Account
from tenants.records.limits import NO_LIMITS, RANGES, Limits


class LeftQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The account's limits and those of this token; without `token`, of the token that asks."""

    token: Annotated[str, Meta(max_length=32)] | None = None


class LeftItem(msgspec.Struct, frozen=True):
    """`name` is that of the RateLimit headers, `limit` the field of Limits; `token` is set if it is a token's limit,
    `model_class` if it counts calls of one class. After `reset_s` it is whole again if nothing more is used."""

    name: str
    limit: str
    token: str | None
    model_class: str | None
    allowed: float
    left: float
    reset_s: int


def limits_answer(account: Account) -> AdminResult[LimitsItem]:
    return AdminResult(limits_item(account), revision=account.revision)


async def show(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[LimitsItem]:
    return limits_answer(await context.accounts.get(request.account_id))


async def lower(context: AdminContext, request: AdminRequest[NoFields, Limits]) -> AdminResult[LimitsItem]:
    def lowered(account: Account) -> Account:
        check_below(request.body, account.ceiling_limits)
        return structs.replace(account, own=request.body)

    account = await context.accounts.update(request.account_id, lowered, request.revision)
    await context.note(request.caller, account.id, "account.own_limits", account.id, own=request.body)
    return limits_answer(account)


def check_below(own: Limits, ceilings: Limits, model_class: str = "") -> None:
    """Raises ApiError for a limit above its ceiling; it names both."""
    for name in RANGES:
        ceiling = ceilings.at_once if name == "burst" else getattr(ceilings, name)
        value = getattr(own, name)
        if value is not None and ceiling is not None and value > ceiling:
            field = f"classes.{model_class}.{name}" if model_class else name
            raise errors.bad_input(
                f"'{field}' is {value:,}, above the account's ceiling of {ceiling:,}; the operator alone can raise it",
                field,
            )
    for name, limits in own.classes.items():
        check_below(limits, ceilings.classes.get(name, NO_LIMITS), name)


async def limits_left(context: AdminContext, request: AdminRequest[LeftQuery, NoFields]) -> AdminResult[list[LeftItem]]:
    account = await context.accounts.get(request.account_id)
    token_id, limits = request.caller.token_id, request.caller.token_limits
    if request.query.token is not None:
        token = await own_token(context, request.account_id, request.query.token)
        token_id, limits = token.id, token.limits
    return AdminResult([_item(status) for status in await context.quota.limits_left(account, token_id, limits)])


def _item(status: LimitStatus) -> LeftItem:
    token, _, model_class = status.subject.partition("class:")
    return LeftItem(
        name=rate_limit_headers.title(status),
        limit=status.measure.value,
        token=token.strip().removeprefix("token:") or None,
        model_class=model_class or None,
        allowed=status.allowed,
        left=round(status.remaining, 6),
        reset_s=status.reset_s,
    )


OPERATIONS: Final = (
    Operation(
        "GET",
        f"{ACCOUNT}/limits",
        show,
        FOR_ADMIN,
        "The account's ceiling, its own limits, and what is in force",
        versioned=True,
    ),
    Operation(
        "PUT",
        f"{ACCOUNT}/limits",
        lower,
        FOR_ADMIN,
        "Say the account's own limits anew; none may be above its ceiling",
        versioned=True,
    ),
    Operation(
        "GET", f"{ACCOUNT}/limits/left", limits_left, FOR_READER, "All limits in force, and what is left of each now"
    ),
)
