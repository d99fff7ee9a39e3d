"""An input of Workers AI's queue, and its place in the answer: `{id, result, success, external_reference}`."""

from typing import Any

import msgspec

from emberline.api.batch_lines import Result, runnable
from emberline.api.body import decode
from emberline.api.conversation import is_json
from emberline.api.errors import Dialect, error_body
from emberline.api.file_lines import FileLine
from emberline.api.line_call import LineCall
from emberline.api.openai_batch_lines import failure_of
from emberline.api.ports import Backend
from emberline.api.reply import encode
from emberline.api.workers_ai_answer import Shape, result_body
from emberline.api.workers_ai_request import RunRequest
from emberline.jobs.line import NewLine
from emberline.protocol.errors import BadInput, EmberlineError, TooLarge

Json = dict[str, Any]


class _Referred(msgspec.Struct):
    external_reference: Any = None


class _Item(RunRequest, kw_only=True):
    external_reference: Any = None


_item_decoder = msgspec.json.Decoder(_Item)
_reference_decoder = msgspec.json.Decoder(_Referred)


class WorkersAILines:
    def __init__(self, service: Backend, model: str) -> None:
        self._service = service
        self._model = model
        self._call = LineCall("", Dialect.NATIVE)

    def read(self, line: FileLine) -> NewLine:
        reference = ""
        try:
            if line.data is None:
                raise TooLarge("the input is larger than one of a batch may be")
            item = decode(line.data, _item_decoder)
            if isinstance(item.external_reference, str):
                reference = item.external_reference[:512]
            if item.stream:
                raise BadInput("`stream` has no meaning in the queue: leave it out", param="stream")
            if item.requests is not None or item.request_id is not None:
                raise BadInput("an input in `requests` is a `prompt` or `messages`", param="requests")
            return NewLine(reference, runnable(item.to_request(self._call, self._model), self._service))
        except EmberlineError as error:
            return NewLine(reference, None, error.info())

    def skip(self, line: FileLine) -> None:
        """Nothing to remember."""


def answer_item(result: Result) -> bytes:
    line = result.line
    item: Json = {"id": line.number}
    try:
        item |= {"result": _shown(result), "success": True}
    except EmberlineError as error:
        item |= {"success": False, "error": error_body(error, Dialect.NATIVE, line.request_id)["errors"][0]}
    reference = _reference(result.given)
    if reference is not None:
        item["external_reference"] = reference
    return encode(item)


def _shown(result: Result) -> Json:
    line = result.line
    if line.state != "succeeded" or line.answer is None:
        raise failure_of(line)
    item = decode(result.given, _item_decoder)
    shape = Shape(json=is_json(item.output()[0]), reasoning=not item.hides_reasoning)
    return result_body(line.answer, shape)


def _reference(given: bytes) -> Any:
    try:
        return decode(given, _reference_decoder).external_reference
    except EmberlineError:
        return None
