"""Readiness: whether tokens can be generated, which is more than that a process is alive."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from emberline.balancer.worker import Snapshot, WorkerSnapshot
from emberline.protocol.block_hash import bytes_per_token
from emberline.protocol.frames import EngineInfo

PROBE_BYTES = 256 << 10  # more than the store writes for one request

_BREAKER = {
    "open": "it failed too many requests; others are preferred for a minute",
    "half_open": "it failed too many requests; it is being tried",
}


class Connection(Protocol):
    """The core's connection to a worker: what health needs besides the ledger."""

    info: EngineInfo | None  # of the last time it was connected
    problem: str  # empty while connected

    @property
    def name(self) -> str: ...


class Health(msgspec.Struct, frozen=True):
    """`ok`: some model can be served; `detail` tells which, as plain data for people and `ps`."""

    ok: bool
    detail: dict[str, Any] = {}


def check(connections: Sequence[Connection], snapshot: Snapshot) -> Health:
    """An idle worker that is connected is healthy; one that hangs is not, and one that drains serves no model. A node
    that has lost one of several models still serves the others: it is not ok only when it can serve none."""
    by_name = {connection.name: connection for connection in connections}
    models: dict[str, dict[str, Any]] = {}
    for worker in snapshot.workers:
        model = models.setdefault(worker.models[0], {"ready": False, "workers": 0, "workers_ready": 0})
        takes_requests = worker.healthy and worker.state != "draining"
        model["workers"] += 1
        model["workers_ready"] += takes_requests
        model["ready"] |= takes_requests and worker.role != "prefill"
    engines = [  # one that is being removed has no connection any more
        _describe(worker, by_name[worker.name]) for worker in snapshot.workers if worker.name in by_name
    ]
    down = sorted(name for name, model in models.items() if not model["ready"])
    return Health(len(down) < len(models), {"engines": engines, "models": models, "models_down": down})


def disk_problem(folder: Path) -> str:
    """Why nothing can be written there, found by writing; empty if it can. Blocks."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as error:
        return f"the data folder {folder} cannot be written: {error.strerror}"
    return ""


def _describe(worker: WorkerSnapshot, connection: Connection) -> dict[str, Any]:
    stalled = "it has work but takes no step" if worker.stalled else ""
    described: dict[str, Any] = {
        "name": worker.name,
        "model": worker.models[0],
        "ok": worker.healthy,
        "problem": connection.problem or stalled or _BREAKER.get(worker.state, "") or worker.problem,
        "state": worker.state,
        "in_flight": worker.in_flight,
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
            "layout": info.layout.name,
            "ranks": info.layout.n_ranks,
            "context_len": info.context_len,
            "kv_tokens": info.kv_tokens,
            "kv_token_bytes": round(bytes_per_token(info.kv_groups)),
            "max_running": info.max_running,
        }
    return described
