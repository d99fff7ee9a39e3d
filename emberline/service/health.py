"""Whether tokens can move, which is more than whether a process lives."""

from typing import Any

import msgspec

from emberline.balancer.fleet import Fleet, Member
from emberline.balancer.snapshot import Snapshot, WorkerSnapshot

_BREAKER = {
    "open": "it failed too many requests; it gets none for a minute",
    "half_open": "it failed too many requests; it is being tried",
}


class Health(msgspec.Struct, frozen=True):
    """`ok`: every model has an engine that moves tokens. `detail` is plain data for people and `ps`."""

    ok: bool
    detail: dict[str, Any] = {}


def check(fleet: Fleet, snapshot: Snapshot) -> Health:
    """An idle engine that is connected is healthy; one that has work but takes no step is not."""
    seen = {worker.name: worker for worker in snapshot.workers}
    engines = [_describe(member, seen.get(member.name)) for member in fleet]
    up = {member.model for member in fleet if member.healthy and _answers(member)}
    down = sorted({member.model for member in fleet} - up)
    return Health(bool(up) and not down, {"engines": engines, "models_down": down})


def _answers(member: Member) -> bool:
    """Prompts alone are no answers."""
    return member.client.info is None or member.client.info.role != "prefill"


def _describe(member: Member, seen: WorkerSnapshot | None) -> dict[str, Any]:
    """`seen`: as the balancer sees it, once it has joined."""
    client = member.client
    doubts = "" if seen is None else _BREAKER.get(seen.state, "") or seen.problem
    described: dict[str, Any] = {
        "name": member.name,
        "model": member.model,
        "ok": member.healthy,
        "problem": client.problem or ("it has work but takes no step" if member.stalled else doubts),
        "state": "down" if seen is None else seen.state,
        "in_flight": member.in_flight,
        "load": msgspec.structs.asdict(member.load),
    }
    if notes := getattr(client, "notes", ""):
        described["notes"] = notes
    if (info := client.info) is not None:
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
