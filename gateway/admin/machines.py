"""Machines with their devices and models, and the fleet of replicas, as this gateway sees them, for the operator. It
shows no prompts and no accounts."""

from typing import Final

import msgspec
from msgspec import structs

from engine.protocol import frames
from gateway.admin.operation import FOR_OPERATOR, OPERATOR, AdminContext, AdminRequest, AdminResult, NoFields, Operation
from gateway.cluster.fleet import MachineView, ReplicaFleet, ReplicaView
from gateway.errors import conflict, not_found


class DeviceItem(msgspec.Struct, frozen=True):
    """A GPU, or the memory of a machine without one; replicas may hold `budget_bytes` of it."""

    name: str
    total_bytes: int
    budget_bytes: int
    held_bytes: int


class RankItem(msgspec.Struct, frozen=True):
    """A rank of a replica that has several, since its start: `steps`, `waited_ms` for other ranks (0 on GPUs, where
    kernels wait), and `device_bytes` that it holds. `device` is an index of the machine's devices, null: none."""

    rank: int
    device: int | None
    steps: int
    waited_ms: int
    device_bytes: int


class TierItem(msgspec.Struct, frozen=True):
    """KV below the pool, in host memory or on disk: what is found there, and the room that there is in all; no room: it
    has ended."""

    held_bytes: int
    room_bytes: int


class LoadItem(msgspec.Struct, frozen=True):
    """The load of a replica. `blocks` have memory now. `background` counts its queued requests, which the other counts
    leave out; a `draining` replica takes none. `hit_ratio` of the prompts' tokens that were looked up in the last
    seconds were cached, `host_hit_ratio` of them in host memory, `disk_hit_ratio` on disk before, null if none was
    looked up; `tokens_per_s` were computed, of prompts and answers. A tier that it has not is null."""

    running: int
    waiting: int
    waiting_tokens: int
    blocks: int
    free_blocks: int
    cached_blocks: int
    shared_blocks: int
    background: int
    draining: bool
    hit_ratio: float | None
    tokens_per_s: float
    steps: int
    host_hit_ratio: float | None = None
    disk_hit_ratio: float | None = None
    ranks: list[RankItem] = []
    host_tier: TierItem | None = None
    disk_tier: TierItem | None = None


class MachineReplicaItem(msgspec.Struct, frozen=True):
    """`residency` is where its weights are, DISK, MEMORY or DEVICE, and `toward` where they are going. `ready_ms` until
    it could serve if it were asked for now, −1: it cannot. `device` is an index of the machine's devices, null: none;
    `devices` are all of them where it has several ranks. Its `device_bytes`, of each of them, include `weights_bytes`
    and `kv_bytes`; its `memory_bytes`, on the host, the `kept_bytes` of KV.
    `role` is which part of calls it is for, BOTH, PREFILL or DECODE.
    `waiting_here` are this gateway's requests that wait for the model; `load` is null while there is no connection."""

    model: str
    residency: str
    toward: str
    ready_ms: int
    device: int | None
    problem: str
    quarantined: bool
    weights_bytes: int
    device_bytes: int
    kv_bytes: int
    kept_bytes: int
    memory_bytes: int
    waiting_here: int
    load: LoadItem | None
    devices: list[int] = []
    role: str = "BOTH"


class MachineItem(msgspec.Struct, frozen=True):
    """`problem` says why there is no connection; the rest is then what it said last. `memory_bytes` of host memory are
    held by models that sleep or may. `moves` counts them by kind, and as KIND_failed those that failed. While it is
    `draining` it takes nothing more, and its calls go on elsewhere."""

    name: str
    address: str
    problem: str
    devices: list[DeviceItem]
    memory_bytes: int
    memory_budget_bytes: int
    moves: dict[str, int]
    replicas: list[MachineReplicaItem]
    draining: bool = False


class MachinesItem(msgspec.Struct, frozen=True):
    machines: list[MachineItem]


class MachineChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine that is `drained` takes nothing more, over its own restarts too, until that is false again."""

    drained: bool


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


async def machines(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[MachinesItem]:
    return AdminResult(MachinesItem([_machine(context.fleet, machine) for machine in context.fleet.machines()]))


def _machine(fleet: ReplicaFleet, machine: MachineView) -> MachineItem:
    report = machine.report
    return MachineItem(
        name=report.machine,
        address=machine.address,
        problem=machine.problem,
        devices=msgspec.convert(report.devices, list[DeviceItem], from_attributes=True),
        memory_bytes=report.memory_bytes,
        memory_budget_bytes=report.memory_budget_bytes,
        moves=report.moves,
        replicas=[_replica(view, fleet.waiting(view.model)) for view in machine.replicas],
        draining=report.draining,
    )


async def change(context: AdminContext, request: AdminRequest[NoFields, MachineChange]) -> AdminResult[MachineItem]:
    name, drained = request.names["machine"], request.body.drained
    named = [each.address for each in context.fleet.machines() if each.report.machine == name and not each.problem]
    if len(named) > 1:
        raise conflict(f"there are {len(named)} machines named {name}: say which by its address, of {', '.join(named)}")
    machine = context.fleet.drain(name, drained=drained)
    if machine is None:
        raise not_found(f"machine connected to this gateway as {name!r}")
    await context.note(request.caller, "", "machine.drain" if drained else "machine.undrain", name)
    return AdminResult(_machine(context.fleet, machine))


def _replica(view: ReplicaView, waiting: int) -> MachineReplicaItem:
    state = view.state
    memory = state.memory or frames.PlacementStatus(state.residency)
    return MachineReplicaItem(
        model=state.model,
        residency=state.residency.name,
        toward=state.toward.name,
        ready_ms=state.ready_ms,
        device=None if state.device < 0 else state.device,
        problem=view.problem,
        quarantined=state.quarantined,
        weights_bytes=memory.weights_bytes,
        device_bytes=memory.device_bytes,
        kv_bytes=memory.kv_bytes,
        kept_bytes=memory.kept_bytes,
        memory_bytes=memory.memory_bytes,
        waiting_here=waiting,
        load=load_of(view),
        devices=state.devices or ([] if state.device < 0 else [state.device]),
        role=state.role.name,
    )


def load_of(view: ReplicaView) -> LoadItem | None:
    if view.load is None:
        return None
    names = ("hit_ratio", "host_hit_ratio", "disk_hit_ratio", "tokens_per_s")
    recent = {name: getattr(view.recent_load, name) for name in names}
    ranks = [
        RankItem(rank, _device_of(view, rank), **structs.asdict(load)) for rank, load in enumerate(view.load.ranks)
    ]
    return msgspec.convert({**structs.asdict(view.load), **recent, "ranks": ranks}, LoadItem, from_attributes=True)


def _device_of(view: ReplicaView, rank: int) -> int | None:
    """On a CPU all ranks are on the first, which is the host's memory."""
    devices = view.state.devices
    return devices[min(rank, len(devices) - 1)] if devices else None


async def fleet(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[FleetItem]:
    return AdminResult(
        FleetItem(
            open_requests=context.open_requests(),
            unsettled=context.quota.unwritten,
            store_away=context.store_health.down,
            replicas=[_fleet_item(replica) for replica in context.fleet.replicas()],
            machines=context.fleet.problems(),
        )
    )


def _fleet_item(view: ReplicaView) -> ReplicaItem:
    return ReplicaItem(view.machine, view.model, view.state.residency.name, view.ready, view.problem, load_of(view))


OPERATIONS: Final = (
    Operation(
        "GET", f"{OPERATOR}/fleet", fleet, FOR_OPERATOR, "This gateway's requests, and the replicas that it sees"
    ),
    Operation(
        "GET", f"{OPERATOR}/machines", machines, FOR_OPERATOR, "The machines, their memory, and where each model is"
    ),
    Operation(
        "PATCH",
        f"{OPERATOR}/machines/{{machine}}",
        change,
        FOR_OPERATOR,
        "Drain a machine, by its name or address, or let it take work again",
    ),
)
