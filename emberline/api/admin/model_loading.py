"""Endpoints for operators: load and unload a model of this machine."""

from typing import Literal

import msgspec

from emberline.api.http.body import read_json
from emberline.api.http.exchange import HttpExchange, Reply, json_reply, while_connected


class ModelName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str  # id or alias


_decoder = msgspec.json.Decoder(ModelName)


async def load(call: HttpExchange) -> Reply:
    """Answered when it is loaded. Idle models make way where there is no room."""
    return await _change(call, "load")


async def unload(call: HttpExchange) -> Reply:
    """Answered when its last request has ended and it is unloaded. The next request for it loads it again."""
    return await _change(call, "unload")


async def _change(call: HttpExchange, action: Literal["load", "unload"]) -> Reply:
    body = await read_json(call, _decoder)
    call.audit_target = body.model[:256]
    await while_connected(call.receive, call.service.operations.load_model(body.model, action))
    card = call.service.models.find(body.model)
    return json_reply({"model": card.id, "state": "loaded" if action == "load" else "on_disk"})
