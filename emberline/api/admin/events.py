"""Events for clients that cannot receive webhooks: a paged list, a long poll, and a resumable stream."""

import asyncio
import logging

from emberline.api.http.exchange import HttpExchange, encode, list_reply, while_connected
from emberline.api.http.streaming import Blocks, BlockStream, LastBlock, Response
from emberline.jobs.webhooks.events import MAX_PAGE, Event, cursor_number, event_object
from emberline.protocol.errors import EmberlineError

MAX_WAIT_S = 60
_RETRY_MS = 1000
_EVENT_STREAM = "text/event-stream"

log = logging.getLogger(__name__)

QUERY = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "wait": {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_S},
    "stream": {"type": "boolean"},
}


async def events(call: HttpExchange) -> Response:
    """List the events after a given one, oldest first. `wait`: seconds to wait for the first; `stream`: as SSE."""
    after = call.query.get("after") or call.headers.get("last-event-id")
    limit = call.int_param("limit", MAX_PAGE, 1, MAX_PAGE)
    wait_s = call.int_param("wait", 0, 0, MAX_WAIT_S)
    streams = call.bool_param("stream", default=_EVENT_STREAM in call.headers.get("accept", ""))
    account, feed = call.principal.account, call.webhooks.feed
    if streams and call.scope["method"] != "HEAD":
        number = cursor_number(after) if after else await feed.last_number(account)
        return BlockStream(_blocks(call, number))
    number = cursor_number(after) if after else 0
    found = await while_connected(call, feed.wait(account, number, wait_s, limit + 1))
    return list_reply([event_object(event) for event in found[:limit]], has_more=len(found) > limit)


async def _blocks(call: HttpExchange, after: int) -> Blocks:
    """Encode events until the client disconnects or the server stops. A client resumes with the id of its last one."""
    account, feed = call.principal.account, call.webhooks.feed
    await feed.last_number(account)  # so that an unavailable store becomes an HTTP status
    yield b"retry: %d\n\n" % _RETRY_MS
    while not feed.ended:
        try:
            found = await feed.wait(account, after, call.limits.heartbeat_s)
        except EmberlineError as error:  # the store is unavailable; its events are sent later
            log.warning("an event stream waits for the store: %s", error.message)
            found = []
            await asyncio.sleep(call.limits.store_retry_s)
        yield b"".join(_encoded(event) for event in found) or b": heartbeat\n\n"
        after = found[-1].number if found else after
    yield LastBlock(b"")


def _encoded(event: Event) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (event.id.encode(), event.type.encode(), encode(event_object(event)))
