"""OpenAI's Responses API: create and stream, now or in the background, continue by id, read back, delete, count."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from emberline.api.admin.events import whole_number
from emberline.api.batches.submission import once
from emberline.api.http.body import decode, read_body, read_json, refuse_unsupported
from emberline.api.http.call import Call, Events, HeaderList, Reply, encode, json_reply, while_connected
from emberline.api.http.errors import NoPreviousResponse, NoSuchResponse
from emberline.api.http.sse import stream
from emberline.api.openai.responses import background
from emberline.api.openai.responses.items import Item, ItemReference, items_decoder, parse, response_of, settle
from emberline.api.openai.responses.output import Composer, Draft, ResponseStream
from emberline.api.openai.responses.request import SEALED, ResponsesRequest, response_id
from emberline.api.openai.responses.tools import offered
from emberline.protocol.answer import MAX_DEPTH, MAX_HISTORY_BYTES, StoredResponse
from emberline.protocol.errors import BadInput, Conflict, EmberlineError, Internal, TooLarge
from emberline.protocol.events import (
    Completed,
    Started,
    TextEvent,
)
from emberline.protocol.request import GenerateRequest

PAGE = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
MAX_REFERENCED = 256  # responses that the references of one request may point into
STREAM = {"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}}
_OWN = re.compile(r"resp_[0-9a-f]{32}")
_CALLED_HERE = {"messages": "input", "max_tokens": "max_output_tokens"}

_decoder = msgspec.json.Decoder(ResponsesRequest)


class _Output(msgspec.Struct):
    output: list[Item]


class _Id(msgspec.Struct):
    id: str


class _Status(msgspec.Struct):
    status: str


_output_decoder = msgspec.json.Decoder(_Output)
_id_decoder = msgspec.json.Decoder(_Id)
_status_decoder = msgspec.json.Decoder(_Status)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what it continues, what it brings, what it becomes."""

    body: ResponsesRequest
    id: str
    created_us: int
    history: list[StoredResponse]  # of the response that it continues, oldest first
    past: list[Item]
    new: list[Item]
    request: GenerateRequest
    draft: Draft


async def create(call: Call) -> Reply | None:
    raw = await read_body(call)
    body = decode(raw, _decoder)
    if body.background:
        return await _create_in_background(call, raw, body)
    turn = await _turn(call, body)
    events = _kept(call, turn, call.service.generate(turn.request, call.principal))
    headers: HeaderList = [(b"cf-ai-req-id", call.id.encode())]
    if turn.body.stream:
        options = turn.body.stream_options
        encoder = ResponseStream(call, turn.draft, padded=bool(options and options.include_obfuscation))
        await stream(call, events, encoder, headers)
        return None
    await while_connected(call.receive, _compose(events, turn.draft))
    return json_reply(turn.draft.whole, headers=headers)


async def _create_in_background(call: Call, raw: bytes, body: ResponsesRequest) -> Reply | None:
    background.check(body)

    async def submit(own_id: str) -> bytes:
        call.id = own_id.removeprefix("resp_")
        turn = await _turn(call, body)
        made = await background.submit(call, own_id, raw, turn.past + turn.new, turn.request)
        return encode(await background.status(call, made))

    reply = await once(call, raw, response_id(call), submit)
    if not body.stream:
        return reply
    made = await background.find(call, _id_decoder.decode(reply.body).id)
    if made is None:
        raise _no_such(response_id(call))
    await background.stream(call, made, -1)
    return None


async def count_tokens(call: Call) -> Reply:
    turn = await _turn(call, await read_json(call, _decoder))
    n_tokens = await call.service.count_tokens(turn.request, call.principal)
    return json_reply({"object": "response.input_tokens", "input_tokens": n_tokens})


async def retrieve(call: Call) -> Reply | None:
    """`stream`: as events, of a response that was made in the background; from `starting_after` on."""
    query = call.query()
    if query.get("stream", "false") not in ("true", "false"):
        raise BadInput("`stream` may be true or false", param="stream")
    after = whole_number(query, "starting_after", -1, 0, 999_999_999)
    made = await _in_background(call, call.tail)
    if query.get("stream") == "true":
        if made is None:
            await _recalled(call)
            raise BadInput("only a response that was made with `background` can be streamed later", param="stream")
        await background.stream(call, made, after)
        return None
    if after >= 0:
        raise BadInput("`starting_after` needs `stream=true`", param="starting_after")
    if made is not None:
        return json_reply(await background.status(call, made))
    (record,) = await _recalled(call)
    return Reply(200, record.body.encode())


async def list_input_items(call: Call) -> Reply:
    """All that the response was made from: earlier turns, which it continued, and its own."""
    query = call.query()
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= 100):
        raise BadInput("`limit` must be a whole number from 1 to 100", param="limit")
    if order not in ("asc", "desc"):
        raise BadInput("`order` may be asc or desc", param="order")
    *earlier, own = await _recalled(call, whole=True)
    items = [item for record in earlier for item in _items(record)] + items_decoder.decode(own.input)
    if order == "desc":
        items.reverse()
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise BadInput(f"`after`: there is no item {after!r}", param="after")
    first = 0 if after is None else ids.index(after) + 1
    shown = items[first : first + int(limit)]
    ends = {"first_id": shown[0].id if shown else None, "last_id": shown[-1].id if shown else None}
    return json_reply({"object": "list", "data": shown, **ends, "has_more": first + len(shown) < len(items)})


async def delete(call: Call) -> Reply:
    if made := await _in_background(call, call.tail):
        await background.delete(call, made)
        return json_reply({"id": call.tail, "object": "response", "deleted": True})
    await _recalled(call)
    if not await call.service.responses.delete(call.principal.account, call.tail):
        raise _no_such(call.tail)
    return json_reply({"id": call.tail, "object": "response", "deleted": True})


async def cancel(call: Call) -> Reply:
    if made := await _in_background(call, call.tail):
        return json_reply(await background.status(call, await background.cancel(call, made)))
    await _recalled(call)
    raise BadInput("only a response made with `background` can be cancelled; this one is complete", param="background")


# --- what a request is ------------------------------------------------------------------------------------------------


async def _turn(call: Call, body: ResponsesRequest) -> Turn:
    refuse_unsupported(body)
    own_id, created_us = response_id(call), time.time_ns() // 1000
    key = own_id.removeprefix("resp_")
    offer = offered(body.tools, body.tool_choice)
    history = await _history(call, body.previous_response_id)
    past = [item for record in history for item in _items(record)]
    given = parse(body.input)
    new = settle(await _resolved(call, given), key)
    where = ["previous_response_id"] * len(past) + [f"input[{i}]" for i in range(len(new))]
    request = body.to_request(call, past + new, where, offer)
    sealed = body.includes(SEALED)
    composer = Composer(key, offer.called, summarise=body.summarises, sealed=sealed)
    draft = Draft(body.echo(own_id, created_us // 1_000_000), composer)
    return Turn(body, own_id, created_us, history, past, new, request, draft)


async def _history(call: Call, previous: str | None) -> list[StoredResponse]:
    if previous is None:
        return []
    records = await _find(call, previous, whole=True)
    if records and _status_decoder.decode(records[-1].body).status in ("queued", "in_progress"):
        raise Conflict(f"{previous} is still being made: wait for it first", param="previous_response_id")
    if not records:
        raise NoPreviousResponse(
            f"there is no response {previous!r} to continue: it was not stored, has expired or was deleted",
            param="previous_response_id",
        )
    return records


async def _resolved(call: Call, given: list[Item | ItemReference]) -> list[Item]:
    """The items with references replaced by what they refer to."""
    wanted = {item.id: response_of(item.id) for item in given if isinstance(item, ItemReference)}
    if not wanted:
        return [item for item in given if not isinstance(item, ItemReference)]
    ids = {found for found in wanted.values() if found is not None}
    if len(ids) > MAX_REFERENCED:
        raise BadInput(f"`input` refers to items of {len(ids)} responses, at most {MAX_REFERENCED}", param="input")
    recalled = await asyncio.gather(*(_find(call, one) for one in ids))
    known = {item.id: item for records in recalled for record in records for item in _items(record)}
    items: list[Item] = []
    for i, item in enumerate(given):
        if isinstance(item, ItemReference):
            if item.id not in known:
                raise NoSuchResponse(f"there is no stored item {item.id!r}: send the item itself", param=f"input[{i}]")
            item = known[item.id]
        items.append(item)
    return items


async def _recalled(call: Call, whole: bool = False) -> list[StoredResponse]:
    records = await _find(call, call.tail, whole)
    if not records:
        raise _no_such(call.tail)
    return records


async def _find(call: Call, name: str, whole: bool = False) -> list[StoredResponse]:
    """The store is asked only for ids that could be ours."""
    if not _OWN.fullmatch(name):
        return []
    if records := await call.service.responses.get(call.principal.account, name, whole):
        return records
    made = await _in_background(call, name)
    return [background.record(made)] if made else []


async def _in_background(call: Call, name: str) -> background.Background | None:
    if not _OWN.fullmatch(name) or not call.has_queue:
        return None
    return await background.find(call, name)


def _no_such(name: str) -> NoSuchResponse:
    return NoSuchResponse(f"there is no response {name[:100]!r}: it was not stored, has expired or was deleted")


def _items(record: StoredResponse) -> list[Item]:
    return items_decoder.decode(record.input) + _output_decoder.decode(record.body).output


# --- what becomes of it -----------------------------------------------------------------------------------------------


async def _kept(call: Call, turn: Turn, events: Events) -> AsyncGenerator[TextEvent, None]:
    """The events, the last of them once the response can be found by its id."""
    new = encode(turn.new).decode() if turn.body.kept else ""
    if turn.body.kept and len(new) + sum(record.n_bytes for record in turn.history) > MAX_HISTORY_BYTES:
        raise TooLarge(f"the conversation is larger than {MAX_HISTORY_BYTES >> 20} MiB", param="input")
    try:
        async with aclosing(events):
            async for event in events:
                if type(event) is Completed:
                    turn.draft.complete(event.usage)
                    if turn.body.kept:
                        await _keep(call, turn, new)
                yield event
    except EmberlineError as error:
        if error.param in _CALLED_HERE:
            error.param = _CALLED_HERE[error.param]
        raise


async def _keep(call: Call, turn: Turn, new: str) -> None:
    """Keep what is new; or all, where the chain is long or what was continued has been deleted meanwhile."""
    responses, parent = call.service.responses, turn.history[-1] if turn.history else None
    record = StoredResponse(
        id=turn.id,
        account=call.principal.account,
        parent=parent.id if parent else None,
        depth=parent.depth + 1 if parent else 0,
        created_us=turn.created_us,
        input=new,
        body=encode(turn.draft.whole).decode(),
    )
    if record.depth < MAX_DEPTH and await responses.put(record):
        return
    whole = encode([*turn.past, *turn.new]).decode()
    await responses.put(msgspec.structs.replace(record, parent=None, depth=0, input=whole))


async def _compose(events: Events, draft: Draft) -> None:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completed):
                return
            if not isinstance(event, Started):
                draft.take(event)
    raise Internal("the answer ended before it was complete")
