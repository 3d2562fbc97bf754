"""Usage by day, model and token for an account, and over all accounts for the operator; as JSON or as CSV."""

import asyncio
import csv
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from operator import add
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.admin.operation import (
    ACCOUNT,
    FOR_OPERATOR,
    FOR_READER,
    OPERATOR,
    AdminContext,
    AdminRequest,
    AdminResult,
    NoFields,
    Operation,
)
from gateway.errors import bad_input
from gateway.listing.pages import PAGE_MAX, sliced
from tenants.records.usage import MICRO, UsageRow, day_of
from tenants.store.protocol import RETENTION_DAYS, USAGE_ACCOUNTS

DAYS_DEFAULT: Final = 30
ROWS_MAX: Final = 100_000  # in one answer
EPOCH: Final = date(1970, 1, 1)
_COUNTS: Final = ("requests", "neurons", "prompt_tokens", "cached_tokens", "completion_tokens")
_COLUMNS: Final = {"token": "token_id", "model": "model", "tag": "tags"}
_Word = Annotated[str, Meta(max_length=200)]


class DaysQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Days in UTC, both ends included; by default today and the 29 before it."""

    from_: date | None = msgspec.field(name="from", default=None)
    to: date | None = None


class RowsQuery(DaysQuery, frozen=True, forbid_unknown_fields=True):
    page: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 1
    per_page: Annotated[int, Meta(ge=1, le=1000)] = 100
    format: Literal["json", "csv"] = "json"


class UsageQuery(RowsQuery, frozen=True, forbid_unknown_fields=True):
    """`by` are the columns to sum by, of day, model, token and tag. A call with several tags is in the row of each; one
    without any is in that of "". Where a day had too many different sets of tags, those of later calls are `*`."""

    by: Annotated[str, Meta(pattern="^(day|model|token|tag)(,(day|model|token|tag)){0,3}$(?!\\n)")] = "day,model,token"
    model: _Word | None = None
    token: _Word | None = None
    tag: _Word | None = None


class AllUsageQuery(RowsQuery, frozen=True, forbid_unknown_fields=True):
    """`by` are the columns to sum by, of day, account and model; `account` is an id or a name."""

    by: Annotated[str, Meta(pattern="^(day|account|model)(,(day|account|model)){0,2}$(?!\\n)")] = "day"
    account: _Word | None = None
    model: _Word | None = None


class UsageItem(msgspec.Struct, frozen=True, kw_only=True):
    """The grouping columns and the sums; `name` is what the account is called now."""

    day: date | UnsetType = UNSET
    account: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    token: str | UnsetType = UNSET
    tag: str | UnsetType = UNSET
    requests: int
    neurons: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    name: str | UnsetType = UNSET


async def of_account(
    context: AdminContext, request: AdminRequest[UsageQuery, NoFields]
) -> AdminResult[list[UsageItem]]:
    query = request.query
    by = columns_used(query.by, model=query.model, token=query.token, tag=query.tag)
    days = span(context, query.from_, query.to)
    usage = await context.store.quotas.usage([request.account_id], *days, by)

    def summed() -> AdminResult[list[UsageItem]]:
        sums = UsageSums(query.by)
        for row in usage.get(request.account_id, ()):
            matches = query.model in (None, row.model) and query.token in (None, row.token_id)
            if matches and (query.tag is None or query.tag in row.each_tag):
                sums.add(request.account_id, row)
        return _answer(sums, query)

    return await asyncio.to_thread(summed)  # a caller's own tags can make them many


async def of_all(context: AdminContext, request: AdminRequest[AllUsageQuery, NoFields]) -> AdminResult[list[UsageItem]]:
    query, accounts = request.query, context.accounts
    first, last = span(context, query.from_, query.to)
    listed = await accounts.list() if query.account is None else [await accounts.find(query.account)]
    sums = UsageSums(query.by, {account.id: account.name for account in listed})
    by = columns_used(query.by, model=query.model)

    def add_all(usage: Mapping[str, Sequence[UsageRow]]) -> None:
        for account_id, rows in usage.items():
            for row in rows:
                if query.model in (None, row.model):
                    sums.add(account_id, row)

    for start in range(0, len(listed), USAGE_ACCOUNTS):
        ids = [account.id for account in listed[start : start + USAGE_ACCOUNTS]]
        await asyncio.to_thread(add_all, await context.store.quotas.usage(ids, first, last, by))
    return await asyncio.to_thread(_answer, sums, query)


def columns_used(by: str, **filters: str | None) -> list[str]:
    """Returns the columns of the store's rows that sums and filters look at."""
    names = {*by.split(","), *(name for name, wanted in filters.items() if wanted is not None)}
    return [_COLUMNS[name] for name in _COLUMNS.keys() & names]


def span(context: AdminContext, first: date | None, last: date | None) -> tuple[int, int]:
    """Returns the first and the last day, since 1970; by default the last 30. Raises ApiError."""
    today = EPOCH + timedelta(day_of(int(context.calendar() * MICRO)))
    to = last or today
    start = first or to - timedelta(min(DAYS_DEFAULT - 1, (to - date.min).days))
    if start > to:
        raise bad_input("'from' is after 'to'", "from")
    if (to - start).days >= RETENTION_DAYS:
        raise bad_input(f"'from' and 'to' may span {RETENTION_DAYS} days", "from")
    return max(0, (start - EPOCH).days), max(0, (to - EPOCH).days)


class UsageSums:
    """Usage added up by some columns, with commas between; `names` are of accounts, where these are among them."""

    def __init__(self, by: str, names: Mapping[str, str] | None = None) -> None:
        self.by = list(dict.fromkeys(by.split(",")))
        self._names = names or {}
        self._sums: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def add(self, account_id: str, row: UsageRow) -> None:
        """Adds a row. Raises ApiError if there are more than ROWS_MAX sums."""
        columns: dict[str, Any] = {"day": row.day, "account": account_id, "model": row.model, "token": row.token_id}
        counts = (row.requests, row.micro_neurons, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
        for tag in row.each_tag if "tag" in self.by else ("",):
            columns["tag"] = tag
            key = tuple(columns[name] for name in self.by)
            before = self._sums.get(key)
            self._sums[key] = counts if before is None else tuple(map(add, before, counts))
        if len(self._sums) > ROWS_MAX:
            raise bad_input(f"this is more than {ROWS_MAX:,} rows; ask for fewer days, or sum by less", "by")

    def sorted_keys(self) -> list[tuple[Any, ...]]:
        """Returns the columns of each sum, in their order. It sorts in parts, since no other thread runs in a sort."""
        parts: defaultdict[Any, list[tuple[Any, ...]]] = defaultdict(list)
        for key in self._sums:
            parts[key[0]].append(key)
        return [key for first in sorted(parts) for key in sorted(parts[first])]

    def item(self, key: tuple[Any, ...]) -> UsageItem:
        fields: dict[str, Any] = dict(zip((*self.by, *_COUNTS), (*key, *self._sums[key]), strict=True))
        fields["neurons"] /= MICRO
        if "day" in fields:
            fields["day"] = EPOCH + timedelta(fields["day"])
        if "account" in fields:
            fields["name"] = self._names[fields["account"]]
        return UsageItem(**fields)


def _answer(sums: UsageSums, query: RowsQuery) -> AdminResult[list[UsageItem]]:
    if query.format == "csv":
        return AdminResult([], csv=usage_csv([sums.item(key) for key in sums.sorted_keys()], sums.by))
    keys, page = sliced(sums.sorted_keys(), query.page, query.per_page)
    return AdminResult([sums.item(key) for key in keys], page=page)


def usage_csv(items: Sequence[UsageItem], by: Sequence[str]) -> str:
    """Renders CSV with a line of names. A text that a spreadsheet would take for a formula gets an apostrophe."""
    names = [*by, *_COUNTS, *(["name"] if "account" in by else [])]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\r\n")
    writer.writerow(names)
    writer.writerows([[_cell(getattr(item, name)) for name in names] for item in items])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return f"'{value}"
    return value.isoformat() if isinstance(value, date) else value


OPERATIONS: Final = (
    Operation(
        "GET",
        f"{ACCOUNT}/usage",
        of_account,
        FOR_READER,
        "What the account used, by day, model, token and tag",
        csv=True,
    ),
    Operation(
        "GET", f"{OPERATOR}/usage", of_all, FOR_OPERATOR, "What all accounts used, by day, account and model", csv=True
    ),
)
