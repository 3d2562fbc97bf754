"""`hearth` with one fault of the kind that others have had, so that whoever measures can see that it is noticed.

python -m tests.end_to_end.broken leaving-is-free gateway --port 8787
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from engine.protocol.types import Scope, ScopeKind
from gateway.cli import main
from gateway.commands import serve
from gateway.inference import cache_scope
from tenants.limits.quota import Quota
from tenants.limits.reservation import CallUsage, Reservation
from tenants.records.holds import Granted
from tenants.records.usage import UsageRecord
from tenants.store.redis.quotas import RedisQuotaStore


def leaving_keeps_its_hold() -> None:
    """A client that leaves is forgotten."""
    settle = Quota.settle

    def forgetful(self: Quota, reservation: Reservation, spent: CallUsage) -> None:
        if spent.outcome != "client_gone":
            settle(self, reservation, spent)

    Quota.settle = forgetful  # type: ignore[method-assign]


def leaving_is_free() -> None:
    """Whoever leaves before the end is not charged for what came until then."""
    settle = Quota.settle

    def generous(self: Quota, reservation: Reservation, spent: CallUsage) -> None:
        settle(self, reservation, spent if spent.outcome == "done" else CallUsage(outcome=spent.outcome))

    Quota.settle = generous  # type: ignore[method-assign]


def nothing_is_held() -> None:
    """The budget is compared with what has been used, and what runs is not counted: check, then add."""
    reserve = RedisQuotaStore.reserve

    async def naive(self: Any, hold: Any) -> Any:
        caps = tuple(msgspec.structs.replace(cap, amount=min(cap.amount, 1), min_amount=0) for cap in hold.caps)
        decision = await reserve(self, msgspec.structs.replace(hold, held=0, caps=caps))
        return msgspec.structs.replace(decision, held=hold.held) if isinstance(decision, Granted) else decision

    RedisQuotaStore.reserve = naive  # type: ignore[method-assign]


def an_outage_loses_settlements() -> None:
    """What the store does not take is thrown away."""

    async def careless(self: Quota, batch: Sequence[UsageRecord], outage: Exception) -> bool:
        return True

    Quota._append_to_outbox = careless  # type: ignore[method-assign]


def tenants_share_prefixes() -> None:
    """Every account reads what every other has cached."""

    def common(kind: ScopeKind, id: bytes = b"", epoch: int = 0, account: bytes = b"") -> Scope:
        return Scope(kind, b"" if kind is ScopeKind.REQUEST else bytes(16), epoch, account)

    cache_scope.Scope = common  # type: ignore[assignment, misc]


BREAKS: Final[dict[str, Callable[[], None]]] = {
    "leaving-keeps-its-hold": leaving_keeps_its_hold,
    "leaving-is-free": leaving_is_free,
    "nothing-is-held": nothing_is_held,
    "an-outage-loses-settlements": an_outage_loses_settlements,
    "tenants-share-prefixes": tenants_share_prefixes,
}


def break_children(name: str) -> None:
    """Lets `hearth serve` start its gateway with the same fault."""
    start = serve.ChildProcess

    def broken(process: str, command: Sequence[str], *others: Any) -> serve.ChildProcess:
        at = command.index("-m") + 1
        words = ["tests.end_to_end.broken", name] if command[at] == "gateway.cli" else [command[at]]
        return start(process, [*command[:at], *words, *command[at + 1 :]], *others)

    serve.ChildProcess = broken  # type: ignore[assignment, misc]


if __name__ == "__main__":
    name = sys.argv.pop(1)
    BREAKS[name]()
    break_children(name)
    sys.exit(main())
