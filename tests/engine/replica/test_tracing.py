"""Spans of sequences, learned from frames alone; and a replica that pays nothing for traces, nor waits for them."""

import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from engine.protocol.frames import SequenceFinished, SequenceStarted, StepOutputs, Submit
from engine.protocol.specs import TelemetrySpec
from engine.protocol.types import FinishReason, SamplingParams, Scope, ScopeKind
from engine.replica import tracing as module
from engine.replica.tracing import ReplicaTracer
from tests.engine.replica.test_server import LIMIT_S, Stamped, finished
from tests.support.otlp_collector import Collector, collecting
from tests.support.stamp_engine import Temper
from tests.support.waiting import wait_for

TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{ABOVE}-01"
MS = 1_000_000
PROMPT = [4_242_424, 4_242_425, 4_242_426, 4_242_427, 4_242_428]
SCOPE = Scope(ScopeKind.TENANT, b"scope-scope-scop")


class Told:
    """Traces in memory, with a clock that moves a millisecond at every look, and frames in few words."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.now_ns = 0
        self.traces = ReplicaTracer(self.exporter, "test-replica", "@cf/test/stamp", 7, self._clock, region="eu")

    def _clock(self) -> int:
        self.now_ns += MS
        return self.now_ns

    def submit(self, id: int, traceparent: str = SAMPLED, owner: int = 1, n: int = 1, *regions: str) -> None:
        packed, allowed = array("I", PROMPT).tobytes(), [*regions]
        submit = Submit(id, packed, SCOPE, SamplingParams(), 9, n=n, traceparent=traceparent, regions=allowed)
        self.traces.accepted(owner, submit)

    def start(self, id: int, waited_ms: float = 0.0, cached_tokens: int = 0) -> None:
        self.traces.observe(1, StepOutputs([], [], b"", started=[SequenceStarted(id, cached_tokens, waited_ms)]))

    def tokens(self, *ids: int, finish: FinishReason | None = None) -> None:
        ended = [] if finish is None else [SequenceFinished(id, finish, 1, "said in words") for id in ids]
        packed = array("I", [4_242_429] * len(ids)).tobytes()
        self.traces.observe(1, StepOutputs(list(ids), [1] * len(ids), packed, finished=ended))

    def finish(self, id: int, reason: FinishReason) -> None:
        self.traces.observe(1, StepOutputs([], [], b"", finished=[SequenceFinished(id, reason, 0, "said in words")]))

    def spans(self) -> Sequence[ReadableSpan]:
        self.traces.close()
        return self.exporter.get_finished_spans()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def names(spans: Sequence[ReadableSpan]) -> list[str]:
    return [span.name for span in spans]


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time // MS, span.end_time // MS


def whole_journey() -> Sequence[ReadableSpan]:
    told = Told()
    told.submit(5)  # at 1 ms
    told.now_ns = 49 * MS
    told.start(5, waited_ms=20.0, cached_tokens=3)
    told.tokens(5)  # at 51 ms
    told.tokens(5)
    told.tokens(5, finish=FinishReason.STOP)  # at 53 ms
    assert told.traces.open == 0
    return told.spans()


def test_a_sequence_is_three_spans_end_to_end_below_the_gateways() -> None:
    spans = whole_journey()
    assert names(spans) == ["replica.queue", "replica.prefill", "replica.decode"]
    assert [times(span) for span in spans] == [(1, 21), (21, 51), (51, 53)]
    for span in spans:
        assert span.context is not None
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == ABOVE
        assert span.resource.attributes["service.name"] == "test-replica"
        assert attributes(span)["gen_ai.request.model"] == "@cf/test/stamp"


def test_spans_say_how_much_was_read_and_written_and_how_it_ended() -> None:
    _, prefill, decode = whole_journey()
    assert attributes(prefill)["gen_ai.usage.input_tokens"] == 5
    assert attributes(prefill)["gen_ai.usage.cache_read.input_tokens"] == 3
    assert attributes(decode)["gen_ai.usage.output_tokens"] == 3
    assert attributes(decode)["gen_ai.response.finish_reasons"] == ("stop",)
    assert decode.status.status_code is StatusCode.UNSET


def test_no_token_scope_or_message_is_in_a_span() -> None:
    said = "".join(span.to_json() for span in whole_journey())
    for content in ("42424", "scope-scope", SCOPE.id.hex(), "said in words"):
        assert content not in said


@pytest.mark.parametrize("traceparent", ["", "junk", SAMPLED[:-1] + "0", "00-" + "0" * 32 + SAMPLED[35:]])
def test_only_what_the_gateway_samples_is_traced(traceparent: str) -> None:
    told = Told()
    told.submit(1, traceparent)
    assert told.traces.open == 0
    told.start(1)
    told.tokens(1, finish=FinishReason.STOP)
    assert told.spans() == ()


def test_what_may_not_leave_for_the_collectors_region_is_not_traced() -> None:
    told = Told()
    told.submit(1, SAMPLED, 1, 1, "us", "mars")
    assert told.traces.open == 0
    told.submit(2, SAMPLED, 1, 1, "us", "eu")
    assert told.traces.open == 1


def test_one_cancelled_in_the_queue_is_one_span() -> None:
    told = Told()
    told.submit(1)
    told.finish(1, FinishReason.CANCELLED)
    (span,) = told.spans()
    assert span.name == "replica.queue"
    assert attributes(span)["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert span.status.status_code is StatusCode.UNSET


def test_one_that_ends_with_its_first_token_decodes_nothing() -> None:
    told = Told()
    told.submit(1)
    told.start(1)
    told.tokens(1, finish=FinishReason.LENGTH)
    spans = told.spans()
    assert names(spans) == ["replica.queue", "replica.prefill"]
    assert attributes(spans[1])["gen_ai.usage.output_tokens"] == 1


def test_a_request_that_is_rejected_after_it_waited_is_a_failed_span_for_each_choice() -> None:
    told = Told()
    told.submit(1)
    told.submit(2)
    told.traces.rejected(1, 1, 2)
    assert told.traces.open == 0
    spans = told.spans()
    assert names(spans) == ["replica.queue"] * 2
    assert {attributes(span)["error.type"] for span in spans} == {"busy"}
    assert "gen_ai.response.finish_reasons" not in attributes(spans[0])


def test_a_failed_sequence_is_a_failed_span() -> None:
    told = Told()
    told.submit(1)
    told.start(1)
    told.finish(1, FinishReason.ERROR)
    queue, prefill = told.spans()
    assert queue.status.status_code is StatusCode.UNSET
    assert prefill.status.status_code is StatusCode.ERROR
    assert attributes(prefill)["error.type"] == "replica_failed"


def test_a_connection_that_ends_ends_its_spans_and_no_others() -> None:
    told = Told()
    told.submit(1, owner=1)
    told.submit(1, owner=2)
    told.traces.dropped(2)
    told.traces.dropped(2)
    assert told.traces.open == 1
    told.finish(1, FinishReason.CANCELLED)
    first, second = told.spans()
    assert attributes(first)["error.type"] == "gateway_gone"
    assert "error.type" not in attributes(second)


def test_each_choice_has_spans_of_its_own() -> None:
    told = Told()
    told.submit(10, n=3)
    for id in (10, 11, 12):
        told.start(id)
    told.tokens(10, 11, 12)
    told.tokens(10, 11, 12, finish=FinishReason.STOP)
    decodes = [span for span in told.spans() if span.name == "replica.decode"]
    assert [attributes(span)["hearth.choice"] for span in decodes] == [0, 1, 2]


def test_unknown_ids_and_frames_out_of_order_harm_nothing() -> None:
    told = Told()
    told.tokens(99, finish=FinishReason.STOP)
    told.traces.dropped(99)
    told.submit(1)
    told.tokens(1, 99)  # before it has started
    told.start(99)
    told.start(1, waited_ms=1e9)  # longer ago than it has come
    told.finish(99, FinishReason.ERROR)
    told.submit(1)  # the id again, before its end was told
    told.finish(1, FinishReason.STOP)
    told.finish(1, FinishReason.STOP)
    assert told.traces.open == 0
    assert names(told.spans()) == ["replica.queue"]


def test_no_span_ends_before_it_begins_when_the_clock_is_set_back() -> None:
    told = Told()
    told.now_ns = 100 * MS
    told.submit(1)
    told.now_ns = 0
    told.start(1)
    told.tokens(1)
    told.tokens(1, finish=FinishReason.STOP)
    for span in told.spans():
        begin, end = times(span)
        assert begin <= end


def test_what_is_open_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_MAX", 8)
    told = Told()
    for id in range(0, 40, 4):
        told.submit(id, n=4)
    assert told.traces.open == 8


def test_what_is_open_at_the_end_is_sent() -> None:
    told = Told()
    told.submit(1)
    assert len(told.spans()) == 1


class Stuck(SpanExporter):
    """A collector that takes a batch and is not heard of again."""

    def __init__(self) -> None:
        self.taken = 0
        self.free, self.freed = threading.Event(), False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        self.freed = self.free.wait(4 * LIMIT_S)
        return SpanExportResult.SUCCESS


def test_a_stuck_collector_holds_up_neither_the_loop_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.2)
    monkeypatch.setattr(module, "QUEUE_MAX", 1000)
    stuck, told = Stuck(), Told()
    told.traces = ReplicaTracer(stuck, "test-replica", "@cf/test/stamp", 7)
    for id in range(3000):
        told.submit(id)
        told.finish(id, FinishReason.CANCELLED)
    assert stuck.taken > 0
    told.traces.close()
    assert not stuck.freed
    stuck.free.set()
    time.sleep(0.3)  # what waited may still come: no more than the queue held
    assert stuck.taken <= 512 + 1000


# A process


class Traced(Stamped):
    """A stamp replica that sends its spans to `url`."""

    def __init__(self, folder: Path, url: str, temper: Temper | None = None) -> None:
        self.url = url
        super().__init__(folder, temper)

    def command(self, temper: Temper) -> list[str]:
        self.spec = msgspec.structs.replace(self.spec, telemetry=TelemetrySpec(otlp_url=self.url))
        return super().command(temper)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
def traced(tmp_path: Path, collector: Collector) -> Iterator[Traced]:
    """A slow replica whose spans are collected."""
    replica = Traced(tmp_path, collector.url, Temper(step_ms=5))
    yield replica
    replica.stop()


@pytest.fixture
def unheard(tmp_path: Path) -> Iterator[Traced]:
    """A replica whose collector takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        replica = Traced(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        yield replica
        replica.stop()


def test_sequences_that_are_cancelled_or_lose_their_connection_end_in_the_trace(
    traced: Traced, collector: Collector
) -> None:
    leaving, staying = traced.peer(), traced.peer()
    for peer, id in ((leaving, 1), (staying, 2)):
        peer.submit(id, max_tokens=3000, traceparent=SAMPLED)
        peer.until(lambda peer, id=id: id in peer.tokens)  # type: ignore[misc]
    leaving.socket.close()
    staying.cancel(2)
    staying.until(finished(2))

    def errors() -> list[str]:
        ended = [span for _, span in collector.spans() if span.name == "replica.decode"]
        return sorted(
            "".join(item.value.string_value for item in span.attributes if item.key == "error.type") for span in ended
        )

    wait_for(lambda: len(errors()) >= 2)
    assert errors() == ["", "gateway_gone"]
    assert {service for service, _ in collector.spans()} == {"hearth-replica"}


def test_a_replica_with_a_silent_collector_serves_and_ends_in_time(unheard: Traced) -> None:
    peer = unheard.peer()
    for id in range(50):
        peer.submit(id, traceparent=SAMPLED)
    peer.until(finished(*range(50)))
    assert {finish.reason for finish in peer.finished.values()} == {FinishReason.LENGTH}
    time.sleep(1.5)  # the first batch is on its way now
    peer.submit(50, traceparent=SAMPLED)
    peer.until(finished(50))
    unheard.process.terminate()
    assert unheard.status() == 0


LOOK = """
import sys, time
from array import array
from pathlib import Path
import msgspec
from engine.process.heartbeat import Heartbeat
from engine.protocol.specs import ReplicaSpec
from engine.replica import server
from engine.replica.replica import ReplicaLimits
from engine.structured_output.manager import StructuredOutputManager
from tests.support.stamp_engine import Stamps

folder, telemetry = sys.argv[1], sys.argv[2]
spec = msgspec.json.decode(
    '{"model": {"name": "m", "folder": ""}, "address": "unix:%s/r", "pulse": "", "boot": 1, "telemetry": %s}'
    % (folder, telemetry),
    type=ReplicaSpec,
)
stamps = Stamps(64, 16, 512, 1000, [])
grammars, heartbeat = StructuredOutputManager(Path(folder), 1), Heartbeat.create(folder + "/p")
assert server.serve(spec, stamps.loaded(), grammars, heartbeat, ReplicaLimits(), orphaned=lambda: True) == 0
print(sorted({name.split(".")[0] for name in sys.modules} & {"opentelemetry", "requests", "google"}))
"""


@pytest.mark.parametrize(
    ("telemetry", "found"),
    [("null", "[]"), ('{"otlp_url": "http://127.0.0.1:1/"}', "['google', 'opentelemetry', 'requests']")],
)
def test_opentelemetry_is_loaded_only_where_a_collector_is_configured(
    tmp_path: Path, telemetry: str, found: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(tmp_path), telemetry], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == found


def test_the_runner_brings_no_opentelemetry_along() -> None:
    look = "import sys, engine.execution.open, engine.host.agent; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
