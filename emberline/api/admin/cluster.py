"""Endpoints of a cluster: workers announce themselves, and operators look at its members.

A worker proves itself by its join key, not by an API key: what it may do is only to announce itself.
"""

from typing import Any

import msgspec

from emberline.api.http.body import read_body, read_json
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.api.http.wire import decode
from emberline.protocol.member import Signed

# What this core knows of a member.
_OWN = ("connected", "problem", "in_flight", "running", "pushing", "seen_s", "hold_s")
MAX_ANNOUNCEMENT_BYTES = 64 << 10  # anybody may send one
MAX_DECISIONS = 1000
PLAN_QUERY = {"model": {"type": "string"}, "limit": {"type": "integer", "minimum": 0, "maximum": MAX_DECISIONS}}
_signed_decoder = msgspec.json.Decoder(Signed)


async def challenge(call: HttpExchange) -> Reply:
    """Begin the announcement of a worker."""
    return json_reply(await call.service.cluster_admin.join_challenge())


async def announce(call: HttpExchange) -> Reply:
    """A worker is there, still there, or about to end."""
    return json_reply(
        await call.service.cluster_admin.announce(
            decode(await read_body(call, MAX_ANNOUNCEMENT_BYTES), _signed_decoder)
        )
    )


class NewBounds(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    bounds: dict[str, Any] | None  # the keys of a `[cluster.models.NAME]` table to change; null: as configured


async def plan(call: HttpExchange) -> Reply:
    """List what the planner saw of each scaled model, what it did, and why."""
    model = call.query.get("model", "")
    return json_reply(
        await call.service.cluster_admin.scaling_plan(model, call.int_param("limit", 20, 0, MAX_DECISIONS))
    )


async def set_bounds(call: HttpExchange) -> Reply:
    """Between how many replicas, and when, the planner scales a model."""
    body = await read_json(call, NewBounds)
    call.audit_target = body.model
    return json_reply(
        {"model": body.model, "bounds": await call.service.cluster_admin.set_scaling_bounds(body.model, body.bounds)}
    )


async def show(call: HttpExchange) -> Reply:
    """The members of the cluster, and how this core stands with each."""
    found = await call.service.cluster_admin.cluster_status()
    rows = [
        {
            **msgspec.structs.asdict(each.member),
            **{name: getattr(each, name) for name in _OWN},
        }
        for each in found.members
    ]
    for row in rows:
        del row["instance"]
    return json_reply({"id": found.id, "region": found.region, "release": found.release, "members": rows})
