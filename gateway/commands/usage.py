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
from gateway.commands.account_tools.limits_left import print_left
from gateway.commands.terminal.options import Day, Json, command_app, exclusive
from gateway.commands.terminal.output import day_text, format_amount, print_either, print_json, print_table, progress
from tenants.audit import SYSTEM
from tenants.deletion import REMOVED
from tenants.records.accounts import Account
from tenants.records.usage import MICRO, Totals, UsageRow
from tenants.store.protocol import RETENTION_DAYS, USAGE_ACCOUNTS, Store

_TEACHING: Final = """\
examples:
  hearth usage                                         all accounts, the last 30 days, by day
  hearth usage --by account                            one line each, also of removed accounts whose ledger stayed
  hearth usage --by plan --from 2026-01-01 --csv
  hearth usage acme --by model
  hearth usage acme --from 2026-01-01 --to 2026-01-31 --by token --csv
  hearth usage acme --by tag                           a call with several tags is in the row of each
  hearth usage acme --left                             what is left of each of its limits now
  hearth usage reconcile                               do the counters say what the ledger's records say?
  hearth usage reconcile acme --from 2026-01-01 --json

Days are in UTC. Records are kept for 400 days. Exit status of reconcile: 1 where counters and records differ.
"""
_DAYS: Final = 30
_COUNTS: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_COLUMNS: Final = {"model": ("model",), "token": ("token_id",), "tag": ("tags",)}
_KEYS: Final[dict[str, Callable[[UsageRow], list[str]]]] = {
    "day": lambda row: [day_text(row.day)],
    "model": lambda row: [row.model],
    "token": lambda row: [row.token_id],
    "tag": lambda row: row.each_tag,
}
_REMOVED_PLAN: Final = "(removed)"
_AMOUNTS: Final = (*_COUNTS, "neurons")
_AMOUNT_HEADS: Final = ("REQUESTS", "PROMPT", "CACHED", "COMPLETION", "NEURONS")
_HEADS: Final = {"account_id": "ACCOUNT"}
_FORM: Final = exclusive()
Accounts = Annotated[str, Parameter(help="its name or id (default: all)")]
By = Literal["day", "model", "token", "tag", "account", "plan"]
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


class Subject(NamedTuple):
    """An account with usage; one that was removed has the name that it had, and no plan."""

    id: str
    name: str
    plan: str


def _days(first: int | None, last: int | None) -> range:
    """Raises ValueError where they are none, or too many."""
    end = int(time.time()) // 86_400 if last is None else last
    start = end - _DAYS if first is None else first
    if not 0 <= end - start < RETENTION_DAYS:
        raise ValueError(f"--from may not be after --to, and they may span {RETENTION_DAYS} days")
    return range(start, end + 1)


async def _accounts(access: StoreAccess, named: Sequence[str]) -> Sequence[Account]:
    if len(named) > 1:
        raise ValueError("name one account, or none for all")
    return [await access.find(named[0])] if named else await access.accounts.list()


async def _subjects(access: StoreAccess, named: Sequence[str]) -> list[Subject]:
    """The accounts, and removed ones where none is named, or that is."""
    removed = [
        Subject(entry.target, msgspec.json.decode(entry.detail)["name"], _REMOVED_PLAN)
        async for entry in access.audit.entries(SYSTEM)
        if entry.action == REMOVED
    ]
    if len(named) == 1 and (gone := [subject for subject in removed if subject.id == named[0]]):
        return gone
    accounts = await _accounts(access, named)
    subjects = [Subject(account.id, account.name, account.plan.name) for account in accounts]
    listed = {subject.id for subject in subjects}  # an export may have brought a removed one back
    return subjects if named else subjects + [gone for gone in removed if gone.id not in listed]


@app.default
async def usage(
    *accounts: Accounts,
    first: First = None,
    last: Last = None,
    by: Annotated[By, Parameter(help="what sums are of (default: day)")] = "day",
    left: Annotated[bool, Parameter(help="what is left of each limit now, in place of what was used")] = False,
    csv: Annotated[bool, Parameter(help="print CSV", group=("Parameters", _FORM))] = False,
    json: Annotated[Json, Parameter(group=("Parameters", _FORM))] = False,
    access: Access,
) -> None:
    """What accounts have used."""
    if left and (csv or by != "day" or first is not None or last is not None):
        raise ValueError("--left is of now, as a table or JSON: it takes no --from, --to, --by or --csv")
    if left:
        return await print_left(access, await _accounts(access, accounts), json)
    days = _days(first, last)
    subjects = {subject.id: subject for subject in await _subjects(access, accounts)}
    sums, total = await _sums(access, list(subjects.values()), days, by)
    keys = {"account": ("account_id", "name"), "plan": ("plan",)}.get(by, ("account_id", "name", by))
    rows = [
        {**_named(subjects.get(of), of, by), **({} if by in ("account", "plan") else {by: key}), **_columns(counts)}
        for (of, key), counts in sums.items()
    ]
    if json:
        print_json({"from": day_text(days[0]), "to": day_text(days[-1]), "rows": rows, "total": _columns(total)})
    elif csv:
        # The name comes last: scripts of before names count columns.
        heads = (*(key for key in keys if key != "name"), *_columns(total), *(["name"] if "name" in keys else []))
        writer = csv_writer.DictWriter(sys.stdout, heads, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        shown = [*rows, {keys[0]: "total", **_columns(total)}]
        cells = [[row.get(key, "") for key in keys] + [format_amount(row[name]) for name in _AMOUNTS] for row in shown]
        print_table((*(_HEADS.get(key, key.upper()) for key in keys), *_AMOUNT_HEADS), cells)


async def _sums(
    access: StoreAccess, subjects: Sequence[Subject], days: range, by: By
) -> tuple[dict[tuple[str, str], Counter[str]], Counter[str]]:
    """Sums by (account's id, or plan; key), and of all."""
    sums: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    keys_of = _KEYS.get(by, _no_key)
    for start in progress(range(0, len(subjects), USAGE_ACCOUNTS), "hundreds of accounts"):
        some = subjects[start : start + USAGE_ACCOUNTS]
        ids = [subject.id for subject in some]
        usage = await access.store.quotas.usage(ids, days[0], days[-1], _COLUMNS.get(by, ()))
        for subject, row in ((each, row) for each in some for row in usage.get(each.id, ())):
            amounts = {name: getattr(row, name) for name in (*_COUNTS, "micro_neurons")}
            total.update(amounts)
            for key in keys_of(row):
                sums[subject.plan if by == "plan" else subject.id, key].update(amounts)
    return sums, total


def _no_key(row: UsageRow) -> list[str]:
    return [""]


def _named(subject: Subject | None, of: str, by: By) -> dict[str, Any]:
    return {"plan": of} if by == "plan" or subject is None else {"account_id": of, "name": subject.name}


def _columns(sums: Counter[str]) -> dict[str, float]:
    return {**{name: sums[name] for name in _COUNTS}, "neurons": sums["micro_neurons"] / MICRO}


@app.command
async def reconcile(
    *accounts: Accounts, first: First = None, last: Last = None, json: Json = False, access: Access
) -> int:
    """Compare the counters with the sums of the ledger's records."""
    days = _days(first, last)
    subjects = {subject.id: subject for subject in await _subjects(access, accounts)}
    ids = progress(list(subjects), "accounts")
    compared = [row for account_id in ids async for row in balances(access.store, account_id, days)]
    differ = [row for row in compared if row.counted != row.recorded]
    names = {row.account_id: subjects[row.account_id].name for row in differ}
    documents = [{**row._asdict(), "day": day_text(row.day), "name": names[row.account_id]} for row in differ]
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
