"""Whether the store answers, told to the operator once when it stops and once when it is back. It asks nothing."""

import logging

from tenants.store.protocol import StoreUnavailable

log = logging.getLogger(__name__)


class StoreHealth:
    """`away` from the first failed call to the next one that succeeds; `count` of such times.

    Callers are told less than the operator is.
    """

    def __init__(self) -> None:
        self.away = False
        self.count = 0

    def begin(self, problem: StoreUnavailable) -> None:
        if not self.away:
            self.away = True
            self.count += 1
            log.error("store_away", extra={"fields": {"problem": str(problem)}})

    def end(self) -> None:
        """A decision was written: nothing less shows that a full disk has room again."""
        if self.away:
            self.away = False
            log.info("store_back")
