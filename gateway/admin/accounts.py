"""All accounts, for the operator: their list, new ones, plans and ceilings, and who is suspended."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs

from gateway.admin.account import AccountItem, account_answer, present_fields
from gateway.admin.operation import (
    OPERATOR,
    AdminContext,
    Name,
    NoFields,
    Operation,
    OperationRequest,
    OperationResult,
    PageQuery,
    values_validated,
)
from gateway.errors import bad_input
from gateway.listing.pages import sliced
from tenants.auth.accounts import NotFound, Permission, checked_name
from tenants.records.accounts import Account
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.plans import DEFAULT_PLAN, Plan

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
    """What is left out stays as it is; a ceiling is said anew as a whole."""

    name: Name | UnsetType = UNSET
    plan: str | UnsetType = UNSET
    ceiling: Limits | UnsetType = UNSET


async def listed(
    office: AdminContext, ask: OperationRequest[AccountsQuery, NoFields]
) -> OperationResult[list[AccountItem]]:
    query = ask.query
    found = [account for account in await office.gateway.accounts.list() if _matches(account, query)]
    shown, page = sliced(found, query.page, query.per_page)
    return OperationResult([account_answer(account).result for account in shown], page=page)


def _matches(account: Account, query: AccountsQuery) -> bool:
    return (
        (query.name is None or query.name.casefold() in account.name.casefold())
        and query.plan in (None, account.plan.name)
        and query.suspended in (None, "false" if account.suspended_at is None else "true")
    )


async def create(office: AdminContext, ask: OperationRequest[NoFields, NewAccount]) -> OperationResult[AccountItem]:
    given = ask.body
    with values_validated():
        name = checked_name(given.name)
    await _plan(office, given.plan)
    account = await office.gateway.accounts.create(name, given.ceiling, given.plan)
    await office.note(
        ask.caller, account.id, "account.create", account.id, name=name, plan=given.plan, ceiling=given.ceiling
    )
    return account_answer(account)


async def show(office: AdminContext, ask: OperationRequest[NoFields, NoFields]) -> OperationResult[AccountItem]:
    return account_answer(await office.gateway.accounts.get(ask.account_id))


async def change(office: AdminContext, ask: OperationRequest[NoFields, TermsChange]) -> OperationResult[AccountItem]:
    said = present_fields(ask.body)
    given: dict[str, Any] = dict(said)
    if "name" in given:
        with values_validated():
            given["name"] = checked_name(given["name"])
    if "plan" in given:
        given["plan"] = await _plan(office, given["plan"])
    account = await office.gateway.accounts.amend(
        ask.account_id, lambda account: structs.replace(account, **given), ask.revision
    )
    await office.note(ask.caller, account.id, "account.change", account.id, **said)
    return account_answer(account)


async def _plan(office: AdminContext, name: str) -> Plan:
    try:
        return await office.gateway.accounts.plan(name)
    except NotFound:
        raise bad_input("'plan': there is no such plan; GET /client/v4/operator/plans lists them", "plan") from None


async def suspend(office: AdminContext, ask: OperationRequest[NoFields, NoFields]) -> OperationResult[AccountItem]:
    account = await office.gateway.accounts.suspend(ask.account_id)
    await office.note(ask.caller, account.id, "account.suspend", account.id)
    return account_answer(account)


async def resume(office: AdminContext, ask: OperationRequest[NoFields, NoFields]) -> OperationResult[AccountItem]:
    account = await office.gateway.accounts.resume(ask.account_id)
    await office.note(ask.caller, account.id, "account.resume", account.id)
    return account_answer(account)


OPERATIONS: Final = (
    Operation(
        method="GET",
        path=ACCOUNTS,
        summary="All accounts, the oldest first",
        permissions=(Permission.OPERATOR,),
        serve=listed,
        query=AccountsQuery,
        body=NoFields,
        result=list[AccountItem],
    ),
    Operation(
        method="POST",
        path=ACCOUNTS,
        summary="A new account",
        permissions=(Permission.OPERATOR,),
        serve=create,
        query=NoFields,
        body=NewAccount,
        result=AccountItem,
        versioned=True,
        creates=True,
    ),
    Operation(
        method="GET",
        path=ACCOUNT_ITEM,
        summary="One account",
        permissions=(Permission.OPERATOR,),
        serve=show,
        query=NoFields,
        body=NoFields,
        result=AccountItem,
        versioned=True,
    ),
    Operation(
        method="PATCH",
        path=ACCOUNT_ITEM,
        summary="Change an account's name, plan and ceiling",
        permissions=(Permission.OPERATOR,),
        serve=change,
        query=NoFields,
        body=TermsChange,
        result=AccountItem,
        versioned=True,
    ),
    Operation(
        method="POST",
        path=f"{ACCOUNT_ITEM}/suspend",
        summary="Refuse an account's calls within 1 s, and end those that run within 5 s",
        permissions=(Permission.OPERATOR,),
        serve=suspend,
        query=NoFields,
        body=NoFields,
        result=AccountItem,
        versioned=True,
    ),
    Operation(
        method="POST",
        path=f"{ACCOUNT_ITEM}/resume",
        summary="Serve a suspended account again",
        permissions=(Permission.OPERATOR,),
        serve=resume,
        query=NoFields,
        body=NoFields,
        result=AccountItem,
        versioned=True,
    ),
)
