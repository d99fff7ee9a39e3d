"""A request of Anthropic's message batches: `{custom_id, params}` in, `{custom_id, result}` out."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.anthropic_answer import message_body
from emberline.api.anthropic_messages import MessagesRequest
from emberline.api.batch_lines import Result, runnable
from emberline.api.body import decode
from emberline.api.errors import Dialect, error_body
from emberline.api.file_lines import FileLine
from emberline.api.line_call import LineCall
from emberline.api.openai_batch_lines import failure_of
from emberline.api.ports import Backend
from emberline.api.reply import encode
from emberline.jobs.line import NewLine
from emberline.protocol.errors import BadInput, EmberlineError, TooLarge

Json = dict[str, Any]


class BatchRequest(msgspec.Struct, kw_only=True):
    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: msgspec.Raw


_request_decoder = msgspec.json.Decoder(BatchRequest)
_params_decoder = msgspec.json.Decoder(MessagesRequest)


class AnthropicLines:
    """The door has seen to it that ids are there and differ."""

    def __init__(self, service: Backend) -> None:
        self._service = service
        self._call = LineCall("", Dialect.ANTHROPIC)

    def read(self, line: FileLine) -> NewLine:
        custom_id = ""
        try:
            if line.data is None:
                raise TooLarge("the request is larger than one of a batch may be")
            given = decode(line.data, _request_decoder)
            custom_id = given.custom_id
            params = decode(bytes(given.params), _params_decoder)
            if params.stream:
                raise BadInput("`stream` has no meaning in a batch: leave it out", param="params.stream")
            return NewLine(custom_id, runnable(params.to_request(self._call), self._service))
        except EmberlineError as error:
            return NewLine(custom_id, None, error.info())

    def skip(self, line: FileLine) -> None:
        """Nothing to remember."""


def result_line(result: Result) -> bytes:
    line = result.line
    return encode({"custom_id": line.custom_id, "result": _result(result)}) + b"\n"


def _result(result: Result) -> Json:
    line = result.line
    if line.state == "expired":
        return {"type": "expired"}
    if line.state == "cancelled":
        return {"type": "canceled"}
    call = LineCall(line.request_id, Dialect.ANTHROPIC)
    if line.state != "succeeded" or line.answer is None:
        return {"type": "errored", "error": error_body(_retold(result, call), Dialect.ANTHROPIC, line.request_id)}
    params = decode(bytes(decode(result.given, _request_decoder).params), _params_decoder)
    return {"type": "succeeded", "message": message_body(call, params.model, line.answer, params.hides_thinking)}


def _retold(result: Result, call: LineCall) -> EmberlineError:
    error = failure_of(result.line)
    if result.line.started_us is None:
        return error
    try:
        decode(bytes(decode(result.given, _request_decoder).params), _params_decoder).to_request(call)
    except EmberlineError:
        return error
    return call.names.retell(error)
