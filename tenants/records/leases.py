"""Slices of an account's budgets that its home cell has lent another cell, as the borrower keeps them. It knows neither
cells nor stores."""

import enum
from typing import Final

import msgspec

LEASE_PREFIX: Final = "lease:"  # a subject that begins with it is a lease


class LeaseState(enum.IntEnum):
    """The states come in this order, and none comes back."""

    ASKED = 0  # the home cell may have granted it
    OPEN = 1
    CLOSED = 2  # calls that run go on, and no other begins
    RETURNED = 3  # the home cell has settled what was used


class QuotaLease(msgspec.Struct, frozen=True, array_like=True):
    """A lease. At its home it is a hold of `amount` micro-neurons under the same id, charged to `day`.

    home          the account's home cell.
    token_id      the token whose call asked first.
    subjects      own the limits that home counts it against beside the account's, a line each: one token's, a class's.
    begun_us      when it was asked for, by the borrower's store; from `until_us` on no call begins on it.
    used          micro-neurons of calls that ended, and those that are held for calls that run.
    open          calls that run; the tokens are those of calls that ended.
    returned      of `used`, what the home cell was told.
    """

    account_id: str
    id: str
    home: str
    token_id: str = ""
    subjects: str = ""
    state: LeaseState = LeaseState.ASKED
    amount: int = 0
    day: int = 0
    begun_us: int = 0
    until_us: int = 0
    used: int = 0
    open: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    returned: int = 0

    @property
    def subject(self) -> str:
        return f"{LEASE_PREFIX}{self.id}"
