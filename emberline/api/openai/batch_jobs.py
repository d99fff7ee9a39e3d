"""A line of OpenAI's batches: `{custom_id, method, url, body}` in, `{id, custom_id, response, error}` out."""

from typing import Any, Protocol

import msgspec

from emberline.api.batches.job_format import FileLine, LineCall, Result, runnable
from emberline.api.http.body import decode
from emberline.api.http.call import Backend, encode
from emberline.api.http.errors import Dialect, codes, error_body
from emberline.api.openai.chat import ChatRequest, chat_body
from emberline.api.openai.completions import CompletionRequest, completion_body
from emberline.api.openai.responses.output import LineResponse
from emberline.jobs.queue.job import Job, NewJob
from emberline.protocol.answer import Answer
from emberline.protocol.errors import BadInput, EmberlineError, Internal, TooLarge, from_info
from emberline.protocol.request import GenerateRequest

MAX_ID_CHARS = 512
_NO_RESPONSE = {"expired": "batch_expired", "cancelled": "batch_cancelled"}
_SAID = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed: the batch was cancelled.",
}

Json = dict[str, Any]


class Body(Protocol):
    """What a line asks for, at one endpoint."""

    stream: bool | None

    def ask(self, call: LineCall) -> GenerateRequest: ...

    def show(self, call: LineCall, created: int, answer: Answer) -> Json: ...


class ChatLine(ChatRequest, kw_only=True):
    def ask(self, call: LineCall) -> GenerateRequest:
        return self.to_request(call)

    def show(self, call: LineCall, created: int, answer: Answer) -> Json:
        return chat_body(call, self, created, answer)


class CompletionLine(CompletionRequest, kw_only=True):
    def ask(self, call: LineCall) -> GenerateRequest:
        requests = self.to_requests(call)
        if len(requests) > 1:
            raise BadInput("a line of a batch has one `prompt`: write a line for each", param="prompt")
        return requests[0]

    def show(self, call: LineCall, created: int, answer: Answer) -> Json:
        return completion_body(call, self, created, answer)


class BatchLine(msgspec.Struct, kw_only=True):
    custom_id: str | None = None
    method: str = "POST"
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw(b"")


_line_decoder = msgspec.json.Decoder(BatchLine)
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "/v1/chat/completions": msgspec.json.Decoder(ChatLine),
    "/v1/completions": msgspec.json.Decoder(CompletionLine),
    "/v1/responses": msgspec.json.Decoder(LineResponse),
}
ENDPOINTS = tuple(_DECODERS)


class OpenAILines:
    def __init__(self, service: Backend, endpoint: str) -> None:
        self._service = service
        self._endpoint = endpoint
        self._first: dict[str, int] = {}  # by custom id, the line that has it
        self._call = LineCall("", Dialect.OPENAI)

    def read(self, line: FileLine) -> NewJob:
        custom_id = ""
        try:
            given = _decoded(line)
            custom_id = (given.custom_id or "")[:MAX_ID_CHARS]
            self._check(given, line.at)
            body = _body(self._endpoint, given)
            if body.stream:
                raise BadInput("`stream` has no meaning in a batch: leave it out", param="body.stream")
            return NewJob(custom_id, runnable(body.ask(self._call), self._service))
        except EmberlineError as error:
            error.message = f"line {line.at}: {error.message}"
            return NewJob(custom_id, None, error.info())

    def skip(self, line: FileLine) -> None:
        try:
            self._check(_decoded(line), line.at)
        except EmberlineError:
            return

    def _check(self, given: BatchLine, at: int) -> None:
        name = given.custom_id
        if not name:
            raise BadInput("`custom_id` is missing: it tells which result is whose", param="custom_id")
        if len(name) > MAX_ID_CHARS:
            raise BadInput(f"`custom_id` is longer than {MAX_ID_CHARS} characters", param="custom_id")
        if (first := self._first.setdefault(name, at)) != at:
            raise BadInput(f"`custom_id` {name[:80]!r} is that of line {first} too", param="custom_id")
        if given.method.upper() != "POST":
            raise BadInput(f"`method` must be POST, not {given.method[:20]!r}", param="method")
        if given.url != self._endpoint:
            shown = repr(given.url[:100]) if given.url else "missing"
            raise BadInput(f"`url` is {shown}, and the batch is for {self._endpoint}", param="url")


def output_line(result: Result, endpoint: str) -> bytes:
    """A result, for the output file if it succeeded, else for the error file."""
    line = result.line
    call = LineCall(line.request_id, Dialect.OPENAI)
    response: Json | None = None
    error: Json | None = None
    try:
        response = {"status_code": 200, "request_id": line.request_id, "body": _shown(result, endpoint, call)}
    except EmberlineError as failure:
        if line.state in _NO_RESPONSE:
            error = {"code": _NO_RESPONSE[line.state], "message": _SAID[line.state]}
        else:
            body = error_body(_retold(failure, result, endpoint, call), Dialect.OPENAI, line.request_id)
            response = {"status_code": codes(failure).status, "request_id": line.request_id, "body": body}
    whole = {"id": f"batch_req_{line.request_id}", "custom_id": line.custom_id or None}
    return encode(whole | {"response": response, "error": error}) + b"\n"


def failure_of(line: Job) -> EmberlineError:
    """Why it did not succeed."""
    return from_info(line.error) if line.error else Internal(f"the request ended as {line.state}")


def _shown(result: Result, endpoint: str, call: LineCall) -> Json:
    line = result.line
    if line.state != "succeeded" or line.answer is None:
        raise failure_of(line)
    body = _body(endpoint, decode(result.given, _line_decoder))
    return body.show(call, (line.ended_us or 0) // 1_000_000, line.answer)


def _retold(error: EmberlineError, result: Result, endpoint: str, call: LineCall) -> EmberlineError:
    """The error with the caller's names of things; a line that never ran was told in them already."""
    if result.line.started_us is None:
        return error
    try:
        _body(endpoint, decode(result.given, _line_decoder)).ask(call)
    except EmberlineError:
        return error
    return call.names.retell(error)


def _decoded(line: FileLine) -> BatchLine:
    if line.data is None:
        raise TooLarge("the line is longer than a line of a batch may be")
    return decode(line.data, _line_decoder)


def _body(endpoint: str, given: BatchLine) -> Body:
    if not bytes(given.body):
        raise BadInput("`body` is missing: it is the request itself", param="body")
    try:
        body: Body = decode(bytes(given.body), _DECODERS[endpoint])
    except EmberlineError as error:
        error.param = f"body.{error.param}" if error.param else "body"
        raise
    return body
