"""`hearth plans`: what accounts may have, and how they are treated beside others."""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from cyclopts import Group, Parameter
from msgspec import UNSET, UnsetType, structs

from gateway.commands.access.reductions import reductions
from gateway.commands.access.store_access import Access, StoreAccess
from gateway.commands.account_tools.documents import plan_json
from gateway.commands.terminal.confirm import Yes, confirm
from gateway.commands.terminal.limits import NO_CHANGE, LimitOptions, limits_rows, limits_text
from gateway.commands.terminal.options import Json, OptionalCount, OptionalDuration, command_app, given_fields
from gateway.commands.terminal.output import format_amount, print_either, print_table
from gateway.declared_problems import convert_declared
from tenants.audit import SYSTEM
from tenants.auth.errors import NotFound
from tenants.records.accounts import DEFAULT_PLAN, Plan

_TEACHING: Final = """\
examples:
  hearth plans list
  hearth plans show team
  hearth plans set team --requests-per-minute 600 --neurons-per-month 5e6 --weight 4
  hearth plans set free --class large --concurrent-requests 1
  hearth plans set team --cap-blocks 20000             how many KV blocks an account's cached prefixes may take
  hearth plans set team --wait 10s                     for how long its requests queue before they are refused
  hearth plans set team --wait none                    what is not named stays
  hearth plans set bank --strict yes                   no failover of the store passes its limits
  hearth plans set team --requests-per-minute 60 --yes     less than before: it asks where accounts have the plan
  hearth plans remove team                             refused while accounts have it
  hearth accounts plan ACCOUNT team

A change holds for all accounts of the plan, on every gateway within a second. The plan `default` is what accounts
have that were given no other; removing it gives it its first content again.
"""
_GROUP: Final = Group("Beside others", help="for each model's replica; `none` takes one back", sort_key=11)
PlanName = Annotated[str, Parameter(help="its name, like free or team-2")]
app = command_app("plans", "what accounts may have: limits, weight, shares of memory", _TEACHING)


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True)
class TreatmentOptions:
    """How an account is treated beside others, as a command line changes it."""

    weight: Annotated[
        float | UnsetType, Parameter(metavar="W", help="share of the engine where it is short (default: 1)")
    ] = UNSET
    sequences: Annotated[OptionalCount, Parameter(help="of one account that run at once")] = UNSET
    kv_blocks: Annotated[OptionalCount, Parameter(help="of one account's running sequences")] = UNSET
    floor_blocks: Annotated[OptionalCount, Parameter(help="cached blocks that others leave it")] = UNSET
    cap_blocks: Annotated[OptionalCount, Parameter(help="cached blocks that it may have")] = UNSET
    wait_s: Annotated[
        OptionalDuration,
        Parameter(metavar="10s", name="--wait", help="for a turn, before a request is refused"),
    ] = UNSET
    strict: Annotated[
        Literal["yes", "no"] | UnsetType,
        Parameter(metavar="yes|no", help="grant only what all replicas of the store have (docs/store.md)"),
    ] = UNSET


_TREATMENT: Final = tuple(TreatmentOptions.__dataclass_fields__)


@app.command(name="list")
async def list_plans(*, json: Json = False, access: Access) -> None:
    """All plans, by name."""
    plans = await access.accounts.plans()
    accounts = Counter(account.plan.name for account in await access.accounts.list())
    rows = [(plan.name, accounts[plan.name], format_amount(plan.weight), limits_text(plan.limits)) for plan in plans]
    documents = [plan_json(plan) for plan in plans]
    print_either(json, documents, lambda: print_table(("PLAN", "ACCOUNTS", "WEIGHT", "LIMITS"), rows))


@app.command
async def show(plan: PlanName, /, *, json: Json = False, access: Access) -> None:
    """All about one plan."""
    _print(await access.accounts.plan(plan), json)


@app.command(name="set")
async def set_plan(
    plan: PlanName,
    /,
    *,
    limits: LimitOptions = NO_CHANGE,
    treatment: TreatmentOptions = TreatmentOptions(),
    yes: Yes = False,
    json: Json = False,
    new_access: Access,
) -> None:
    """A new plan, or change what is given of one."""
    access = new_access
    try:
        before = await access.accounts.plan(plan)
    except NotFound:
        before = Plan(plan)
    changes: dict[str, Any] = {"limits": limits.changed(before.limits), **given_fields(treatment, _TREATMENT)}
    if "strict" in changes:
        changes["strict"] = treatment.strict == "yes"
    after = convert_declared({**structs.asdict(before), **changes}, Plan)
    if after not in await access.accounts.plans():
        await _confirm_reductions(access, before, after, yes)
        after = await access.accounts.put_plan(after, before.revision)
        await access.note(SYSTEM, "plan.change", after.name, **structs.asdict(after))
    _print(after, json)


async def _confirm_reductions(access: StoreAccess, before: Plan, after: Plan, yes: bool) -> None:
    """Asks where accounts lose something. Raises Declined."""
    users = [account.name for account in await access.accounts.list() if account.plan.name == before.name]
    if users and (lost := reductions(before, after)):
        whose = f"{len(users)} accounts" if len(users) > 1 else f"the account {users[0]}"
        confirm(f"{whose} of the plan {before.name} would get less: {', '.join(lost)}", yes)


@app.command
async def remove(plan: PlanName, /, *, yes: Yes = False, json: Json = False, access: Access) -> None:
    """Remove a plan that no account has."""
    if plan == DEFAULT_PLAN.name:
        await _confirm_reductions(access, await access.accounts.plan(plan), DEFAULT_PLAN, yes)
    await access.accounts.remove_plan(plan)
    await access.note(SYSTEM, "plan.remove", plan)
    print_either(json, {"plan": plan, "removed": True}, lambda: print(f"{plan} is removed"))


def _print(plan: Plan, as_json: bool) -> None:
    treatment = [(name, format_amount(getattr(plan, name))) for name in _TREATMENT if name != "strict"]
    rows = [
        *limits_rows(plan.limits),
        *treatment,
        ("strict", "yes" if plan.strict else "no"),
        ("revision", plan.revision),
    ]
    print_either(as_json, plan_json(plan), lambda: print_table(("PLAN", plan.name), rows))
