"""Background responses: a batch with one job, whose events can be streamed from any sequence number on.

The events are derived from the job's transcript, which is append-only and durable. A sequence number therefore means
the same event in every process and at any time, and a stream can be resumed elsewhere without loss.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from emberline.api.batches.job_format import job_error, queued_request
from emberline.api.batches.submission import new_batch, queue_position, store_requests
from emberline.api.http.errors import NoSuchResponse
from emberline.api.http.exchange import HttpExchange, encode
from emberline.api.http.sse import named_event
from emberline.api.http.streaming import Blocks, BlockStream, LastBlock
from emberline.api.http.wire import decode
from emberline.api.openai.responses.form import RESPONSE
from emberline.api.openai.responses.items import Item, items_decoder, parse_input
from emberline.api.openai.responses.output import ResponseBuilder, StreamEvent
from emberline.api.openai.responses.request import ResponsesRequest, item_fields
from emberline.jobs.batches.batch import Batch
from emberline.jobs.queue.job import Job, NewJob
from emberline.jobs.queue.transcript import TranscriptPart
from emberline.protocol.complete_response import StoredResponse
from emberline.protocol.errors import Conflict, EmberlineError, NotFound
from emberline.protocol.events import ChoiceDone
from emberline.protocol.request import GenerateRequest, SamplingDefaults
from emberline.service.event_collector import events_of

ENDPOINT = "/v1/responses"
QUEUED_POLL_S = 0.5  # how often a stream checks whether its job has started,
RUNNING_POLL_S = 0.1  # and then for new output, where no notification arrives from another process
_N_OPENING_EVENTS = 3  # created, queued, in_progress

Json = dict[str, Any]


class _Submitted(msgspec.Struct):
    """The content of the batch's file: the request body, all items of the conversation, the model's sampling
    parameters at the time."""

    body: msgspec.Raw
    items: msgspec.Raw
    defaults: SamplingDefaults = SamplingDefaults()


class BackgroundResponse(NamedTuple):
    batch: Batch
    job: Job
    parts: list[TranscriptPart]  # of the transcript so far
    body: ResponsesRequest
    items: str  # JSON
    defaults: SamplingDefaults  # the model's, for what the body leaves out

    @property
    def status(self) -> str:
        """Before the job has ended."""
        if self.batch.cancelling_us is not None or self.job.state == "cancelled":
            return "cancelled"
        return "in_progress" if self.job.state == "leased" else "queued"

    @property
    def ended(self) -> bool:
        return self.job.state in ("succeeded", "failed", "cancelled", "expired", "dead")


_submitted_decoder = msgspec.json.Decoder(_Submitted)


async def submit(
    call: HttpExchange, own_id: str, raw: bytes, items: Sequence[Item], request: GenerateRequest
) -> BackgroundResponse:
    """Queue the response durably."""
    card = call.model_card(request.model)
    request = queued_request(request, card.id)
    submitted = encode(_Submitted(msgspec.Raw(raw), msgspec.Raw(encode(items)), card.defaults))
    file = await store_requests(call, own_id, [msgspec.Raw(submitted)])
    try:
        new = new_batch(call, own_id, "response", ENDPOINT, model=request.model, input_file_id=file.id)
        await call.queue.submit(new, [NewJob("", request)])
    finally:
        await call.queue.files.delete(call.principal.account, file.id)
    found = await find(call, own_id)
    if found is None:
        raise NoSuchResponse(f"the response {own_id} was deleted while it was submitted")
    return found


async def find(call: HttpExchange, own_id: str) -> BackgroundResponse | None:
    queue = call.queue
    try:
        batch = await queue.batch(call.principal.account, own_id)
        if batch.kind != "response" or batch.input_blob is None:
            return None
        job = await queue.job(own_id, 0)
    except NotFound:
        return None
    submitted = decode(await queue.blobs.get(batch.input_blob), _submitted_decoder)
    parts = await queue.transcripts.read(own_id, 0)
    body = decode(bytes(submitted.body), RESPONSE.decoder)
    items = bytes(submitted.items).decode()
    return BackgroundResponse(batch, job, parts, body, items, submitted.defaults)


async def _refresh(call: HttpExchange, found: BackgroundResponse) -> BackgroundResponse:
    """The current state. The job is read first: if it has ended, the transcript read after it is complete."""
    queue, own_id = call.queue, found.batch.id
    try:
        batch = await queue.batch(call.principal.account, own_id)
        job = await queue.job(own_id, 0)
    except NotFound:  # deleted while it was streamed
        return found._replace(job=msgspec.structs.replace(found.job, state="cancelled", answer=None))
    new = await queue.transcripts.read(own_id, 0, after=len(found.parts))
    return found._replace(batch=batch, job=job, parts=found.parts + new)


def _body(found: BackgroundResponse) -> Json:
    events = BackgroundEvents(found)
    events.advance(found)
    return events.response


async def response_with_position(call: HttpExchange, found: BackgroundResponse) -> Json:
    """The response object; until it has ended, with its position in the queue."""
    return _body(found) if found.ended else _body(found) | {"queue": await queue_position(call, found.batch)}


def stored_response(found: BackgroundResponse) -> StoredResponse:
    """Return the background response in the form of other stored responses, so that it can be continued."""
    batch = found.batch
    return StoredResponse(
        id=batch.id,
        account=batch.account,
        created_us=batch.created_us,
        input=found.items,
        body=encode(_body(found)).decode(),
    )


async def cancel(call: HttpExchange, found: BackgroundResponse) -> BackgroundResponse:
    await call.queue.cancel(call.principal.account, found.batch.id)
    return await find(call, found.batch.id) or found


async def delete(call: HttpExchange, found: BackgroundResponse) -> None:
    if not found.ended:
        raise Conflict("the response is not complete yet: cancel it first")
    await call.queue.delete(call.principal.account, found.batch.id)


def stream(call: HttpExchange, found: BackgroundResponse, after: int) -> BlockStream:
    """The events with sequence numbers above `after`, until the response has ended."""
    return BlockStream(_blocks(call, found, after), headers=call.id_headers)


async def _blocks(call: HttpExchange, found: BackgroundResponse, after: int) -> Blocks:
    batches, events = call.batches, BackgroundEvents(found)
    sent_s = time.monotonic()
    while True:
        new = events.advance(found)
        chunk = b"".join(
            named_event(event["type"], event | {"sequence_number": number}) for number, event in new if number > after
        )
        last = found.ended or batches.closing.is_set()  # a client that is cut off resumes at another process
        if not chunk and not last and time.monotonic() - sent_s >= call.limits.heartbeat_s:
            chunk = b": heartbeat\n\n"
        if chunk or last:
            sent_s = time.monotonic()
        if last:
            yield LastBlock(chunk)
            return
        yield chunk
        poll_s = RUNNING_POLL_S if found.job.state == "leased" else QUEUED_POLL_S
        await batches.queue.wait_for_change(found.batch.id, poll_s)
        found = await _refresh(call, found)


def _with_names(found: BackgroundResponse, error: EmberlineError) -> EmberlineError:
    """The job's error with the client's field names, as the same request has them in the foreground."""
    if error.param is None:
        return error
    items, n_new = items_decoder.decode(found.items), len(parse_input(found.body.input))
    fields = item_fields(len(items) - n_new, n_new)
    return found.body.to_request("", items, fields, found.body.parse_tools())[1].rename(error)


class BackgroundEvents:
    """The events of one background response from its beginning, each once and in order, and the resulting object."""

    def __init__(self, found: BackgroundResponse) -> None:
        created = found.batch.created_us // 1_000_000
        tools = found.body.parse_tools()
        self._builder = ResponseBuilder(found.body, tools, found.batch.id, created, found.defaults)
        self._n_events = 0
        self._n_parts = 0
        self._ended = False
        self._output_done = False

    @property
    def response(self) -> Json:
        return self._builder.response

    def advance(self, found: BackgroundResponse) -> list[tuple[int, StreamEvent]]:
        """The events since the last call, with their sequence numbers."""
        events: list[StreamEvent] = []
        if not self._n_events:
            queued = self.response | {"status": "queued"}
            events += [{"type": f"response.{name}", "response": queued} for name in ("created", "queued")]
        if self._n_events < _N_OPENING_EVENTS and (found.job.started_us is not None or found.parts or found.ended):
            events.append({"type": "response.in_progress", "response": self.response | {"status": "in_progress"}})
        for part in found.parts[self._n_parts :]:
            for event in part.events:
                self._output_done = self._output_done or isinstance(event, ChoiceDone)
                events += self._builder.add(event)
        self._n_parts = len(found.parts)
        self.response["status"] = found.status
        if found.ended and not self._ended:
            self._ended = True
            events += self._end(found)
        first, self._n_events = self._n_events, self._n_events + len(events)
        return list(enumerate(events, first))

    def _end(self, found: BackgroundResponse) -> list[StreamEvent]:
        job, builder = found.job, self._builder
        events: list[StreamEvent] = []
        if job.answer is not None:
            if not self._output_done:  # it ran without a transcript
                events += [added for event in events_of(job.answer) for added in builder.add(event)]
            builder.complete(job.answer.usage, (job.ended_us or found.batch.created_us) // 1_000_000)
        elif job.state == "cancelled":
            events += builder.close("incomplete")
            builder.response["output"] = builder.items
        else:
            events += builder.close("incomplete")
            builder.fail(_with_names(found, job_error(job)))
        return [*events, {"type": f"response.{builder.response['status']}", "response": builder.response}]
