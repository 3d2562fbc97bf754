"""Plans, for the operator: limits and weights that accounts are sold."""

from typing import Any, Final

import msgspec
from msgspec import NODEFAULT, structs

from gateway import errors
from gateway.admin.operation import (
    FOR_OPERATOR,
    OPERATOR,
    AdminContext,
    AdminRequest,
    AdminResult,
    NoFields,
    Operation,
    values_validated,
)
from tenants.audit import SYSTEM
from tenants.auth.errors import NotFound
from tenants.records.accounts import Plan

PLANS: Final = f"{OPERATOR}/plans"

# A plan without its name and revision.
PlanContent: Final[Any] = msgspec.defstruct(
    "PlanContent",
    [
        (field.name, field.type, field.default)
        for field in structs.fields(Plan)
        if field.name not in ("name", "revision") and field.default is not NODEFAULT
    ],
    frozen=True,
    forbid_unknown_fields=True,
)


class RemovedItem(msgspec.Struct, frozen=True):
    name: str


async def listed(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[list[Plan]]:
    return AdminResult(list(await context.accounts.plans()))


async def show(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[Plan]:
    try:
        plan = await context.accounts.plan(request.names["plan"])
    except NotFound:
        raise errors.not_found("plan") from None
    return AdminResult(plan, revision=plan.revision)


async def keep(context: AdminContext, request: AdminRequest[NoFields, Any]) -> AdminResult[Plan]:
    content = structs.asdict(request.body)
    with values_validated():
        plan = await context.accounts.put_plan(Plan(request.names["plan"], **content), request.revision)
    await context.note(request.caller, SYSTEM, "plan.change", plan.name, revision=plan.revision, **content)
    return AdminResult(plan, revision=plan.revision)


async def remove(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[RemovedItem]:
    try:
        await context.accounts.remove_plan(request.names["plan"])
    except NotFound:
        raise errors.not_found("plan") from None
    await context.note(request.caller, SYSTEM, "plan.remove", request.names["plan"])
    return AdminResult(RemovedItem(request.names["plan"]))


OPERATIONS: Final = (
    Operation("GET", PLANS, listed, FOR_OPERATOR, "All plans, by name"),
    Operation("GET", f"{PLANS}/{{plan}}", show, FOR_OPERATOR, "One plan", versioned=True),
    Operation(
        "PUT",
        f"{PLANS}/{{plan}}",
        keep,
        FOR_OPERATOR,
        "A new plan, or a plan said anew, in force for its accounts within 1 s",
        body=PlanContent,
        versioned=True,
    ),
    Operation(
        "DELETE",
        f"{PLANS}/{{plan}}",
        remove,
        FOR_OPERATOR,
        "Remove a plan that no account has; the default one has its first content again",
    ),
)
