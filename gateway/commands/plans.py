"""`hearth plans`: what accounts may have, and how they are treated beside others."""

import argparse
from typing import Any, Final

import msgspec
from msgspec import structs

from gateway.commands.limits import (
    add_limits,
    changed_limits,
    format_amount,
    given_limits,
    limits_rows,
    limits_text,
    or_none,
)
from gateway.commands.output import add_action, add_command, duration, print_json, print_table, read_settings
from gateway.commands.store_access import StoreAccess, plan_json, with_store_access
from tenants.audit import SYSTEM
from tenants.auth.accounts import NotFound
from tenants.records.plans import Plan

_TEACHING = """\
examples:
  hearth plans list
  hearth plans show team
  hearth plans set team --requests-per-minute 600 --neurons-per-month 5e6 --weight 4
  hearth plans set free --class large --concurrent-requests 1
  hearth plans set team --cap-blocks 20000             how many KV blocks an account's cached prefixes may take
  hearth plans set team --wait 10s                     for how long its requests queue before they are refused
  hearth plans set team --wait none                    what is not named stays
  hearth plans remove team                             refused while accounts have it
  hearth accounts plan ACCOUNT team

A change holds for all accounts of the plan, on every gateway within a second. The plan `default` is what accounts
have that were given no other; removing it gives it its first content again.
"""
_TREATMENT: Final = ("weight", "sequences", "kv_blocks", "floor_blocks", "cap_blocks", "wait_s")


def add(commands: Any) -> None:
    parser = add_command(commands, "plans", "what accounts may have: limits, weight, shares of memory", _TEACHING)
    actions = parser.add_subparsers(dest="action", metavar="list | show | set | remove", required=True)
    add_action(actions, "list", "all plans, by name")
    _of_plan(actions, "show", "all about one plan")
    _add_treatment(_of_plan(actions, "set", "a new plan, or change what is given of one"))
    _of_plan(actions, "remove", "remove a plan that no account has")
    parser.set_defaults(run=run)


def _of_plan(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    action = add_action(actions, name, summary)
    action.add_argument("plan", help="its name, like free or team-2")
    return action


def _add_treatment(action: argparse.ArgumentParser) -> None:
    add_limits(action)
    beside = action.add_argument_group("beside others", "for each model's replica; `none` takes one back")
    beside.add_argument("--weight", type=float, metavar="W", help="share of the engine where it is short (default: 1)")
    beside.add_argument("--sequences", type=or_none(int), metavar="N", help="of one account that run at once")
    beside.add_argument("--kv-blocks", type=or_none(int), metavar="N", help="of one account's running sequences")
    beside.add_argument("--floor-blocks", type=or_none(int), metavar="N", help="cached blocks that others leave it")
    beside.add_argument("--cap-blocks", type=or_none(int), metavar="N", help="cached blocks that it may have")
    beside.add_argument(
        "--wait", dest="wait_s", type=or_none(duration), metavar="10s", help="for a turn, before a request is refused"
    )


def run(options: argparse.Namespace) -> int:
    actions = {"list": _list, "show": _show, "set": _set, "remove": _remove}
    return with_store_access(read_settings(options), lambda tenantry: actions[options.action](tenantry, options))


async def _list(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    found = await tenantry.accounts.plans()
    if options.json:
        print_json([plan_json(plan) for plan in found])
        return 0
    counts = [one.plan.name for one in await tenantry.accounts.list()]
    table = [
        (plan.name, counts.count(plan.name), format_amount(plan.weight), limits_text(plan.limits)) for plan in found
    ]
    print_table(("PLAN", "ACCOUNTS", "WEIGHT", "LIMITS"), table)
    return 0


async def _show(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    return _print(await tenantry.accounts.plan(options.plan), options)


async def _set(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    try:
        before = await tenantry.accounts.plan(options.plan)
    except NotFound:
        before = Plan(options.plan)
    changes = {"limits": changed_limits(before.limits, options), **given_limits(options, *_TREATMENT)}
    plan = msgspec.convert({**structs.asdict(before), **changes}, Plan)
    if plan not in await tenantry.accounts.plans():
        plan = await tenantry.accounts.keep_plan(plan, before.revision)
        await tenantry.note(SYSTEM, "plan.change", plan.name, **structs.asdict(plan))
    return _print(plan, options)


async def _remove(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    await tenantry.accounts.remove_plan(options.plan)
    await tenantry.note(SYSTEM, "plan.remove", options.plan)
    if options.json:
        print_json({"plan": options.plan, "removed": True})
    else:
        print(f"{options.plan} is removed")
    return 0


def _print(plan: Plan, options: argparse.Namespace) -> int:
    if options.json:
        print_json(plan_json(plan))
    else:
        treatment = [(name, format_amount(getattr(plan, name))) for name in _TREATMENT]
        print_table(("PLAN", plan.name), [*limits_rows(plan.limits), *treatment, ("revision", plan.revision)])
    return 0
