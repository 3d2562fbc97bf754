"""The console at /console/: its files, read once and compressed, and `/`, which leads browsers there.

It knows no tenant and no token: the page calls the public API by itself. Scripts and styles lie below a name that is
the digest of them all, so that browsers keep them for good, and no page ever runs with scripts of another version.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import Final

from starlette.routing import Route

from gateway import errors
from gateway.http.exchange import Exchange
from gateway.http.routes import Endpoint, ExchangeServer, by_method
from gateway.http.static_files import CONTENT_TYPES, PAGE_HEADERS, StaticAnswer

STATIC: Final = Path(__file__).with_name("static")
PAGE: Final = "index.html"
DIGEST_MARK: Final = b"{{digest}}"  # in the page, where the name of its scripts' folder is to be


def console_files(folder: Path = STATIC) -> dict[str, StaticAnswer]:
    """Reads the console's files: by their path below /console/, which is "" for the page."""
    contents = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in CONTENT_TYPES
    }
    together = hashlib.sha256(b"".join(b"%s\0%d\0%s" % (name.encode(), len(c), c) for name, c in contents.items()))
    digest = together.hexdigest()[:16]
    page = contents.pop(PAGE).replace(DIGEST_MARK, digest.encode())
    files = {f"{digest}/{name}": _answer(name, content, True) for name, content in contents.items()}
    return {"": _answer(PAGE, page, False), **files}


def _answer(name: str, content: bytes, immutable: bool) -> StaticAnswer:
    return StaticAnswer(content, CONTENT_TYPES[Path(name).suffix], PAGE_HEADERS, immutable)


def console_routes(server: ExchangeServer) -> list[Route]:
    """Builds the routes of the console, and of `/`."""
    send = partial(_send, console_files())
    paths = {"/": _lead, "/console": _lead, "/console/{path:path}": by_method("console", GET=send)}
    return [Route(path, Endpoint(server, handler)) for path, handler in paths.items()]


async def _send(files: dict[str, StaticAnswer], exchange: Exchange) -> None:
    """Answers with a file. Raises ApiError."""
    file = files.get(exchange.path_params["path"])
    if file is None:
        raise errors.no_route(exchange.path)
    await file.serve(exchange)


async def _lead(exchange: Exchange) -> None:
    """Leads a browser to the console; for all others there is nothing here. Raises ApiError."""
    if exchange.method not in ("GET", "HEAD") or b"text/html" not in exchange.headers.get(b"accept", b""):
        raise errors.no_route(exchange.path)
    exchange.route = "console"
    await exchange.answer(302, b"", [(b"location", b"/console/"), (b"vary", b"accept"), *PAGE_HEADERS])
