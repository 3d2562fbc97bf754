"""Usage of many accounts by day in one answer, for the operator's overview: each number of a day in a list."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.admin.accounts import AccountsQuery, found
from gateway.admin.operation import FOR_OPERATOR, OPERATOR, AdminContext, AdminRequest, AdminResult, NoFields, Operation
from gateway.admin.usage import EPOCH, columns_used, span
from gateway.errors import bad_input
from tenants.records.accounts import Account
from tenants.records.usage import MICRO, UsageRow
from tenants.store.protocol import USAGE_ACCOUNTS

DAYS_MAX: Final = 92


class AccountDaysQuery(AccountsQuery, frozen=True, forbid_unknown_fields=True):
    """Which accounts, as in their list; and which days in UTC, both ends included: today and the 29 before it."""

    from_: date | None = msgspec.field(name="from", default=None)
    to: date | None = None
    model: Annotated[str, Meta(max_length=200)] | None = None


class AccountDaysItem(msgspec.Struct, frozen=True):
    """One account; its lists have a number for each of the answer's days."""

    id: str
    name: str
    plan: str
    suspended: bool
    requests: list[int]
    neurons: list[float]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    completion_tokens: list[int]


class DaysItem(msgspec.Struct, frozen=True):
    days: list[date]
    accounts: list[AccountDaysItem]


async def by_account(context: AdminContext, request: AdminRequest[AccountDaysQuery, NoFields]) -> AdminResult[DaysItem]:
    query = request.query
    first, last = span(context, query.from_, query.to)
    if last - first >= DAYS_MAX:
        raise bad_input(f"'from' and 'to' may span {DAYS_MAX} days here; ask for fewer, or for one account", "from")
    accounts, page = await found(context, query)
    usage: dict[str, Sequence[UsageRow]] = {}
    by = columns_used("day", model=query.model)
    for start in range(0, len(accounts), USAGE_ACCOUNTS):
        ids = [account.id for account in accounts[start : start + USAGE_ACCOUNTS]]
        usage.update(await context.store.quotas.usage(ids, first, last, by))
    items = await asyncio.to_thread(_items, accounts, usage, first, last, query.model)
    days = [EPOCH + timedelta(day) for day in range(first, last + 1)]
    return AdminResult(DaysItem(days, items), page=page)


def _items(
    accounts: Sequence[Account], usage: Mapping[str, Sequence[UsageRow]], first: int, last: int, model: str | None
) -> list[AccountDaysItem]:
    items = []
    for account in accounts:
        days = [[0] * (last - first + 1) for _ in range(5)]
        for row in usage.get(account.id, ()):
            if model in (None, row.model):
                counts = (row.requests, row.micro_neurons, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
                for numbers, count in zip(days, counts, strict=True):
                    numbers[row.day - first] += count
        requests, micro_neurons, prompt, cached, completion = days
        neurons = [count / MICRO for count in micro_neurons]
        head = (account.id, account.name, account.plan.name, account.suspended_at is not None)
        items.append(AccountDaysItem(*head, requests, neurons, prompt, cached, completion))
    return items


OPERATIONS: Final = (
    Operation(
        "GET",
        f"{OPERATOR}/usage/accounts",
        by_account,
        FOR_OPERATOR,
        "What each account of a page used on each day",
    ),
)
