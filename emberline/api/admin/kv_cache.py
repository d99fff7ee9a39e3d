"""Endpoints for cached KV: statistics, purge, export and import. A key acts for its own account, an admin for any.

A purge also forgets the texts that the server remembers of the same conversations: token ids, streams that could be
resumed, cached replies.
"""

import asyncio
from typing import Any

import msgspec

from emberline.api.http.body import body_chunks, read_json
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.api.http.streaming import ByteStream, Chunks
from emberline.protocol.errors import BadInput, Conflict, Forbidden
from emberline.protocol.frames import TierStats

MAX_FILE_BYTES = 1 << 40
MAX_SESSION_CHARS = 1024
PIECE_BYTES = 1 << 20
OCTETS = b"application/octet-stream"

EXPORT_QUERY = {"account": {"type": "string"}, "session": {"type": "string"}, "model": {"type": "string"}}
IMPORT_QUERY = {"account": {"type": "string"}, "worker": {"type": "string"}}


class Purge(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The cached KV to forget: of one session of an account, of an account, or (for admins) everything."""

    account: str | None = None  # default: the caller's
    session: str | None = None
    everything: bool = False


async def show(call: HttpExchange) -> Reply:
    """The tiers of every engine worker."""
    engines = (await call.service.operations.health()).detail.get("engines", ())
    return json_reply({"workers": [_worker(engine) for engine in engines if engine["load"]["kv_total_blocks"]]})


async def purge(call: HttpExchange) -> Reply:
    body = await read_json(call, Purge)
    if body.everything:
        if not call.principal.is_admin:
            raise Forbidden("only an admin may purge the KV cache of all accounts")
        if body.account is not None or body.session is not None:
            raise BadInput(
                "`everything` is purged of all accounts: leave `account` and `session` out", param="everything"
            )
        call.audit_target = "everything"
        return await _purge(call, None, None, None)
    salt = _salt(call, body.account)
    if call.shares_kv and (body.session is None or not call.principal.is_admin):
        raise Conflict("accounts share the KV cache here ([kv] share_between_accounts): an admin may purge everything")
    session = None if body.session is None else _session(body.session)
    call.audit_target = f"account {body.account or call.principal.account}" + (f" session {session}" if session else "")
    return await _purge(call, body.account or call.principal.account, salt, session)


async def export(call: HttpExchange) -> ByteStream:
    """Send a session's KV as a file."""
    salt, session = _salt(call, call.query.get("account")), _session(call.query.get("session", ""))
    model = call.query.get("model")
    if model is not None:
        model = call.service.models.find(model, call.principal.account).id
    return ByteStream(_pieces(call, salt, session, model), OCTETS)


async def import_(call: HttpExchange) -> Reply:
    """Take in a file that `export` has sent."""
    salt, cache = _salt(call, call.query.get("account")), call.service.kv_cache
    async with cache.upload() as path:
        with path.open("xb") as file:
            async for chunk in body_chunks(call, MAX_FILE_BYTES):
                await asyncio.to_thread(file.write, chunk)
        return json_reply(await cache.import_file(path, salt, call.query.get("worker")))


def _salt(call: HttpExchange, account: str | None) -> bytes:
    """Salt of the account's cached KV. Raises Forbidden if the caller may not act for the account."""
    if account is None or account == call.principal.account:
        return call.principal.salt
    if not call.principal.is_admin:
        raise Forbidden(f"this key belongs to account {call.principal.account} and may not act for account {account}")
    return call.salt_of(account)


def _session(text: str) -> str:
    if not 0 < len(text) <= MAX_SESSION_CHARS:
        raise BadInput(f"`session` must have 1 to {MAX_SESSION_CHARS} characters", param="session")
    return text


async def _purge(call: HttpExchange, account: str | None, salt: bytes | None, session: str | None) -> Reply:
    """Purge the core and the store first: a worker that does not answer keeps nothing of them."""
    texts = await call.service.operations.purge(account, session)
    n_replies = await call.gateways.cache.purge(account) if call.has_gateways and session is None else 0
    workers = await call.service.kv_cache.purge(salt, session)
    return json_reply(
        {
            "blocks": sum(sum(tiers.values()) for tiers in workers.values()),
            "workers": workers,
            "conversations": texts.conversations,
            "streams": texts.streams,
            "replies": n_replies,
        }
    )


def _worker(engine: dict[str, Any]) -> dict[str, Any]:
    load = engine["load"]
    device = {"used_blocks": load["kv_used_blocks"], "total_blocks": load["kv_total_blocks"]}
    tiers = [msgspec.structs.asdict(msgspec.convert(tier, TierStats, from_attributes=True)) for tier in load["tiers"]]
    return {"name": engine["name"], "model": engine["model"], "device": device, "tiers": tiers}


async def _pieces(call: HttpExchange, salt: bytes, session: str, model: str | None) -> Chunks:
    async with call.service.kv_cache.export(salt, session, model) as (path, _):
        with path.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield piece
