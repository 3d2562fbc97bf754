"""The key that an account's notices are signed with, for their receivers. A setting says where they go."""

from typing import Final

import msgspec

from gateway.admin.operation import ACCOUNT, FOR_ADMIN, AdminContext, AdminRequest, AdminResult, NoFields, Operation
from tenants.limits.soft_caps import webhook_secret


class KeyItem(msgspec.Struct, frozen=True):
    """The key in the form of the Standard Webhooks specification; it changes with the server's secret alone."""

    key: str


async def show(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[KeyItem]:
    return AdminResult(KeyItem(webhook_secret(context.notice_key(request.account_id))))


OPERATIONS: Final = (
    Operation("GET", f"{ACCOUNT}/notices/key", show, FOR_ADMIN, "The key that the account's notices are signed with"),
)
