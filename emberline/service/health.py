"""Whether tokens can move, which is more than whether a process lives."""

from typing import Any

import msgspec

from emberline.balancer.fleet import Fleet, Member


class Health(msgspec.Struct, frozen=True):
    """`ok`: every model has an engine that moves tokens. `detail` is plain data for people and `ps`."""

    ok: bool
    detail: dict[str, Any] = {}


def check(fleet: Fleet) -> Health:
    """An idle engine that is connected is healthy; one that has work but takes no step is not."""
    engines = [_describe(member) for member in fleet]
    up = {member.model for member in fleet if member.healthy}
    down = sorted({member.model for member in fleet} - up)
    return Health(bool(up) and not down, {"engines": engines, "models_down": down})


def _describe(member: Member) -> dict[str, Any]:
    client = member.client
    described: dict[str, Any] = {
        "name": member.name,
        "model": member.model,
        "ok": member.healthy,
        "problem": client.problem or ("it has work but takes no step" if member.stalled else ""),
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
