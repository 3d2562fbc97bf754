"""`hearth` with one fault of the kind that quotas have elsewhere, so that whoever measures can see that it is noticed.

python -m tests.end_to_end.broken leaving-is-free gateway --port 8787
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from gateway.cli import main
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


BREAKS: Final[dict[str, Callable[[], None]]] = {
    "leaving-keeps-its-hold": leaving_keeps_its_hold,
    "leaving-is-free": leaving_is_free,
    "nothing-is-held": nothing_is_held,
    "an-outage-loses-settlements": an_outage_loses_settlements,
}


if __name__ == "__main__":
    BREAKS[sys.argv.pop(1)]()
    sys.exit(main())
