"""What was used: by day, model and token for an account, over all accounts for the operator; as JSON or as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import date, timedelta
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway import errors
from gateway.admin.operation import ACCOUNT, OPERATOR, Answer, Ask, Nothing, Office, Operation, PageItem
from gateway.errors import bad_input
from gateway.listing import PAGE_MAX, sliced
from tenants.accounts import NotFound, Permission
from tenants.store import KEPT_DAYS, UsageRow
from tenants.usage import MICRO, day_of

DAYS_DEFAULT: Final = 30
ROWS_MAX: Final = 100_000  # of one answer as CSV, and of what one asks to be summed
EPOCH: Final = date(1970, 1, 1)
_Word = Annotated[str, Meta(max_length=200)]
_Account = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class Days(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Days in UTC, both ends included: today and the 29 before it where nothing is said."""

    from_: date | None = msgspec.field(name="from", default=None)
    to: date | None = None


class Rows(Days, frozen=True, forbid_unknown_fields=True):
    page: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 1
    per_page: Annotated[int, Meta(ge=1, le=1000)] = 100
    format: Literal["json", "csv"] = "json"


class UsageQuery(Rows, frozen=True, forbid_unknown_fields=True):
    """`by` are the columns to sum by, of day, model and token."""

    by: Annotated[str, Meta(pattern="^(day|model|token)(,(day|model|token)){0,2}$")] = "day,model,token"
    model: _Word | None = None
    token: _Word | None = None


class AllUsageQuery(Rows, frozen=True, forbid_unknown_fields=True):
    """`by` are the columns to sum by, of day, account and model."""

    by: Annotated[str, Meta(pattern="^(day|account|model)(,(day|account|model)){0,2}$")] = "day"
    account: _Account | None = None
    model: _Word | None = None


class UsageItem(msgspec.Struct, frozen=True, kw_only=True):
    """The columns that are summed by, and the sums."""

    day: date | UnsetType = UNSET
    account: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    token: str | UnsetType = UNSET
    requests: int
    neurons: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


async def of_account(office: Office, ask: Ask[UsageQuery, Nothing]) -> Answer[list[UsageItem]]:
    query = ask.query
    first, last = span(office, query)
    rows = [
        row
        for row in await office.store.usage(ask.account_id, first, last)
        if query.model in (None, row.model) and query.token in (None, row.token_id)
    ]
    return _answer(summed(((ask.account_id, row) for row in rows), query.by.split(",")), query, query.by)


async def of_all(office: Office, ask: Ask[AllUsageQuery, Nothing]) -> Answer[list[UsageItem]]:
    query = ask.query
    first, last = span(office, query)
    rows: list[tuple[str, UsageRow]] = []
    for account_id in await _account_ids(office, query.account):
        found = await office.store.usage(account_id, first, last)
        rows += [(account_id, row) for row in found if query.model in (None, row.model)]
        if len(rows) > ROWS_MAX:
            raise bad_input(f"this is more than {ROWS_MAX:,} rows to sum; ask for fewer days, or for one account")
    return _answer(summed(rows, query.by.split(",")), query, query.by)


async def _account_ids(office: Office, account_id: str | None) -> list[str]:
    if account_id is None:
        return [account.id for account in await office.gateway.accounts.list()]
    try:
        return [(await office.gateway.accounts.get(account_id)).id]
    except NotFound:
        raise errors.no_such_account() from None


def span(office: Office, query: Days) -> tuple[int, int]:
    """The first and the last day, since 1970. Raises Refusal."""
    today = EPOCH + timedelta(day_of(int(office.gateway.calendar() * MICRO)))
    to = query.to or today
    start = query.from_ or to - timedelta(min(DAYS_DEFAULT - 1, (to - date.min).days))
    if start > to:
        raise bad_input("'from' is after 'to'", "from")
    if (to - start).days >= KEPT_DAYS:
        raise bad_input(f"'from' and 'to' may span {KEPT_DAYS} days", "from")
    return max(0, (start - EPOCH).days), max(0, (to - EPOCH).days)


def summed(rows: Iterable[tuple[str, UsageRow]], by: Sequence[str]) -> list[UsageItem]:
    """In the order of the columns."""
    sums: dict[tuple[Any, ...], list[int]] = {}
    for account_id, row in rows:
        every = {"day": row.day, "account": account_id, "model": row.model, "token": row.token_id}
        counts = (row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.micro_neurons)
        sums_of = sums.setdefault(tuple(every[name] for name in by), [0] * len(counts))
        for index, count in enumerate(counts):
            sums_of[index] += count
    return [_item(dict(zip(by, key, strict=True)), sums[key]) for key in sorted(sums)]


def _item(columns: dict[str, Any], sums: list[int]) -> UsageItem:
    requests, prompt_tokens, cached_tokens, completion_tokens, micro_neurons = sums
    if "day" in columns:
        columns["day"] = EPOCH + timedelta(columns["day"])
    return UsageItem(
        **columns,
        requests=requests,
        neurons=micro_neurons / MICRO,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=completion_tokens,
    )


def _answer(items: list[UsageItem], query: Rows, by: str) -> Answer[list[UsageItem]]:
    if query.format == "csv":
        if len(items) > ROWS_MAX:
            raise bad_input(f"this is more than {ROWS_MAX:,} rows; ask for fewer days, or sum by less")
        return Answer([], csv=table(items, by.split(",")))
    shown, page = sliced(items, query.page, query.per_page)
    return Answer(list(shown), page=PageItem(**page))


def table(items: Sequence[UsageItem], by: Sequence[str]) -> str:
    """As CSV with a line of names. A text that a spreadsheet would take for a formula begins with an apostrophe."""
    names = [*dict.fromkeys(by), "requests", "neurons", "prompt_tokens", "cached_tokens", "completion_tokens"]
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
        method="GET",
        path=f"{ACCOUNT}/usage",
        summary="What the account used, by day, model and token",
        permissions=(Permission.ACCOUNT_ADMIN, Permission.USAGE_READ),
        serve=of_account,
        query=UsageQuery,
        body=Nothing,
        result=list[UsageItem],
        csv=True,
    ),
    Operation(
        method="GET",
        path=f"{OPERATOR}/usage",
        summary="What all accounts used, by day, account and model",
        permissions=(Permission.OPERATOR,),
        serve=of_all,
        query=AllUsageQuery,
        body=Nothing,
        result=list[UsageItem],
        csv=True,
    ),
)
