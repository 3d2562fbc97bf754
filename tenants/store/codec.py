"""Accounts and plans as the JSON documents in stores. It does not know the stores.

New fields have defaults, so that documents of earlier versions are read as they are.
"""

from typing import Any, Final

import msgspec
from msgspec import structs

from tenants.records.accounts import Account, Deletion, Plan, Settings
from tenants.records.limits import NO_LIMITS, Limits


class _AccountDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """An account without what has columns of its own: id, times, revision and the plan's name."""

    name: str
    ceiling: Limits = NO_LIMITS
    own: Limits = NO_LIMITS
    settings: Settings = Settings()
    epoch: int = 0
    deletion: Deletion | None = None
    home: str = ""


_read_account = msgspec.json.Decoder(_AccountDocument).decode
read_plan: Final = msgspec.json.Decoder(Plan).decode


def account_document(account: Account) -> str:
    return msgspec.json.encode(msgspec.convert(account, _AccountDocument, from_attributes=True)).decode()


def read_account(
    account_id: str, created_at: int, revision: int, suspended_at: int | None, document: str | bytes, plan: Plan
) -> Account:
    fields: dict[str, Any] = structs.asdict(_read_account(document))
    fields |= {"created_at": created_at, "revision": revision, "suspended_at": suspended_at}
    return Account(id=account_id, plan=plan, **fields)


def plan_document(plan: Plan) -> str:
    """Without what only a strict plan has, which earlier versions do not read."""
    fields = structs.asdict(plan)
    if not plan.strict:
        del fields["strict"]
    return msgspec.json.encode(fields).decode()
