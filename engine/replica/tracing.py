"""A replica's half of a traced request: how long it waited, read its prompt and wrote, below the gateway's span.

It learns from frames alone, of requests whose traceparent is sampled. No token, text or scope is ever in a span. Spans
are made when their sequence has ended and sent by a thread of their own: the loop never waits for a collector, and what
it cannot take is dropped. Imported only where a collector is configured.

    gateway: chat …  ├──────────────────────────────────────────────┤
    replica.queue      ├────┤
    replica.prefill         ├──────────┤
    replica.decode                     ├──────────────────────────┤
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from engine.protocol.frames import StepOutputs, Submit
from engine.protocol.specs import ReplicaSpec
from engine.protocol.types import FinishReason

OPEN_MAX: Final = 8192  # sequences followed at once; further ones go untraced
QUEUE_MAX: Final = 8192  # spans that wait to be sent
EXPORT_S: Final = 2.0  # for one batch, its retry included
FLUSH_S: Final = 2.0  # for all that is left at the end; less than a machine waits for a pulse
_BATCH: Final = 512
_DELAY_MS: Final = 1000
_ERROR_TYPES: Final = {FinishReason.ERROR: "replica_failed", FinishReason.GRAMMAR: "grammar_failed"}
_propagator: Final = TraceContextTextMapPropagator()


@dataclass(slots=True)
class _SequenceTrace:
    """A sequence on its way. Times are nanoseconds since 1970; None is what has not happened."""

    parent: Context
    choice: int | None  # None where the request has only one
    prompt_tokens: int
    submitted: int
    started: int | None = None
    first_token: int | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0


class ReplicaTracer:
    """Follows the sequences of one replica. Ids that it does not know are ignored: they are not traced."""

    def __init__(
        self, exporter: SpanExporter, service: str, model: str, boot: int, now_ns: Callable[[], int] = time.time_ns,
        region: str = "",
    ) -> None:  # fmt: skip
        """The exporter's collector is in `region`."""
        self._region = region
        resource = Resource.create({"service.name": service, "process.pid": os.getpid(), "hearth.boot": boot})
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=QUEUE_MAX, max_export_batch_size=_BATCH, schedule_delay_millis=_DELAY_MS
            )
        )
        self._tracer = self._provider.get_tracer("hearth.replica")
        self._model = model
        self._now_ns = now_ns
        self._journeys: dict[int, dict[int, _SequenceTrace]] = {}  # by owner and id

    @property
    def open(self) -> int:
        """Sequences that are followed now."""
        return sum(map(len, self._journeys.values()))

    def accepted(self, owner: int, submit: Submit) -> None:
        """This Submit of this connection will run. It is not followed where the collector is in none of its regions."""
        parent = _propagator.extract({"traceparent": submit.traceparent})
        if not trace.get_current_span(parent).get_span_context().trace_flags.sampled:
            return
        if submit.regions and self._region not in submit.regions:
            return
        if self.open + submit.n > OPEN_MAX:
            return
        now, prompt_tokens = self._now_ns(), len(submit.tokens) // 4
        journeys = self._journeys.setdefault(owner, {})
        for choice in range(submit.n):
            named = choice if submit.n > 1 else None
            journeys[submit.id + choice] = _SequenceTrace(parent, named, prompt_tokens, now)

    def observe(self, owner: int, progress: StepOutputs) -> None:
        """Notes outputs that are sent to a connection now."""
        journeys = self._journeys.get(owner)
        if journeys is None:
            return
        now = self._now_ns()
        for started in progress.started:
            if (journey := journeys.get(started.id)) is not None:
                journey.started = min(journey.submitted + int(started.waited_ms * 1e6), now)
                journey.cached_tokens = started.cached_tokens
        for id, count in zip(progress.ids, progress.counts, strict=True):
            if (journey := journeys.get(id)) is not None:
                journey.completion_tokens += count
                if journey.first_token is None:
                    journey.first_token = now
        for finish in progress.finished:
            if (journey := journeys.pop(finish.id, None)) is not None:
                self._end(journey, now, finish.reason, _ERROR_TYPES.get(finish.reason))
        if not journeys:
            del self._journeys[owner]

    def rejected(self, owner: int, first: int, choices: int) -> None:
        """The request of these ids waited and will not run."""
        journeys = self._journeys.get(owner, {})
        for id in range(first, first + choices):
            if (journey := journeys.pop(id, None)) is not None:
                self._end(journey, self._now_ns(), None, "busy")
        if not journeys:
            self._journeys.pop(owner, None)

    def dropped(self, owner: int) -> None:
        """The connection is gone, and what ran for it has ended."""
        now = self._now_ns()
        for journey in self._journeys.pop(owner, {}).values():
            self._end(journey, now, FinishReason.CANCELLED, "gateway_gone")

    def close(self) -> None:
        """Ends what is open and sends what is left, for at most FLUSH_S. Call it once, last."""
        for owner in list(self._journeys):
            self.dropped(owner)
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)  # it waits up to 30 s by itself
        closing.start()
        closing.join(FLUSH_S)

    def _end(self, journey: _SequenceTrace, now: int, reason: FinishReason | None, error: str | None) -> None:
        """Makes the spans of the phases that the sequence came to, end to end; the last one says how it ended."""
        phases = [("replica.queue", journey.submitted)]
        if journey.started is not None:
            phases.append(("replica.prefill", journey.started))
        if journey.first_token is not None and journey.first_token < now:
            phases.append(("replica.decode", journey.first_token))
        ends = [*(begin for _, begin in phases[1:]), now]
        for (name, begin), end in zip(phases, ends, strict=True):
            last = name == phases[-1][0]
            span = self._tracer.start_span(
                name,
                context=journey.parent,
                attributes=self._attributes(journey, name, reason if last else None),
                start_time=begin,
            )
            if last and error is not None:
                span.set_attribute("error.type", error)
                span.set_status(trace.StatusCode.ERROR)
            span.end(max(begin, end))

    def _attributes(self, journey: _SequenceTrace, name: str, reason: FinishReason | None) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {"gen_ai.request.model": self._model}
        if journey.choice is not None:
            attributes["hearth.choice"] = journey.choice
        if name == "replica.prefill":
            attributes["gen_ai.usage.input_tokens"] = journey.prompt_tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = journey.cached_tokens
        if reason is not None:
            attributes["gen_ai.usage.output_tokens"] = journey.completion_tokens
            attributes["gen_ai.response.finish_reasons"] = [str(reason)]
        return attributes


def open_tracer(spec: ReplicaSpec) -> ReplicaTracer:
    """Traces to the collector that the spec names."""
    assert spec.telemetry is not None
    exporter = OTLPSpanExporter(endpoint=spec.telemetry.otlp_url, timeout=EXPORT_S)
    service, region = f"{spec.telemetry.service}-replica", spec.telemetry.region
    return ReplicaTracer(exporter, service, spec.model.name, spec.boot, region=region)
