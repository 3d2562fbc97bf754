"""The key that an account's notices are signed with, for whoever receives them. Where they go is a setting."""

from typing import Final

import msgspec

from gateway.admin.operation import ACCOUNT, AdminContext, NoFields, Operation, OperationRequest, OperationResult
from tenants.limits.soft_caps import webhook_secret
from tenants.records.grants import Permission


class KeyItem(msgspec.Struct, frozen=True):
    """In the form of the Standard Webhooks specification; the same as long as the server's secret is."""

    key: str


async def show(context: AdminContext, request: OperationRequest[NoFields, NoFields]) -> OperationResult[KeyItem]:
    return OperationResult(KeyItem(webhook_secret(context.notice_key(request.account_id))))


OPERATIONS: Final = (
    Operation(
        method="GET",
        path=f"{ACCOUNT}/notices/key",
        summary="The key that the account's notices are signed with",
        permissions=(Permission.ACCOUNT_ADMIN,),
        serve=show,
        result=KeyItem,
    ),
)
