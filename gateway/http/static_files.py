"""Answers that are the same for everybody: files of the package for browsers, compressed once, with a policy that lets
a page load nothing from elsewhere. It knows no paths.
"""

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gateway.http.exchange import Exchange, Header

# Scripts and styles of this gateway alone, none inside a page, and no markup made of text.
CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
PAGE_HEADERS: Final[tuple[Header, ...]] = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
)
CONTENT_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_FOREVER: Final = b"public, max-age=31536000, immutable"
_LEVEL: Final = 9


class StaticAnswer:
    """Bytes that a browser may keep: for good where their address names their version, else it asks about them each
    time, so that a page and its scripts are of one version."""

    def __init__(
        self, content: bytes, content_type: bytes, headers: Sequence[Header] = (), immutable: bool = False
    ) -> None:
        self.content = content
        self._gzipped = gzip.compress(content, _LEVEL, mtime=0)
        self._etag = b'"%s"' % hashlib.sha256(content).hexdigest()[:32].encode()
        self._headers: list[Header] = [
            (b"content-type", content_type),
            (b"etag", self._etag),
            (b"cache-control", _FOREVER if immutable else b"no-cache"),
            (b"vary", b"Accept-Encoding"),
            (b"x-content-type-options", b"nosniff"),
            *headers,
        ]

    async def serve(self, exchange: Exchange) -> None:
        if self._etag in exchange.headers.get(b"if-none-match", b""):
            await exchange.answer(304, b"", self._headers)
        elif _takes_gzip(exchange.headers.get(b"accept-encoding", b"")):
            await exchange.answer(200, self._gzipped, [*self._headers, (b"content-encoding", b"gzip")])
        else:
            await exchange.answer(200, self.content, self._headers)


def static_files(folder: Path) -> dict[str, StaticAnswer]:
    """Reads the files of a folder of the package that browsers get, by their names."""
    return {
        path.name: StaticAnswer(path.read_bytes(), CONTENT_TYPES[path.suffix], PAGE_HEADERS)
        for path in sorted(folder.iterdir())
        if path.suffix in CONTENT_TYPES
    }


def _takes_gzip(accepted: bytes) -> bool:
    for coding in accepted.lower().split(b","):
        name, _, weight = coding.replace(b" ", b"").partition(b";")
        if name in (b"gzip", b"*"):
            return weight not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000")
    return False
