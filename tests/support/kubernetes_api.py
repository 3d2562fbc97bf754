"""As much of a Kubernetes API server as EndpointSlices need: lists, watches, bookmarks, versions that expire. It may be
away, repeat itself, or tell what is old."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

SERVICE = "hearth-machines"
PORT = 8791


def endpoint_slice(name: str, version: int, machines: dict[str, str], *, ready: bool = True) -> dict[str, Any]:
    """A slice with these machines: node name → IP address."""
    endpoints = [
        {"addresses": [address], "conditions": {"ready": ready}, "nodeName": node, "zone": "fra1"}
        for node, address in machines.items()
    ]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "resourceVersion": str(version),
            "labels": {"kubernetes.io/service-name": SERVICE},
        },
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": "porter", "port": PORT, "protocol": "TCP"}],
    }


@dataclass
class FakeKubernetes:
    """`slices` are what there is; `push` sends any event to all watches. A watch from before `oldest` is told 410, as
    an event where `expires_in_stream`; where `ends_at_once`, any watch ends without a word."""

    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = 100
    oldest: int = 0
    expires_in_stream: bool = False
    ends_at_once: bool = False
    away: bool = False
    lists: int = 0
    watched_from: list[int] = field(default_factory=list)
    url: str = ""
    _history: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _watches: set[asyncio.StreamWriter] = field(default_factory=set)

    def put(self, name: str, machines: dict[str, str], *, ready: bool = True) -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = endpoint_slice(name, self.version, machines, ready=ready)
        self.push({"type": kind, "object": self.slices[name]})

    def delete(self, name: str) -> None:
        self.version += 1
        gone = self.slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self.push({"type": "DELETED", "object": gone})

    def bookmark(self) -> None:
        self.version += 1
        metadata = {"resourceVersion": str(self.version)}
        self.push({"type": "BOOKMARK", "object": {"kind": "EndpointSlice", "metadata": metadata}})

    def push(self, event: dict[str, Any]) -> None:
        self._history.append((self.version, event))
        for watch in self._watches:
            _chunk(watch, event)

    def cut(self) -> None:
        """All watches end without a word."""
        for watch in self._watches:
            watch.transport.abort()

    @property
    def watches(self) -> int:
        return len(self._watches)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeKubernetes"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if self.away:
                    writer.transport.abort()
                    return
                target = urlsplit(head.split(" ", 2)[1])
                query = {name: values[0] for name, values in parse_qs(target.query).items()}
                assert target.path == "/apis/discovery.k8s.io/v1/namespaces/ml/endpointslices", target.path
                assert query["labelSelector"] == f"kubernetes.io/service-name={SERVICE}"
                if "watch" in query:
                    await self._watch(int(query["resourceVersion"]), reader, writer)
                    return
                self.lists += 1
                items = {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.slices.values())}
                _answer(writer, 200, items)

    async def _watch(self, version: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.watched_from.append(version)
        expired = {"kind": "Status", "code": 410, "message": "too old resource version"}
        if version < self.oldest and not self.expires_in_stream:
            _answer(writer, 410, expired)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        if version < self.oldest or self.ends_at_once:
            if not self.ends_at_once:
                _chunk(writer, {"type": "ERROR", "object": expired})
            writer.write(b"0\r\n\r\n")
            writer.close()
            return
        for at, event in self._history:
            if at > version:
                _chunk(writer, event)
        self._watches.add(writer)
        try:
            await reader.read()
        finally:
            self._watches.discard(writer)


def _answer(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    text = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(text), text))


def _chunk(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    line = json.dumps(event).encode() + b"\n"
    writer.write(b"%x\r\n%b\r\n" % (len(line), line))
