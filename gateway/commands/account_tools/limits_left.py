"""`hearth usage --left`: what accounts may still use now, of each limit in force. It changes and counts nothing."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from gateway.commands.access.store_access import StoreAccess
from gateway.commands.terminal.output import format_amount, print_either, print_table
from tenants.limits.caps import LimitStatus, RequestSize, caps_of, limits_status
from tenants.records.accounts import Account
from tenants.records.usage import MICRO

_NO_USAGE: Final = RequestSize()


async def print_left(access: StoreAccess, accounts: Sequence[Account], as_json: bool) -> None:
    """One row for each limit of each account and of each of its classes of models."""
    statuses = [(account, status) for account in accounts for status in await _left(access, account)]
    documents = [_document(account, status) for account, status in statuses]
    rows = [
        (
            account.name, account.plan.name, status.subject or "-", status.measure.value,
            format_amount(status.allowed), format_amount(round(status.remaining, 3)), f"{_share(status):.0%}",
            str(timedelta(seconds=status.reset_s)) if status.reset_s else "-",
        )
        for account, status in statuses
    ]  # fmt: skip
    heads = ("ACCOUNT", "PLAN", "SUBJECT", "LIMIT", "ALLOWED", "LEFT", "OF IT", "WHOLE IN")
    print_either(as_json, documents, lambda: print_table(heads, rows))


async def _left(access: StoreAccess, account: Account) -> Sequence[LimitStatus]:
    limits = account.limits
    subjects = [("", limits), *((f"class:{name}", of_class) for name, of_class in sorted(limits.classes.items()))]
    caps = caps_of(subjects, _NO_USAGE)
    return limits_status(caps, await access.store.quotas.remaining(account.id, caps), int(time.time() * MICRO))


def _share(status: LimitStatus) -> float:
    return min(1.0, status.remaining / status.allowed) if status.allowed else 0.0


def _document(account: Account, status: LimitStatus) -> dict[str, Any]:
    return {
        "account_id": account.id,
        "name": account.name,
        "plan": account.plan.name,
        "subject": status.subject,
        "limit": status.measure.value,
        "allowed": status.allowed,
        "left": round(status.remaining, 6),
        "reset_s": status.reset_s,
    }
