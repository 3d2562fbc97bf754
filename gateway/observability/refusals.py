"""One line of the log for each refused call, of each account at most so many a second: the rest is counted. It sees
ids, codes and names of fields, never what a caller sent.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from gateway.errors import ApiError
from gateway.http.exchange import Exchange

LINES_MAX: Final = 10  # of one account in one second; callers that were not verified are one account, ""

log = logging.getLogger(__name__)


def _later(seconds: float, act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, act)


class RefusalLog:
    """Knows the accounts of the running second alone. `clock` is monotonic seconds; `later` calls a function after so
    many, so that what was left out is told of also where nothing follows."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], object] = _later,
    ) -> None:
        self._clock = clock
        self._later = later
        self._second = 0
        self._seen: Counter[str] = Counter()

    def note(self, exchange: Exchange, refusal: ApiError) -> None:
        """Writes the line of a request that ends with this refusal, unless its own line has told of it."""
        if exchange.reported:
            return
        second = int(self._clock())
        if second != self._second:
            self._tell_left_out()
            self._second = second
        self._seen[exchange.account_id] += 1
        if self._seen[exchange.account_id] <= LINES_MAX:
            log.info("request_refused", extra={"fields": {**_caller(exchange), **refusal.log_fields}})
        elif self._seen[exchange.account_id] == LINES_MAX + 1:
            self._later(1.0, self._tell_if_over)

    def _tell_if_over(self) -> None:
        if int(self._clock()) != self._second:
            self._tell_left_out()

    def _tell_left_out(self) -> None:
        for account, count in self._seen.items():
            if count > LINES_MAX:
                fields = {"account": account or None, "requests": count - LINES_MAX}
                log.warning("refusals_left_out", extra={"fields": fields})
        self._seen.clear()


def _caller(exchange: Exchange) -> dict[str, object]:
    """What is known of the request; its account and token are null where the credential opened nothing."""
    return {
        "request": exchange.request_id,
        "account": exchange.account_id or None,
        "token": exchange.token_id or None,
        "route": exchange.route,
        "method": exchange.method[:20],
        "ms": round((exchange.elapsed_s()) * 1000, 3),
    }
