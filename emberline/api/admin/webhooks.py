"""Webhook endpoints: create, update, delete; their delivery log, redelivery, rotation of the signing secret."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.http.body import read_json
from emberline.api.http.errors import NoBody
from emberline.api.http.exchange import HttpExchange, Reply, json_reply, list_reply
from emberline.jobs.webhooks.deliveries import DeliveryAttempt, DeliveryRecord
from emberline.jobs.webhooks.events import cursor_number
from emberline.jobs.webhooks.webhook_store import OVERLAP_S, EndpointUpdate, WebhookEndpoint

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
    """Replay of one delivery, or of all failed deliveries if it names none."""

    delivery_id: str | None = None


class RotateRequest(msgspec.Struct, kw_only=True):
    """Rotation of a secret. For `overlap_s` seconds, deliveries are signed with the old secret too."""

    overlap_s: Annotated[int, Meta(ge=0, le=30 * 86_400)] = OVERLAP_S


async def create(call: HttpExchange) -> Reply:
    """Only this response contains the secret that verifies deliveries."""
    body = await read_json(call, NewEndpoint)
    endpoints = call.webhooks.endpoints
    endpoint = await endpoints.create(call.principal.account, "standard", _update(call, body))
    return json_reply(_endpoint_body(endpoint) | {"secret": endpoints.secret_of(endpoint)})


async def list_all(call: HttpExchange) -> Reply:
    found = await call.webhooks.endpoints.of_account(call.principal.account)
    return list_reply([_endpoint_body(endpoint) for endpoint in found], has_more=False)


async def retrieve(call: HttpExchange) -> Reply:
    return json_reply(_endpoint_body(await _endpoint(call)))


async def update(call: HttpExchange) -> Reply:
    body = await read_json(call, EndpointChange)
    endpoint = await call.webhooks.endpoints.update(call.principal.account, call.path_param, _update(call, body))
    return json_reply(_endpoint_body(endpoint))


async def delete(call: HttpExchange) -> Reply:
    await call.webhooks.endpoints.delete(call.principal.account, call.path_param)
    return json_reply({"id": call.path_param, "object": "webhook_endpoint", "deleted": True})


async def rotate(call: HttpExchange) -> Reply:
    try:
        body = await read_json(call, RotateRequest)
    except NoBody:
        body = RotateRequest()
    endpoints = call.webhooks.endpoints
    endpoint = await endpoints.rotate(call.principal.account, call.path_param, body.overlap_s)
    return json_reply(_endpoint_body(endpoint) | {"secret": endpoints.secret_of(endpoint)})


async def deliveries(call: HttpExchange) -> Reply:
    """Latest events first; `before` is the id of an event."""
    limit = call.int_param("limit", 20, 1, MAX_LISTED)
    state: Any = call.enum_param("state", STATES, "pending") if "state" in call.query else None
    before = cursor_number(call.query["before"]) if "before" in call.query else None
    endpoint = await _endpoint(call)
    found = await call.webhooks.deliveries.records(endpoint, state, before, limit + 1)
    return list_reply([_delivery_body(item) for item in found[:limit]], has_more=len(found) > limit)


async def replay(call: HttpExchange) -> Reply:
    try:
        body = await read_json(call, ReplayRequest)
    except NoBody:
        body = ReplayRequest()
    n = await call.webhooks.deliveries.replay(await _endpoint(call), body.delivery_id)
    return json_reply({"object": "webhook_endpoint.replay", "replayed": n})


async def _endpoint(call: HttpExchange) -> WebhookEndpoint:
    return await call.webhooks.endpoints.get(call.principal.account, call.path_param)


def _update(call: HttpExchange, body: EndpointChange) -> EndpointUpdate:
    model = call.service.models.find(body.model, call.principal.account).id if body.model else body.model
    return EndpointUpdate(name=body.name, url=body.url, model=model, types=body.events, enabled=body.enabled)


def _endpoint_body(endpoint: WebhookEndpoint) -> dict[str, Any]:
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


def _delivery_body(item: DeliveryRecord) -> dict[str, Any]:
    delivery, event = item.delivery, item.event
    return {
        "id": delivery.id,
        "object": "webhook_delivery",
        "event": {"id": event.id, "type": event.type} if event else None,
        "state": delivery.state,
        "created_at": delivery.created_us / 1e6,
        "next_attempt_at": delivery.ready_us / 1e6 if delivery.state == "pending" else None,
        "finished_at": None if delivery.finished_us is None else delivery.finished_us / 1e6,
        "attempts": [_attempt_body(attempt) for attempt in item.attempts],
    }


def _attempt_body(attempt: DeliveryAttempt) -> dict[str, Any]:
    if attempt.status is None and not attempt.problem:  # it is running, or its process died
        return {"number": attempt.number, "outcome": "unknown"}
    return {
        "number": attempt.number,
        "outcome": "succeeded" if attempt.succeeded else "failed",
        "status": attempt.status,
        "problem": attempt.problem or None,
        "started_at": attempt.started_us / 1e6,
        "duration_ms": attempt.took_us / 1e3,
    }
