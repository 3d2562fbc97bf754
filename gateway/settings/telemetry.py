"""[telemetry] and [log] of hearth.toml: what its processes tell of themselves. It reads no file."""

from typing import Annotated

import msgspec

from gateway.settings.doc import doc


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[telemetry]: traces, and the metrics at /metrics."""

    otlp_url: Annotated[str | None, doc("OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces; default: none")] = None
    otlp_region: Annotated[
        str, doc("region of what is at otlp_url; empty: this host's own", pattern="^[a-z0-9-]{0,32}$")
    ] = ""
    service: Annotated[str, doc("service.name; replicas add -replica", min_length=1, max_length=100)] = "hearth"
    sample: Annotated[float, doc("share of requests that are traced", ge=0, le=1)] = 1.0
    metrics_accounts: Annotated[int, doc("accounts with their own series; others are summed", ge=0, le=10_000)] = 200


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[log]: how all processes write their logs."""

    format: Annotated[str, doc("json, text, or auto: text on a terminal", pattern="^(auto|json|text)$")] = "auto"
    level: Annotated[str, doc("debug, info, warning or error", pattern="^(debug|info|warning|error)$")] = "info"
    file: Annotated[
        str, doc("for serve's and gateways' lines; empty: serve's in the state folder, gateways' nowhere")
    ] = ""
    file_bytes: Annotated[int, doc("after which a file is moved aside", ge=10_000, le=1 << 40)] = 8 << 20
    files: Annotated[int, doc("that are kept aside", ge=0, le=1000)] = 4
