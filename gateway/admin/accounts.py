"""All accounts, for the operator: their list, new ones, plans and ceilings, and who is suspended."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs

from gateway.admin.account import AccountItem, account_answer, present_fields
from gateway.admin.operation import (
    FOR_OPERATOR,
    OPERATOR,
    AdminContext,
    AdminRequest,
    AdminResult,
    Name,
    NoFields,
    Operation,
    PageQuery,
    values_validated,
)
from gateway.errors import bad_input
from gateway.listing.pages import sliced
from tenants.auth.accounts import checked_name
from tenants.auth.errors import NotFound
from tenants.records.accounts import DEFAULT_PLAN, Account, Plan
from tenants.records.limits import NO_LIMITS, Limits

ACCOUNTS: Final = f"{OPERATOR}/accounts"
ACCOUNT_ITEM: Final = f"{ACCOUNTS}/{{account_id}}"


class AccountsQuery(PageQuery, frozen=True, forbid_unknown_fields=True):
    """`name` is a part of it, in upper or lower case."""

    name: Annotated[str, Meta(max_length=100)] | None = None
    plan: Annotated[str, Meta(max_length=32)] | None = None
    suspended: Literal["true", "false"] | None = None


class NewAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Name
    plan: str = DEFAULT_PLAN.name
    ceiling: Limits = NO_LIMITS


class TermsChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields that are left out stay as they are; a ceiling is replaced as a whole."""

    name: Name | UnsetType = UNSET
    plan: str | UnsetType = UNSET
    ceiling: Limits | UnsetType = UNSET


async def listed(
    context: AdminContext, request: AdminRequest[AccountsQuery, NoFields]
) -> AdminResult[list[AccountItem]]:
    query = request.query
    accounts = [account for account in await context.accounts.list() if _matches(account, query)]
    items, page = sliced(accounts, query.page, query.per_page)
    return AdminResult([account_answer(account).result for account in items], page=page)


def _matches(account: Account, query: AccountsQuery) -> bool:
    return (
        (query.name is None or query.name.casefold() in account.name.casefold())
        and query.plan in (None, account.plan.name)
        and query.suspended in (None, "false" if account.suspended_at is None else "true")
    )


async def create(context: AdminContext, request: AdminRequest[NoFields, NewAccount]) -> AdminResult[AccountItem]:
    body = request.body
    with values_validated():
        name = checked_name(body.name)
    await _plan(context, body.plan)
    account = await context.accounts.create(name, body.ceiling, body.plan)
    await context.note(
        request.caller, account.id, "account.create", account.id, name=name, plan=body.plan, ceiling=body.ceiling
    )
    return account_answer(account)


async def show(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[AccountItem]:
    return account_answer(await context.accounts.get(request.account_id))


async def change(context: AdminContext, request: AdminRequest[NoFields, TermsChange]) -> AdminResult[AccountItem]:
    fields = present_fields(request.body)
    changes: dict[str, Any] = dict(fields)
    if "name" in changes:
        with values_validated():
            changes["name"] = checked_name(changes["name"])
    if "plan" in changes:
        changes["plan"] = await _plan(context, changes["plan"])
    account = await context.accounts.update(
        request.account_id, lambda account: structs.replace(account, **changes), request.revision
    )
    await context.note(request.caller, account.id, "account.change", account.id, **fields)
    return account_answer(account)


async def _plan(context: AdminContext, name: str) -> Plan:
    try:
        return await context.accounts.plan(name)
    except NotFound:
        raise bad_input("'plan': there is no such plan; GET /client/v4/operator/plans lists them", "plan") from None


async def suspend(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[AccountItem]:
    account = await context.accounts.suspend(request.account_id)
    await context.note(request.caller, account.id, "account.suspend", account.id)
    return account_answer(account)


async def resume(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[AccountItem]:
    account = await context.accounts.resume(request.account_id)
    await context.note(request.caller, account.id, "account.resume", account.id)
    return account_answer(account)


OPERATIONS: Final = (
    Operation("GET", ACCOUNTS, listed, FOR_OPERATOR, "All accounts, the oldest first"),
    Operation("POST", ACCOUNTS, create, FOR_OPERATOR, "A new account", versioned=True, creates=True),
    Operation("GET", ACCOUNT_ITEM, show, FOR_OPERATOR, "One account", versioned=True),
    Operation(
        "PATCH", ACCOUNT_ITEM, change, FOR_OPERATOR, "Change an account's name, plan and ceiling", versioned=True
    ),
    Operation(
        "POST",
        f"{ACCOUNT_ITEM}/suspend",
        suspend,
        FOR_OPERATOR,
        "Refuse an account's calls within 1 s, and end those that run within 5 s",
        versioned=True,
    ),
    Operation(
        "POST", f"{ACCOUNT_ITEM}/resume", resume, FOR_OPERATOR, "Serve a suspended account again", versioned=True
    ),
)
