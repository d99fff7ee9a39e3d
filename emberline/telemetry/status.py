"""The state of the whole server as one document, for `/api/status`, `emberline top` and the operator's pages.

Made in the core from what it already keeps: the in-flight ledger, the history and the metrics. Its cost does not grow
with the requests that have ended, and 10,000 requests in flight are only counted, not listed.
"""

from collections.abc import Callable
from itertools import islice
from typing import Literal

import msgspec

from emberline.accounts.usage_row import UsageRow
from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.ledger import InFlightRequest
from emberline.balancer.worker import Snapshot
from emberline.protocol.frames import DeviceUse, TierStats
from emberline.telemetry.health import Health
from emberline.telemetry.history import N_RECENT, STEP_S, History
from emberline.telemetry.metrics import Metrics

MAX_REQUESTS = 1000  # that are listed


class StatusQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bounds on the lists of a status report."""

    requests: int = 50  # in flight, oldest first
    recent: int = 20  # ended, newest first
    since_s: int = 0  # of the series: points that were closed behind this Unix time

    def __post_init__(self) -> None:
        assert 0 <= self.requests <= MAX_REQUESTS
        assert 0 <= self.recent <= N_RECENT


class WorkerStatus(msgspec.Struct, kw_only=True):
    name: str
    model: str
    role: str  # both | prefill | decode
    state: str  # ready | down | draining | stalled | open | half_open (the last two are the circuit breaker's)
    ok: bool
    problem: str  # why it is not ok, or not used; empty
    device: str
    running: int  # sequences, as the worker reports
    waiting: int  # sequences in the worker's own queue
    max_running: int  # 0: unknown
    kv_used: float | None  # 0 to 1; None: the worker does not report it
    kv_tokens: int  # capacity; 0: unknown
    utilisation: float | None  # share of the last seconds in which its device computed; None: unknown
    memory_used_bytes: int  # of its device; of a CPU worker its own memory; 0: unknown
    memory_bytes: int  # in all
    power_w: float | None  # None: the device does not tell
    in_flight: int  # sequences of this server, and prompts computed for other workers
    held: int  # requests in the admission queue that wait for this worker
    prefill_tokens: int  # uncached prompt tokens that are still to be computed
    wait_s: float  # until a prompt sent now would be started
    transfers_in: int  # requests whose KV is being received
    transfers_out: int  # requests whose KV is being sent
    preemptions: int  # since its start
    input_tokens_per_s: float  # over the last 10 to 20 s
    output_tokens_per_s: float
    output_tokens: int  # since its start
    prompt_tokens: int
    hit_ratio: float | None  # of prompt tokens since its start; None: no prompt yet
    tiers: list["TierStatus"]  # of its KV cache, below the device, fastest first
    drafted_tokens: int  # by speculative decoding, since its start
    accepted_tokens: int  # of those


class TierStatus(msgspec.Struct, kw_only=True):
    """One tier of a worker's KV cache; of the pool, size and blocks are those of the whole pool."""

    name: str  # host, disk or pool
    state: str  # ok, or "degraded: why"
    used_bytes: int
    capacity_bytes: int
    blocks: int
    hit_ratio: float | None  # of the blocks that were asked for since the worker's start
    read_rate: float  # bytes per second, measured; 0: unknown
    oldest_s: float  # since the block that was not used for longest was used


class ModelStatus(msgspec.Struct, kw_only=True):
    """Totals since the core's start."""

    id: str
    requests: dict[str, int]  # ended, by status
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_ratio: float | None


class RequestStatus(msgspec.Struct, kw_only=True):
    """A request in flight."""

    id: str
    account: str
    model: str
    priority: str
    phase: Literal["waiting", "prefill", "decode"]
    is_job: bool
    age_s: float  # since it asked for a worker
    phase_s: float  # since its phase began
    input_tokens: int
    cached_tokens: int  # expected
    output_tokens: int  # as of the last checkpoint, about a second ago; jobs report none
    worker: str  # that decodes; while it waits, the one it waits for
    prefill_worker: str  # where that is another one


class EndedRequest(msgspec.Struct, kw_only=True):
    id: str
    account: str
    model: str
    priority: str
    status: str  # finished | failed | cancelled
    ended_s: float  # Unix time
    duration_s: float
    ttft_s: float | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class Status(msgspec.Struct, kw_only=True):
    time_s: float  # Unix time of the server
    uptime_s: float
    ok: bool  # as `/health`
    problem: str  # why not, or what is impaired; empty
    workers: list[WorkerStatus]
    models: list[ModelStatus]
    waiting: dict[str, int]  # requests in the admission queue, by class
    phases: dict[str, int]  # all requests in flight: waiting, prefill, decode
    requests: list[RequestStatus]
    recent: list[EndedRequest]
    step_s: int  # between two points of the series
    series: dict[str, list[float | None]]  # by field of `history.Point`, oldest first


def status(
    query: StatusQuery,
    health: Health,
    admission: AdmissionController,
    metrics: Metrics,
    history: History,
    used_by: Callable[[str], UsageRow | None],
) -> Status:
    """`used_by`: the last checkpoint of a running request."""
    snapshot, now_s, time_s = admission.snapshot(), admission.now_s(), history.now_s()
    phases = {"waiting": 0, "prefill": 0, "decode": 0}
    for record in admission.balancer.ledger:
        phases[record.phase] += 1
    listed = islice(admission.balancer.ledger, query.requests)
    return Status(
        time_s=round(time_s, 3),
        uptime_s=round(time_s - history.started_s, 1),
        ok=health.ok,
        problem=_problem(health),
        workers=_workers(snapshot, health, history),
        models=_models(metrics),
        waiting=snapshot.waiting,
        phases=phases,
        requests=[_request(record, now_s, used_by(record.request.id)) for record in listed],
        recent=[_ended(row) for row in islice(reversed(history.recent), query.recent)],
        step_s=STEP_S,
        series=history.series(query.since_s),
    )


def _problem(health: Health) -> str:
    disk = health.detail.get("disk", "ok")
    down = health.detail.get("models_down", ())
    return "; ".join([*([disk] if disk != "ok" else []), *(f"no worker can serve {name}" for name in down)])


def _workers(snapshot: Snapshot, health: Health, history: History) -> list[WorkerStatus]:
    details = {engine["name"]: engine for engine in health.detail.get("engines", ())}
    found: list[WorkerStatus] = []
    for worker in snapshot.workers:
        load, detail = worker.load, details.get(worker.name, {})
        rate, use = history.rate(worker.name, load.prompt_tokens, load.output_tokens), load.device or DeviceUse()
        found.append(
            WorkerStatus(
                name=worker.name,
                model=worker.models[0],
                role=worker.role,
                state=worker.state,
                ok=worker.healthy,
                problem=detail.get("problem", worker.problem),
                device=" ".join(filter(None, (detail.get("device"), detail.get("backend")))),
                running=load.running,
                waiting=load.waiting,
                max_running=detail.get("max_running", 0),
                kv_used=round(load.kv_used_blocks / load.kv_total_blocks, 4) if load.kv_total_blocks else None,
                kv_tokens=detail.get("kv_tokens", 0),
                utilisation=load.utilisation,
                memory_used_bytes=use.memory_used_bytes,
                memory_bytes=use.memory_bytes,
                power_w=use.power_w,
                in_flight=worker.in_flight,
                held=worker.waiting,
                prefill_tokens=worker.prefill_tokens,
                wait_s=round(worker.wait_s, 3),
                transfers_in=load.awaiting,
                transfers_out=load.pushing,
                preemptions=load.preemptions,
                input_tokens_per_s=rate.input_per_s,
                output_tokens_per_s=rate.output_per_s,
                output_tokens=load.output_tokens,
                prompt_tokens=load.prompt_tokens,
                hit_ratio=_ratio(load.cached_tokens, load.cached_tokens + load.prompt_tokens),
                tiers=[_tier(tier) for tier in load.tiers],
                drafted_tokens=sum(sum(stats.drafted) for stats in load.drafts),
                accepted_tokens=sum(sum(stats.accepted) for stats in load.drafts),
            )
        )
    return found


def _tier(stats: TierStats) -> TierStatus:
    return TierStatus(
        name=stats.name,
        state=stats.state,
        used_bytes=stats.used_bytes,
        capacity_bytes=stats.capacity_bytes,
        blocks=stats.blocks,
        hit_ratio=_ratio(stats.hits, stats.hits + stats.misses),
        read_rate=round(stats.read_rate),
        oldest_s=round(stats.oldest_s, 1),
    )


def _models(metrics: Metrics) -> list[ModelStatus]:
    return [
        ModelStatus(
            id=name,
            requests=dict(model.by_status),
            input_tokens=model.prompt_tokens,
            cached_tokens=model.cached_tokens,
            output_tokens=model.generation_tokens,
            hit_ratio=_ratio(model.cached_tokens, model.prompt_tokens),
        )
        for name, model in metrics.models.items()
    ]


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _request(record: InFlightRequest, now_s: float, used: UsageRow | None) -> RequestStatus:
    request, route, phase = record.request, record.route, record.phase
    since_s = {"waiting": record.arrived_s, "prefill": record.dispatched_s, "decode": record.first_token_s or 0.0}
    return RequestStatus(
        id=request.id,
        account=request.account,
        model=request.model,
        priority=request.priority,
        phase=phase,
        is_job=record.is_job,
        age_s=round(now_s - record.arrived_s, 3),
        phase_s=round(now_s - since_s[phase], 3),
        input_tokens=request.input_tokens,
        cached_tokens=0 if route is None else route.cached_tokens,
        output_tokens=0 if used is None else used.output_tokens,
        worker=record.waits_for if route is None else route.decode,
        prefill_worker="" if route is None else route.prefill,
    )


def _ended(row: UsageRow) -> EndedRequest:
    first_us = row.first_token_us
    return EndedRequest(
        id=row.id,
        account=row.account,
        model=row.model,
        priority=row.priority,
        status=row.status,
        ended_s=row.finished_us / 1e6,
        duration_s=round((row.finished_us - row.created_us) / 1e6, 3),
        ttft_s=None if first_us is None else round((first_us - row.created_us) / 1e6, 3),
        input_tokens=row.input_tokens,
        cached_tokens=row.cached_tokens,
        output_tokens=row.output_tokens,
    )
