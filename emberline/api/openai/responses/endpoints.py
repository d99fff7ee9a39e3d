"""OpenAI's Responses API: create and stream, now or in the background, continue by id, compact, retrieve, delete,
count."""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from emberline.api.batches.submission import submit_once
from emberline.api.common.response_body import collect
from emberline.api.common.unsupported_fields import refuse_unsupported
from emberline.api.http.body import LARGE_BYTES, read_wire
from emberline.api.http.errors import NoPreviousResponse, NoSuchResponse
from emberline.api.http.exchange import (
    Events,
    HttpExchange,
    LargeRequest,
    Reply,
    encode,
    json_reply,
    list_reply,
    while_connected,
)
from emberline.api.http.resumable import HEADER, resume_log
from emberline.api.http.streaming import EventStream, Response
from emberline.api.openai.responses import background
from emberline.api.openai.responses.compaction import compacted, summary_request
from emberline.api.openai.responses.form import RESPONSE
from emberline.api.openai.responses.items import (
    Item,
    ItemReference,
    items_decoder,
    parse_input,
    response_of,
    with_ids,
)
from emberline.api.openai.responses.output import ResponseBuilder, ResponseStream, usage_body
from emberline.api.openai.responses.request import ResponsesRequest, item_fields, response_id
from emberline.api.openai.responses.unstored import of_connection
from emberline.protocol.complete_response import MAX_DEPTH, MAX_HISTORY_BYTES, StoredResponse
from emberline.protocol.errors import BadInput, Conflict, EmberlineError, Internal, NoSuchStream, TooLarge, Unsupported
from emberline.protocol.events import Completed, Started
from emberline.protocol.request import GenerateRequest, ToolChoice

_ORDERS = ("asc", "desc")
PAGE = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"enum": list(_ORDERS)},
    "after": {"type": "string"},
}
STREAM = {"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}}
MAX_REFERENCED = 256  # responses whose items one request may refer to
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
_FIELD_NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}


class _StoredBody(msgspec.Struct):
    """The parts of a stored response object that are read again."""

    id: str = ""
    status: str = ""
    output: list[Item] = []


_body_decoder = msgspec.json.Decoder(_StoredBody)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request with the conversation it continues and the response it produces."""

    body: ResponsesRequest
    id: str
    created_us: int
    history: list[StoredResponse]  # up to the response that it continues, oldest first
    past: list[Item]
    new: list[Item]
    request: GenerateRequest
    builder: ResponseBuilder


async def create(call: HttpExchange) -> Response:
    wire = await read_wire(call, RESPONSE.session_fields)
    body: ResponsesRequest = wire.decode(RESPONSE.decoder)
    if body.background:
        return await _create_in_background(call, wire.raw, body)
    turn = await _prepare(call, body)
    events = call.run(turn.request) if body.generate is not False else _prefill(call, turn.request)
    events = _store_on_completion(call, turn, events)
    if body.stream:
        encoder = ResponseStream(call.id, call.dialect, turn.builder, call.field_names, padded=body.obfuscates)
        return EventStream(events, encoder, headers=call.id_headers, log_id=turn.id)
    await while_connected(call, _build(events, turn.builder))
    return json_reply(turn.builder.response, headers=call.id_headers)


async def _create_in_background(call: HttpExchange, raw: bytes, body: ResponsesRequest) -> Response:
    call.refuse_gateway("background")
    if body.generate is False:
        raise BadInput("a background response is generated: leave `generate` out", param="generate")
    if not body.stored:
        raise BadInput("a background response is always stored: leave `store` out", param="store")

    async def submit(own_id: str) -> bytes:
        call.id = own_id.removeprefix("resp_")
        turn = await _prepare(call, body)
        found = await background.submit(call, own_id, raw, turn.past + turn.new, turn.request)
        return encode(await background.response_with_position(call, found))

    reply = await submit_once(call, raw, response_id(call.id), submit)
    if not body.stream:
        return reply
    found = await background.find(call, _body_decoder.decode(reply.body).id)
    if found is None:
        raise _no_such_response(response_id(call.id))
    return background.stream(call, found, -1)


async def count_tokens(call: HttpExchange) -> Reply:
    wire = await read_wire(call, RESPONSE.session_fields)
    turn = await _prepare(call, wire.decode(RESPONSE.decoder))
    n_tokens = await call.count_tokens(turn.request)
    return json_reply({"object": "response.input_tokens", "input_tokens": n_tokens})


async def compact(call: HttpExchange) -> Reply:
    """Replace a conversation by fewer tokens. The result is not stored: it is the input of the next response."""
    wire = await read_wire(call, RESPONSE.session_fields)
    body: ResponsesRequest = wire.decode(RESPONSE.decoder)
    for field in ("stream", "background"):
        if getattr(body, field):
            raise Unsupported(f"a compaction comes at once and whole: leave `{field}` out", param=field)
    turn = await _prepare(call, body)
    with _renamed_fields():
        answer = await collect(call, call.run(summary_request(turn.request)))
    output = compacted(turn.past + turn.new, answer, turn.id.removeprefix("resp_"))
    head = {"id": turn.id, "object": "response.compaction", "created_at": turn.created_us // 1_000_000}
    return json_reply(head | {"output": output, "usage": usage_body(answer.usage)}, headers=call.id_headers)


async def retrieve(call: HttpExchange) -> Response:
    """With `stream`, the events after `starting_after`, of a background response or of a resumable one."""
    streams = call.bool_param("stream")
    after = call.int_param("starting_after", -1, 0, 999_999_999)
    found = await _find_background(call, call.path_param)
    if streams:
        return await _resume(call) if found is None else background.stream(call, found, after)
    if after >= 0:
        raise BadInput("`starting_after` needs `stream=true`", param="starting_after")
    if found is not None:
        return json_reply(await background.response_with_position(call, found))
    (record,) = await _load(call)
    return Reply(200, record.body.encode())


async def _resume(call: HttpExchange) -> Response:
    try:
        return await resume_log(call, call.path_param)
    except NoSuchStream:
        await _load(call)
        raise BadInput(
            f"only a response created with `background`, or with the header `{HEADER}`, can be streamed later",
            param="stream",
        ) from None


async def list_input_items(call: HttpExchange) -> Reply:
    """All items of the response's input, with those of the conversation that it continues."""
    limit, after = call.int_param("limit", 20, 1, 100), call.query.get("after")
    order = call.enum_param("order", _ORDERS, "desc")
    *earlier, own = await _load(call, with_history=True)
    items = [item for record in earlier for item in _items(record)] + items_decoder.decode(own.input)
    if order == "desc":
        items.reverse()
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise BadInput(f"`after`: there is no item {after!r}", param="after")
    first = 0 if after is None else ids.index(after) + 1
    page = [msgspec.to_builtins(item) for item in items[first : first + limit]]
    return list_reply(page, has_more=first + len(page) < len(items))


async def delete(call: HttpExchange) -> Reply:
    if found := await _find_background(call, call.path_param):
        await background.delete(call, found)
    else:
        await _load(call)
        if not await call.service.responses.delete(call.principal.account, call.path_param):
            raise _no_such_response(call.path_param)
    return json_reply({"id": call.path_param, "object": "response", "deleted": True})


async def cancel(call: HttpExchange) -> Reply:
    if found := await _find_background(call, call.path_param):
        return json_reply(await background.response_with_position(call, await background.cancel(call, found)))
    await _load(call)
    raise BadInput(
        "only a response created with `background` can be cancelled; this one is complete", param="background"
    )


# --- preparing a request ----------------------------------------------------------------------------------------------


async def _prepare(call: HttpExchange, body: ResponsesRequest) -> Turn:
    refuse_unsupported(body)
    own_id, created_us = response_id(call.id), time.time_ns() // 1000
    tools = body.parse_tools()
    history = await _history(call, body.previous_response_id)
    past = [item for record in history for item in _items(record)]
    new = with_ids(await _resolve_references(call, parse_input(body.input)), own_id.removeprefix("resp_"))
    fields = item_fields(len(past), len(new))
    request, call.field_names = body.to_request(call.id, past + new, fields, tools, call.session)
    defaults = call.model_card(body.model).defaults
    builder = ResponseBuilder(body, tools, own_id, created_us // 1_000_000, defaults)
    return Turn(body, own_id, created_us, history, past, new, request, builder)


async def _history(call: HttpExchange, previous: str | None) -> list[StoredResponse]:
    if previous is None:
        return []
    records = await _find(call, previous, with_history=True)
    if records and _body_decoder.decode(records[-1].body).status in ("queued", "in_progress"):
        raise Conflict(f"{previous} is not complete yet: wait for it first", param="previous_response_id")
    if not records:
        raise NoPreviousResponse(
            f"there is no response {previous[:100]!r} to continue: it was not stored, has expired or was deleted",
            param="previous_response_id",
        )
    return records


async def _resolve_references(call: HttpExchange, given: list[Item | ItemReference]) -> list[Item]:
    """The items, with references replaced by the items that they refer to."""
    referenced = {item.id: response_of(item.id) for item in given if isinstance(item, ItemReference)}
    ids = {found for found in referenced.values() if found is not None}
    if len(ids) > MAX_REFERENCED:
        raise BadInput(f"`input` refers to items of {len(ids)} responses, at most {MAX_REFERENCED}", param="input")
    loaded = await asyncio.gather(*(_find(call, one) for one in ids))
    known = {item.id: item for records in loaded for record in records for item in _items(record)}
    items: list[Item] = []
    for i, item in enumerate(given):
        if isinstance(item, ItemReference):
            if item.id not in known:
                raise NoSuchResponse(
                    f"there is no stored item {item.id[:100]!r}: send the item itself", param=f"input[{i}]"
                )
            item = known[item.id]
        items.append(item)
    return items


async def _load(call: HttpExchange, with_history: bool = False) -> list[StoredResponse]:
    records = await _find(call, call.path_param, with_history)
    if not records:
        raise _no_such_response(call.path_param)
    return records


async def _find(call: HttpExchange, own_id: str, with_history: bool = False) -> list[StoredResponse]:
    """The store is queried only for well-formed ids."""
    if not _RESPONSE_ID.fullmatch(own_id):
        return []
    unstored = of_connection(call)
    if unstored is not None and (record := unstored.find(call.principal.account, own_id)) is not None:
        return [record]
    if records := await call.service.responses.get(call.principal.account, own_id, with_history):
        if call.relays_large and sum(record.n_bytes for record in records) > LARGE_BYTES:
            raise LargeRequest
        return records
    found = await _find_background(call, own_id)
    return [background.stored_response(found)] if found else []


async def _find_background(call: HttpExchange, own_id: str) -> background.BackgroundResponse | None:
    if not _RESPONSE_ID.fullmatch(own_id) or not call.has_queue:
        return None
    return await background.find(call, own_id)


def _no_such_response(own_id: str) -> NoSuchResponse:
    return NoSuchResponse(f"there is no response {own_id[:100]!r}: it was not stored, has expired or was deleted")


def _items(record: StoredResponse) -> list[Item]:
    return items_decoder.decode(record.input) + _body_decoder.decode(record.body).output


# --- generating the response ------------------------------------------------------------------------------------------


async def _store_on_completion(call: HttpExchange, turn: Turn, events: Events) -> Events:
    """The events; Completed follows once the response can be found by its id."""
    stored = turn.body.stored
    new = encode(turn.new).decode() if stored else ""
    if stored and len(new) + sum(record.n_bytes for record in turn.history) > MAX_HISTORY_BYTES:
        raise TooLarge(f"the conversation is larger than {MAX_HISTORY_BYTES >> 20} MiB", param="input")
    with _renamed_fields():
        async with aclosing(events):
            async for event in events:
                if type(event) is Completed:
                    turn.builder.complete(event.usage)
                    if stored:
                        await _store(call, turn, new)
                    elif (unstored := of_connection(call)) is not None:
                        # Beyond any chain's depth: a stored response that continues it is stored with all of it.
                        whole = _whole_conversation(_record(call, turn, ""), turn)
                        unstored.keep(msgspec.structs.replace(whole, depth=MAX_DEPTH))
                yield event


@contextmanager
def _renamed_fields() -> Iterator[None]:
    """Give errors the names of fields that chats call otherwise."""
    try:
        yield
    except EmberlineError as error:
        error.param = _FIELD_NAMES.get(error.param or "", error.param)
        raise


async def _store(call: HttpExchange, turn: Turn, new: str) -> None:
    """Store the new items only; or all, where the chain is long or the continued response was deleted meanwhile."""
    responses, record = call.service.responses, _record(call, turn, new)
    if record.depth < MAX_DEPTH and await responses.put(record):
        return
    await responses.put(_whole_conversation(record, turn))


def _record(call: HttpExchange, turn: Turn, new: str) -> StoredResponse:
    """The complete response, with the new items, as the next one of its chain."""
    parent = turn.history[-1] if turn.history else None
    return StoredResponse(
        id=turn.id,
        account=call.principal.account,
        parent=parent.id if parent else None,
        depth=parent.depth + 1 if parent else 0,
        created_us=turn.created_us,
        input=new,
        body=encode(turn.builder.response).decode(),
    )


def _whole_conversation(record: StoredResponse, turn: Turn) -> StoredResponse:
    """The record as the first one of a chain."""
    whole = encode([*turn.past, *turn.new]).decode()
    return msgspec.structs.replace(record, parent=None, depth=0, input=whole)


async def _prefill(call: HttpExchange, request: GenerateRequest) -> Events:
    """Compute the prompt, for the response that continues this one. What the engine generates for it is dropped."""
    sampling = msgspec.structs.replace(request.sampling, max_tokens=1, min_tokens=0)
    changes: dict[str, Any] = {"sampling": sampling, "tool_choice": ToolChoice("none"), "output": None}
    async with aclosing(call.run(msgspec.structs.replace(request, **changes))) as events:
        async for event in events:
            if isinstance(event, Started | Completed):
                yield event


async def _build(events: Events, builder: ResponseBuilder) -> None:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completed):
                return
            if not isinstance(event, Started):
                builder.add(event)
    raise Internal("the events ended before the answer was complete")
