"""Endpoints for operators: health, metrics, loaded models, the queue."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from emberline import __version__
from emberline.api.common.model_list import listed_names, ollama_model
from emberline.api.http.body import read_json
from emberline.api.http.errors import HeaderList
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.catalog.model_card import ModelCard
from emberline.jobs.queue.job import Job
from emberline.protocol.errors import NotFound

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
NO_STORE: HeaderList = [(b"cache-control", b"no-store")]
MAX_DEAD_LETTERS = 1000
_NEVER = "2318-01-01T00:00:00Z"  # when a model expires for Ollama's clients, which compute with it
QUEUE_QUERY = {"dead": {"type": "integer", "minimum": 0, "maximum": MAX_DEAD_LETTERS}}


async def health(call: HttpExchange) -> Reply:
    """Tell if the server can generate. If keys are used, only callers with a key get details."""
    found = await call.service.operations.health()
    body: dict[str, Any] = {"status": "ok" if found.ok else "unavailable", "version": __version__}
    if call.trusted:
        body["detail"] = found.detail
    retry: HeaderList = [] if found.ok else [(b"retry-after", b"1")]
    return json_reply(body, 200 if found.ok else 503, NO_STORE + retry)


async def metrics(call: HttpExchange) -> Reply:
    return Reply(200, await call.service.operations.metrics(), METRICS_TYPE, NO_STORE)


async def ps(call: HttpExchange) -> Reply:
    """The models that can compute now, with the fields that Ollama's clients read; for an admin, workers and their load
    too."""
    cards = [card for card in call.models() if call.service.models.state(card.id) in ("", "loaded", "provider")]
    found = await call.service.operations.health()
    on_gpus = {engine["model"] for engine in found.detail.get("engines", ()) if _is_gpu(engine.get("device", ""))}
    unload_in_s = {model["id"]: model["unload_in_s"] for model in found.detail.get("model_states", ())}
    models = [_model(card, name, card.id in on_gpus, unload_in_s.get(card.id)) for name, card in listed_names(cards)]
    if not call.principal.is_admin:
        return json_reply({"models": models}, headers=NO_STORE)
    of_model = found.detail.get("models", {})
    models = [model | of_model.get(model["id"], {}) for model in models]
    body = {"version": __version__, "ok": found.ok, **found.detail, "models": models}
    return json_reply(body, headers=NO_STORE)


async def favicon(call: HttpExchange) -> Reply:
    return Reply(204, b"", headers=[(b"cache-control", b"max-age=86400")])


def _is_gpu(device: str) -> bool:
    return device not in ("", "cpu")


def _model(card: ModelCard, name: str, on_gpu: bool, unload_in_s: float | None) -> dict[str, Any]:
    """The model under one of its names; `id` is its own."""
    unloads_at = None if unload_in_s is None else datetime.now(UTC) + timedelta(seconds=unload_in_s)
    return ollama_model(card, name) | {
        "id": card.id,
        "aliases": card.aliases,
        "context_window": card.context_window,
        "context_length": card.context_window,  # Ollama's name
        "architecture": card.architecture,
        "weight_bytes": card.weight_bytes,
        "size_vram": card.weight_bytes if on_gpu else 0,
        "expires_at": _NEVER if unloads_at is None else unloads_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }


class QueueReplay(msgspec.Struct, kw_only=True):
    batch: str
    line: int | None = None  # the job's number; None: all dead letters of the batch


async def show_queue(call: HttpExchange) -> Reply:
    """Queued and running jobs by model and account; the first of the dead letters. An admin sees every account's."""
    queue, account = call.queue, None if call.principal.is_admin else call.principal.account
    now_us = queue.now_us()
    waiting = [
        {
            "model": depth.model,
            "account": depth.account,
            "queued": depth.n_queued,
            "running": depth.n_leased,
            "quarantined": depth.n_quarantined,
            "age_s": None if depth.oldest_us is None else round(max(0, now_us - depth.oldest_us) / 1e6, 1),
        }
        for depth in await queue.depths()
        if account in (None, depth.account)
    ]
    n_dead = await queue.count_dead_letters(account)
    limit = call.int_param("dead", 20, 0, MAX_DEAD_LETTERS)
    dead = [_dead_letter(job) for job in await queue.dead_letters(account, limit=limit)] if n_dead and limit else []
    return json_reply({"waiting": waiting, "n_dead": n_dead, "dead": dead}, headers=NO_STORE)


async def replay_dead_letters(call: HttpExchange) -> Reply:
    body = await read_json(call, QueueReplay)
    account = None if call.principal.is_admin else call.principal.account
    n_jobs = await call.queue.replay(body.batch, body.line, account)
    if call.principal.is_admin and call.has_accounts:
        await call.accounts.audit.record(call.actor(), "queue.replay", body.batch, {"line": body.line, "jobs": n_jobs})
    if not n_jobs:
        which = f"line {body.line}" if body.line is not None else "no line"
        raise NotFound(f"{which} of {body.batch[:100]} is among the dead letters", param="line")
    return json_reply({"replayed": n_jobs})


def _dead_letter(job: Job) -> dict[str, Any]:
    return {
        "batch": job.batch_id,
        "line": job.number,
        "custom_id": job.custom_id,
        "model": job.model,
        "kills": job.kills,
        "ended_at": None if job.ended_us is None else job.ended_us // 1_000_000,
        "error": None if job.error is None else job.error.message,
    }
