"""Webhook endpoints: create, change, delete; what was delivered to them, sending it again, a new secret."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.admin.events import list_of, whole_number
from emberline.api.http.body import read_json
from emberline.api.http.call import Call, Reply, json_reply
from emberline.api.http.errors import NoBody
from emberline.jobs.webhooks.deliveries import DeliveryAttempt, DeliveryRecord
from emberline.jobs.webhooks.endpoints import OVERLAP_S, EndpointUpdate, WebhookEndpoint
from emberline.jobs.webhooks.events import cursor_number
from emberline.protocol.errors import BadInput

MAX_LISTED = 100
STATES = ("pending", "delivered", "failed")
DELIVERIES = {
    "state": {"enum": list(STATES)},
    "before": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
}


class EndpointChange(msgspec.Struct, kw_only=True):
    """`model` null or empty: events of every model. `events` may be ["*"]."""

    name: str | None = None
    url: str | None = None
    model: str | None = None
    events: Annotated[list[str], Meta(max_length=64)] | None = None
    enabled: bool | None = None


class NewEndpoint(EndpointChange, kw_only=True):
    url: str


class ReplayRequest(msgspec.Struct, kw_only=True):
    """Without a delivery's id: all that failed."""

    delivery_id: str | None = None


class RotateRequest(msgspec.Struct, kw_only=True):
    """For so many seconds deliveries are signed with the old secret too."""

    overlap_s: Annotated[int, Meta(ge=0, le=30 * 86_400)] = OVERLAP_S


_new = msgspec.json.Decoder(NewEndpoint)
_change = msgspec.json.Decoder(EndpointChange)
_replay = msgspec.json.Decoder(ReplayRequest)
_rotate = msgspec.json.Decoder(RotateRequest)


async def create(call: Call) -> Reply:
    """The answer alone holds the secret to verify deliveries with."""
    body = await read_json(call, _new)
    endpoints = call.events.endpoints
    endpoint = await endpoints.create(call.principal.account, "standard", _changes(call, body))
    return json_reply(_shown(endpoint) | {"secret": endpoints.secret_of(endpoint)})


async def list_all(call: Call) -> Reply:
    found = await call.events.endpoints.of_account(call.principal.account)
    return json_reply(list_of([_shown(endpoint) for endpoint in found], has_more=False))


async def retrieve(call: Call) -> Reply:
    return json_reply(_shown(await _endpoint(call)))


async def update(call: Call) -> Reply:
    body = await read_json(call, _change)
    endpoint = await call.events.endpoints.update(call.principal.account, call.tail, _changes(call, body))
    return json_reply(_shown(endpoint))


async def delete(call: Call) -> Reply:
    await call.events.endpoints.delete(call.principal.account, call.tail)
    return json_reply({"id": call.tail, "object": "webhook_endpoint", "deleted": True})


async def rotate(call: Call) -> Reply:
    try:
        body = await read_json(call, _rotate)
    except NoBody:
        body = RotateRequest()
    endpoints = call.events.endpoints
    endpoint = await endpoints.rotate(call.principal.account, call.tail, body.overlap_s)
    return json_reply(_shown(endpoint) | {"secret": endpoints.secret_of(endpoint)})


async def deliveries(call: Call) -> Reply:
    """The latest events first; `before` an event's id."""
    query = call.query()
    limit = whole_number(query, "limit", 20, 1, MAX_LISTED)
    state: Any = query.get("state")
    if state not in (None, *STATES):
        raise BadInput(f"`state` may be {', '.join(STATES)}", param="state")
    before = cursor_number(query["before"]) if "before" in query else None
    endpoint = await _endpoint(call)
    found = await call.events.deliveries.records(endpoint, state, before, limit + 1)
    return json_reply(list_of([_logged(item) for item in found[:limit]], has_more=len(found) > limit))


async def replay(call: Call) -> Reply:
    try:
        body = await read_json(call, _replay)
    except NoBody:
        body = ReplayRequest()
    n = await call.events.deliveries.replay(await _endpoint(call), body.delivery_id)
    return json_reply({"object": "webhook_endpoint.replay", "replayed": n})


async def _endpoint(call: Call) -> WebhookEndpoint:
    return await call.events.endpoints.get(call.principal.account, call.tail)


def _changes(call: Call, body: EndpointChange) -> EndpointUpdate:
    model = call.service.resolve(body.model).id if body.model else body.model
    return EndpointUpdate(name=body.name, url=body.url, model=model, types=body.events, enabled=body.enabled)


def _shown(endpoint: WebhookEndpoint) -> dict[str, Any]:
    since_us = endpoint.failing_since_us
    return {
        "id": endpoint.id,
        "object": "webhook_endpoint",
        "created_at": endpoint.created_us // 1_000_000,
        "name": endpoint.name,
        "url": endpoint.url,
        "model": endpoint.model or None,
        "events": endpoint.type_list,
        "enabled": bool(endpoint.enabled),
        "disabled_reason": endpoint.disabled_reason or None,
        "failing_since": None if since_us is None else since_us // 1_000_000,
    }


def _logged(item: DeliveryRecord) -> dict[str, Any]:
    delivery, event = item.delivery, item.event
    waits = delivery.state == "pending"
    return {
        "id": delivery.id,
        "object": "webhook_delivery",
        "event": {"id": event.id, "type": event.type} if event else None,
        "state": delivery.state,
        "created_at": delivery.created_us / 1e6,
        "next_attempt_at": delivery.ready_us / 1e6 if waits else None,
        "finished_at": None if delivery.finished_us is None else delivery.finished_us / 1e6,
        "attempts": [_attempt(attempt) for attempt in item.attempts],
    }


def _attempt(attempt: DeliveryAttempt) -> dict[str, Any]:
    outcome: Literal["succeeded", "failed", "unknown"] = "succeeded" if attempt.succeeded else "failed"
    if attempt.status is None and not attempt.problem:  # it runs now, or its process ended under it
        return {"number": attempt.number, "outcome": "unknown"}
    return {
        "number": attempt.number,
        "outcome": outcome,
        "status": attempt.status,
        "problem": attempt.problem or None,
        "started_at": attempt.started_us / 1e6,
        "duration_ms": attempt.took_us / 1e3,
    }
