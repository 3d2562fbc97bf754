"""A stand-in for the Hugging Face hub's HTTP interface: model listings, redirects to storage, ranges, cut downloads."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What it holds, and what was asked of it."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut_after: int | None = None  # bytes of a large file; then the connection ends
    damaged: bool = False  # large files arrive with another content
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    tokens: list[tuple[str, str | None]] = field(default_factory=list)  # path, Authorization
    url: str = ""

    def ranges(self, name: str) -> list[str | None]:
        """The Range header of every download of a file, in order."""
        return [ranged for method, path, ranged in self.requests if method == "GET" and path.endswith(name)]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.requests.append((self.command, path, self.headers.get("Range")))
            hub.tokens.append((path, self.headers.get("Authorization")))
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
                self._listing(match[1], match[2] or "main")
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._file(match[1], match[3], body)
            else:
                self._error(404, "RepoNotFound")

        def _listing(self, name: str, revision: str) -> None:
            files = hub.repositories.get(name)
            if files is None:
                self._error(401, "RepoNotFound")
            elif revision not in ("main", COMMIT):
                self._error(404, "RevisionNotFound")
            else:
                siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
                self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode(), {})

        def _file(self, name: str, file: str, body: bool) -> None:
            content = hub.repositories.get(name, {}).get(file)
            if name in hub.gated:
                self._error(403, "GatedRepo")
                return
            if content is None:
                self._error(404, "EntryNotFound")
                return
            large = file.endswith(".safetensors")
            digest = hashlib.sha256(content).hexdigest() if large else hashlib.sha1(content).hexdigest()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
            if large:
                headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest}"'}
            start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
            if not body:
                self._send(200, b"", headers, length=len(content))
                return
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            sent = content[start:]
            if large and hub.damaged:
                sent = bytes(len(sent))
            self._send(206 if start else 200, sent, headers, cut=hub.cut_after if large else None)

        def _error(self, status: int, code: str) -> None:
            self._send(status, b'{"error": "no"}', {"X-Error-Code": code, "X-Error-Message": code})

        def _send(
            self, status: int, body: bytes, headers: dict[str, str], length: int | None = None, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body if cut is None else body[:cut])
            if cut is not None and cut < len(body):
                self.close_connection = True

    return Handler


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port of 127.0.0.1."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
