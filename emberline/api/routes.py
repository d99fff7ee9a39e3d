"""Every route of the server, with its policy."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from emberline.api.admin import (
    accounts,
    audit,
    cluster,
    events,
    kv_cache,
    prices,
    providers,
    status,
    usage,
    webhooks,
    workers,
)
from emberline.api.admin import endpoints as admin
from emberline.api.admin import model_management as models
from emberline.api.anthropic import batches as message_batches
from emberline.api.anthropic import message_form as anthropic
from emberline.api.anthropic.message_request import CountRequest
from emberline.api.batches.submission import JOB_QUERY
from emberline.api.common.form import Form
from emberline.api.gateway import admin as gateways
from emberline.api.gateway import ai_binding as binding
from emberline.api.gateway import paths as gateway
from emberline.api.http import openapi, resumable
from emberline.api.http.errors import Dialect
from emberline.api.http.exchange import HttpExchange, Reply, encode
from emberline.api.http.router import ANY_API, APIS, GATEWAY, Policy, Route
from emberline.api.ollama import handlers as ollama
from emberline.api.ollama.chat_request import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaPrompt,
    OllamaPull,
    OllamaShow,
)
from emberline.api.openai import audio, batches, embeddings, files, media, tokenization
from emberline.api.openai import chat_completions as openai
from emberline.api.openai.completions import CompletionRequest
from emberline.api.openai.responses import endpoints as responses
from emberline.api.openai.responses import websocket
from emberline.api.openai.responses.request import ResponsesRequest
from emberline.api.playground import assets, chats
from emberline.api.workers_ai import catalog
from emberline.api.workers_ai import event_subscriptions as subscriptions
from emberline.api.workers_ai import handlers as workers_ai
from emberline.api.workers_ai.run_request import RunRequest, UniversalRequest
from emberline.catalog.model_card import TEXT_CLASSIFICATION, TEXT_EMBEDDINGS, TEXT_GENERATION
from emberline.config import EndpointConfig
from emberline.protocol.gateway import GatewaySettings
from emberline.protocol.member import Signed

AI = "/client/v4/accounts/{account}/ai"
SUBSCRIPTIONS = "/client/v4/accounts/{account}/event_subscriptions/subscriptions"
QUEUE = {"queueRequest": {"type": "boolean"}}

# Method, path, endpoint, summary; then the struct of the body, unless the endpoint is a form, and the query parameters.
_Row = tuple[Any, ...]

_OPENAI: tuple[_Row, ...] = (
    ("POST", "/chat/completions", openai.CHAT, "Chat"),
    ("POST", "/completions", openai.completions, "Complete text", CompletionRequest),
    ("POST", "/embeddings", embeddings.EMBEDDINGS, "Embed texts"),
    ("POST", "/rerank", embeddings.RERANK, "Rank documents by relevance"),
    ("POST", "/images/generations", media.generate_images, "Make images", media.ImagesRequest),
    ("POST", "/images/edits", media.edit_images, "Edit images"),
    ("POST", "/audio/speech", media.speech, "Turn text into speech", media.SpeechRequestBody),
    ("POST", "/audio/transcriptions", audio.transcriptions, "Transcribe recorded speech"),
    ("POST", "/audio/translations", audio.translations, "Translate recorded speech into English"),
    ("GET", "/models", openai.list_models, "List models"),
    ("GET", "/models/{model}", openai.get_model, "Describe a model"),
    ("POST", "/responses", responses.create, "Create a response", ResponsesRequest),
    ("GET", "/responses", websocket.connect, "Create responses over a WebSocket"),
    ("POST", "/responses/input_tokens", responses.count_tokens, "Count a response's tokens", ResponsesRequest),
    ("POST", "/responses/compact", responses.compact, "Compact a conversation", ResponsesRequest),
    ("GET", "/responses/{id}", responses.retrieve, "Retrieve a stored response", None, responses.STREAM),
    ("DELETE", "/responses/{id}", responses.delete, "Delete a stored response"),
    ("GET", "/responses/{id}/input_items", responses.list_input_items, "List its input items", None, responses.PAGE),
    ("POST", "/responses/{id}/cancel", responses.cancel, "Cancel a response"),
    ("POST", "/files", files.create, "Upload a file"),
    ("GET", "/files", files.list_all, "List files", None, files.PAGE),
    ("GET", "/files/{id}", files.retrieve, "Describe a file"),
    ("DELETE", "/files/{id}", files.delete, "Delete a file"),
    ("GET", "/files/{id}/content", files.content, "Download a file"),
    ("POST", "/batches", batches.create, "Run a file of requests", batches.NewBatchRequest),
    ("GET", "/batches", batches.list_all, "List batches", None, batches.PAGE),
    ("GET", "/batches/{id}", batches.retrieve, "Retrieve a batch"),
    ("POST", "/batches/{id}/cancel", batches.cancel, "Cancel a batch, or one of its jobs", None, JOB_QUERY),
    ("DELETE", "/batches/{id}", batches.delete, "Delete a batch and its results"),
    ("GET", "/events", events.events, "List, await or stream events", None, events.QUERY),
    ("POST", "/webhook_endpoints", webhooks.create, "Create a webhook endpoint", webhooks.NewEndpoint),
    ("GET", "/webhook_endpoints", webhooks.list_all, "List webhook endpoints"),
    ("GET", "/webhook_endpoints/{id}", webhooks.retrieve, "Retrieve a webhook endpoint"),
    ("POST", "/webhook_endpoints/{id}", webhooks.update, "Update a webhook endpoint", webhooks.EndpointChange),
    ("DELETE", "/webhook_endpoints/{id}", webhooks.delete, "Delete a webhook endpoint"),
    ("GET", "/webhook_endpoints/{id}/deliveries", webhooks.deliveries, "List deliveries", None, webhooks.DELIVERIES),
    ("POST", "/webhook_endpoints/{id}/replay", webhooks.replay, "Deliver again", webhooks.ReplayRequest),
    ("POST", "/webhook_endpoints/{id}/rotate", webhooks.rotate, "Rotate the signing secret", webhooks.RotateRequest),
)
_TOKENIZER: tuple[_Row, ...] = (
    ("POST", "/tokenize", tokenization.tokenize, "Tokenize a prompt", tokenization.TokenizeRequest),
    ("POST", "/detokenize", tokenization.detokenize, "Text of token ids", tokenization.DetokenizeRequest),
    ("GET", "/tokenizer_info", tokenization.info, "Describe a tokenizer", None, tokenization.MODEL_NAME),
)
_OLLAMA: tuple[_Row, ...] = (
    ("POST", "/chat", ollama.chat, "Chat, as Ollama does", OllamaChat),
    ("POST", "/generate", ollama.generate, "Answer a prompt, as Ollama does", OllamaPrompt),
    ("POST", "/embed", ollama.embed, "Embed texts, as Ollama does", OllamaEmbed),
    ("POST", "/embeddings", ollama.embeddings, "Embed a text, as older Ollama does", OllamaEmbeddings),
    ("GET", "/tags", ollama.tags, "List models, as Ollama does"),
    ("POST", "/show", ollama.show, "Describe a model, as Ollama does", OllamaShow),
    (
        "POST",
        "/pull",
        ollama.pull,
        "Download a model (operators), as Ollama does; or check that it is there",
        OllamaPull,
    ),
    ("GET", "/version", ollama.version, "The version of Ollama's API"),
)
_STREAMS: tuple[_Row, ...] = (
    ("GET", "/streams/{id}", resumable.resume, "Resume a stream", None, resumable.AFTER),
    ("DELETE", "/streams/{id}", resumable.cancel, "Cancel the request of a resumable stream"),
)
_COHERE: tuple[_Row, ...] = (("POST", "/rerank", embeddings.RERANK_V2, "Rank documents by relevance, as Cohere does"),)
_ANTHROPIC: tuple[_Row, ...] = (
    ("POST", "/messages", anthropic.MESSAGES, "Create a message"),
    ("POST", "/messages/count_tokens", anthropic.count_tokens, "Count a message's tokens", CountRequest),
    ("POST", "/messages/batches", message_batches.create, "Run many messages", message_batches.NewMessageBatch),
    ("GET", "/messages/batches", message_batches.list_all, "List message batches", None, message_batches.PAGE),
    ("GET", "/messages/batches/{id}", message_batches.retrieve, "Retrieve a message batch"),
    ("DELETE", "/messages/batches/{id}", message_batches.delete, "Delete a message batch and its results"),
    ("POST", "/messages/batches/{id}/cancel", message_batches.cancel, "Cancel a message batch or job", None, JOB_QUERY),
    ("GET", "/messages/batches/{id}/results", message_batches.results, "Download a message batch's results"),
)
_WORKERS_AI: tuple[_Row, ...] = (
    ("POST", "/run", workers_ai.run_universal, "Run a model", UniversalRequest, QUEUE),
    ("POST", "/run/{model}", workers_ai.run, "Run a model", RunRequest, QUEUE),
    ("GET", "/models/search", catalog.models, "Search models", None, catalog.MODEL_FILTERS),
    ("GET", "/models/schema", catalog.schema, "Describe a model's input and output", None, catalog.MODEL_NAME),
    ("GET", "/tasks/search", catalog.tasks, "List tasks", None, catalog.PAGING),
    ("GET", "/authors/search", catalog.list_authors, "List authors", None, catalog.PAGING),
)
_BINDING: tuple[_Row, ...] = (  # as workerd sends it, or wrapped by miniflare
    ("POST", "/run", binding.run, "Run a model for a Worker", binding.BindingRequest),
    ("POST", "/ai-gateway/run", binding.run, "Run a model through a gateway for a Worker", binding.BindingRequest),
    ("GET", "/ai-api/models/search", catalog.models, "Search models for a Worker", None, catalog.MODEL_FILTERS),
    ("GET", binding.GATEWAYS + "{model}", binding.gateway_url, "A gateway's address for a Worker"),
    ("POST", binding.WRAPPED, binding.wrapped, "A request of a Worker, inside another one"),
    ("GET", binding.WRAPPED, binding.wrapped, "A request of a Worker, inside another one"),
)
_BINDING_GATEWAY: tuple[_Row, ...] = (  # the Worker gets the response as it is
    ("POST", binding.UNIVERSAL + "{id}", binding.run_universal, "Try several models in order for a Worker"),
)
_BINDING_PROXY: tuple[_Row, ...] = (
    ("POST", "/run/proxy", binding.wrapped, "A request of a Worker, by way of older wrangler"),
    ("GET", "/run/proxy", binding.wrapped, "A request of a Worker, by way of older wrangler"),
)
_SUBSCRIPTIONS: tuple[_Row, ...] = (
    ("POST", "", subscriptions.create, "Subscribe to a model's events", subscriptions.NewSubscription),
    ("GET", "", subscriptions.list_all, "List event subscriptions", None, catalog.PAGING),
    ("GET", "/{id}", subscriptions.retrieve, "Retrieve an event subscription"),
    ("PATCH", "/{id}", subscriptions.update, "Update an event subscription", subscriptions.SubscriptionChange),
    ("DELETE", "/{id}", subscriptions.delete, "Delete an event subscription"),
)


# Tasks of the models that a body names.
_TASKS: dict[type[Any], tuple[str, ...]] = {
    **dict.fromkeys(
        (openai.CHAT.decoder.type, CompletionRequest, ResponsesRequest, anthropic.MESSAGES.decoder.type, CountRequest),
        (TEXT_GENERATION,),
    ),
    **dict.fromkeys((OllamaChat, OllamaPrompt), (TEXT_GENERATION,)),
    **dict.fromkeys((embeddings.EMBEDDINGS.decoder.type, OllamaEmbed, OllamaEmbeddings), (TEXT_EMBEDDINGS,)),
    embeddings.RERANK.decoder.type: (TEXT_CLASSIFICATION,),
    UniversalRequest: (),
}


@lru_cache(8)
def _document(names: openapi.ModelNames) -> bytes:
    return encode(openapi.document(ROUTES, names, _TASKS))


async def describe(call: HttpExchange) -> Reply:
    """The document, with the names of the models that the caller may use."""
    by_task: dict[str, tuple[str, ...]] = {}
    for card in call.known_models():
        by_task[card.task] = (*by_task.get(card.task, ()), card.id, *card.aliases)
    others = bool(call.service.models.upstream.providers.clients)
    return Reply(200, _document(openapi.ModelNames(tuple(by_task.items()), others)))


_OPEN: tuple[_Row, ...] = (
    ("GET", "/", assets.playground, "Playground"),
    ("GET", "/assets/{asset}", assets.asset, "Scripts and styles of the pages"),
    ("GET", "/operations", assets.operations, "The operator's pages"),
    ("GET", "/favicon.ico", admin.favicon, "No icon"),
    ("GET", "/health", admin.health, "Health check"),
    ("GET", "/openapi.json", describe, "This document"),
    ("POST", "/api/cluster/challenge", cluster.challenge, "Begin to announce a worker"),
    ("POST", "/api/cluster/announce", cluster.announce, "Announce a worker to the cluster", Signed),
)
_ADMIN: tuple[_Row, ...] = (
    ("GET", "/metrics", admin.metrics, "Metrics for Prometheus"),
    ("GET", "/api/status", status.show, "Load, requests in flight and the last hour", None, status.QUERY),
    ("GET", "/api/accounts", accounts.list_accounts, "List accounts", None, accounts.PAGE),
    ("POST", "/api/accounts", accounts.create_account, "Create an account", accounts.NewAccount),
    ("GET", "/api/accounts/{id}", accounts.retrieve_account, "Retrieve an account"),
    ("PATCH", "/api/accounts/{id}", accounts.update_account, "Limit or disable an account", accounts.AccountChange),
    ("GET", "/api/keys", accounts.list_keys, "List API keys", None, accounts.KEY_PAGE),
    ("POST", "/api/keys", accounts.create_key, "Create an API key", accounts.NewKeyRequest),
    ("GET", "/api/keys/{id}", accounts.retrieve_key, "Retrieve an API key's record"),
    ("PATCH", "/api/keys/{id}", accounts.update_key, "Change an API key's scope and limits", accounts.KeyChange),
    ("POST", "/api/keys/{id}/rotate", accounts.rotate_key, "Replace an API key", accounts.RotateKeyRequest),
    ("POST", "/api/keys/{id}/revoke", accounts.revoke_key, "Revoke an API key"),
    ("GET", "/api/cluster", cluster.show, "Members of the cluster"),
    ("GET", "/api/cluster/plan", cluster.plan, "What the planner saw, did and why", None, cluster.PLAN_QUERY),
    ("POST", "/api/cluster/bounds", cluster.set_bounds, "Set the bounds of a scaled model", cluster.NewBounds),
    ("GET", "/api/cache", kv_cache.show, "Tiers of the KV cache of every engine worker"),
    ("GET", "/api/audit", audit.entries, "List the audit log", None, audit.PAGE),
    ("GET", "/api/audit/verify", audit.verify, "Verify the audit log", None, audit.HEAD),
    ("POST", "/api/models/load", models.load, "Load a model", models.ModelName),
    ("POST", "/api/models/unload", models.unload, "Unload a model once it is idle", models.ModelName),
    ("POST", "/api/prices", prices.set_price, "Set a model's price", prices.NewPrice),
    ("POST", "/api/prices/remove", prices.remove_price, "Take a model's price away", prices.NoPrice),
    ("POST", "/api/workers/drain", workers.drain, "Send a worker nothing new", workers.WorkerName),
    ("POST", "/api/workers/undrain", workers.undrain, "Use a drained worker again", workers.WorkerName),
    ("POST", "/api/workers/restart", workers.restart, "End a worker to be started again", workers.WorkerName),
    ("POST", "/api/workers/role", workers.role, "Give a worker another role", workers.WorkerRoleChange),
    ("POST", "/api/workers/leave", workers.leave, "Drain a worker and remove it", workers.LeavingWorker),
    ("GET", "/api/aliases", models.list_aliases, "List aliases of models"),
    ("POST", "/api/aliases", models.put_alias, "Add or replace an alias", models.NewAlias),
    ("DELETE", "/api/aliases/{model}", models.remove_alias, "Remove an alias"),
    ("POST", "/api/workers/join", workers.join, "Add a worker or an upstream server", EndpointConfig),
)
_TENANT: tuple[_Row, ...] = (  # of the caller's account; an admin sees all
    ("POST", "/api/models/push", models.push, "Push a version of a predictor", None, models.PUSH_QUERY),
    ("GET", "/api/models/versions", models.versions, "List a predictor's versions", None, models.VERSIONS_QUERY),
    ("GET", "/api/models/logs", models.logs, "The end of a predictor's log", None, models.LOG_QUERY),
    ("POST", "/api/models/rollback", models.roll_back, "Serve an earlier version of a predictor", models.Rollback),
    ("POST", "/api/models/remove", models.remove_pushed, "Remove a predictor", models.ModelName),
    ("GET", "/api/models/available", models.available, "Models that can be pulled by name, and what fits"),
    ("GET", "/api/ps", admin.ps, "Models; for an admin engine workers and their load too"),
    ("GET", "/api/usage", usage.report, "Report usage and its cost", None, usage.QUERY),
    ("GET", "/api/providers", providers.list_all, "List providers with a key"),
    ("POST", "/api/providers", providers.add, "Store a provider's key", providers.NewProvider),
    ("DELETE", "/api/providers/{id}", providers.remove, "Remove a provider's key", None, providers.ACCOUNT),
    ("POST", "/api/providers/{id}/test", providers.test, "Ask a provider for its models"),
    ("GET", "/api/prices", prices.list_prices, "List prices", None, prices.MODEL),
    ("GET", "/api/gateways", gateways.list_all, "List gateways", None, gateways.ACCOUNT),
    ("POST", "/api/gateways", gateways.put, "Create or replace a gateway", GatewaySettings),
    ("GET", "/api/gateways/{id}", gateways.retrieve, "Retrieve a gateway", None, gateways.ACCOUNT),
    ("DELETE", "/api/gateways/{id}", gateways.delete, "Delete a gateway", None, gateways.ACCOUNT),
    ("GET", "/api/gateways/{id}/logs", gateways.logs, "Search a gateway's log", None, gateways.LOG_QUERY),
    ("DELETE", "/api/gateways/{id}/cache", gateways.purge, "Forget cached replies", None, gateways.ACCOUNT),
    ("POST", "/api/cache/purge", kv_cache.purge, "Forget cached KV of an account or a session", kv_cache.Purge),
    ("GET", "/api/cache/export", kv_cache.export, "Export a session's cached KV", None, kv_cache.EXPORT_QUERY),
    ("POST", "/api/cache/import", kv_cache.import_, "Import a session's cached KV", None, kv_cache.IMPORT_QUERY),
    ("GET", "/api/chats", chats.list_all, "List or search saved chats", None, chats.PAGE),
    ("POST", "/api/chats", chats.put, "Save a chat", chats.NewChat),
    ("DELETE", "/api/chats", chats.delete_all, "Delete all saved chats"),
    ("GET", "/api/chats/{id}", chats.retrieve, "Retrieve a saved chat"),
    ("PATCH", "/api/chats/{id}", chats.rename, "Rename a saved chat", chats.ChatChange),
    ("DELETE", "/api/chats/{id}", chats.delete, "Delete a saved chat"),
    ("GET", "/api/queue", admin.show_queue, "Queue depths and dead letters", None, admin.QUEUE_QUERY),
    ("POST", "/api/queue/replay", admin.replay_dead_letters, "Run dead letters again", admin.QueueReplay),
)


_GATEWAY: tuple[_Row, ...] = (
    ("POST", "", gateway.universal, "Try several models of any provider in order"),
    ("POST", "/{rest}", gateway.dispatch, "Call a model of any provider through a gateway"),
    ("GET", "/{rest}", gateway.list_models, "List the models that a gateway reaches"),
)


_PUSHES = (models.push, models.versions, models.logs, models.roll_back, models.remove_pushed)
_OF_ANY_API = (resumable.resume, resumable.cancel, binding.wrapped)


def _routes(prefix: str, dialect: Dialect, rows: tuple[_Row, ...], policy: Policy = Policy.KEY) -> list[Route]:
    return [_route(method, prefix + path, policy, dialect, *rest) for method, path, *rest in rows]


def _route(method: str, path: str, policy: Policy, dialect: Dialect, *rest: Any) -> Route:
    route = Route(method, path, policy, dialect, *rest)
    if isinstance(route.endpoint, Form):
        route = replace(route, body=route.endpoint.decoder.type)
    if route.endpoint is websocket.connect:
        route = replace(route, opens_websocket=True)
    if path.startswith(GATEWAY) or rest[0] in _OF_ANY_API:
        return replace(route, api=ANY_API)
    return (
        replace(route, api=APIS["push" if rest[0] in _PUSHES else _first_word(path)]) if policy is Policy.KEY else route
    )


def _first_word(path: str) -> str:
    """First segment of the path after the API's prefix (`/v1/`, `/api/`, …)."""
    for prefix in (
        f"{AI}/v1/v1/",
        f"{AI}/v1/",
        f"{AI}/",
        SUBSCRIPTIONS.removesuffix("subscriptions"),
        "/v1/",
        "/v2/",
        "/api/",
        "/",
    ):
        if path.startswith(prefix):
            return path[len(prefix) :].partition("/")[0]
    return path


ROUTES: tuple[Route, ...] = (
    *_routes("", Dialect.OPENAI, _OPEN, Policy.OPEN),
    *_routes("", Dialect.OPENAI, _ADMIN, Policy.ADMIN),
    *_routes("", Dialect.OPENAI, _TENANT),
    *_routes("", Dialect.OPENAI, _TOKENIZER),
    *_routes("/api", Dialect.OLLAMA, _OLLAMA),
    *_routes(AI, Dialect.NATIVE, _WORKERS_AI),
    *_routes(AI, Dialect.BINDING, _BINDING_PROXY),
    *_routes("", Dialect.BINDING, _BINDING),
    *_routes("", Dialect.GATEWAY, _BINDING_GATEWAY),
    *_routes("/v1", Dialect.OPENAI, _OPENAI),
    *_routes("/v1", Dialect.OPENAI, _STREAMS),
    *_routes(f"{AI}/v1", Dialect.OPENAI_ENVELOPED, _STREAMS),
    *_routes("/v2", Dialect.OPENAI, _COHERE),
    *_routes(f"{AI}/v1", Dialect.OPENAI_ENVELOPED, _OPENAI),
    *_routes(SUBSCRIPTIONS, Dialect.NATIVE, _SUBSCRIPTIONS),
    *_routes("/v1", Dialect.ANTHROPIC, _ANTHROPIC),
    *_routes(f"{AI}/v1", Dialect.ANTHROPIC_ENVELOPED, _ANTHROPIC),
    *_routes(GATEWAY, Dialect.GATEWAY, _GATEWAY),
    # Anthropic's client appends /v1/messages to whatever base URL it is given.
    *_routes(f"{AI}/v1/v1", Dialect.ANTHROPIC_ENVELOPED, _ANTHROPIC),
)
