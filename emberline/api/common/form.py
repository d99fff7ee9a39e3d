"""Request forms: how the body of one kind of request is read, and how its answer is written.

A form is the endpoint of its HTTP route. The lines of batches, the paths of gateways and background responses use the
same form, so that a body means the same wherever it comes from.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from emberline.api.common.encoding import EncodeFields, run_encoding, with_json_rows
from emberline.api.common.response_body import collect
from emberline.api.http.body import read_wire
from emberline.api.http.errors import Dialect, FieldNames, HeaderList
from emberline.api.http.exchange import Events, HttpExchange, json_reply
from emberline.api.http.sse import EventEncoder
from emberline.api.http.streaming import EventStream, Response
from emberline.api.http.wire import SESSION_FIELDS, Wire
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import BadInput
from emberline.protocol.request import EncodeRequest, GenerateRequest

LONG_PROMPT_BYTES = 4 << 10  # of token ids that an answer has of its prompts; longer answers are written in a thread
Body = TypeVar("Body")
# Makes the canonical request of a body, an id and a session. Returns it with the client's names of its fields.
ToTask = Callable[[Body, str, str | None], tuple[GenerateRequest | EncodeRequest, FieldNames]]
Relay = Callable[[HttpExchange, Wire], Awaitable[Response] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm(Generic[Body]):
    """Form in which the answers to one kind of request are written."""

    to_body: Callable[[str, Body, int, Answer], Any]  # takes the request's id, its body, the Unix time and the answer
    # Takes the request's id, the API, the body and the Unix time. None: the answer comes whole.
    to_stream: Callable[[str, Dialect, Body, int], EventEncoder] | None = None
    headers: Callable[[HttpExchange], HeaderList] = attrgetter("id_headers")
    envelope: Callable[[HttpExchange, Any], Any] | None = None  # wraps the body of a reply that comes whole

    async def answer(
        self, call: HttpExchange, body: Body, events: Events, n_choices: int = 1, streams: bool | None = False
    ) -> Response:
        """Answer with what a model generates: as a stream, or whole."""
        created = int(time.time())
        if streams:
            assert self.to_stream is not None
            return EventStream(events, self.to_stream(call.id, call.dialect, body, created), headers=self.headers(call))
        answer = await collect(call, events, n_choices)
        if sum(len(choice.prompt.ids) for choice in answer.choices if choice.prompt is not None) > LONG_PROMPT_BYTES:
            return await asyncio.to_thread(lambda: self._reply(call, self.to_body(call.id, body, created, answer)))
        return self._reply(call, self.to_body(call.id, body, created, answer))

    async def encode(self, call: HttpExchange, body: Body, task: EncodeRequest) -> Response:
        """Answer with vectors, scores or labels of texts."""
        assert isinstance(body, EncodeFields)
        encoded = await run_encoding(call, task)
        if encoded.pooling is not None and body.wants_rows:
            encoded = await with_json_rows(encoded)
        answer = Answer([], encoded.usage, encoded)
        return self._reply(call, self.to_body(call.id, body, int(time.time()), answer))

    def _reply(self, call: HttpExchange, body: Any) -> Response:
        body = body if self.envelope is None else self.envelope(call, body)
        return json_reply(body, headers=self.headers(call))


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(AnswerForm[Body]):
    """One kind of request."""

    decoder: msgspec.json.Decoder[Body]
    to_task: ToTask[Body]
    # Relays a body to an upstream server. Returns None if the body has to be read here.
    relay: Relay | None = None
    # Relays a body that is no canonical request, with images, say. Returns None if no other server may read it either.
    relay_unread: Relay | None = None
    session_fields: tuple[str, ...] = SESSION_FIELDS  # the body's names of its session, by precedence

    async def __call__(self, call: HttpExchange) -> Response:
        """Serve the form as an endpoint."""
        wire = await read_wire(call, self.session_fields)
        if self.relay is not None and (relayed := self.relay(call, wire)) is not None:
            return await relayed
        try:
            body: Any = wire.decode(self.decoder)
            task, call.field_names = self.to_task(body, call.id, call.session)
        except BadInput:
            if self.relay_unread is None or (relayed := self.relay_unread(call, wire)) is None:
                raise
            return await relayed
        if isinstance(task, EncodeRequest):
            return await self.encode(call, body, task)
        if (usage := getattr(body, "usage", None)) is not None and usage.include:
            call.wants_cost = True
        return await self.answer(call, body, call.run(task), task.n, body.stream)
