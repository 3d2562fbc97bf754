"""`hearth accounts`: tenants, what each may use and how it is served."""

import argparse
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import structs

from gateway.commands import transfer
from gateway.commands.limits import add_limits, changed_limits, given_limits, limits_rows, limits_text, or_none
from gateway.commands.output import (
    add_action,
    add_command,
    duration,
    print_json,
    print_table,
    read_settings,
    split,
    time_text,
)
from gateway.commands.store_access import StoreAccess, account_json, with_store_access
from tenants.auth.accounts import Account
from tenants.records.limits import NO_LIMITS
from tenants.records.plans import DEFAULT_PLAN
from tenants.records.settings import Settings

_TEACHING = """\
examples:
  hearth accounts create acme                          an account and its first token, shown this once
  hearth accounts create acme --plan team --json       the same as JSON: account_id, token, ...
  hearth accounts list
  hearth accounts show ACCOUNT                         plan, limits, settings, whether it is suspended
  hearth accounts limits ACCOUNT                       what it may use, and who said so
  hearth accounts limits ACCOUNT --requests-per-minute 60 --neurons-per-day 10000
  hearth accounts limits ACCOUNT --neurons-per-day none                what its plan says again
  hearth accounts limits ACCOUNT --class large --concurrent-requests 2     of the models of one class alone
  hearth accounts plan ACCOUNT team
  hearth accounts suspend ACCOUNT                      refused within a second; what runs ends within five
  hearth accounts resume ACCOUNT
  hearth accounts settings ACCOUNT --zero-retention yes --cache-keep 5m
  hearth accounts settings ACCOUNT --regions eu-west,eu-north --notices-url https://acme.example/hearth
  hearth accounts purge-cache ACCOUNT                  no prefix cached until now is found any more
  hearth accounts export > all.jsonl                   accounts, tokens' seals and plans; never a token's secret
  hearth accounts export --usage --audit ACCOUNT > one.jsonl
  hearth accounts import all.jsonl --dry-run           looks at the whole file, changes nothing

It writes to the store itself: a running server sees the change at once, and none needs to run. All changes are in
the audit log (`hearth audit list ACCOUNT`).
"""
_ACTIONS = "create | list | show | limits | plan | suspend | resume | settings | purge-cache | export | import"


def add(commands: Any) -> None:
    parser = add_command(commands, "accounts", "accounts: their limits, plans, settings; export and import", _TEACHING)
    actions = parser.add_subparsers(dest="action", metavar=_ACTIONS, required=True)
    create = add_action(actions, "create", "a new account and its first token")
    create.add_argument("name", help="for people; need not be unique")
    create.add_argument("--plan", default=DEFAULT_PLAN.name, help=f"default: {DEFAULT_PLAN.name}")
    add_limits(create)
    add_action(actions, "list", "all accounts, oldest first")
    _of_account(actions, "show", "all about one account")
    add_limits(_of_account(actions, "limits", "show an account's limits, or change those that are given"))
    _of_account(actions, "plan", "give an account another plan").add_argument("plan", help="its name")
    _of_account(actions, "suspend", "refuse an account's calls until it is resumed")
    _of_account(actions, "resume", "serve a suspended account again")
    _add_settings(_of_account(actions, "settings", "show an account's settings, or change those that are given"))
    _of_account(actions, "purge-cache", "make all that is cached for an account unfindable")
    transfer.add(actions)
    parser.set_defaults(run=run)


def _of_account(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    action = add_action(actions, name, summary)
    action.add_argument("account", help="its id, 32 hex characters")
    return action


def _add_settings(action: argparse.ArgumentParser) -> None:
    action.add_argument("--zero-retention", type=_yes_or_no, metavar="yes|no", help="nothing outlives its request")
    action.add_argument("--cache-scope", choices=["tenant", "user", "request"], help="who shares cached prefixes")
    action.add_argument(
        "--cache-keep", dest="cache_keep_s", type=or_none(duration), metavar="5m", help="after the last use, or none"
    )
    action.add_argument("--sharing", metavar="A,B", type=split, help="accounts that share cached prefixes, or none")
    action.add_argument("--regions", metavar="A,B", type=split, help="where its calls may be served, or none: anywhere")
    action.add_argument(
        "--notices-url", type=or_none(str), metavar="URL", help="told of neurons that are used, or none"
    )
    action.add_argument("--notices-at", metavar="0.8,1.0", type=_parts, help="the parts of a limit that are told")


def run(options: argparse.Namespace) -> int:
    return with_store_access(read_settings(options), lambda tenantry: _ACTION[options.action](tenantry, options))


async def _create(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    account, secret = await tenantry.open_account(options.name, changed_limits(NO_LIMITS, options), options.plan)
    if options.json:
        print_json({**account_json(account), "token": secret})
    else:
        print(f"account  {account.id}\ntoken    {secret}\n\nThe token is shown this once: keep it.")
    return 0


async def _list(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    found = await tenantry.accounts.list()
    if options.json:
        print_json([account_json(account) for account in found])
        return 0
    table = [(one.id, one.name, one.plan.name, _state(one), limits_text(one.limits)) for one in found]
    print_table(("ACCOUNT", "NAME", "PLAN", "STATE", "LIMITS"), table)
    return 0


async def _show(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    account = await tenantry.accounts.get(options.account)
    return _print(account, options, _print_whole)


async def _limits(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    account = await tenantry.accounts.get(options.account)
    if changed_limits(account.ceiling, options) != account.ceiling:
        account = await tenantry.accounts.amend(
            account.id, lambda account: structs.replace(account, ceiling=changed_limits(account.ceiling, options))
        )
        await tenantry.note(account.id, "account.change", account.id, ceiling=account.ceiling)
    return _print(account, options, _print_limits)


async def _plan(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    plan = await tenantry.accounts.plan(options.plan)
    account = await tenantry.accounts.amend(options.account, lambda account: structs.replace(account, plan=plan))
    await tenantry.note(account.id, "account.change", account.id, plan=plan.name)
    return _print(account, options, _print_limits)


async def _suspend(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    account = await tenantry.accounts.suspend(options.account)
    await tenantry.note(account.id, "account.suspend", account.id)
    return _print(account, options, lambda account: print(f"{account.id} is suspended"))


async def _resume(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    account = await tenantry.accounts.resume(options.account)
    await tenantry.note(account.id, "account.resume", account.id)
    return _print(account, options, lambda account: print(f"{account.id} is served again"))


async def _purge_cache(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    account = await tenantry.accounts.purge_cache(options.account)
    await tenantry.note(account.id, "account.purge_cache", account.id, epoch=account.epoch)
    return _print(account, options, lambda account: print(f"nothing cached for {account.id} is found any more"))


async def _settings(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    account = await tenantry.accounts.get(options.account)
    wished = _wished(account.settings, options)
    if wished.sharing and account.id not in wished.sharing:
        raise ValueError("--sharing names all accounts of the group, this one among them")
    if wished != account.settings:
        account = await tenantry.accounts.amend(
            account.id, lambda account: structs.replace(account, settings=_wished(account.settings, options))
        )
        await tenantry.note(account.id, "account.settings", account.id, settings=account.settings)
    return _print(account, options, _print_settings)


def _wished(settings: Settings, options: argparse.Namespace) -> Settings:
    """With what the options say. Raises ValueError in words for people."""
    names = ("zero_retention", "cache_scope", "cache_keep_s", "sharing", "regions")
    notices = given_limits(options, "notices_url", "notices_at")
    said: dict[str, Any] = {**msgspec.to_builtins(settings), **given_limits(options, *names)}
    if notices.get("notices_url", "") is None:
        said["notices"] = None
    elif notices:
        told = {"url": notices.get("notices_url"), "at": notices.get("notices_at")}
        said["notices"] = {**(said["notices"] or {}), **{name: value for name, value in told.items() if value}}
    return msgspec.convert(said, Settings)


def _print(account: Account, options: argparse.Namespace, for_people: Callable[[Account], None]) -> int:
    if options.json:
        print_json(account_json(account))
    else:
        for_people(account)
    return 0


def _print_whole(account: Account) -> None:
    print(f"account     {account.id}\nname        {account.name}\nstate       {_state(account)}")
    print(
        f"created     {time_text(account.created_at)}\nplan        {account.plan.name}\nrevision    {account.revision}"
    )
    print()
    _print_limits(account)
    print()
    _print_settings(account)


def _print_limits(account: Account) -> None:
    table = limits_rows(account.limits, account.plan.limits, account.ceiling, account.own)
    print_table(("LIMIT", "HOLDS", f"PLAN {account.plan.name}", "OPERATOR", "ITS OWN"), table)


def _print_settings(account: Account) -> None:
    print_table(("SETTING", "VALUE"), [(name, _text(value)) for name, value in _wishes(account.settings).items()])


def _wishes(settings: Settings) -> dict[str, Any]:
    said: dict[str, Any] = msgspec.to_builtins(settings)
    notices = said.pop("notices") or {"url": None, "at": ()}
    return {**said, "notices_url": notices["url"], "notices_at": notices["at"]}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _state(account: Account) -> str:
    return "active" if account.suspended_at is None else f"suspended since {time_text(account.suspended_at)}"


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return text == "yes"


def _parts(text: str) -> list[float]:
    try:
        return [float(part) for part in split(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no parts of a limit: write them like 0.8,1.0") from None


_ACTION = {
    "create": _create,
    "list": _list,
    "show": _show,
    "limits": _limits,
    "plan": _plan,
    "suspend": _suspend,
    "resume": _resume,
    "settings": _settings,
    "purge-cache": _purge_cache,
    "export": transfer.export,
    "import": transfer.import_file,
}
