"""Responses that are made in the background: a batch of one line, whose events can be read again from any number on.

The events are made of the result when it is there: until then a stream tells that the response is queued or in
progress, and what was said comes at its end. Their numbers never change, so a stream can be left and taken up again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from emberline.api.batch_lines import runnable
from emberline.api.body import decode
from emberline.api.call import Call
from emberline.api.departure import while_connected
from emberline.api.errors import NoSuchResponse
from emberline.api.openai_batch_lines import failure_of
from emberline.api.openai_responses_items import Item
from emberline.api.openai_responses_output import Event
from emberline.api.openai_responses_request import ResponsesRequest
from emberline.api.openai_responses_stream import Draft
from emberline.api.openai_responses_whole import draft_of, fill
from emberline.api.reply import encode
from emberline.api.submitting import store_lines
from emberline.jobs.batch import Batch, NewBatch
from emberline.jobs.line import Line, NewLine
from emberline.protocol.errors import BadInput, Conflict, NotFound
from emberline.protocol.record import Record
from emberline.protocol.request import GenerateRequest

ENDPOINT = "/v1/responses"
LOOK_S = 0.5  # how often a stream that waits looks whether its response has begun
HEARTBEAT_S = 15.0

Json = dict[str, Any]


class _Kept(msgspec.Struct):
    """What was submitted: the body, and all items that the response was made from."""

    body: msgspec.Raw
    items: msgspec.Raw


class Background(NamedTuple):
    batch: Batch
    line: Line
    body: ResponsesRequest
    items: str  # JSON

    @property
    def status(self) -> str:
        """As long as it is not known how it went."""
        if self.batch.cancelling_us is not None or self.line.state == "cancelled":
            return "cancelled"
        return "in_progress" if self.line.state == "leased" else "queued"

    @property
    def ended(self) -> bool:
        return self.line.state in ("succeeded", "failed", "cancelled", "expired", "dead")


_kept_decoder = msgspec.json.Decoder(_Kept)
_body_decoder = msgspec.json.Decoder(ResponsesRequest)


def check(body: ResponsesRequest) -> None:
    if not body.kept:
        raise BadInput("a response that is made in the background is stored: leave `store` out", param="store")


async def submit(call: Call, own_id: str, raw: bytes, items: Sequence[Item], request: GenerateRequest) -> Background:
    """Durable when it returns."""
    queue, account = call.batches.queue, call.principal.account
    request = runnable(request, call.service)
    kept = encode(_Kept(msgspec.Raw(raw), msgspec.Raw(encode(items))))
    file = await store_lines(call, own_id, [msgspec.Raw(kept)])
    try:
        new = NewBatch(
            id=own_id,
            account=account,
            key_id=call.principal.key_id,
            kind="response",
            endpoint=ENDPOINT,
            model=request.model,
            input_file_id=file.id,
        )
        await queue.submit(new, [NewLine("", request)])
    finally:
        await queue.files.delete(account, file.id)
    found = await find(call, own_id)
    if found is None:
        raise NoSuchResponse(f"the response {own_id} was deleted as it was made")
    return found


async def find(call: Call, own_id: str) -> Background | None:
    queue = call.batches.queue
    try:
        batch = await queue.batch(call.principal.account, own_id)
        if batch.kind != "response" or batch.input_blob is None:
            return None
        line = await queue.line(own_id, 0)
    except NotFound:
        return None
    kept = decode(await queue.blobs.get(batch.input_blob), _kept_decoder)
    return Background(batch, line, decode(bytes(kept.body), _body_decoder), bytes(kept.items).decode())


def shown(found: Background) -> Json:
    """The response object as it is now."""
    return _told(found)[0].whole


def record(found: Background) -> Record:
    """As one that is kept: it can be continued once it is complete."""
    batch = found.batch
    return Record(
        id=batch.id,
        account=batch.account,
        created_us=batch.created_us,
        input=found.items,
        body=encode(shown(found)).decode(),
    )


async def cancel(call: Call, found: Background) -> Background:
    await call.batches.queue.cancel(call.principal.account, found.batch.id)
    return await find(call, found.batch.id) or found


async def delete(call: Call, found: Background) -> None:
    if not found.ended:
        raise Conflict("the response is still being made: cancel it first")
    await call.batches.queue.delete(call.principal.account, found.batch.id)


# --- streams ----------------------------------------------------------------------------------------------------------


async def stream(call: Call, found: Background, after: int) -> None:
    """Events with numbers above `after`, the last of them when the response has ended."""
    await while_connected(call.receive, _stream(call, found, after))


async def _stream(call: Call, found: Background, after: int) -> None:
    await call.start_stream([(b"cf-ai-req-id", call.id.encode())])
    waited_s = 0.0
    while True:
        events = _told(found)[1]
        piece = b"".join(_encoded(number, event) for number, event in enumerate(events) if number > after)
        after = max(after, len(events) - 1)
        ended = found.ended
        if not piece and not ended and waited_s >= HEARTBEAT_S:
            piece, waited_s = b": still here\n\n", 0.0
        if piece or ended:
            await call.send({"type": "http.response.body", "body": piece, "more_body": not ended})
        if ended:
            return
        await call.batches.queue.changed(found.batch.id, LOOK_S)
        waited_s += LOOK_S
        found = await find(call, found.batch.id) or _gone(found)


def _gone(found: Background) -> Background:
    """Deleted while somebody watched."""
    line = msgspec.structs.replace(found.line, state="cancelled", answer=None)
    return found._replace(line=line)


def _encoded(number: int, event: Event) -> bytes:
    told = encode(event | {"sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), told)


def _told(found: Background) -> tuple[Draft, list[Event]]:
    """The response as far as it is, and the events that tell of it from its beginning."""
    batch, line = found.batch, found.line
    draft = draft_of(found.body, batch.id, batch.created_us // 1_000_000)
    queued = draft.whole | {"status": "queued"}
    events: list[Event] = [
        {"type": "response.created", "response": queued},
        {"type": "response.queued", "response": queued},
    ]
    if line.started_us is not None or found.ended:
        events.append({"type": "response.in_progress", "response": draft.whole | {"status": "in_progress"}})
    draft.whole["status"] = found.status
    if not found.ended:
        return draft, events
    if line.answer is not None:
        events += fill(draft, line.answer, (line.ended_us or batch.created_us) // 1_000_000)
    elif line.state != "cancelled":
        draft.fail(failure_of(line))
    events.append({"type": f"response.{draft.whole['status']}", "response": draft.whole})
    return draft, events
