"""The jobs of OpenAI batches: `{custom_id, method, url, body}` in, `{id, custom_id, response, error}` out."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from emberline.api.batches.job_format import FileLine, Result, line_request
from emberline.api.common.unsupported_fields import refuse_unsupported
from emberline.api.http.body import decode
from emberline.api.http.call import Backend, encode
from emberline.api.http.errors import Dialect, FieldNames, codes, error_body
from emberline.api.openai.chat import ChatRequest, chat_body
from emberline.api.openai.completions import CompletionRequest, completion_body
from emberline.api.openai.embeddings import EmbeddingsRequest, embeddings_body
from emberline.api.openai.responses.items import Item, ItemReference, parse_input, with_ids
from emberline.api.openai.responses.output import response_body
from emberline.api.openai.responses.request import ResponsesRequest, response_id
from emberline.jobs.batches.batch import Batch
from emberline.jobs.queue.job import NewJob
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import BadInput, EmberlineError, Internal
from emberline.protocol.request import GenerateRequest

MAX_ID_CHARS = 512
_NOT_RUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}

Json = dict[str, Any]
Parsed = tuple[GenerateRequest, FieldNames]


class BatchLine(msgspec.Struct, kw_only=True):
    custom_id: str | None = None
    method: str = "POST"
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw(b"")


def _completion_request(body: CompletionRequest, request_id: str) -> Parsed:
    requests, names = body.to_requests(request_id)
    if len(requests) > 1:
        raise BadInput("a line of a batch has one `prompt`: write a line for each", param="prompt")
    return requests[0], names


def _response_request(body: ResponsesRequest, request_id: str) -> Parsed:
    """Lines are independent of each other and of stored responses: each must hold its whole conversation."""
    refuse_unsupported(body)
    if body.background:
        raise BadInput("`background` has no meaning in a batch: leave it out", param="background")
    if body.previous_response_id is not None:
        raise BadInput("a line of a batch continues no response: send its items", param="previous_response_id")
    items: list[Item] = []
    for item in parse_input(body.input):
        if isinstance(item, ItemReference):
            raise BadInput("a line of a batch refers to no stored item: send the item itself", param="input")
        items.append(item)
    items = with_ids(items, request_id)
    request, names = body.to_request(request_id, items, [f"input[{i}]" for i in range(len(items))], body.parse_tools())
    if request.session == response_id(request_id):  # nothing continues the session of a batch line
        request = msgspec.structs.replace(request, session=None)
    return request, names


def _response_body(request_id: str, body: ResponsesRequest, created: int, answer: Answer) -> Json:
    return response_body(body, response_id(request_id), created, answer) | {"store": False}


def _embeddings_request(body: EmbeddingsRequest, request_id: str) -> Parsed:
    encode, names = body.to_request(request_id)
    return GenerateRequest(id=request_id, model=body.model, encode=encode, api="embeddings"), names


def _embeddings_body(request_id: str, body: EmbeddingsRequest, created: int, answer: Answer) -> Json:
    if answer.encoded is None:
        raise Internal("the result has no vectors")
    return embeddings_body(body, answer.encoded)


class EndpointFormat(NamedTuple):
    """How the body of a line is parsed and its result formatted, for one endpoint."""

    decoder: msgspec.json.Decoder[Any]
    to_request: Callable[[Any, str], Parsed]  # body and request id
    to_body: Callable[[str, Any, int, Answer], Json]  # request id, body, Unix time and answer


FORMATS = {
    "/v1/chat/completions": EndpointFormat(msgspec.json.Decoder(ChatRequest), ChatRequest.to_request, chat_body),
    "/v1/completions": EndpointFormat(msgspec.json.Decoder(CompletionRequest), _completion_request, completion_body),
    "/v1/embeddings": EndpointFormat(msgspec.json.Decoder(EmbeddingsRequest), _embeddings_request, _embeddings_body),
    "/v1/responses": EndpointFormat(msgspec.json.Decoder(ResponsesRequest), _response_request, _response_body),
}

_line_decoder = msgspec.json.Decoder(BatchLine)


class OpenAIJobReader:
    """Reads the lines of a batch in order; no two may have the same custom id."""

    def __init__(self, service: Backend, batch: Batch) -> None:
        self._service = service
        self._batch = batch
        self._endpoint = batch.endpoint
        self._line_of: dict[str, int] = {}  # by custom id, the line that has it

    def __call__(self, line: FileLine) -> NewJob:
        custom_id = ""
        try:
            given = decode(line.content(), _line_decoder)
            custom_id = (given.custom_id or "")[:MAX_ID_CHARS]
            self._check(given, line.number)
            body = _body(self._endpoint, given)
            if body.stream:
                raise BadInput("`stream` has no meaning in a batch: leave it out", param="body.stream")
            request, _ = FORMATS[self._endpoint].to_request(body, "")
            return NewJob(custom_id, line_request(request, self._service, self._batch))
        except EmberlineError as error:
            error.message = f"line {line.number}: {error.message}"
            return NewJob(custom_id, None, error.info())

    def _check(self, given: BatchLine, number: int) -> None:
        custom_id = given.custom_id
        if not custom_id:
            raise BadInput("`custom_id` is missing: it identifies the line's result", param="custom_id")
        if len(custom_id) > MAX_ID_CHARS:
            raise BadInput(f"`custom_id` is longer than {MAX_ID_CHARS} characters", param="custom_id")
        if (first := self._line_of.setdefault(custom_id, number)) != number:
            raise BadInput(f"`custom_id` {custom_id[:80]!r} is that of line {first} too", param="custom_id")
        if given.method.upper() != "POST":
            raise BadInput(f"`method` must be POST, not {given.method[:20]!r}", param="method")
        if given.url != self._endpoint:
            shown = repr(given.url[:100]) if given.url else "missing"
            raise BadInput(f"`url` is {shown}, and the batch is for {self._endpoint}", param="url")


def result_line(result: Result, endpoint: str) -> bytes:
    """A line of the output file if the job succeeded, else of the error file."""
    job, form = result.job, FORMATS[endpoint]
    response: Json | None = None
    error: Json | None = None
    try:
        answer = result.answer()
        body = _body(endpoint, decode(result.line, _line_decoder))
        shown = form.to_body(job.request_id, body, (job.ended_us or 0) // 1_000_000, answer)
        response = {"status_code": 200, "request_id": job.request_id, "body": shown}
    except EmberlineError as failure:
        if job.state in _NOT_RUN:
            code, message = _NOT_RUN[job.state]
            error = {"code": code, "message": message}
        else:
            renamed = result.renamed(failure, lambda: _field_names(result, endpoint))
            shown = error_body(renamed, Dialect.OPENAI, job.request_id)
            response = {"status_code": codes(failure).status, "request_id": job.request_id, "body": shown}
    head = {"id": f"batch_req_{job.request_id}", "custom_id": job.custom_id or None}
    return encode(head | {"response": response, "error": error}) + b"\n"


def _field_names(result: Result, endpoint: str) -> FieldNames:
    body = _body(endpoint, decode(result.line, _line_decoder))
    return FORMATS[endpoint].to_request(body, result.job.request_id)[1]


def _body(endpoint: str, given: BatchLine) -> Any:
    if not bytes(given.body):
        raise BadInput("`body` is missing: it is the request itself", param="body")
    try:
        return decode(bytes(given.body), FORMATS[endpoint].decoder)
    except EmberlineError as error:
        error.param = f"body.{error.param}" if error.param else "body"
        raise
