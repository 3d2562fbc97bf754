"""Accounts as their administrators and the operator see them, and the changes that administrators may make."""

from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType, structs

from gateway import errors
from gateway.admin.operation import (
    ACCOUNT,
    FOR_ADMIN,
    AdminContext,
    AdminRequest,
    AdminResult,
    Name,
    NoFields,
    Operation,
    time_of,
    values_validated,
)
from tenants.auth.accounts import checked_account_name
from tenants.limits.soft_caps import webhook_secret
from tenants.records.accounts import Account, Settings
from tenants.records.limits import Limits


class LimitsItem(msgspec.Struct, frozen=True):
    """`most` is what the plan and the operator's `ceiling` allow, `own` what the account's administrators lowered,
    `in_force` the tighter of both."""

    ceiling: Limits
    most: Limits
    own: Limits
    in_force: Limits


class AccountItem(msgspec.Struct, frozen=True):
    """`removed_on` is when an account that was deleted is removed, unless it is restored before. `home` is the cell
    that it is kept in, where that is another one."""

    id: str
    name: str
    plan: str
    created_on: datetime
    suspended_on: datetime | None
    removed_on: datetime | None
    settings: Settings
    limits: LimitsItem
    revision: int
    home: str | None = None


# The fields of Settings, each of which may be left out.
SettingsChange: Final[Any] = msgspec.defstruct(
    "SettingsChange",
    [(field.name, field.type | UnsetType, UNSET) for field in structs.fields(Settings)],
    frozen=True,
    forbid_unknown_fields=True,
)


class AccountChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields that are left out stay as they are, within `settings` too."""

    name: Name | UnsetType = UNSET
    settings: SettingsChange | UnsetType = UNSET


class KeyItem(msgspec.Struct, frozen=True):
    """The key in the form of the Standard Webhooks specification; it changes with the server's secret alone."""

    key: str


def limits_item(account: Account) -> LimitsItem:
    return LimitsItem(account.ceiling, account.ceiling_limits, account.own, account.limits)


def account_answer(account: Account) -> AdminResult[AccountItem]:
    item = AccountItem(
        id=account.id,
        name=account.name,
        plan=account.plan.name,
        created_on=time_of(account.created_at),
        suspended_on=None if account.suspended_at is None else time_of(account.suspended_at),
        removed_on=None if account.deletion is None else time_of(account.deletion.due_at),
        settings=account.settings,
        limits=limits_item(account),
        revision=account.revision,
        home=account.home or None,
    )
    return AdminResult(item, revision=account.revision)


async def show(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[AccountItem]:
    return account_answer(await context.accounts.get(request.account_id))


async def change(context: AdminContext, request: AdminRequest[NoFields, AccountChange]) -> AdminResult[AccountItem]:
    with values_validated():
        fields = {} if request.body.name is UNSET else {"name": checked_account_name(request.body.name)}
    settings: dict[str, Any] = {} if request.body.settings is UNSET else present_fields(request.body.settings)

    def changed(account: Account) -> Account:
        with values_validated():
            return structs.replace(account, settings=structs.replace(account.settings, **settings), **fields)

    sharing, notices = settings.get("sharing"), settings.get("notices")
    if sharing and request.account_id not in sharing:
        raise errors.bad_input("'sharing' names all accounts of the group, this one among them", "settings.sharing")
    if notices is not None and not context.limits.private_notices and not notices.url.lower().startswith("https:"):
        raise errors.bad_input("'url' of notices is an https:// address", "settings.notices.url")
    account = await context.accounts.update(request.account_id, changed, request.revision)
    context.encodings.reach_epoch(account.id, account.epoch)
    await context.note(request.caller, account.id, "account.settings", account.id, **fields, **settings)
    return account_answer(account)


def present_fields(change: msgspec.Struct) -> dict[str, Any]:
    """The fields of a change that were not left out."""
    fields = {name: getattr(change, name) for name in change.__struct_fields__}
    return {name: value for name, value in fields.items() if value is not UNSET}


async def notice_key(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[KeyItem]:
    return AdminResult(KeyItem(webhook_secret(context.notice_key(request.account_id))))


OPERATIONS: Final = (
    Operation("GET", ACCOUNT, show, FOR_ADMIN, "The account, its settings and its limits", versioned=True),
    Operation(
        "PATCH",
        ACCOUNT,
        change,
        FOR_ADMIN,
        "Change its name and settings: zero retention, the cache's scope, sharing, regions, notices",
        versioned=True,
    ),
    Operation(
        "GET", f"{ACCOUNT}/notices/key", notice_key, FOR_ADMIN, "The key that the account's notices are signed with"
    ),
)
