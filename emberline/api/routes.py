"""Every route of the server, with its policy. There are no others."""

from functools import cache

from emberline.api.admin import endpoints as admin
from emberline.api.admin import endpoints as queue_admin
from emberline.api.admin import events
from emberline.api.admin import webhooks as webhook_endpoints
from emberline.api.admin.webhooks import (
    DELIVERIES,
    EndpointChange,
    NewEndpoint,
    ReplayRequest,
    RotateRequest,
)
from emberline.api.anthropic import batches as anthropic_batches
from emberline.api.anthropic import messages as anthropic
from emberline.api.anthropic.batches import NewMessageBatch
from emberline.api.anthropic.message_request import CountRequest, MessagesRequest
from emberline.api.batches.submission import LINE
from emberline.api.http import openapi
from emberline.api.http.call import Call, Reply, encode
from emberline.api.http.errors import Dialect
from emberline.api.http.router import Policy, Route
from emberline.api.openai import batches as openai_batches
from emberline.api.openai import endpoints as openai
from emberline.api.openai import files as openai_files
from emberline.api.openai.batches import NewBatchRequest
from emberline.api.openai.chat import ChatRequest
from emberline.api.openai.completions import CompletionRequest
from emberline.api.openai.responses import endpoints as openai_responses
from emberline.api.openai.responses.endpoints import PAGE
from emberline.api.openai.responses.request import ResponsesRequest
from emberline.api.workers_ai import catalog as search
from emberline.api.workers_ai import endpoints as workers_ai
from emberline.api.workers_ai import event_subscriptions
from emberline.api.workers_ai.catalog import MODEL_FILTERS, PAGING
from emberline.api.workers_ai.event_subscriptions import NewSubscription, SubscriptionChange
from emberline.api.workers_ai.run_request import RunRequest, UniversalRequest

AI = "/client/v4/accounts/{account}/ai"
SUBSCRIPTIONS = "/client/v4/accounts/{account}/event_subscriptions/subscriptions"
OPEN, KEY = Policy.OPEN, Policy.KEY
QUEUE = {"queueRequest": {"type": "boolean"}}
NATIVE, OPENAI, ANTHROPIC = Dialect.NATIVE, Dialect.OPENAI, Dialect.ANTHROPIC


def _openai(prefix: str, form: Dialect) -> list[Route]:
    return [
        Route("POST", f"{prefix}/chat/completions", KEY, form, openai.chat_completions, "Chat", body=ChatRequest),
        Route("POST", f"{prefix}/completions", KEY, form, openai.completions, "Complete text", body=CompletionRequest),
        Route("GET", f"{prefix}/models", KEY, form, openai.list_models, "List models"),
        Route("GET", f"{prefix}/models/{{model}}", KEY, form, openai.get_model, "Describe a model"),
    ]


def _responses(prefix: str, form: Dialect) -> list[Route]:
    path, door, body = f"{prefix}/responses", openai_responses, ResponsesRequest
    return [
        Route("POST", path, KEY, form, door.create, "Create a response", body=body),
        Route("POST", f"{path}/input_tokens", KEY, form, door.count_tokens, "Count a response's tokens", body=body),
        Route("GET", f"{path}/{{id}}", KEY, form, door.retrieve, "A stored response", query=door.STREAM),
        Route("DELETE", f"{path}/{{id}}", KEY, form, door.delete, "Delete a stored response"),
        Route("GET", f"{path}/{{id}}/input_items", KEY, form, door.list_input_items, "Its input", query=PAGE),
        Route("POST", f"{path}/{{id}}/cancel", KEY, form, door.cancel, "Cancel a response"),
    ]


def _files(prefix: str, form: Dialect) -> list[Route]:
    path, one, door = f"{prefix}/files", f"{prefix}/files/{{id}}", openai_files
    return [
        Route("POST", path, KEY, form, door.create, "Upload a file"),
        Route("GET", path, KEY, form, door.list_all, "List files", query=door.PAGE),
        Route("GET", one, KEY, form, door.retrieve, "A file's description"),
        Route("DELETE", one, KEY, form, door.delete, "Delete a file"),
        Route("GET", f"{one}/content", KEY, form, door.content, "What is in a file"),
    ]


def _batches(prefix: str, form: Dialect) -> list[Route]:
    path, one, door = f"{prefix}/batches", f"{prefix}/batches/{{id}}", openai_batches
    return [
        Route("POST", path, KEY, form, door.create, "Run a file of requests", body=NewBatchRequest),
        Route("GET", path, KEY, form, door.list_all, "List batches", query=door.PAGE),
        Route("GET", one, KEY, form, door.retrieve, "A batch"),
        Route("POST", f"{one}/cancel", KEY, form, door.cancel, "Cancel a batch, or one line", query=LINE),
        Route("DELETE", one, KEY, form, door.delete, "Delete a batch and its results"),
    ]


def _message_batches(prefix: str, form: Dialect) -> list[Route]:
    path, one, door = f"{prefix}/messages/batches", f"{prefix}/messages/batches/{{id}}", anthropic_batches
    return [
        Route("POST", path, KEY, form, door.create, "Run many messages", body=NewMessageBatch),
        Route("GET", path, KEY, form, door.list_all, "List message batches", query=door.PAGE),
        Route("GET", one, KEY, form, door.retrieve, "A message batch"),
        Route("DELETE", one, KEY, form, door.delete, "Delete a message batch and its results"),
        Route("POST", f"{one}/cancel", KEY, form, door.cancel, "Cancel a message batch, or one", query=LINE),
        Route("GET", f"{one}/results", KEY, form, door.results, "A message batch's results"),
    ]


def _anthropic(prefix: str, form: Dialect) -> list[Route]:
    path, count = f"{prefix}/messages", anthropic.count_tokens
    return [
        Route("POST", path, KEY, form, anthropic.messages, "Create a message", body=MessagesRequest),
        Route("POST", f"{path}/count_tokens", KEY, form, count, "Count a message's tokens", body=CountRequest),
        *_message_batches(prefix, form),
    ]


def _events(prefix: str, form: Dialect) -> list[Route]:
    path, one, door = f"{prefix}/webhook_endpoints", f"{prefix}/webhook_endpoints/{{id}}", webhook_endpoints
    return [
        Route("GET", f"{prefix}/events", KEY, form, events.events, "What happened, as it happens", query=events.QUERY),
        Route("POST", path, KEY, form, door.create, "Create a webhook endpoint", body=NewEndpoint),
        Route("GET", path, KEY, form, door.list_all, "List webhook endpoints"),
        Route("GET", one, KEY, form, door.retrieve, "A webhook endpoint"),
        Route("POST", one, KEY, form, door.update, "Change a webhook endpoint", body=EndpointChange),
        Route("DELETE", one, KEY, form, door.delete, "Delete a webhook endpoint"),
        Route("GET", f"{one}/deliveries", KEY, form, door.deliveries, "Its deliveries", query=DELIVERIES),
        Route("POST", f"{one}/replay", KEY, form, door.replay, "Deliver again", body=ReplayRequest),
        Route("POST", f"{one}/rotate", KEY, form, door.rotate, "A new signing secret", body=RotateRequest),
    ]


def _subscriptions(path: str) -> list[Route]:
    one, door, new, change = f"{path}/{{id}}", event_subscriptions, NewSubscription, SubscriptionChange
    return [
        Route("POST", path, KEY, NATIVE, door.create, "Subscribe to a model's events", body=new),
        Route("GET", path, KEY, NATIVE, door.list_all, "List event subscriptions", query=PAGING),
        Route("GET", one, KEY, NATIVE, door.retrieve, "An event subscription"),
        Route("PATCH", one, KEY, NATIVE, door.update, "Change an event subscription", body=change),
        Route("DELETE", one, KEY, NATIVE, door.delete, "Delete an event subscription"),
    ]


@cache
def _document() -> bytes:
    return encode(openapi.document(ROUTES))


async def describe(call: Call) -> Reply:
    return Reply(200, _document())


ROUTES: tuple[Route, ...] = (
    Route("GET", "/", OPEN, OPENAI, admin.page, "What runs here and how to call it"),
    Route("GET", "/favicon.ico", OPEN, OPENAI, admin.favicon, "No icon"),
    Route("GET", "/health", OPEN, OPENAI, admin.health, "Whether tokens can move"),
    Route("GET", "/metrics", KEY, OPENAI, admin.metrics, "Metrics for Prometheus"),
    Route("GET", "/api/ps", KEY, OPENAI, admin.ps, "Models, engines and their load"),
    Route(
        "GET", "/api/queue", KEY, OPENAI, queue_admin.show, "What waits, and the dead letters", query=queue_admin.PAGE
    ),
    Route("POST", "/api/queue/replay", KEY, OPENAI, queue_admin.replay, "Run dead letters again", queue_admin.Replay),
    Route("GET", "/openapi.json", OPEN, OPENAI, describe, "This document"),
    Route("POST", f"{AI}/run", KEY, NATIVE, workers_ai.run_universal, "Run a model", UniversalRequest, QUEUE),
    Route("POST", f"{AI}/run/{{model}}", KEY, NATIVE, workers_ai.run, "Run a model", RunRequest, QUEUE),
    Route("GET", f"{AI}/models/search", KEY, NATIVE, search.models, "Search models", query=MODEL_FILTERS),
    Route("GET", f"{AI}/models/schema", KEY, NATIVE, search.schema, "A model's schema", query=search.MODEL_NAME),
    Route("GET", f"{AI}/tasks/search", KEY, NATIVE, search.tasks, "List tasks", query=PAGING),
    Route("GET", f"{AI}/authors/search", KEY, NATIVE, search.list_authors, "List authors", query=PAGING),
    *_openai("/v1", OPENAI),
    *_openai(f"{AI}/v1", Dialect.OPENAI_ENVELOPED),
    *_responses("/v1", OPENAI),
    *_responses(f"{AI}/v1", Dialect.OPENAI_ENVELOPED),
    *_files("/v1", OPENAI),
    *_files(f"{AI}/v1", Dialect.OPENAI_ENVELOPED),
    *_batches("/v1", OPENAI),
    *_batches(f"{AI}/v1", Dialect.OPENAI_ENVELOPED),
    *_events("/v1", OPENAI),
    *_events(f"{AI}/v1", Dialect.OPENAI_ENVELOPED),
    *_subscriptions(SUBSCRIPTIONS),
    *_anthropic("/v1", ANTHROPIC),
    *_anthropic(f"{AI}/v1", Dialect.ANTHROPIC_ENVELOPED),
    # Anthropic's client appends /v1/messages to whatever base it is given.
    *_anthropic(f"{AI}/v1/v1", Dialect.ANTHROPIC_ENVELOPED),
)
