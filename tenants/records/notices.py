"""Webhook notices that wait for delivery."""

import msgspec


class Notice(msgspec.Struct, frozen=True):
    """A message to an account's own address, until it was delivered or too many tries failed."""

    id: str
    account_id: str
    url: str
    body: bytes
    due_at: float
    tries: int = 0
