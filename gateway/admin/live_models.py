"""Models as they are now, over all machines, and the latest moves of their weights, as this gateway sees them. It shows
no prompts and no accounts."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from engine.protocol.types import Residency, TierLoad
from gateway.admin.machines import TierItem
from gateway.admin.operation import (
    FOR_OPERATOR,
    OPERATOR,
    AdminContext,
    AdminRequest,
    AdminResult,
    NoFields,
    Operation,
    Time,
)
from gateway.cluster.fleet import ReplicaView
from gateway.cluster.move_log import MOVES_MAX, Move, MoveKind

_MOVES_AT_ONCE: Final = 500


class LiveModelItem(msgspec.Struct, frozen=True):
    """A model's replicas by place, and their load together. `ready` serve, `moving` are on their way, `quarantined`
    died too often. `waiting` are queued in replicas, `waiting_here` are this gateway's calls that wait for a replica.
    `ready_in_ms` until one could serve a call of now; null: nobody can tell. KV blocks are those that have memory; hits
    and tiers are as a replica's load has them."""

    model: str
    replicas: int
    on_device: int
    in_memory: int
    on_disk: int
    ready: int
    moving: int
    quarantined: int
    ready_in_ms: int | None
    running: int
    waiting: int
    waiting_here: int
    background: int
    tokens_per_s: float
    hit_ratio: float | None
    blocks: int
    free_blocks: int
    cached_blocks: int
    problems: list[str]
    host_hit_ratio: float | None = None
    disk_hit_ratio: float | None = None
    host_tier: TierItem | None = None
    disk_tier: TierItem | None = None


class MovesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Moves that began at `since` or later, the newest first."""

    since: Time | None = None
    model: Annotated[str, Meta(max_length=200)] | None = None
    kind: MoveKind | None = None
    limit: Annotated[int, Meta(ge=1, le=_MOVES_AT_ONCE)] = 100


class MoveItem(msgspec.Struct, frozen=True):
    """A replica's way: a wake comes from host memory, a start from disk; a sleep goes to memory, an end to disk.
    `seconds` is null while it moves; `problem` says why it did not arrive. `device` is null where none is known."""

    began: datetime
    kind: MoveKind
    model: str
    machine: str
    replica: str
    device: int | None
    from_: str = msgspec.field(name="from")
    to: str
    seconds: float | None
    problem: str


async def models(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[list[LiveModelItem]]:
    by_model: defaultdict[str, list[ReplicaView]] = defaultdict(list)
    for replica in context.fleet.replicas():
        by_model[replica.model].append(replica)
    return AdminResult([_model(name, by_model[name], context.fleet.waiting(name)) for name in sorted(by_model)])


def _model(name: str, replicas: Sequence[ReplicaView], waiting_here: int) -> LiveModelItem:
    places = [replica.state.residency for replica in replicas]
    loads = [replica.load for replica in replicas if replica.load is not None]
    expected = [replica.expected_s for replica in replicas if replica.expected_s is not None]
    return LiveModelItem(
        model=name,
        replicas=len(replicas),
        on_device=places.count(Residency.DEVICE),
        in_memory=places.count(Residency.MEMORY),
        on_disk=places.count(Residency.DISK),
        ready=sum(replica.ready for replica in replicas),
        moving=sum(replica.state.residency is not replica.state.toward for replica in replicas),
        quarantined=sum(replica.state.quarantined for replica in replicas),
        ready_in_ms=round(1000 * min(expected)) if expected else None,
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        waiting_here=waiting_here,
        background=sum(load.background for load in loads),
        tokens_per_s=sum(replica.recent_load.tokens_per_s for replica in replicas),
        hit_ratio=_mean(replica.recent_load.hit_ratio for replica in replicas),
        blocks=sum(load.blocks for load in loads),
        free_blocks=sum(load.free_blocks for load in loads),
        cached_blocks=sum(load.cached_blocks for load in loads),
        problems=sorted({replica.problem for replica in replicas if replica.problem}),
        host_hit_ratio=_mean(replica.recent_load.host_hit_ratio for replica in replicas),
        disk_hit_ratio=_mean(replica.recent_load.disk_hit_ratio for replica in replicas),
        host_tier=_sum(load.host_tier for load in loads),
        disk_tier=_sum(load.disk_tier for load in loads),
    )


def _mean(ratios: Iterable[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return sum(known) / len(known) if known else None


def _sum(tiers: Iterable[TierLoad | None]) -> TierItem | None:
    known = [tier for tier in tiers if tier is not None]
    held_bytes, room_bytes = sum(tier.held_bytes for tier in known), sum(tier.room_bytes for tier in known)
    return TierItem(held_bytes, room_bytes) if known else None


async def moves(context: AdminContext, request: AdminRequest[MovesQuery, NoFields]) -> AdminResult[list[MoveItem]]:
    query = request.query
    chosen = [
        move
        for move in context.fleet.moves.latest()
        if query.model in (None, move.model)
        and query.kind in (None, move.kind)
        and (query.since is None or move.began_at >= query.since.timestamp())
    ]
    return AdminResult([_move(move) for move in chosen[: query.limit]])


def _move(move: Move) -> MoveItem:
    return MoveItem(
        began=datetime.fromtimestamp(move.began_at, UTC),
        kind=move.kind,
        model=move.model,
        machine=move.machine,
        replica=move.replica,
        device=None if move.device < 0 else move.device,
        from_=move.origin.name,
        to=move.target.name,
        seconds=None if move.ended_at is None else round(move.ended_at - move.began_at, 3),
        problem=move.problem,
    )


OPERATIONS: Final = (
    Operation(
        "GET",
        f"{OPERATOR}/models",
        models,
        FOR_OPERATOR,
        "Each model's replicas, queues and rates now, over all machines",
    ),
    Operation(
        "GET",
        f"{OPERATOR}/moves",
        moves,
        FOR_OPERATOR,
        f"Wakes and other moves of models, the newest first; the latest {MOVES_MAX:,} that this gateway saw",
    ),
)
