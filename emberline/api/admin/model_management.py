"""Endpoints for operators: aliases of models; listing, loading and unloading models of this machine."""

from typing import Literal

import msgspec

from emberline.api.http.body import read_body, read_json
from emberline.api.http.exchange import HttpExchange, Reply, json_reply, while_connected
from emberline.catalog.aliases import ModelName as AliasName
from emberline.catalog.aliases import Targets
from emberline.catalog.model_card import PUSHED, pushed_id
from emberline.protocol.errors import BadInput, Forbidden
from emberline.protocol.prediction import VersionRow, read_resources

LOG_LINES, MAX_LOG_LINES = 100, 1000
MAX_VERSION = 10**9

_BYTES = {"type": "integer", "minimum": 1}
_SECONDS = {"type": "number"}
VERSIONS_QUERY = {"model": {"type": "string"}}
LOG_QUERY = {
    "model": {"type": "string"},
    "version": {"type": "integer", "minimum": 1},
    "lines": {"type": "integer", "minimum": 1, "maximum": MAX_LOG_LINES, "default": LOG_LINES},
}
PUSH_QUERY = {
    "name": {"type": "string"},
    **{"memory_bytes": _BYTES, "scratch_bytes": _BYTES, "cpus": _SECONDS, "setup_s": _SECONDS, "predict_s": _SECONDS},
}


class NewAlias(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: AliasName
    targets: Targets  # weights by model


async def list_aliases(call: HttpExchange) -> Reply:
    return _aliases_reply(call)


async def put_alias(call: HttpExchange) -> Reply:
    """Add an alias or replace it. It is in effect at once, in every HTTP worker, and stays over restarts."""
    body = await read_json(call, NewAlias)
    call.audit_target = body.name
    await call.service.operations.change_alias(body.name, body.targets)
    return _aliases_reply(call)


async def remove_alias(call: HttpExchange) -> Reply:
    await call.service.operations.change_alias(call.path_param, None)
    return _aliases_reply(call)


def _aliases_reply(call: HttpExchange) -> Reply:
    aliases = sorted(call.service.models.aliases.aliases.values(), key=lambda alias: alias.name)
    return json_reply({"aliases": [msgspec.structs.asdict(alias) for alias in aliases]})


class ModelName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str  # id or alias


class Rollback(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str  # "@me/name"
    version: int | None = None  # None: the one before the served one


async def available(call: HttpExchange) -> Reply:
    """Models that `POST /api/pull` can add to this machine by name, with size, licence and whether they fit.

    The list is empty for a caller who may add none. `can_load` is true if the caller may load and unload models."""
    is_admin = call.principal.is_admin
    found = await call.pulls.offers() if call.has_pulls and is_admin else []
    return json_reply({"object": "list", "data": [offer.body() for offer in found], "can_load": is_admin})


async def push(call: HttpExchange) -> Reply:
    """Add a version of a predictor: the body is a tar archive of its project, the query its name and bounds.

    Answered when its packages are installed."""
    account = _pusher(call)
    if not (name := call.query.get("name", "")):
        raise BadInput("`name` of the model is needed in the query", param="name")
    _check_scope(call, name)
    call.audit_target = name[:256]
    resources = read_resources(call.query)
    pushed = await call.pulls.push(await read_body(call, any_type=True), name, resources, account)
    await _audit(call, "push", account)
    return json_reply(msgspec.structs.asdict(pushed))


async def versions(call: HttpExchange) -> Reply:
    """List the versions of a model that the caller's account has pushed."""
    account, model = _pusher(call), call.query.get("model", "")
    _check_scope(call, model)
    return _versions_reply(await call.pulls.versions(account, model))


async def logs(call: HttpExchange) -> Reply:
    """The last lines that a model which the caller's account has pushed has printed, and why its predictions failed."""
    account, model = _pusher(call), call.query.get("model", "")
    _check_scope(call, model)
    version = call.int_param("version", 1, 1, MAX_VERSION) if "version" in call.query else None
    found = await call.pulls.log(account, model, version, call.int_param("lines", LOG_LINES, 1, MAX_LOG_LINES))
    return json_reply({"object": "list", **msgspec.structs.asdict(found)})


async def roll_back(call: HttpExchange) -> Reply:
    """Serve an earlier version of a model that the caller's account has pushed; running predictions end first."""
    account, body = _pusher(call), await read_json(call, Rollback)
    _check_scope(call, body.model)
    call.audit_target = body.model[:256]
    rows = await call.pulls.roll_back(account, body.model, body.version)
    await _audit(call, "rollback", account)
    return _versions_reply(rows)


async def remove_pushed(call: HttpExchange) -> Reply:
    """Remove a model that the caller's account has pushed, with all its versions."""
    account, body = _pusher(call), await read_json(call, ModelName)
    _check_scope(call, body.model)
    call.audit_target = body.model[:256]
    await call.pulls.remove(account, body.model)
    await _audit(call, "remove", account)
    return json_reply({"removed": body.model})


def _pusher(call: HttpExchange) -> str:
    """The account whose models the caller pushes; empty: the operator's. Raises Forbidden if it may push none."""
    if not call.has_pulls:
        raise Forbidden("this server takes no models over HTTP")
    account = "" if call.principal.is_admin else call.principal.account
    call.pulls.pushes(account)
    return account


def _check_scope(call: HttpExchange, name: str) -> None:
    """Raise Forbidden unless the caller's key may use a pushed model of that name."""
    known = name.lower().removeprefix(PUSHED)
    call.principal.check_model(f"{PUSHED}{known}", (pushed_id(call.principal.account, known),))


async def _audit(call: HttpExchange, act: str, account: str) -> None:
    """Record a change of the account's pushed models."""
    if call.has_accounts:
        await call.accounts.audit.record(
            call.actor(), f"POST /api/models/{act}", call.audit_target, {"account": account}
        )


def _versions_reply(rows: list[VersionRow]) -> Reply:
    return json_reply({"object": "list", "data": [msgspec.structs.asdict(row) for row in rows]})


async def load(call: HttpExchange) -> Reply:
    """Answered when it is loaded. Idle models make way where there is no room."""
    return await _change(call, "load")


async def unload(call: HttpExchange) -> Reply:
    """Answered when its last request has ended and it is unloaded. The next request for it loads it again."""
    return await _change(call, "unload")


async def _change(call: HttpExchange, action: Literal["load", "unload"]) -> Reply:
    body = await read_json(call, ModelName)
    call.audit_target = body.model[:256]
    await while_connected(call, call.service.operations.load_model(body.model, action))
    card = call.service.models.find(body.model, None)
    return json_reply({"model": card.id, "state": "loaded" if action == "load" else "on_disk"})
