"""Responses that are made in the background: a batch of one line, whose events can be read from any number on.

The events are made of the line's transcript, which grows as it runs. What is in there stays, whatever dies: a number
means the same event at every door and at any time, so a stream can be left and taken up again without loss.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from emberline.api.batches.job_format import runnable
from emberline.api.batches.submission import standing, store_lines
from emberline.api.common.answer import pieces_of
from emberline.api.http.body import decode
from emberline.api.http.call import Call, encode, while_connected
from emberline.api.http.errors import NoSuchResponse
from emberline.api.openai.batch_jobs import failure_of
from emberline.api.openai.responses.items import Item
from emberline.api.openai.responses.output import Event, draft_of
from emberline.api.openai.responses.request import ResponsesRequest
from emberline.jobs.batches.batch import Batch, NewBatch
from emberline.jobs.queue.job import Job, NewJob
from emberline.jobs.queue.transcript import TranscriptPart
from emberline.protocol.answer import StoredResponse
from emberline.protocol.errors import BadInput, Conflict, NotFound
from emberline.protocol.events import ChoiceDone
from emberline.protocol.request import GenerateRequest

ENDPOINT = "/v1/responses"
LOOK_S = 0.5  # how often a stream that waits looks whether its response has begun,
LIVE_S = 0.1  # and then for what it says, where nobody can tell it across processes
HEARTBEAT_S = 15.0
_BEGUN = 3  # events that come before anything is said

Json = dict[str, Any]


class _Kept(msgspec.Struct):
    """What was submitted: the body, and all items that the response was made from."""

    body: msgspec.Raw
    items: msgspec.Raw


class Background(NamedTuple):
    batch: Batch
    line: Job
    parts: list[TranscriptPart]  # of the transcript, as far as it is
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
        await queue.submit(new, [NewJob("", request)])
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
        line = await queue.job(own_id, 0)
    except NotFound:
        return None
    kept = decode(await queue.blobs.get(batch.input_blob), _kept_decoder)
    parts = await queue.transcripts.read(own_id, 0)
    return Background(batch, line, parts, decode(bytes(kept.body), _body_decoder), bytes(kept.items).decode())


async def _refreshed(call: Call, found: Background) -> Background:
    """As it is now. The line first: if it has ended, the transcript that is read then is whole."""
    queue, own_id = call.batches.queue, found.batch.id
    try:
        batch = await queue.batch(call.principal.account, own_id)
        line = await queue.job(own_id, 0)
    except NotFound:  # deleted while somebody watched
        return found._replace(line=msgspec.structs.replace(found.line, state="cancelled", answer=None))
    new = await queue.transcripts.read(own_id, 0, after=len(found.parts))
    return found._replace(batch=batch, line=line, parts=found.parts + new)


def shown(found: Background) -> Json:
    """The response object as it is now."""
    account = Account(found)
    account.go_on(found)
    return account.whole


async def status(call: Call, found: Background) -> Json:
    """The response object, and where it stands as long as it waits or runs."""
    return shown(found) if found.ended else shown(found) | {"queue": await standing(call, found.batch)}


def record(found: Background) -> StoredResponse:
    """As one that is kept: it can be continued once it is complete."""
    batch = found.batch
    return StoredResponse(
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
    desk, account = call.batches, Account(found)
    said_s = time.monotonic()
    while True:
        events = account.go_on(found)
        piece = b"".join(_encoded(number, event) for number, event in events if number > after)
        over = found.ended or desk.closing.is_set()  # who is cut off asks another door for the rest
        if not piece and not over and time.monotonic() - said_s >= HEARTBEAT_S:
            piece = b": still here\n\n"
        if piece or over:
            said_s = time.monotonic()
            await call.send({"type": "http.response.body", "body": piece, "more_body": not over})
        if over:
            return
        await desk.queue.wait_for_change(found.batch.id, LIVE_S if found.line.state == "leased" else LOOK_S)
        found = await _refreshed(call, found)


def _encoded(number: int, event: Event) -> bytes:
    told = encode(event | {"sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), told)


class Account:
    """Tells one response from its beginning: its events in order, each once, and the object that they make."""

    def __init__(self, found: Background) -> None:
        self._draft = draft_of(found.body, found.batch.id, found.batch.created_us // 1_000_000)
        self._n_told = 0
        self._n_parts = 0
        self._over = False
        self._done = False  # all that it says has been said

    @property
    def whole(self) -> Json:
        return self._draft.whole

    def go_on(self, found: Background) -> list[tuple[int, Event]]:
        """What is new since the last time, with its numbers."""
        events: list[Event] = []
        if not self._n_told:
            queued = self.whole | {"status": "queued"}
            events += [{"type": f"response.{name}", "response": queued} for name in ("created", "queued")]
        if self._n_told < _BEGUN and (found.line.started_us is not None or found.parts or found.ended):
            events.append({"type": "response.in_progress", "response": self.whole | {"status": "in_progress"}})
        for part in found.parts[self._n_parts :]:
            for piece in part.events:
                self._done = self._done or isinstance(piece, ChoiceDone)
                events += self._draft.take(piece)
        self._n_parts = len(found.parts)
        self.whole["status"] = found.status
        if found.ended and not self._over:
            self._over = True
            events += self._end(found)
        first, self._n_told = self._n_told, self._n_told + len(events)
        return list(enumerate(events, first))

    def _end(self, found: Background) -> list[Event]:
        line, draft = found.line, self._draft
        events: list[Event] = []
        if line.answer is not None:
            if not self._done:  # run without a transcript
                events += [event for piece in pieces_of(line.answer) for event in draft.take(piece)]
            draft.complete(line.answer.usage, (line.ended_us or found.batch.created_us) // 1_000_000)
        elif line.state == "cancelled":
            events += draft.composer.end("incomplete")
            draft.whole["output"] = draft.composer.items
        else:
            events += draft.composer.end("incomplete")
            draft.fail(failure_of(line))
        return [*events, {"type": f"response.{draft.whole['status']}", "response": draft.whole}]
