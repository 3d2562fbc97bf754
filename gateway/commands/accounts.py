"""`hearth accounts`: tenants and what each may use."""

import argparse
from typing import Any

import msgspec

from gateway.commands.tenantry import account_json, ask
from gateway.commands.words import add_action, add_command, print_json, print_table, read_settings
from tenants.accounts import Account, Accounts, Limits

_TEACHING = """\
examples:
  hearth accounts create acme                          an account and its first token, shown this once
  hearth accounts create acme --json                   the same as JSON: account_id, token, ...
  hearth accounts list
  hearth accounts limits ACCOUNT                       what it may use
  hearth accounts limits ACCOUNT --requests-per-minute 60 --neurons-per-day 10000

It writes to the store itself: a running server sees the change at once, and none needs to run.
"""


def add(commands: Any) -> None:
    parser = add_command(commands, "accounts", "create and list accounts, change their limits", _TEACHING)
    actions = parser.add_subparsers(dest="action", metavar="create | list | limits", required=True)
    create = add_action(actions, "create", "a new account and its first token")
    create.add_argument("name", help="for people; need not be unique")
    add_action(actions, "list", "all accounts, oldest first")
    limits = add_action(actions, "limits", "show an account's limits, or change those that are given")
    limits.add_argument("account", help="its id, 32 hex characters")
    for action in (create, limits):
        action.add_argument("--requests-per-minute", type=int, metavar="N")
        action.add_argument("--burst", type=int, metavar="N", help="requests that may come at once")
        action.add_argument("--neurons-per-day", type=float, metavar="N", help="the budget until midnight UTC")
        action.add_argument("--concurrent-requests", type=int, metavar="N")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    actions = {"create": _create, "list": _list, "limits": _limits}
    return ask(read_settings(options), lambda accounts: actions[options.action](accounts, options))


async def _create(accounts: Accounts, options: argparse.Namespace) -> int:
    account = await accounts.create(options.name, _changed(Limits(), options))
    _, secret = await accounts.mint(account.id, "first")
    if options.json:
        print_json({**account_json(account), "token": secret})
    else:
        print(f"account  {account.id}\ntoken    {secret}\n\nThe token is shown this once: keep it.")
    return 0


async def _list(accounts: Accounts, options: argparse.Namespace) -> int:
    found = await accounts.list()
    if options.json:
        print_json([account_json(account) for account in found])
    else:
        _print(list(found))
    return 0


async def _limits(accounts: Accounts, options: argparse.Namespace) -> int:
    account = await accounts.get(options.account)
    wanted = _changed(account.limits, options)
    if wanted != account.limits:
        account = await accounts.set_ceiling(account.id, wanted)
    if options.json:
        print_json(account_json(account))
    else:
        _print([account])
    return 0


def _changed(limits: Limits, options: argparse.Namespace) -> Limits:
    given = {
        "requests_per_minute": options.requests_per_minute,
        "burst": options.burst,
        "neurons_per_day": options.neurons_per_day,
        "concurrent_requests": options.concurrent_requests,
    }
    return msgspec.structs.replace(limits, **{name: value for name, value in given.items() if value is not None})


def _print(accounts: list[Account]) -> None:
    heads = ("ACCOUNT", "NAME", "REQUESTS/MIN", "BURST", "NEURONS/DAY", "AT ONCE")
    rows = []
    for account in accounts:
        limits = account.limits
        neurons = f"{limits.neurons_per_day:,.15g}"
        counts = (limits.requests_per_minute, limits.at_once, neurons, limits.concurrent_requests)
        rows.append((account.id, account.name, *counts))
    print_table(heads, rows)
