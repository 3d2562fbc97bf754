"""A collector of traces: OTLP over HTTP, in a thread of the test."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(ThreadingHTTPServer):
    """OTLP over HTTP, kept as it came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Intake)
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def spans(self) -> list[tuple[str, Span]]:
        """All that came, each with its service.name."""
        found = []
        for body in list(self.bodies):
            for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = {item.key: item.value.string_value for item in sent.resource.attributes}
                found += [(resource["service.name"], span) for scope in sent.scope_spans for span in scope.spans]
        return found


class Intake(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        if self.path == "/v1/traces":
            self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        taking = threading.Thread(target=collector.serve_forever)
        taking.start()
        yield collector
        collector.shutdown()
        taking.join()
