"""The fleet as this gateway sees it, for the operator. It shows no prompts and no accounts."""

from typing import Final

import msgspec

from gateway.admin.machines import LoadItem, load_of
from gateway.admin.operation import FOR_OPERATOR, OPERATOR, AdminContext, AdminRequest, AdminResult, NoFields, Operation
from gateway.cluster.fleet import ReplicaView


class ReplicaItem(msgspec.Struct, frozen=True):
    """`load` is null while this gateway has no connection to it."""

    machine: str
    model: str
    residency: str
    ready: bool
    problem: str
    load: LoadItem | None


class FleetItem(msgspec.Struct, frozen=True):
    """`open_requests` and `unsettled` are this gateway's; `machines` are those that it cannot reach, and why."""

    open_requests: int
    unsettled: int
    store_away: bool
    replicas: list[ReplicaItem]
    machines: dict[str, str]


async def show(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[FleetItem]:
    return AdminResult(
        FleetItem(
            open_requests=context.open_requests(),
            unsettled=context.quota.unwritten,
            store_away=context.store_health.down,
            replicas=[_item(replica) for replica in context.fleet.replicas()],
            machines=context.fleet.problems(),
        )
    )


def _item(view: ReplicaView) -> ReplicaItem:
    return ReplicaItem(view.machine, view.model, view.state.residency.name, view.ready, view.problem, load_of(view))


OPERATIONS: Final = (
    Operation("GET", f"{OPERATOR}/fleet", show, FOR_OPERATOR, "This gateway's requests, and the replicas that it sees"),
)
