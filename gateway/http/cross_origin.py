"""Which pages of other origins may read this gateway's answers (CORS): the headers that tell browsers, and the answer
to their preflight. It knows no paths, and never allows credentials that a browser adds by itself.
"""

import re
from collections.abc import Sequence
from typing import Final

from gateway import errors
from gateway.http.exchange import Exchange, Header

ANY: Final = "*"
PREFLIGHT_S: Final = 600  # a browser asks again after so long
_METHODS: Final[Header] = (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE")
# All of an answer's headers: request ids, limits and Retry-After among them. No credentials, so * means all.
_EXPOSED: Final[Header] = (b"access-control-expose-headers", b"*")
_NAMES: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1000}")


class CrossOriginPolicy:
    """`allowed` are origins as browsers write them, or `*` for all; none by default."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(origin.encode() for origin in allowed)
        self._any = ANY in allowed

    def headers(self, origin: bytes | None) -> list[Header]:
        """Returns what every answer to a page of this origin carries; None where the request names no origin."""
        if self._any:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        if not self._allowed:
            return []
        vary = (b"vary", b"Origin")  # so that no cache gives one origin's answer to another
        return (
            [(b"access-control-allow-origin", origin), _EXPOSED, vary] if origin in self._allowed and origin else [vary]
        )

    async def answer_preflight(self, exchange: Exchange) -> bool:
        """Answers a browser that asks whether it may send a page's request; returns whether this was one. Raises
        ApiError for an origin that is not allowed."""
        wanted = exchange.headers.get(b"access-control-request-method")
        origin = exchange.headers.get(b"origin")
        if exchange.method != "OPTIONS" or wanted is None or origin is None:
            return False
        exchange.route = "preflight"
        if not self._any and origin not in self._allowed:
            raise errors.origin_not_allowed(origin.decode("latin-1"))
        names = exchange.headers.get(b"access-control-request-headers", b"")
        asked = [(b"access-control-allow-headers", names)] if _NAMES.fullmatch(names) else []
        await exchange.answer(204, b"", [_METHODS, *asked, (b"access-control-max-age", b"%d" % PREFLIGHT_S)])
        return True
