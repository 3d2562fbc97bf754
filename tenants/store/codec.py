"""Accounts and plans as the JSON documents that stores keep. It does not know where they are kept.

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
    """All of it but what a store keeps beside: id, times, revision and the plan's name."""
    kept = _Account(account.name, account.ceiling, account.own, account.settings, account.epoch)
    return _write(kept).decode()


def read_account(
    account_id: str, created_at: int, revision: int, suspended_at: int | None, document: str | bytes, plan: Plan
) -> Account:
    kept = _read_account(document)
    return Account(
        id=account_id,
        name=kept.name,
        ceiling=kept.ceiling,
        created_at=created_at,
        own=kept.own,
        plan=plan,
        settings=kept.settings,
        epoch=kept.epoch,
        suspended_at=suspended_at,
        revision=revision,
    )


def plan_document(plan: Plan) -> str:
    return _write(plan).decode()


def read_plan(document: str | bytes) -> Plan:
    return _read_plan(document)
