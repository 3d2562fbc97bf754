import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.observability import tracing as module
from gateway.observability.tracing import RequestTracer
from gateway.settings.config import ModelEntryConfig
from tenants.limits.reservation import CallUsage
from tests.support import minilm
from tests.support.served_gateway import looped, served
from tests.support.stub_replica import MODEL

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def traced(folder: Path, exporter: InMemorySpanExporter, **body: Any) -> tuple[Sequence[ReadableSpan], str]:
    """The spans of one call, and the traceparent that the replica saw."""
    traces = RequestTracer(exporter)
    async with served(folder, traces=traces) as gateway:
        gateway.behaviour.cached_tokens = 2
        await gateway.call(gateway.run_path, {"max_tokens": 3, **body}, traceparent=PARENT)
        await gateway.settled()
        seen = gateway.fleet.submits[0].traceparent if gateway.fleet.submits else ""
    return exporter.get_finished_spans(), seen


@looped
async def test_a_request_is_one_span_with_genai_names_and_no_content(tmp_path: Path) -> None:
    (span,), seen = await traced(tmp_path, InMemorySpanExporter(), prompt="a secret question")
    said = attributes(span)
    assert span.name == f"chat {MODEL}"
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == MODEL
    assert said["gen_ai.usage.output_tokens"] == 3
    assert said["gen_ai.usage.cache_read.input_tokens"] == 2
    assert said["hearth.outcome"] == "done"
    assert "secret" not in span.to_json()
    assert span.context is not None
    assert seen == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


@pytest.mark.parametrize(("collector", "spans"), [("eu", 1), ("us", 0), ("", 0)])
def test_a_call_leaves_a_span_only_where_the_collector_is_in_its_regions(collector: str, spans: int) -> None:
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(exporter, region=collector)
    bound = tracer.start_span("m", {b"traceparent": PARENT.encode()}, regions=("eu", "eu-2"))
    bound.end(CallUsage(outcome="done"))
    assert bool(bound.traceparent) is bool(spans), "its replica leaves none either"
    tracer.start_span("m", {}).end(CallUsage(outcome="done"))
    tracer.close()
    assert len(exporter.get_finished_spans()) == spans + 1


@looped
async def test_a_request_for_vectors_is_one_span_whatever_its_texts(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    entry = ModelEntryConfig(name=MODEL, folder=str(minilm.folder()))
    async with served(tmp_path, traces=RequestTracer(exporter), models=[entry]) as gateway:
        await gateway.call(gateway.run_path, {"text": ["one", "two"]}, traceparent=PARENT)
        await gateway.settled()
        seen = {submit.traceparent for submit in gateway.fleet.submits}
    (span,) = exporter.get_finished_spans()
    assert span.name == f"embeddings {MODEL}"
    assert attributes(span)["gen_ai.operation.name"] == "embeddings"
    assert attributes(span)["gen_ai.usage.input_tokens"] == 6
    assert span.context is not None
    assert seen == {f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"}


@looped
async def test_the_span_hangs_below_the_callers(tmp_path: Path) -> None:
    (span,), seen = await traced(tmp_path, InMemorySpanExporter(), prompt="hello")
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert seen.split("-")[1] == PARENT.split("-")[1]


@looped
async def test_a_failed_request_is_a_failed_span(tmp_path: Path) -> None:
    (span,), seen = await traced(tmp_path, InMemorySpanExporter(), prompt="hello", logit_bias={"999999": 1})
    assert attributes(span)["error.type"] == "invalid_request"
    assert seen == ""


@pytest.mark.parametrize(("given", "seen"), [(PARENT, PARENT), ("junk", ""), ("00-" + "0" * 32 + PARENT[35:], "")])
def test_without_an_exporter_only_a_good_traceparent_is_handed_on(given: str, seen: str) -> None:
    span = RequestTracer(None).start_span(MODEL, {b"traceparent": given.encode()})
    assert span.traceparent == seen


class Stuck(SpanExporter):
    """A collector that takes a batch and is not heard of again."""

    def __init__(self) -> None:
        self.free, self.freed = threading.Event(), False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.freed = self.free.wait(60)
        return SpanExportResult.SUCCESS


def test_a_stuck_collector_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.2)
    stuck = Stuck()
    traces = RequestTracer(stuck)
    traces.start_span(MODEL, {}).end(CallUsage(1, 0, 1, "done", None, 1.0))
    traces.close()
    assert not stuck.freed
    stuck.free.set()
