"""What waits for the store and how it did, in numbers, for metrics and operators. It asks the store nothing."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from gateway.observability.store_health import StoreHealth
from tenants.limits import outbox
from tenants.limits.quota import Quota
from tenants.limits.reconciler import Reconciler


@dataclass(frozen=True, slots=True)
class StoreState:
    """`available` is false from a failed decision to the next one written; settlements wait in memory or in the outbox,
    on this disk."""

    available: bool
    outages: int
    different_days: int
    open_reservations: int
    unsettled: int
    outbox_bytes: int
    outbox_damaged_files: int


def store_state(health: StoreHealth, quota: Quota, reconciler: Reconciler, outbox_folder: Path) -> StoreState:
    waiting_bytes = 0
    for path in outbox_folder.glob(f"*{outbox.SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another gateway may remove one at any moment
            waiting_bytes += path.stat().st_size
    damaged = len(list(outbox_folder.glob(f"*{outbox.DAMAGED}")))
    counts = (health.outages, reconciler.different, quota.open, quota.unwritten)
    return StoreState(not health.down, *counts, waiting_bytes, damaged)
