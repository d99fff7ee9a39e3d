"""Cloudflare's event subscriptions, for models: their destination here is a webhook."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.http.body import read_json
from emberline.api.http.call import Call, Reply, json_reply
from emberline.api.workers_ai.answer import envelope
from emberline.api.workers_ai.catalog import page_of
from emberline.jobs.webhooks.endpoints import EndpointForm, EndpointUpdate, WebhookEndpoint
from emberline.jobs.webhooks.events import WORKERS_AI, WORKERS_AI_TYPES, timestamp
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


_new = msgspec.json.Decoder(NewSubscription)
_change = msgspec.json.Decoder(SubscriptionChange)


async def create(call: Call) -> Reply:
    """The answer's destination alone holds the secret to verify deliveries with."""
    body = await read_json(call, _new)
    endpoints = call.events.endpoints
    endpoint = await endpoints.create(call.principal.account, _FORM, _changes(call, body))
    shown = _shown(endpoint)
    shown["destination"]["secret"] = endpoints.secret_of(endpoint)
    return json_reply(envelope(shown))


async def list_all(call: Call) -> Reply:
    found = await call.events.endpoints.of_account(call.principal.account, _FORM)
    return page_of(call.query(), [_shown(endpoint) for endpoint in found])


async def retrieve(call: Call) -> Reply:
    return json_reply(envelope(_shown(await call.events.endpoints.get(call.principal.account, call.tail, _FORM))))


async def update(call: Call) -> Reply:
    body = await read_json(call, _change)
    changes = _changes(call, body)
    return json_reply(
        envelope(_shown(await call.events.endpoints.update(call.principal.account, call.tail, changes, _FORM)))
    )


async def delete(call: Call) -> Reply:
    account, endpoints = call.principal.account, call.events.endpoints
    endpoint = await endpoints.get(account, call.tail, _FORM)
    await endpoints.delete(account, endpoint.id, _FORM)
    return json_reply(envelope(_shown(endpoint)))


def _changes(call: Call, body: SubscriptionChange) -> EndpointUpdate:
    model = call.service.resolve(body.source.model_name).id if body.source else None
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
            f'events go to webhooks, not to {destination.type!r}: write {{"type": "webhook", "url": …}}; '
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


def _shown(endpoint: WebhookEndpoint) -> dict[str, Any]:
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
