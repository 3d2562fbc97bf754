"""All accounts, for the operator: their list, new ones, plans and ceilings, and who is suspended."""

from collections.abc import Sequence
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
    values_validated,
)
from gateway.errors import bad_input
from gateway.listing.pages import PAGE_MAX, PageItem
from tenants import deletion
from tenants.auth.accounts import checked_account_name
from tenants.auth.errors import NotFound
from tenants.records.account_search import AccountSearch
from tenants.records.accounts import DEFAULT_PLAN, Account, Plan
from tenants.records.limits import NO_LIMITS, Limits

ACCOUNTS: Final = f"{OPERATOR}/accounts"
ACCOUNTS_AT_ONCE: Final = 200
ACCOUNT_ITEM: Final = f"{ACCOUNTS}/{{account_id}}"


class AccountsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`name` is a part of it, in upper or lower case, or the account's id."""

    page: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 1
    per_page: Annotated[int, Meta(ge=1, le=ACCOUNTS_AT_ONCE)] = 20
    order: Literal["created", "name"] = "created"

    name: Annotated[str, Meta(max_length=100)] | None = None
    plan: Annotated[str, Meta(max_length=32)] | None = None
    suspended: Literal["true", "false"] | None = None


class NewAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Name
    plan: str = DEFAULT_PLAN.name
    ceiling: Limits = NO_LIMITS


class DeletionQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For `grace_seconds` the account can be restored; `usage` says what becomes of its ledger then."""

    grace_seconds: Annotated[int, Meta(ge=0, le=int(deletion.GRACE_MAX_S))] = int(deletion.GRACE_S)
    usage: Literal["keep", "drop"] = "keep"


class TermsChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields that are left out stay as they are; a ceiling is replaced as a whole."""

    name: Name | UnsetType = UNSET
    plan: str | UnsetType = UNSET
    ceiling: Limits | UnsetType = UNSET


async def listed(
    context: AdminContext, request: AdminRequest[AccountsQuery, NoFields]
) -> AdminResult[list[AccountItem]]:
    accounts, page = await found(context, request.query)
    return AdminResult([account_answer(account).result for account in accounts], page=page)


async def found(context: AdminContext, query: AccountsQuery) -> tuple[Sequence[Account], PageItem]:
    """Returns the accounts of a page of a search, and which page that is."""
    search = AccountSearch(
        name=query.name or "",
        plan=query.plan,
        suspended=None if query.suspended is None else query.suspended == "true",
        order=query.order,
        first=(query.page - 1) * query.per_page,
        limit=query.per_page,
    )
    accounts, total = await context.store.accounts.search(search)
    return accounts, PageItem(len(accounts), query.page, query.per_page, total)


async def create(context: AdminContext, request: AdminRequest[NoFields, NewAccount]) -> AdminResult[AccountItem]:
    body = request.body
    with values_validated():
        name = checked_account_name(body.name)
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
            changes["name"] = checked_account_name(changes["name"])
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


async def delete(context: AdminContext, request: AdminRequest[DeletionQuery, NoFields]) -> AdminResult[AccountItem]:
    grace_s, keep_usage = request.query.grace_seconds, request.query.usage == "keep"
    now_s = context.calendar()
    account = await deletion.delete(context.accounts, request.account_id, now_s, grace_s, keep_usage=keep_usage)
    detail = {"grace_s": grace_s, "keep_usage": keep_usage}
    await context.note(request.caller, account.id, "account.delete", account.id, **detail)
    return account_answer(account)


async def restore(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[AccountItem]:
    account = await deletion.restore(context.accounts, request.account_id, context.calendar())
    await context.note(request.caller, account.id, "account.restore", account.id)
    return account_answer(account)


OPERATIONS: Final = (
    Operation("GET", ACCOUNTS, listed, FOR_OPERATOR, "All accounts, by name or the oldest first"),
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
    Operation(
        "DELETE",
        ACCOUNT_ITEM,
        delete,
        FOR_OPERATOR,
        "Suspend an account, and remove it after a time in which it can be restored",
        versioned=True,
    ),
    Operation("POST", f"{ACCOUNT_ITEM}/restore", restore, FOR_OPERATOR, "Take a deletion back", versioned=True),
)
