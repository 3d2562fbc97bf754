"""One span per inference request, with the GenAI attribute names, handed on to the replica as a traceparent.

No prompt, completion or account is ever in a span. Where no exporter is given nothing is made and nothing is sent.
"""

import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.settings.telemetry import TelemetryConfig
from tenants.limits.reservation import CallUsage

EXPORT_S: Final = 2.0  # for one batch, its retry included
FLUSH_S: Final = 2.0  # for all that is left at the end
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_propagator: Final = TraceContextTextMapPropagator()


@dataclass(slots=True)
class RequestSpan:
    """One request's span. `traceparent` goes to the replica; it is the caller's own where tracing is off."""

    span: trace.Span | None
    traceparent: str

    def end(self, spent: CallUsage) -> None:
        span = self.span
        if span is None:
            return
        span.set_attribute("gen_ai.usage.input_tokens", spent.prompt_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", spent.cached_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", spent.completion_tokens)
        span.set_attribute("hearth.outcome", spent.outcome)
        if spent.first_token_ms is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", spent.first_token_ms / 1000)
        if spent.outcome != "done":
            span.set_attribute("error.type", spent.outcome)
            span.set_status(trace.StatusCode.ERROR)
        span.end()


class RequestTracer:
    """Spans of one gateway. `exporter` None switches them off; `region` is of the collector."""

    def __init__(
        self, exporter: SpanExporter | None, service: str = "hearth", sample: float = 1.0, region: str = ""
    ) -> None:
        self._region = region
        self._provider: TracerProvider | None = None
        if exporter is not None:
            resource = Resource.create({"service.name": service})
            sampler = TraceIdRatioBased(sample)
            self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
            self._tracer = self._provider.get_tracer("hearth.gateway")

    def start_span(
        self, model: str, headers: Mapping[bytes, bytes], operation: str = "chat", regions: Collection[str] = ()
    ) -> RequestSpan:
        """Starts a request's span, below the caller's where its headers name one. `operation` is GenAI's name. A
        request that may be served in some regions leaves no span where the collector is in none of them, here and at
        the replica."""
        if regions and self._provider is not None and self._region not in regions:
            return RequestSpan(None, "")
        header = headers.get(b"traceparent", b"").decode("latin-1")
        parent = header if _TRACEPARENT.fullmatch(header) else ""
        if self._provider is None:
            return RequestSpan(None, parent)
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=_propagator.extract({"traceparent": parent}),
            kind=trace.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "hearth",
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
            },
        )
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, context=trace.set_span_in_context(span))
        return RequestSpan(span, carrier.get("traceparent", ""))

    def close(self) -> None:
        """Sends what is left, for at most FLUSH_S. Blocks; called once everything else has ended."""
        if self._provider is not None:
            closing = threading.Thread(target=self._provider.shutdown, daemon=True)  # it waits up to 30 s by itself
            closing.start()
            closing.join(FLUSH_S)


def open_tracer(config: TelemetryConfig, region: str) -> RequestTracer:
    """A tracer to the configured OTLP endpoint, or one that does nothing; this gateway is in `region`."""
    if config.otlp_url is None:
        return RequestTracer(None)
    exporter = OTLPSpanExporter(endpoint=config.otlp_url, timeout=EXPORT_S)
    return RequestTracer(exporter, config.service, config.sample, config.otlp_region or region)
