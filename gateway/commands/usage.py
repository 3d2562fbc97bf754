"""`hearth usage`: what accounts have used, and whether the counters say what the records say."""

import csv as csv_writer
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from cyclopts import Parameter
from msgspec import structs

from gateway.commands.access.store_access import Access, StoreAccess
from gateway.commands.terminal.options import Day, Json, command_app, exclusive
from gateway.commands.terminal.output import day_text, format_amount, print_either, print_json, print_table, progress
from tenants.records.usage import MICRO, Totals, UsageRow
from tenants.store.protocol import RETENTION_DAYS, USAGE_ACCOUNTS, Store

_TEACHING: Final = """\
examples:
  hearth usage                                         all accounts, the last 30 days, by day
  hearth usage ACCOUNT --by model
  hearth usage ACCOUNT --from 2026-01-01 --to 2026-01-31 --by token --csv
  hearth usage ACCOUNT --by tag                        a call with several tags is in the row of each
  hearth usage reconcile                               do the counters say what the ledger's records say?
  hearth usage reconcile ACCOUNT --from 2026-01-01 --json

Days are in UTC. Records are kept for 400 days. Exit status of reconcile: 1 where counters and records differ.
"""
_DAYS: Final = 30
_COUNTS: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_COLUMNS: Final = {"day": (), "model": ("model",), "token": ("token_id",), "tag": ("tags",)}
_KEYS: Final[dict[str, Callable[[UsageRow], list[str]]]] = {
    "day": lambda row: [day_text(row.day)],
    "model": lambda row: [row.model],
    "token": lambda row: [row.token_id],
    "tag": lambda row: row.each_tag,
}
_FORM: Final = exclusive()
Accounts = Annotated[str, Parameter(help="its id (default: all)")]
First = Annotated[Day, Parameter(name="--from", help="like 2026-01-31 (default: 30 days ago)")]
Last = Annotated[Day, Parameter(name="--to", help="the last one (default: today)")]
app = command_app("usage", "what accounts have used; check counters against records", _TEACHING)


class BalanceRow(NamedTuple):
    """Counters beside the same sums of records; `subject` is whose limits they count for (tenants/limits/caps.py)."""

    account_id: str
    day: int
    subject: str
    counted: Totals
    recorded: Totals


def _days(first: int | None, last: int | None) -> range:
    """Raises ValueError where they are none, or too many."""
    end = int(time.time()) // 86_400 if last is None else last
    start = end - _DAYS if first is None else first
    if not 0 <= end - start < RETENTION_DAYS:
        raise ValueError(f"--from must be a day before --to, and they may span {RETENTION_DAYS} days")
    return range(start, end + 1)


async def _ids(access: StoreAccess, named: Sequence[str]) -> list[str]:
    if len(named) > 1:
        raise ValueError("name one account, or none for all")
    if named:
        return [(await access.accounts.get(named[0])).id]
    return [account.id for account in await access.accounts.list()]


@app.default
async def usage(
    *accounts: Accounts,
    first: First = None,
    last: Last = None,
    by: Annotated[Literal["day", "model", "token", "tag"], Parameter(help="what sums are of (default: day)")] = "day",
    csv: Annotated[bool, Parameter(help="print CSV", group=("Parameters", _FORM))] = False,
    json: Annotated[Json, Parameter(group=("Parameters", _FORM))] = False,
    access: Access,
) -> None:
    """What accounts have used."""
    days = _days(first, last)
    sums: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    ids = await _ids(access, accounts)
    for start in progress(range(0, len(ids), USAGE_ACCOUNTS), "hundreds of accounts"):
        some = ids[start : start + USAGE_ACCOUNTS]
        usage = await access.store.quotas.usage(some, days[0], days[-1], _COLUMNS[by])
        for account_id, row in ((id, row) for id in some for row in usage.get(id, ())):
            amounts = {name: getattr(row, name) for name in (*_COUNTS, "micro_neurons")}
            total.update(amounts)
            for key in _KEYS[by](row):
                sums[account_id, key].update(amounts)
    if json:
        rows = [{"account_id": account_id, by: key, **_columns(counts)} for (account_id, key), counts in sums.items()]
        print_json({"from": day_text(days[0]), "to": day_text(days[-1]), "rows": rows, "total": _columns(total)})
    elif csv:
        writer = csv_writer.writer(sys.stdout, lineterminator="\n")
        writer.writerow(("account_id", by, *_columns(total)))
        writer.writerows((*key, *_columns(counts).values()) for key, counts in sums.items())
    else:
        lines = {**sums, ("total", ""): total}
        heads = ("ACCOUNT", by.upper(), "REQUESTS", "PROMPT", "CACHED", "COMPLETION", "NEURONS")
        print_table(heads, [(*key, *map(format_amount, _columns(counts).values())) for key, counts in lines.items()])


def _columns(sums: Counter[str]) -> dict[str, float]:
    return {**{name: sums[name] for name in _COUNTS}, "neurons": sums["micro_neurons"] / MICRO}


@app.command
async def reconcile(
    *accounts: Accounts, first: First = None, last: Last = None, json: Json = False, access: Access
) -> int:
    """Compare the counters with the sums of the ledger's records."""
    days = _days(first, last)
    ids = progress(await _ids(access, accounts), "accounts")
    compared = [row for account_id in ids async for row in balances(access.store, account_id, days)]
    differ = [row for row in compared if row.counted != row.recorded]
    documents = [{**row._asdict(), "day": day_text(row.day)} for row in differ]
    span = {"from": day_text(days[0]), "to": day_text(days[-1])}
    document: Any = msgspec.to_builtins({**span, "compared": len(compared), "differ": documents})
    print_either(json, document, lambda: _print_differences(differ, len(compared), days))
    return int(bool(differ))


def _print_differences(differ: Sequence[BalanceRow], compared: int, days: range) -> None:
    if not differ:
        print(f"counters and records agree: {compared} compared, {day_text(days[0])} to {day_text(days[-1])}")
        return
    rows = [
        (row.account_id, day_text(row.day), row.subject or "-", name, format_amount(counter), format_amount(records))
        for row in differ
        for name, counter in structs.asdict(row.counted).items()
        if counter != (records := getattr(row.recorded, name))
    ]
    print_table(("ACCOUNT", "DAY", "SUBJECT", "WHAT", "COUNTER", "RECORDS"), rows)


async def balances(store: Store, account_id: str, days: range) -> AsyncIterator[BalanceRow]:
    """One row for each day with usage and each subject that has a record there, the account itself first."""
    rows = (await store.quotas.usage([account_id], days[0], days[-1], ())).get(account_id, ())
    recorded = {row.day for row in rows}
    for day in days:
        if day not in recorded and await store.quotas.totals(account_id, day) == Totals():
            continue
        records = await store.quotas.records(account_id, day)
        for subject in sorted({"", *(subject for record in records for subject in record.subjects_counted)}):
            balance = await store.quotas.reconcile(account_id, day, subject)
            if balance.counted != balance.recorded:  # a settlement may have come between its parts: look again
                balance = await store.quotas.reconcile(account_id, day, subject)
            yield BalanceRow(account_id, day, subject, balance.counted, balance.recorded)
