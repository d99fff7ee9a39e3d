"""Cloudflare's event subscriptions for models; their destination is a webhook."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.http.body import read_json
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.api.workers_ai.catalog import paged_reply
from emberline.api.workers_ai.response_body import envelope
from emberline.jobs.webhooks.events import WORKERS_AI, WORKERS_AI_TYPES, timestamp
from emberline.jobs.webhooks.webhook_store import EndpointForm, EndpointUpdate, WebhookEndpoint
from emberline.protocol.errors import BadInput

_FORM: EndpointForm = "workers_ai"
_EVENTS = tuple(name.removeprefix(WORKERS_AI) for name in WORKERS_AI_TYPES)


class Source(msgspec.Struct, kw_only=True):
    type: Literal["workersAi.model"]
    model_name: str


class Destination(msgspec.Struct, kw_only=True):
    type: str = "webhook"
    url: str | None = None


class SubscriptionChange(msgspec.Struct, kw_only=True):
    name: str | None = None
    enabled: bool | None = None
    source: Source | None = None
    destination: Destination | None = None
    events: Annotated[list[str], Meta(min_length=1, max_length=16)] | None = None


class NewSubscription(SubscriptionChange, kw_only=True):
    source: Source
    destination: Destination
    events: Annotated[list[str], Meta(min_length=1, max_length=16)]


async def create(call: HttpExchange) -> Reply:
    """Only this response contains the secret that verifies deliveries."""
    new = await read_json(call, NewSubscription)
    endpoints = call.webhooks.endpoints
    endpoint = await endpoints.create(call.principal.account, _FORM, _update(call, new))
    body = _subscription_body(endpoint)
    body["destination"]["secret"] = endpoints.secret_of(endpoint)
    return json_reply(envelope(body))


async def list_all(call: HttpExchange) -> Reply:
    found = await call.webhooks.endpoints.of_account(call.principal.account, _FORM)
    return paged_reply(call, [_subscription_body(endpoint) for endpoint in found])


async def retrieve(call: HttpExchange) -> Reply:
    endpoint = await call.webhooks.endpoints.get(call.principal.account, call.path_param, _FORM)
    return json_reply(envelope(_subscription_body(endpoint)))


async def update(call: HttpExchange) -> Reply:
    update = _update(call, await read_json(call, SubscriptionChange))
    endpoint = await call.webhooks.endpoints.update(call.principal.account, call.path_param, update, _FORM)
    return json_reply(envelope(_subscription_body(endpoint)))


async def delete(call: HttpExchange) -> Reply:
    account, endpoints = call.principal.account, call.webhooks.endpoints
    endpoint = await endpoints.get(account, call.path_param, _FORM)
    await endpoints.delete(account, endpoint.id, _FORM)
    return json_reply(envelope(_subscription_body(endpoint)))


def _update(call: HttpExchange, body: SubscriptionChange) -> EndpointUpdate:
    model = call.service.models.find(body.source.model_name, call.principal.account).id if body.source else None
    return EndpointUpdate(
        name=body.name,
        url=_url(body.destination) if body.destination else None,
        model=model,
        types=_types(body.events) if body.events is not None else None,
        enabled=body.enabled,
    )


def _url(destination: Destination) -> str:
    if destination.type != "webhook":
        raise BadInput(
            f'events are delivered to webhooks, not to {destination.type!r}: send {{"type": "webhook", "url": …}}; '
            "without a public address, read them at /v1/events",
            param="destination.type",
        )
    if destination.url is None:
        raise BadInput("the destination needs a URL", param="destination.url")
    return destination.url


def _types(names: Sequence[str]) -> list[str]:
    short = [name.removeprefix(WORKERS_AI) for name in names]
    for name in short:
        if name not in _EVENTS:
            raise BadInput(f"a model has no event {name[:80]!r}; it has {', '.join(_EVENTS)}", param="events")
    return [WORKERS_AI + name for name in short]


def _subscription_body(endpoint: WebhookEndpoint) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "name": endpoint.name,
        "enabled": bool(endpoint.enabled),
        "source": {"type": "workersAi.model", "model_name": endpoint.model},
        "destination": {"type": "webhook", "url": endpoint.url},
        "events": [name.removeprefix(WORKERS_AI) for name in endpoint.type_list],
        "created_at": timestamp(endpoint.created_us),
        "modified_at": timestamp(endpoint.modified_us),
    }
