"""A search among all accounts, by a part of the name, the plan and suspension. It knows no store."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from tenants.records.accounts import name_key


class AccountHead(NamedTuple):
    """What an account is searched by; a store reads it without the rest. `name_key` is as the function makes it."""

    id: str
    name_key: str
    plan: str
    suspended: bool
    created_at: int


class AccountSearch(msgspec.Struct, frozen=True):
    """`name` is a part of it, in upper or lower case, or the account's id. `limit` accounts are wanted, from place
    `first` on."""

    name: str = ""
    plan: str | None = None
    suspended: bool | None = None
    order: Literal["created", "name"] = "created"
    first: int = 0
    limit: int = 100

    def pick(self, heads: Iterable[AccountHead]) -> tuple[list[str], int]:
        """The ids of the wanted accounts, in order, and how many match in all. Costs a few ms for 10,000."""
        part = name_key(self.name)
        found = [
            head
            for head in heads
            if (not part or part in head.name_key or part == head.id)
            and self.plan in (None, head.plan)
            and self.suspended in (None, head.suspended)
        ]
        if self.order == "name":
            found.sort(key=lambda head: (head.name_key, head.id))
        else:
            found.sort(key=lambda head: (head.created_at, head.id))
        return [head.id for head in found[self.first : self.first + self.limit]], len(found)
