"""The spans of requests through the real pipeline, as a collector receives them."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.config import ConfigError, TracingConfig
from emberline.log import ContextFilter, JsonFormatter
from emberline.protocol.trace_context import TraceContext, current, new_span_id, new_trace_id
from emberline.service import Service
from emberline.telemetry import tracing
from tests.collector import Collector, SpanRecord, Start, collector, traced
from tests.service.conftest import MODEL, PATIENCE_S, Opener
from tests.service.fake_engine import FakeEngine, Script
from tests.service.test_service import ask, events_of
from tests.service.test_tools import NOTHING, NOW, PARIS, WEATHER, Tell, tell
from tests.text.tool_calls.models import model
from tests.upstream.conftest import Opener as BenchOpener
from tests.upstream.conftest import bench

__all__ = ["bench", "collector", "tell", "traced"]

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def client_of(service: Service, folder: Path) -> httpx.AsyncClient:
    app = App(service, ApiSettings(Authenticator(Secret.open(folder))))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8686")


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "the secret prompt"}], **fields}


async def spans(collector: Collector, *names: str) -> dict[str, SpanRecord]:
    return await asyncio.to_thread(collector.wait_for, *names)


async def test_a_request_with_a_traceparent(
    service: Service, engine: FakeEngine, collector: Collector, traced: Start, tmp_path: Path
) -> None:
    traced()
    engine.cached = 4
    async with client_of(service, tmp_path) as client:
        answer = await client.post("/v1/chat/completions", json=chat(), headers={"traceparent": PARENT})
        assert answer.status_code == 200
    found = await spans(
        collector, "POST /v1/chat/completions", f"chat {MODEL}", "prefill", "decode", "prepare", "admit"
    )
    server, request = found["POST /v1/chat/completions"], found[f"chat {MODEL}"]
    assert {span.trace_id for span in found.values()} == {TRACE}
    assert (server.parent_id, server.kind) == (SPAN, "server")
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["emberline.request.id"] == answer.headers["x-request-id"]
    assert request.parent_id == server.span_id
    usage = answer.json()["usage"]
    assert request.attributes["gen_ai.operation.name"] == "chat"
    assert request.attributes["gen_ai.provider.name"] == "emberline"
    assert request.attributes["gen_ai.request.model"] == MODEL
    assert request.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert request.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert request.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert request.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert request.error == server.error == ""
    for name in ("prepare", "admit", "prefill", "decode"):
        part = found[name]
        assert part.parent_id == request.span_id
        assert request.start_ns <= part.start_ns <= part.end_ns <= request.end_ns
    assert found["prefill"].end_ns == found["decode"].start_ns
    assert "attempt" not in found
    assert "secret prompt" not in str(collector.spans), "content is opt-in"
    assert collector.resources[0]["service.name"] == "emberline"


async def test_content_on_opt_in(service: Service, collector: Collector, traced: Start, tmp_path: Path) -> None:
    traced(content=True)
    async with client_of(service, tmp_path) as client:
        await client.post("/v1/chat/completions", json=chat())
    request = (await spans(collector, f"chat {MODEL}"))[f"chat {MODEL}"]
    assert json.loads(request.attributes["gen_ai.input.messages"])[0]["content"] == "the secret prompt"
    assert json.loads(request.attributes["gen_ai.output.messages"])[0]["content"] == "Hello!"


async def test_the_parent_decides_what_is_sampled(
    service: Service, collector: Collector, traced: Start, tmp_path: Path
) -> None:
    tracer = traced(sample_ratio=0.0)
    async with client_of(service, tmp_path) as client:
        for parent in ({}, {"traceparent": PARENT.removesuffix("01") + "00"}):
            assert (await client.post("/v1/chat/completions", json=chat(), headers=parent)).status_code == 200
        await client.post("/v1/chat/completions", json=chat(), headers={"traceparent": PARENT})
        await client.get("/health", headers={"traceparent": PARENT})
    await spans(collector, "POST /v1/chat/completions", f"chat {MODEL}")
    assert len([span for span in collector.spans if span.kind == "server"]) == 1
    assert tracer.exporter.counts["dropped"] == 0


def test_the_ratio_is_kept(traced: Start) -> None:
    tracer = traced(sample_ratio=0.1)
    n = sum(tracer.begin(None).sampled for _ in range(20_000))
    assert 1500 < n < 2500
    context = TraceContext(new_trace_id(), new_span_id(), False)
    assert len({tracer.begin(context).sampled for _ in range(50)}) == 1, "one decision per trace"


async def test_a_failed_worker_is_an_attempt_with_an_error(
    tmp_path: Path, say: Callable[..., Script], open_one: Opener, collector: Collector, traced: Start
) -> None:
    traced()
    engines = [await FakeEngine(tmp_path / f"{name}.sock", name=name).start() for name in ("a", "b")]
    service = await open_one(*engines)
    current.set(TraceContext(TRACE, SPAN, True))
    task = asyncio.create_task(events_of(service, ask()))
    async with asyncio.timeout(PATIENCE_S):
        while not any(engine.submitted for engine in engines):
            await asyncio.sleep(0.001)
    first, second = engines if engines[0].submitted else reversed(engines)
    assert first.submitted[0].trace_id == TRACE
    second.script = say("from the other")
    await first.die()
    await task
    found = await spans(collector, "attempt", f"chat {MODEL}")
    attempts = sorted((span for span in collector.spans if span.name == "attempt"), key=lambda span: span.start_ns)
    assert [bool(span.error) for span in attempts] == [True, False]
    assert len({span.attributes["emberline.worker"] for span in attempts}) == 2
    assert found[f"chat {MODEL}"].error == ""
    await second.die()


@pytest.mark.parametrize("traces", [True, False])
async def test_an_upstream_server_gets_the_traceparent(
    bench: BenchOpener, tmp_path: Path, collector: Collector, traced: Start, traces: bool
) -> None:
    """Also where this server does not trace: then the client's own."""
    if traces:
        traced()
    made = await bench(("a", "vllm", "both"))
    body = {"model": "standin", "messages": [{"role": "user", "content": "hi"}]}
    async with client_of(made.service, tmp_path) as client:
        headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
        assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    sent = made.standins["a"].headers
    assert sent["tracestate"] == "vendor=1"
    if not traces:
        assert sent["traceparent"] == PARENT
        return
    found = await spans(collector, "upstream_attempt", "chat standin")
    attempt = found["upstream_attempt"]
    assert sent["traceparent"] == f"00-{TRACE}-{attempt.span_id}-01"
    assert (attempt.kind, attempt.parent_id) == ("client", found["chat standin"].span_id)
    assert attempt.attributes["gen_ai.provider.name"] == "vllm"


@pytest.mark.asyncio(loop_scope="module")  # the loop of `tell`
async def test_tool_calls_and_the_wait_in_the_engine_are_spans(tell: Tell, collector: Collector, traced: Start) -> None:
    traced()
    service, engine = await tell("qwen", model("qwen").tool_format.write([PARIS, NOTHING]))
    engine.waited_s = 0.25
    current.set(TraceContext(TRACE, SPAN, True))
    await events_of(service, ask(tools=(WEATHER, NOW)))
    found = await spans(collector, "tool_parse", "engine_queue", "prefill", f"chat {MODEL}")
    request, parsing = found[f"chat {MODEL}"], found["tool_parse"]
    assert parsing.attributes["gen_ai.tool.name"] == ["get_weather", "now"]
    assert request.attributes["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert request.start_ns <= parsing.start_ns <= parsing.end_ns <= request.end_ns
    waiting = found["engine_queue"]
    assert abs(waiting.end_ns - waiting.start_ns - 250e6) < 2e6
    assert found["prefill"].start_ns == waiting.end_ns


async def test_log_lines_name_the_trace(service: Service, traced: Start, caplog: pytest.LogCaptureFixture) -> None:
    traced()
    caplog.handler.addFilter(ContextFilter("core"))
    caplog.set_level(logging.INFO, "emberline.request")
    current.set(TraceContext(TRACE, SPAN, True))
    request = ask()
    await events_of(service, request)
    (line,) = [record for record in caplog.records if record.name == "emberline.request"]
    shown = json.loads(JsonFormatter().format(line))
    assert (shown["request_id"], shown["trace_id"], shown["span_id"]) == (request.id, TRACE, SPAN)


ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel:4318"}


def test_standard_variables() -> None:
    found = tracing.settings(
        TracingConfig(),
        {
            **ON,
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x, tenant=a",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.25",
            "OTEL_SERVICE_NAME": "chat",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=prod",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
        },
    )
    assert (found.url, found.ratio, found.parent_based) == ("http://otel:4318/v1/traces", 0.25, True)
    assert found.headers == {"authorization": "Bearer x", "tenant": "a"}
    assert found.resource["service.name"] == "chat"
    assert found.resource["deployment.environment.name"] == "prod"
    assert found.timeout_s == 2.5
    assert not found.content


def test_the_configuration_comes_first() -> None:
    config = TracingConfig(endpoint="https://mine/v1/traces", sample_ratio=0.1, content=True)
    found = tracing.settings(config, {**ON, "OTEL_TRACES_SAMPLER": "always_off"})
    assert (found.url, found.ratio, found.content) == ("https://mine/v1/traces", 0.1, True)
    signal = {**ON, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces/x"}
    assert tracing.settings(TracingConfig(), signal).url == "http://traces/x"


@pytest.mark.parametrize("off", [{}, {**ON, "OTEL_SDK_DISABLED": "true"}, {**ON, "OTEL_TRACES_EXPORTER": "none"}])
def test_off(off: dict[str, str]) -> None:
    assert tracing.settings(TracingConfig(), off).url == ""


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "OTEL_TRACES_SAMPLER"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "x"}, "OTEL_TRACES_SAMPLER_ARG"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "otel:4317"}, "http://"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tracing.settings(TracingConfig(), {**ON, **environ})
