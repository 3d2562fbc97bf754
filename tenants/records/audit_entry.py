"""An entry of the audit log."""

import msgspec


class AuditEntry(msgspec.Struct, frozen=True):
    """One action of one actor. `at` is seconds since 1970; `account_id` is "" for what concerns no one account.

    `seal` is made of all else and of the seal before it: tenants/audit.py.
    """

    account_id: str
    seq: int
    at: int
    actor: str
    action: str
    target: str
    detail: str  # JSON
    seal: str
