"""A trace collector for tests: OTLP/HTTP in a thread, read with OpenTelemetry's own protobuf definitions."""

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from emberline.config import TracingConfig
from emberline.telemetry import tracing
from emberline.telemetry.otlp import ExportLimits

Start = Callable[..., tracing.Tracer]
KINDS = ("", "internal", "server", "client", "producer", "consumer")


class SpanRecord(msgspec.Struct):
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str
    links: list[tuple[str, str]]
    state: str


class Collector:
    """`status` answers the next exports."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = collector.status  # a test may change it once it sees that something has arrived
                collector.headers.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
                if status == 200:
                    collector._read(body)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait_for(self, *names: str, timeout_s: float = 60.0) -> dict[str, SpanRecord]:
        """The spans by name, once there is one of each of these."""
        until_s = time.monotonic() + timeout_s
        while not set(names) <= {span.name for span in self.spans}:
            assert time.monotonic() < until_s, f"{names} among {[span.name for span in self.spans]}"
            time.sleep(0.005)
        return {span.name: span for span in self.spans}

    def _read(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(_attributes(group.resource.attributes))
            for span in (span for scope in group.scope_spans for span in scope.spans):
                self.spans.append(
                    SpanRecord(
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        kind=KINDS[span.kind],
                        start_ns=span.start_time_unix_nano,
                        end_ns=span.end_time_unix_nano,
                        attributes=_attributes(span.attributes),
                        error=span.status.message if span.status.code == 2 else "",
                        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                        state=span.trace_state,
                    )
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def traced(collector: Collector) -> Iterator[Start]:
    """Starts tracing to the collector, until the test ends."""

    def start(**config: Any) -> tracing.Tracer:
        settings = tracing.settings(TracingConfig(endpoint=collector.url, **config), {})
        tracer = tracing.start(settings, "test", ExportLimits(interval_s=0.01))
        assert tracer is not None
        return tracer

    yield start
    tracing.stop()
