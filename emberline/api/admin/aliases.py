"""Endpoints for operators: aliases of models."""

import msgspec

from emberline.api.http.body import read_json
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.catalog.aliases import ModelName, Targets


class NewAlias(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: ModelName
    targets: Targets  # weights by model


_decoder = msgspec.json.Decoder(NewAlias)


async def list_all(call: HttpExchange) -> Reply:
    return _reply(call)


async def put(call: HttpExchange) -> Reply:
    """Add an alias or replace it. It is in effect at once, in every HTTP worker, and stays over restarts."""
    body = await read_json(call, _decoder)
    call.audit_target = body.name
    await call.service.operations.change_alias(body.name, body.targets)
    return _reply(call)


async def remove(call: HttpExchange) -> Reply:
    await call.service.operations.change_alias(call.path_param, None)
    return _reply(call)


def _reply(call: HttpExchange) -> Reply:
    aliases = sorted(call.service.models.aliases.aliases.values(), key=lambda alias: alias.name)
    return json_reply({"aliases": [msgspec.structs.asdict(alias) for alias in aliases]})
