"""Whether the store answers, logged once when it stops and once when it is back. It asks nothing."""

import logging
from dataclasses import dataclass

from tenants.store.protocol import StoreUnavailable

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StoreHealth:
    """`down` from the first failed call to the next one that succeeds; `outages` counts such times.

    The log has the problem's text, which callers do not get.
    """

    down: bool = False
    outages: int = 0

    def mark_down(self, problem: StoreUnavailable) -> None:
        if not self.down:
            self.down = True
            self.outages += 1
            log.error("store_away", extra={"fields": {"problem": str(problem)}})

    def mark_up(self) -> None:
        """Ends an outage after a written decision: only a write shows that a full disk has room again."""
        if self.down:
            self.down = False
            log.info("store_back")
