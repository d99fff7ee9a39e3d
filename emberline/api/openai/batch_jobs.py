"""The jobs of OpenAI batches: `{custom_id, method, url, body}` in, `{id, custom_id, response, error}` out."""

from collections.abc import Mapping
from typing import Any

import msgspec

from emberline.api.batches.job_format import FileLine, Result, line_request
from emberline.api.common.form import Form
from emberline.api.http.errors import Dialect, FieldNames, codes, error_body
from emberline.api.http.exchange import Services, encode
from emberline.api.http.unknown_fields import unknown_field_log
from emberline.api.http.wire import Wire, decode
from emberline.api.openai.chat_completions import CHAT, COMPLETION
from emberline.api.openai.embeddings import EMBEDDINGS
from emberline.api.openai.responses.form import RESPONSE
from emberline.jobs.batches.batch import Batch
from emberline.jobs.queue.job import NewJob
from emberline.protocol.errors import BadInput, EmberlineError

MAX_ID_CHARS = 512
_NOT_RUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}

Json = dict[str, Any]


class BatchLine(msgspec.Struct, kw_only=True):
    custom_id: str | None = None
    method: str = "POST"
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw(b"")


FORMS: Mapping[str, Form[Any]] = {  # by the endpoint that a batch names
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": RESPONSE,
}

_line_decoder = msgspec.json.Decoder(BatchLine)


class OpenAIJobReader:
    """Reads the lines of a batch in order; no two may have the same custom id."""

    def __init__(self, service: Services, batch: Batch) -> None:
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
            body = _body(self._endpoint, given, logs=True)
            if body.stream:
                raise BadInput("`stream` has no meaning in a batch: leave it out", param="body.stream")
            task, _ = FORMS[self._endpoint].to_task(body, "", None)
            return NewJob(custom_id, line_request(task, self._service, self._batch))
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
    job, form = result.job, FORMS[endpoint]
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
    return FORMS[endpoint].to_task(body, result.job.request_id, None)[1]


def _body(endpoint: str, given: BatchLine, logs: bool = False) -> Any:
    """The body of a line. `logs`: unknown fields are logged, as no response has a header for them."""
    if not bytes(given.body):
        raise BadInput("`body` is missing: it is the request itself", param="body")
    wire = Wire(bytes(given.body))
    try:
        body = wire.decode(FORMS[endpoint].decoder)
    except EmberlineError as error:
        error.param = f"body.{error.param}" if error.param else "body"
        raise
    if logs:
        unknown_field_log.add(f"{endpoint} in a batch", wire.unknown)
    return body
