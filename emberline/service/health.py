"""Whether tokens can be generated, which is more than whether a process is alive."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from emberline.balancer.balancer import Snapshot
from emberline.balancer.worker import WorkerSnapshot
from emberline.protocol.frames import EngineInfo

_BREAKER = {
    "open": "it failed too many requests; it gets none for a minute",
    "half_open": "it failed too many requests; it is being tried",
}


class Connection(Protocol):
    """The core's connection to a worker: what health needs besides the ledger."""

    info: EngineInfo | None  # of the last time it was connected
    problem: str  # empty while connected

    @property
    def name(self) -> str: ...


class Health(msgspec.Struct, frozen=True):
    """`ok`: every model has a worker that makes progress. `detail` is plain data for people and `ps`."""

    ok: bool
    detail: dict[str, Any] = {}


def check(connections: Sequence[Connection], snapshot: Snapshot) -> Health:
    """An idle worker that is connected is healthy; one that has work but makes no progress is not."""
    by_name = {connection.name: connection for connection in connections}
    workers = snapshot.workers
    up = {worker.models[0] for worker in workers if worker.healthy and worker.role != "prefill"}
    down = sorted({worker.models[0] for worker in workers} - up)
    engines = [_describe(worker, by_name[worker.name]) for worker in workers]
    return Health(bool(up) and not down, {"engines": engines, "models_down": down})


def _describe(worker: WorkerSnapshot, connection: Connection) -> dict[str, Any]:
    stalled = "it has work but takes no step" if worker.stalled else ""
    described: dict[str, Any] = {
        "name": worker.name,
        "model": worker.models[0],
        "ok": worker.healthy,
        "problem": connection.problem or stalled or _BREAKER.get(worker.state, "") or worker.problem,
        "state": worker.state,
        "in_flight": worker.active,
        "load": msgspec.structs.asdict(worker.load),
    }
    if notes := getattr(connection, "notes", ""):
        described["notes"] = notes
    if (info := connection.info) is not None:
        described |= {
            "fingerprint": info.fingerprint,
            "role": info.role,
            "device": info.device,
            "backend": info.backend,
            "context_len": info.context_len,
            "kv_tokens": info.kv_tokens,
            "max_running": info.max_running,
        }
    return described
