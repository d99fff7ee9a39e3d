"""OpenTelemetry traces: spans are made once, at the end of a request, from stamps that the pipeline keeps anyway.

Nothing of this is on the path of a token: an unsampled request costs a comparison, a sampled one a few stamps and, at
its end, a handful of tuples that a thread encodes and exports (`otlp.py`). The tracer is one per process, as loggers
are; without an endpoint there is none, and a client's `traceparent` is still passed on and logged.
"""

import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from emberline import __version__
from emberline.accounts.usage_row import UsageRow
from emberline.config import ConfigError, TracingConfig
from emberline.protocol.errors import EmberlineError
from emberline.protocol.trace_context import TraceContext, TraceDetails, current, new_span_id, new_trace_id, parse
from emberline.telemetry.otlp import CLIENT, CONSUMER, EXPORT_LIMITS, INTERNAL, SERVER, Exporter, ExportLimits, Span
from emberline.telemetry.request_log import Clock

MAX_CONTENT_CHARS = 65_536  # of a prompt or a reply, where content is traced
_RATIO_BITS = 56  # of a trace id, which the standard wants random

_tracer: "Tracer | None" = None


class TracingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved once, in the core. The headers may hold a secret."""

    url: str = ""  # of the collector's traces; empty: no tracing
    ratio: float = 1.0
    parent_based: bool = True
    content: bool = False
    headers: dict[str, str] = {}
    timeout_s: float = 10.0
    resource: dict[str, str] = {}


def settings(config: TracingConfig, environ: Mapping[str, str]) -> TracingSettings:
    """The configuration, and for what it leaves out the standard OTEL_* variables."""

    def variable(name: str) -> str:
        return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")

    url = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    base = config.endpoint or ("" if url else environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""))
    if base:
        url = base if urlsplit(base).path.endswith("/v1/traces") else f"{base.rstrip('/')}/v1/traces"
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if not url or (disabled and not config.endpoint):
        return TracingSettings()
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"the address of the trace collector must be http:// or https://, not {url!r}")
    if (protocol := variable("PROTOCOL")) not in ("", "http/protobuf"):
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: traces are exported as http/protobuf only")
    ratio, parent_based = _sampler(environ) if config.sample_ratio is None else (config.sample_ratio, True)
    capture = environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "").lower()
    return TracingSettings(
        url=url,
        ratio=ratio,
        parent_based=parent_based,
        content=config.content if config.content is not None else capture in ("true", "span_only", "span_and_event"),
        headers=_pairs(variable("HEADERS")),
        timeout_s=_number("OTEL_EXPORTER_OTLP_TIMEOUT", variable("TIMEOUT") or "10000") / 1000,
        resource={
            "service.name": environ.get("OTEL_SERVICE_NAME", "emberline"),
            "service.version": __version__,
            "host.name": socket.gethostname(),
            **_pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", "")),
        },
    )


def _sampler(environ: Mapping[str, str]) -> tuple[float, bool]:
    """Read OTEL_TRACES_SAMPLER: the share of traces, and True if a parent's decision comes first."""
    name = environ.get("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    kind = name.removeprefix("parentbased_")
    if kind not in ("always_on", "always_off", "traceidratio"):
        raise ConfigError(f"OTEL_TRACES_SAMPLER={name} is not known; there are always_on, always_off, traceidratio")
    argument = _number("OTEL_TRACES_SAMPLER_ARG", environ.get("OTEL_TRACES_SAMPLER_ARG") or "1")
    ratio = {"always_on": 1.0, "always_off": 0.0}.get(kind, argument)
    if not 0 <= ratio <= 1:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG={ratio:g} is not between 0 and 1")
    return ratio, kind != name


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number") from None


def _pairs(text: str) -> dict[str, str]:
    """`key=value,key=value`, the values percent-encoded."""
    pairs = (item.partition("=") for item in text.split(",") if "=" in item)
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs}


def start(settings: TracingSettings, process: str, limits: ExportLimits = EXPORT_LIMITS) -> "Tracer | None":
    """Trace this process from now on, if there is a collector."""
    global _tracer
    _tracer = Tracer(settings, process, limits) if settings.url else None
    return _tracer


def take_counts() -> dict[str, int]:
    """Counts of this process's spans by outcome since the last call. HTTP workers send them to the core's metrics."""
    if _tracer is None:
        return {}
    now, before = dict(_tracer.exporter.counts), _tracer.told
    _tracer.told = now
    return {outcome: n - before.get(outcome, 0) for outcome, n in now.items() if n != before.get(outcome, 0)}


def add_counts(counts: Mapping[str, int]) -> None:
    """Add the span counts of another process to those of this one."""
    if _tracer is not None:
        for outcome, n in counts.items():
            _tracer.exporter.others[outcome] += n


def stop() -> None:
    """Export what is left. Blocks for a moment."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.exporter.close()


class Tracer:
    """Decides what is sampled, and makes the spans of requests, jobs and deliveries."""

    def __init__(self, settings: TracingSettings, process: str, limits: ExportLimits) -> None:
        resource = {**settings.resource, "service.instance.id": f"{os.getpid()}", "emberline.process": process}
        self.content = settings.content
        self.told: dict[str, int] = {}  # the counts that `take_counts` has returned
        self.exporter = Exporter(settings.url, resource, settings.headers, settings.timeout_s, limits)
        self._parent_based = settings.parent_based
        self._bound = int(settings.ratio * (1 << _RATIO_BITS))

    def begin(self, parent: TraceContext | None) -> TraceContext:
        """The context of a new span: of the parent's trace, or of a new one."""
        if parent is None:
            trace_id = new_trace_id()
            return TraceContext(trace_id, new_span_id(), self._samples(trace_id))
        sampled = parent.sampled if self._parent_based else self._samples(parent.trace_id)
        return TraceContext(parent.trace_id, new_span_id(), sampled, parent.state)

    def _samples(self, trace_id: str) -> bool:
        return int(trace_id[-_RATIO_BITS // 4 :], 16) < self._bound


def incoming(headers: Mapping[str, str]) -> tuple[TraceContext | None, TraceContext | None]:
    """The context of an HTTP request, and that of the client's span. Both are the client's where this server does not
    trace: it is passed on."""
    given = headers.get("traceparent")
    parent = parse(given, headers.get("tracestate")) if given else None
    return (parent if _tracer is None else _tracer.begin(parent)), parent


def end_http_request(
    context: TraceContext | None,
    parent: TraceContext | None,
    clock: Clock,
    method: str,
    route: str,
    status: int,
    request_id: str,
) -> None:
    """The server span of an HTTP request."""
    if _tracer is None or context is None or not context.sampled:
        return
    attributes = {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
        "emberline.request.id": request_id,
    }
    error = f"status {status}" if status >= 500 or not status else ""
    if error:
        attributes["error.type"] = str(status)
    name = f"{method} {route}" if route else method
    span = Span(
        context, parent.span_id if parent else "", name, clock.created_us, clock.now_us(), attributes, SERVER, error
    )
    _tracer.exporter.add((span,))


# --- a request in the pipeline ---------------------------------------------------------------------------------------


class RequestTrace:
    """The stamps of one sampled request, which become its spans when it ends."""

    __slots__ = ("_admitted_us", "_asked_us", "_attempts", "_clock", "_context", "_parent", "_tracer")

    def __init__(self, tracer: Tracer, parent: TraceContext, clock: Clock) -> None:
        self._tracer = tracer
        self._parent = parent
        self._context = parent._replace(span_id=new_span_id())
        self._clock = clock
        self._asked_us = clock.now_us()  # the request is prepared, and asks for workers
        self._admitted_us: int | None = None
        self._attempts: list[tuple[TraceContext, int, str, str]] = []  # began, worker, error; the last one is open

    def admitted(self) -> None:
        self._admitted_us = self._clock.now_us()

    def attempt(self, worker: str) -> TraceContext:
        """An attempt begins there; its context goes with it."""
        context = self._context._replace(span_id=new_span_id())
        self._attempts.append((context, self._clock.now_us(), worker, ""))
        return context

    def failed(self, error: EmberlineError) -> None:
        """The attempt has failed; another may follow."""
        if self._attempts:
            context, began_us, worker, _ = self._attempts[-1]
            self._attempts[-1] = (context, began_us, worker, error.kind)

    def end(self, row: UsageRow, operation: str, provider: str, error: Exception | None, details: TraceDetails) -> None:
        """`details` of the last attempt."""
        spans = [
            self._child("prepare", row.created_us, self._asked_us),
            self._child(
                "admit", self._asked_us, self._admitted_us or row.finished_us, {"emberline.class": row.priority}
            ),
        ]
        ends_us = [began_us for _, began_us, *_ in self._attempts[1:]] + [row.finished_us]
        upstream = provider != PROVIDER
        for (context, began_us, worker, problem), end_us in zip(self._attempts, ends_us, strict=True):
            if upstream or problem or len(self._attempts) > 1:
                attributes: dict[str, Any] = {"emberline.worker": worker, "gen_ai.provider.name": provider}
                if problem:
                    attributes["error.type"] = problem
                name, kind = ("upstream_attempt", CLIENT) if upstream else ("attempt", INTERNAL)
                spans.append(Span(context, self._context.span_id, name, began_us, end_us, attributes, kind, problem))
        if self._attempts:
            began_us, worker = self._attempts[-1][1:3]
            waited = next((phase for phase in details.phases if phase.name == "engine_queue"), None)
            prefill_us = began_us if waited is None else self._clock.at_us(waited.end_s)
            at = {"emberline.worker": worker}
            where = at if waited is None else waited.attributes  # the prefill worker, where there is one
            spans.append(self._child("prefill", prefill_us, row.first_token_us or row.finished_us, where))
            if row.first_token_us is not None:
                spans.append(self._child("decode", row.first_token_us, row.finished_us, at))
            for phase in details.phases:
                span = (phase.name, self._clock.at_us(phase.start_s), self._clock.at_us(phase.end_s), phase.attributes)
                spans.append(self._child(*span))
        problem = "" if error is None else error.kind if isinstance(error, EmberlineError) else type(error).__name__
        if row.status == "cancelled":
            problem = "cancelled"
        attributes = _genai_attributes(row, operation, provider, details)
        if problem:
            attributes["error.type"] = problem
        request = Span(
            self._context,
            self._parent.span_id,
            f"{operation} {row.model}",
            row.created_us,
            row.finished_us,
            attributes,
            INTERNAL,
            problem,
        )
        self._tracer.exporter.add((request, *spans))

    @property
    def content(self) -> bool:
        return self._tracer.content

    def _child(self, name: str, start_us: int, end_us: int, attributes: Mapping[str, Any] | None = None) -> Span:
        context = self._context._replace(span_id=new_span_id())
        return Span(context, self._context.span_id, name, start_us, end_us, attributes or {})


PROVIDER = "emberline"  # `gen_ai.provider.name` of our own engines


def request_trace(clock: Clock) -> RequestTrace | None:
    """The trace of the request that begins now. Returns None if the request is not sampled."""
    if _tracer is None:
        return None
    context = current.get()
    return None if context is None or not context.sampled else RequestTrace(_tracer, context, clock)


def _genai_attributes(row: UsageRow, operation: str, provider: str, details: TraceDetails) -> dict[str, Any]:
    """By OpenTelemetry's semantic conventions for generative AI; ours begin with `emberline`."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": row.model,
        "gen_ai.response.model": row.model,
        "gen_ai.response.id": row.id,
        "gen_ai.usage.input_tokens": row.input_tokens,
        "gen_ai.usage.output_tokens": row.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": row.cached_tokens,
        "emberline.account": row.account,
        "emberline.class": row.priority,
        "emberline.status": row.status,
    }
    if row.reasoning_tokens:
        attributes["gen_ai.usage.reasoning.output_tokens"] = row.reasoning_tokens
    if row.first_token_us is not None:
        attributes["emberline.time_to_first_token_ms"] = (row.first_token_us - row.created_us) / 1000
    if details.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = list(details.finish_reasons)
    if details.input:
        attributes["gen_ai.input.messages"] = details.input[:MAX_CONTENT_CHARS]
    if details.output:
        attributes["gen_ai.output.messages"] = details.output[:MAX_CONTENT_CHARS]
    return attributes


# --- queued work -----------------------------------------------------------------------------------------------------


class JobTrace:
    """One attempt at a queued job. The context in which it was submitted came with its batch.

    The one job of a background response continues that trace. A batch's jobs, of which there may be thousands, have
    traces of their own with a link to it, and are sampled by themselves.
    """

    def __init__(self, submitted: TraceContext | None, continues: bool) -> None:
        self._clock = Clock()
        self._parent = submitted if continues else None
        self._link = None if continues else submitted
        self.context = self._parent if _tracer is None else _tracer.begin(self._parent)

    def end(self, batch_id: str, number: int, model: str, attempt: int, problem: str) -> None:
        context = self.context
        if _tracer is None or context is None or not context.sampled:
            return
        attributes = {
            "messaging.system": PROVIDER,
            "messaging.operation.name": "process",
            "emberline.batch.id": batch_id,
            "emberline.job.number": number,
            "emberline.job.attempt": attempt,
            "gen_ai.request.model": model,
        }
        parent_id = "" if self._parent is None else self._parent.span_id
        span = (context, parent_id, "job", self._clock.created_us, self._clock.now_us(), attributes)
        _tracer.exporter.add((Span(*span, CONSUMER, problem, self._link),))


class DeliveryTrace:
    """One attempt at the delivery of a webhook, in the trace of the request that submitted the work."""

    def __init__(self, submitted: TraceContext | None) -> None:
        self._clock = Clock()
        self._parent = submitted
        self.context = submitted if _tracer is None or submitted is None else _tracer.begin(submitted)

    def end(self, delivery_id: str, event_type: str, status: int | None, problem: str) -> None:
        context = self.context
        if _tracer is None or context is None or not context.sampled:
            return
        attributes: dict[str, Any] = {"emberline.delivery.id": delivery_id, "emberline.event.type": event_type}
        if status is not None:
            attributes["http.response.status_code"] = status
        assert self._parent is not None
        span = (context, self._parent.span_id, "webhook", self._clock.created_us, self._clock.now_us(), attributes)
        _tracer.exporter.add((Span(*span, CLIENT, problem),))
