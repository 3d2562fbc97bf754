"""[server] of hearth.toml. It reads no file."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.settings.doc import doc
from gateway.settings.origins import origin_problem

_HostName = Annotated[str, Meta(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9._-]*[a-z0-9])?$", max_length=255)]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[server]: the HTTP side."""

    host: Annotated[str, doc("address to listen on")] = "127.0.0.1"
    port: Annotated[int, doc("port to listen on; 0 takes a free one", ge=0, le=65535)] = 8787
    header_bytes_max: Annotated[int, doc("largest request head; above it 431", ge=1024)] = 16 << 10
    header_s: Annotated[float, doc("a request head must be complete within this time", gt=0)] = 10.0
    body_bytes_max: Annotated[int, doc("largest request body; above it 413", ge=1024)] = 10_000_000
    account_bytes: Annotated[
        int, doc("bytes of bodies that an account may send in a second to this gateway; above it 429", ge=1024)
    ] = 16_000_000
    body_s: Annotated[float, doc("a request body must be complete within this time", gt=0)] = 30.0
    connections: Annotated[int, doc("open connections at once; above it 503", ge=1)] = 16384
    requests: Annotated[int, doc("inference requests in progress at once; above it 429", ge=1)] = 12288
    first_byte_s: Annotated[float, doc("a stream's first byte leaves within this time", gt=0)] = 1.0
    ping_s: Annotated[float, doc("silence in a stream is broken by a comment after it", gt=0)] = 8.0
    blocked_s: Annotated[float, doc("a client that reads nothing this long is dropped", gt=0)] = 30.0
    wait_s: Annotated[float, doc("how long a call waits for a replica that can serve", ge=0)] = 30.0
    request_s: Annotated[float, doc("longest life of one inference request; then 408", gt=0)] = 900.0
    region: Annotated[str, doc("region of this gateway; accounts may allow some", pattern="^[a-z0-9-]{0,32}$")] = ""
    region_urls: Annotated[
        dict[str, str],
        doc(
            "URL of a gateway of each region, like https://eu.example.com: where calls that came to the wrong one are "
            "sent by 307; none: they get 403"
        ),
    ] = {}
    private_notices: Annotated[bool, doc("notices of soft caps may go to private addresses and plain http")] = False
    drain_s: Annotated[float, doc("on SIGTERM, running streams get this long to end", ge=0)] = 20.0
    scrub_memory: Annotated[
        bool, doc("all processes overwrite the memory that they free: zero retention then holds for it as well")
    ] = False
    address_connections: Annotated[int, doc("open connections of one address, or IPv6 /64; above it 503", ge=1)] = 4096
    address_failures: Annotated[
        int, doc("credentials of one address, or IPv6 /64, that may fail in a minute; above it 429", ge=1)
    ] = 60
    certificate: Annotated[str, doc("PEM file of a certificate chain: HTTPS, read anew when changed; with `key`")] = ""
    key: Annotated[str, doc("PEM file of the certificate's private key, not encrypted")] = ""
    hosts: Annotated[list[_HostName], doc("served names in Host, also *.example.com; empty: any", max_length=100)] = []
    allowed_origins: Annotated[
        list[str],
        doc("origins of pages that may call this gateway, like https://app.example.com; * for all", max_length=100),
    ] = []
    proxies: Annotated[list[str], doc("networks of proxies that tell callers' addresses", max_length=100)] = []
    proxy_header: Annotated[
        str,
        doc(
            "where these proxies write it: x-forwarded-for or forwarded; the other one never counts",
            pattern="^(x-forwarded-for|forwarded)$",
        ),
    ] = "x-forwarded-for"
    purge_s: Annotated[
        float,
        doc("a purge or raised epoch reaches what replicas cache within so long, on any gateway", ge=0.1, le=60),
    ] = 2.0
    batch_keep_s: Annotated[float, doc("a batch's results stay so long after its end", ge=60, le=2_592_000)] = 86_400.0
    unknown_fields: Annotated[
        Literal["refuse", "ignore"],
        doc("fields of a call that are not known here: 400, or left out and named in x-ignored-fields"),
    ] = "refuse"
    neuron_usd: Annotated[float, doc("US dollars for a neuron, in marketplaces' lists of models", ge=0)] = 0.000011
    metrics_networks: Annotated[
        tuple[str, ...], doc("networks that read /metrics without an operator's token", max_length=100)
    ] = ("127.0.0.0/8", "::1/128")

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("`certificate` and `key` go together; one of them is missing")
        for origin in self.allowed_origins:
            if problem := origin_problem(origin):
                raise ValueError(f"`allowed_origins`: {origin!r} {problem}")
        for region, url in self.region_urls.items():
            if problem := "is any" if url == "*" else origin_problem(url):
                raise ValueError(f"`region_urls`: {url!r} of {region} {problem}")
        for name in ("proxies", "metrics_networks"):
            for network in getattr(self, name):
                try:
                    ipaddress.ip_network(network)
                except ValueError as error:
                    problem = f"`{name}`: {network!r} is no network: {error}; write it like 10.0.0.0/8 or ::1/128"
                    raise ValueError(problem) from None
