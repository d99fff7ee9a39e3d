"""Endpoints for operators: workers join, leave and drain while the server runs."""

from typing import Annotated, Literal

import msgspec

from emberline.api.http.body import read_json
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.cluster.membership import WorkerChange
from emberline.config import EndpointConfig
from emberline.protocol.frames import WorkerRole

MAX_WAIT_S = 60.0


class WorkerName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str  # as `emberline ps` shows it


class WorkerRoleChange(WorkerName, kw_only=True):
    role: WorkerRole
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0  # for what it ran in its former role


class LeavingWorker(WorkerName, kw_only=True):
    stop: bool = False  # end its process, too; a worker of this machine ends in any case


async def drain(call: HttpExchange) -> Reply:
    """The worker finishes what it has and gets nothing new."""
    return await _rest(call, "drain")


async def undrain(call: HttpExchange) -> Reply:
    return await _rest(call, "undrain")


async def role(call: HttpExchange) -> Reply:
    """The worker serves prefill, decode or both from now on; its weights stay loaded, and its cache stays."""
    body = await read_json(call, WorkerRoleChange)
    return await _change(call, WorkerChange(action="role", name=body.name, role=body.role, wait_s=body.wait_s))


async def leave(call: HttpExchange) -> Reply:
    """The worker drains, and is removed when its last request has ended."""
    body = await read_json(call, LeavingWorker)
    return await _change(call, WorkerChange(action="leave", name=body.name, stop=body.stop))


async def join(call: HttpExchange) -> Reply:
    """A worker or upstream server, described as in `[[endpoints]]`."""
    body = await read_json(call, EndpointConfig)
    return await _change(call, WorkerChange(action="join", name=body.name, config=body))


async def restart(call: HttpExchange) -> Reply:
    """The worker finishes what it has and ends, with a status that says to start it again."""
    return await _rest(call, "restart")


async def _rest(call: HttpExchange, action: Literal["drain", "undrain", "restart"]) -> Reply:
    body = await read_json(call, WorkerName)
    return await _change(call, WorkerChange(action=action, name=body.name))


async def _change(call: HttpExchange, change: WorkerChange) -> Reply:
    call.audit_target = change.name
    names = await call.service.cluster_admin.change_workers(change)
    engines = {engine["name"]: engine for engine in (await call.service.operations.health()).detail.get("engines", ())}
    gone = {"state": "left", "in_flight": 0}
    found = [(name, engines.get(name, gone)) for name in names]
    return json_reply({"workers": [{"name": name, **{key: each[key] for key in gone}} for name, each in found]})
