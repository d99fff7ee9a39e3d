import math
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from emberline.protocol.trace_context import TraceContext
from emberline.telemetry import otlp
from emberline.telemetry.otlp import CLIENT, Exporter, ExportLimits, Span, encode
from tests.collector import Collector, _attributes

CONTEXT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True, "a=1")
QUICK = ExportLimits(interval_s=0.01, first_backoff_s=0.01)
SPAN = Span(CONTEXT, "", "name", 1, 2, {})


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


scalars = st.one_of(st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(), st.text())


@given(
    st.dictionaries(st.text(min_size=1), st.one_of(scalars, st.lists(st.text()))),
    st.text(),
    st.integers(0, 1 << 50),
    st.text(),
)
def test_protobuf_reads_what_is_encoded(attributes: dict[str, object], name: str, start_us: int, error: str) -> None:
    link = CONTEXT._replace(span_id="1" * 16)
    span = Span(CONTEXT, "2" * 16, name, start_us, start_us + 7, attributes, CLIENT, error, link)
    found = ExportTraceServiceRequest.FromString(encode([span, SPAN]))
    first, second = found.resource_spans[0].scope_spans[0].spans
    assert (first.trace_id.hex(), first.span_id.hex(), first.parent_span_id.hex()) == (*CONTEXT[:2], "2" * 16)
    assert (first.name, first.kind, first.trace_state) == (name, CLIENT, "a=1")
    assert first.end_time_unix_nano - first.start_time_unix_nano == 7000
    assert (first.status.code, first.status.message) == ((2, error) if error else (0, ""))
    assert first.links[0].span_id.hex() == "1" * 16
    read = _attributes(first.attributes)
    assert read.keys() == attributes.keys()
    for key, value in attributes.items():
        assert read[key] == value or (isinstance(value, float) and math.isnan(value))
    assert second.parent_span_id == b""


def test_spans_arrive(collector: Collector) -> None:
    exporter = Exporter(f"{collector.url}/v1/traces", {"service.name": "ours"}, {"authorization": "Bearer x"})
    exporter.add([SPAN])
    exporter.close()
    assert [span.name for span in collector.spans] == ["name"]
    assert collector.resources == [{"service.name": "ours"}]
    assert collector.headers[0]["path"] == "/v1/traces"
    assert collector.headers[0]["authorization"] == "Bearer x"
    assert exporter.counts == {"exported": 1, "dropped": 0, "failed": 0}


def test_a_collector_that_is_down_costs_nothing_but_spans() -> None:
    exporter = Exporter("http://127.0.0.1:1/v1/traces", {}, limits=ExportLimits(queued=100))
    began_s = time.thread_time()
    for _ in range(1000):
        exporter.add([SPAN])
    assert time.thread_time() - began_s < 0.5
    assert exporter.counts["dropped"] >= 1000 - 100 - otlp.MAX_BATCH
    assert exporter.n_queued <= 100
    exporter.close()
    assert sum(exporter.counts.values()) == 1000


def test_a_busy_collector_gets_them_later_and_a_refusal_is_final(collector: Collector) -> None:
    exporter = Exporter(f"{collector.url}/v1/traces", {}, limits=QUICK)
    collector.status = 503
    exporter.add([SPAN])
    while not collector.headers:
        time.sleep(0.002)
    collector.status = 200
    collector.wait_for("name")
    collector.status = 400
    n_posts = len(collector.headers)
    exporter.add([SPAN])
    while len(collector.headers) == n_posts:
        time.sleep(0.002)
    exporter.close()
    assert exporter.counts == {"exported": 1, "dropped": 0, "failed": 1}


def test_what_cannot_be_sent_does_not_end_the_thread(collector: Collector) -> None:
    exporter = Exporter(f"{collector.url}/v1/traces", {}, limits=QUICK)
    exporter.add([SPAN._replace(start_us=-1)])
    while not exporter.counts["failed"]:
        time.sleep(0.002)
    exporter.add([SPAN])
    collector.wait_for("name")
    exporter.close()
    assert exporter.counts == {"exported": 1, "dropped": 0, "failed": 1}
