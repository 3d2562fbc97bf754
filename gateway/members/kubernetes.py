"""The machines behind a headless service of Kubernetes: its EndpointSlices, listed once and then watched. Each endpoint
is the porter of the machine that is named after its node.

What Kubernetes thinks of an endpoint's health does not count: whether a machine answers, a gateway finds out itself.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import msgspec

from engine.process.supervised import Backoff
from engine.protocol.address import machine_address
from gateway.members.protocol import Membership

PORT_NAME: Final = "porter"
WATCH_S: Final = 240  # after which the API server ends a watch, so that one that hangs is noticed
_ANSWER_S: Final = 10.0
_MARGIN_S: Final = 30.0
_BACKOFF_S: Final = (0.2, 30.0)
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SERVICE_LABEL: Final = "kubernetes.io/service-name"
_EXPIRED: Final = 410

log = logging.getLogger(__name__)


class _Reference(msgspec.Struct, rename="camel"):
    name: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] = []
    node_name: str | None = None
    target_ref: _Reference | None = None


class _Port(msgspec.Struct, rename="camel"):
    name: str | None = None
    port: int | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Slice(msgspec.Struct, rename="camel"):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _SliceList(msgspec.Struct, rename="camel"):
    metadata: _Metadata
    items: list[_Slice]


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Expired(Exception):
    """The API server no longer knows the version that a watch is to begin at."""


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """Where the API server is, and how a pod shows who it is. The token is read for each request: it is renewed."""

    url: str
    token: Path | None
    verify: ssl.SSLContext | bool

    def headers(self) -> Mapping[str, str]:
        return {} if self.token is None else {"authorization": f"Bearer {self.token.read_text().strip()}"}


def pod_api(environment: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> KubernetesApi:
    """The API server of the cluster that this pod runs in. Raises ValueError outside one."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").is_file():
        raise ValueError(
            '[cluster] members = "kubernetes:…" is for pods with a service account: KUBERNETES_SERVICE_HOST or '
            f"{account / 'token'} is missing"
        )
    host = f"[{host}]" if ":" in host else host
    trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
    return KubernetesApi(f"https://{host}:{port}", account / "token", trusted)


class KubernetesMembers:
    """See Members."""

    def __init__(
        self, api: KubernetesApi, namespace: str, service: str, backoff_s: tuple[float, float] = _BACKOFF_S
    ) -> None:
        self._api = api
        self._path = f"{api.url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._service = service
        self._backoff = Backoff(*backoff_s)
        self._ended = Backoff(*backoff_s)  # of watches without an event, bookmarks included: one of WATCH_S has some
        self._slices: dict[str, _Slice] = {}
        self._version = ""
        self._told: Membership | None = None

    async def follow(self, on_change: Callable[[Membership], None]) -> None:
        self._version = ""
        timeout = httpx.Timeout(_ANSWER_S, read=WATCH_S + _MARGIN_S)
        async with httpx.AsyncClient(verify=self._api.verify, timeout=timeout, trust_env=False) as client:
            while True:
                try:
                    if not self._version:
                        await self._list(client)
                        self._tell(on_change)
                    async for _ in self._watch(client):
                        self._ended.reset()
                        self._tell(on_change)
                    pause_s = self._ended.fail()
                except _Expired:
                    self._version = ""  # lists again; what was told stays until then
                    pause_s = self._ended.fail()
                except (httpx.HTTPError, msgspec.MsgspecError, OSError) as error:
                    if self._backoff.failures == 0:
                        log.warning("Kubernetes does not answer, its machines stay as they are: %s", _text(error))
                    pause_s = self._backoff.fail()
                await asyncio.sleep(pause_s)

    def _tell(self, on_change: Callable[[Membership], None]) -> None:
        self._backoff.reset()
        membership = Membership(frozenset(address for each in self._slices.values() for address in _addresses(each)))
        if membership != self._told:
            on_change(membership)
            self._told = membership

    def _query(self, **query: str | int) -> dict[str, str | int]:
        return {"labelSelector": f"{_SERVICE_LABEL}={self._service}", **query}

    async def _list(self, client: httpx.AsyncClient) -> None:
        answer = await client.get(self._path, params=self._query(), headers=self._api.headers(), timeout=_ANSWER_S)
        answer.raise_for_status()
        found = msgspec.json.decode(answer.content, type=_SliceList)
        self._slices = {each.metadata.name: each for each in found.items}
        self._version = found.metadata.resource_version

    async def _watch(self, client: httpx.AsyncClient) -> AsyncIterator[None]:
        """Takes changes as they come; yields after each that may matter. Raises _Expired."""
        query = self._query(watch=1, resourceVersion=self._version, allowWatchBookmarks="true", timeoutSeconds=WATCH_S)
        async with client.stream("GET", self._path, params=query, headers=self._api.headers()) as answer:
            if answer.status_code == _EXPIRED:
                raise _Expired
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.strip():
                    self._take(msgspec.json.decode(line, type=_Event))
                    yield

    def _take(self, event: _Event) -> None:
        """One event, which may be old, or have come before. Raises _Expired."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            if status.code == _EXPIRED:
                raise _Expired
            raise httpx.RemoteProtocolError(f"the watch ended with {status.code}: {status.message}")
        changed = msgspec.json.decode(event.object, type=_Slice)
        name, version = changed.metadata.name, changed.metadata.resource_version
        if event.type != "BOOKMARK":
            known = self._slices.get(name)
            if known is not None and _older(version, known.metadata.resource_version):
                return
            if event.type == "DELETED":
                self._slices.pop(name, None)
            elif known is not None or not _older(version, self._version):
                self._slices[name] = changed
        if not _older(version, self._version):
            self._version = version


def _addresses(of: _Slice) -> list[str]:
    ports = [port.port for port in of.ports or [] if port.port is not None and port.name in (PORT_NAME, None, "")]
    found = []
    for endpoint in of.endpoints or []:
        name = endpoint.node_name or (endpoint.target_ref.name if endpoint.target_ref else "")
        if ports and name and endpoint.addresses:
            host = endpoint.addresses[0]
            found.append(machine_address(name, f"[{host}]:{ports[0]}" if ":" in host else f"{host}:{ports[0]}"))
    return found


def _older(version: str, than: str) -> bool:
    """Whether one resource version is before another; of those that are no numbers, which is not known, none is."""
    return version.isdigit() and than.isdigit() and int(version) < int(than)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
