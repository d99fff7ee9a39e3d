"""Events for those without a public address: a list to page through, a long poll, a stream to resume."""

import asyncio
import logging
from typing import Any

from emberline.api.http.call import Call, Reply, encode, json_reply, while_connected
from emberline.jobs.webhooks.events import MAX_PAGE, Event, cursor_number, event_object
from emberline.protocol.errors import BadInput, EmberlineError

HEARTBEAT_S = 15.0
MAX_WAIT_S = 60
_RETRY_MS = 1000
_PAUSE_S = 1.0  # between two looks at a store in trouble
_STREAM = "text/event-stream"

log = logging.getLogger(__name__)

QUERY = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "wait": {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_S},
    "stream": {"type": "boolean"},
}


async def events(call: Call) -> Reply | None:
    """What happened after an event, oldest first. `wait`: seconds to wait for something; `stream`: as it happens."""
    query = call.query()
    after = query.get("after") or call.headers.get("last-event-id")
    limit = whole_number(query, "limit", MAX_PAGE, 1, MAX_PAGE)
    wait_s = whole_number(query, "wait", 0, 0, MAX_WAIT_S)
    streams = query.get("stream", "true" if _STREAM in call.headers.get("accept", "") else "false")
    if streams not in ("true", "false"):
        raise BadInput("`stream` may be true or false", param="stream")
    account, feed = call.principal.account, call.events.feed
    if streams == "true" and call.scope["method"] != "HEAD":
        number = cursor_number(after) if after else await feed.last_number(account)
        await while_connected(call.receive, _stream(call, number))
        return None
    number = cursor_number(after) if after else 0
    found = await while_connected(call.receive, feed.wait(account, number, wait_s, limit + 1))
    return json_reply(list_of([event_object(event) for event in found[:limit]], has_more=len(found) > limit))


async def _stream(call: Call, after: int) -> None:
    """Until the client leaves or the server stops. A client that comes back says with which event it goes on."""
    account, feed, send = call.principal.account, call.events.feed, call.send
    await feed.last_number(account)  # a store in trouble is told as a status
    await call.start_stream([])
    await send({"type": "http.response.body", "body": b"retry: %d\n\n" % _RETRY_MS, "more_body": True})
    while not feed.ended:
        try:
            found = await feed.wait(account, after, HEARTBEAT_S)
        except EmberlineError as error:  # the store is away for a while: nothing is lost, it comes later
            log.warning("a stream of events waits: %s", error.message)
            found = []
            await asyncio.sleep(_PAUSE_S)
        piece = b"".join(_encoded(event) for event in found) or b": nothing new\n\n"
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        after = found[-1].number if found else after
    await send({"type": "http.response.body", "body": b""})


def _encoded(event: Event) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (event.id.encode(), event.type.encode(), encode(event_object(event)))


def list_of(rows: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": rows[0]["id"] if rows else None, "last_id": rows[-1]["id"] if rows else None}
    return {"object": "list", "data": rows, **ends, "has_more": has_more}


def whole_number(query: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and least <= int(text) <= most):
        raise BadInput(f"`{name}` must be a whole number from {least} to {most}", param=name)
    return int(text)
