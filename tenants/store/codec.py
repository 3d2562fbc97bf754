"""Accounts and plans as the JSON documents in stores. It does not know the stores.

New fields have defaults, so that documents of earlier versions are read as they are.
"""

import msgspec

from tenants.records.accounts import Account
from tenants.records.limits import NO_LIMITS, Limits
from tenants.records.plans import Plan
from tenants.records.settings import Settings


class _Account(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    ceiling: Limits = NO_LIMITS
    own: Limits = NO_LIMITS
    settings: Settings = Settings()
    epoch: int = 0


_read_account = msgspec.json.Decoder(_Account).decode
_read_plan = msgspec.json.Decoder(Plan).decode
_write = msgspec.json.Encoder().encode


def account_document(account: Account) -> str:
    """The account without what has columns of its own: id, times, revision and the plan's name."""
    document = _Account(account.name, account.ceiling, account.own, account.settings, account.epoch)
    return _write(document).decode()


def read_account(
    account_id: str, created_at: int, revision: int, suspended_at: int | None, document: str | bytes, plan: Plan
) -> Account:
    fields = _read_account(document)
    return Account(
        id=account_id,
        name=fields.name,
        ceiling=fields.ceiling,
        created_at=created_at,
        own=fields.own,
        plan=plan,
        settings=fields.settings,
        epoch=fields.epoch,
        suspended_at=suspended_at,
        revision=revision,
    )


def plan_document(plan: Plan) -> str:
    return _write(plan).decode()


def read_plan(document: str | bytes) -> Plan:
    return _read_plan(document)
