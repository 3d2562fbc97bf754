"""Webhook notices that wait to be delivered."""

import msgspec


class Notice(msgspec.Struct, frozen=True):
    """Something to be told to an account's own address, until it was taken or too many tries failed."""

    id: str
    account_id: str
    url: str
    body: bytes
    due_at: float
    tries: int = 0
