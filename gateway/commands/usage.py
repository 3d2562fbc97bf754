"""`hearth usage`: what accounts have used, and whether the counters say what the records say."""

import argparse
import csv
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import structs
from tqdm import tqdm

from gateway.commands.limits import format_amount
from gateway.commands.output import add_command, day, day_text, fail, print_json, print_table, read_settings
from gateway.commands.store_access import StoreAccess, with_store_access
from tenants.records.usage import MICRO, Totals, UsageRow
from tenants.store.protocol import RETENTION_DAYS, Store

_TEACHING = """\
examples:
  hearth usage                                         all accounts, the last 30 days, by day
  hearth usage ACCOUNT --by model
  hearth usage ACCOUNT --from 2026-01-01 --to 2026-01-31 --by token --csv
  hearth usage ACCOUNT --by tag                        a call with several tags is in the row of each
  hearth usage reconcile                               do the counters say what the ledger's records say?
  hearth usage reconcile ACCOUNT --from 2026-01-01 --json

Days are in UTC. Records are kept for 400 days. Exit status of reconcile: 1 where counters and records differ.
"""
_RECONCILE: Final = "reconcile"
_DAYS: Final = 30
_SUMS: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "micro_neurons")
_KEYS: Final[dict[str, Callable[[UsageRow], list[str]]]] = {
    "day": lambda row: [day_text(row.day)],
    "model": lambda row: [row.model],
    "token": lambda row: [row.token_id],
    "tag": lambda row: row.each_tag,
}


class BalanceRow(NamedTuple):
    """Counters beside the same sums of records; `subject` is whose limits they count for (tenants/limits/caps.py)."""

    account_id: str
    day: int
    subject: str
    counted: Totals
    recorded: Totals


def add(commands: Any) -> None:
    parser = add_command(commands, "usage", "what accounts have used; check counters against records", _TEACHING)
    parser.usage = "hearth usage [reconcile] [ACCOUNT] [--from DAY] [--to DAY] [--by COLUMN] [--csv] [--json]"
    parser.add_argument("words", nargs="*", metavar="ACCOUNT", help="its id, after `reconcile` or alone (default: all)")
    parser.add_argument("--from", dest="first", type=day, metavar="DAY", help="like 2026-01-31 (default: 30 days ago)")
    parser.add_argument("--to", dest="last", type=day, metavar="DAY", help="the last one (default: today)")
    parser.add_argument("--by", choices=[*_KEYS], default="day", help="what sums are of (default: day)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV")
    form.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    reconcile = options.words[:1] == [_RECONCILE]
    accounts = options.words[1:] if reconcile else options.words
    today = int(time.time()) // 86_400
    last = today if options.last is None else options.last
    first = last - _DAYS if options.first is None else options.first
    if len(accounts) > 1:
        return fail("name one account, or none for all")
    if not 0 <= last - first < RETENTION_DAYS:
        return fail(f"--from must be a day before --to, and they may span {RETENTION_DAYS} days")
    if reconcile and options.csv:
        return fail("reconcile prints a table, or --json")
    action = _reconcile if reconcile else _sum_up
    return with_store_access(
        read_settings(options), lambda tenantry: action(tenantry, options, accounts, range(first, last + 1))
    )


async def _ids(tenantry: StoreAccess, named: Sequence[str]) -> list[str]:
    return [(await tenantry.accounts.get(one)).id for one in named] or [
        one.id for one in await tenantry.accounts.list()
    ]


async def _sum_up(tenantry: StoreAccess, options: argparse.Namespace, named: Sequence[str], days: range) -> int:
    found: dict[tuple[str, str], list[int]] = {}
    rows: list[UsageRow] = []
    for account_id in _with_progress(await _ids(tenantry, named)):
        of_account = await tenantry.store.quotas.usage(account_id, days[0], days[-1])
        found.update({(account_id, key): sums for key, sums in _sums(of_account, _KEYS[options.by]).items()})
        rows += of_account
    total = _sums(rows, lambda _: [""]).get("", [0] * len(_SUMS))
    if options.json:
        _print_json(found, total, options.by, days)
    elif options.csv:
        written = csv.writer(sys.stdout, lineterminator="\n")
        written.writerow(("account_id", options.by, *_SUMS[:-1], "neurons"))
        written.writerows((*key, *sums[:-1], _neurons(sums)) for key, sums in found.items())
    else:
        _print_table(found, total, options.by)
    return 0


def _sums(rows: Sequence[UsageRow], keys_of: Callable[[UsageRow], list[str]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in rows:
        for key in keys_of(row):
            sums = found.setdefault(key, [0] * len(_SUMS))
            for place, name in enumerate(_SUMS):
                sums[place] += getattr(row, name)
    return found


def _neurons(sums: Sequence[int]) -> float:
    return sums[-1] / MICRO


def _print_json(found: dict[tuple[str, str], list[int]], total: list[int], by: str, days: range) -> None:
    def told(sums: list[int]) -> dict[str, float]:
        return {**dict(zip(_SUMS[:-1], sums, strict=False)), "neurons": _neurons(sums)}

    rows = [{"account_id": account_id, by: key, **told(sums)} for (account_id, key), sums in found.items()]
    print_json({"from": day_text(days[0]), "to": day_text(days[-1]), "rows": rows, "total": told(total)})


def _print_table(found: dict[tuple[str, str], list[int]], total: list[int], by: str) -> None:
    lines = {**found, ("total", ""): total}
    rows = [(*key, *map(format_amount, sums[:-1]), format_amount(_neurons(sums))) for key, sums in lines.items()]
    print_table(("ACCOUNT", by.upper(), "REQUESTS", "PROMPT", "CACHED", "COMPLETION", "NEURONS"), rows)


async def _reconcile(tenantry: StoreAccess, options: argparse.Namespace, named: Sequence[str], days: range) -> int:
    ids = _with_progress(await _ids(tenantry, named))
    compared = [one for account_id in ids async for one in balances(tenantry.store, account_id, days)]
    differ = [one for one in compared if one.counted != one.recorded]
    if options.json:
        told = [{**one._asdict(), "day": day_text(one.day)} for one in differ]
        document = {"from": day_text(days[0]), "to": day_text(days[-1]), "compared": len(compared), "differ": told}
        print_json(msgspec.to_builtins(document))
    elif differ:
        rows = [
            (
                one.account_id,
                day_text(one.day),
                one.subject or "-",
                name,
                format_amount(counter),
                format_amount(records),
            )
            for one in differ
            for name, counter in structs.asdict(one.counted).items()
            if counter != (records := getattr(one.recorded, name))
        ]
        print_table(("ACCOUNT", "DAY", "SUBJECT", "WHAT", "COUNTER", "RECORDS"), rows)
    else:
        print(f"counters and records agree: {len(compared)} compared, {day_text(days[0])} to {day_text(days[-1])}")
    return int(bool(differ))


async def balances(store: Store, account_id: str, days: range) -> AsyncIterator[BalanceRow]:
    """Of each of the days that has any, and of every subject that has a record there, the account itself first."""
    recorded = {row.day for row in await store.quotas.usage(account_id, days[0], days[-1])}
    for of_day in days:
        if of_day not in recorded and await store.quotas.totals(account_id, of_day) == Totals():
            continue
        records = await store.quotas.records(account_id, of_day)
        for subject in sorted({"", *(subject for record in records for subject in record.counted)}):
            balance = await store.quotas.reconcile(account_id, of_day, subject)
            if balance.counted != balance.recorded:  # a settlement may have come between its parts: look again
                balance = await store.quotas.reconcile(account_id, of_day, subject)
            yield BalanceRow(account_id, of_day, subject, balance.counted, balance.recorded)


def _with_progress(account_ids: Sequence[str]) -> Iterator[str]:
    yield from tqdm(account_ids, unit=" accounts", file=sys.stderr, disable=not sys.stderr.isatty())
