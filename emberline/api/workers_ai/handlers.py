"""The Workers AI API's `run`: now, or queued and polled by request id."""

import re
from typing import Any

import msgspec

from emberline.api.batches.job_format import FileLine, Result, batch_results, line_request
from emberline.api.batches.submission import find_batch, new_batch, position_body, submit_once, submit_requests
from emberline.api.common.form import AnswerForm
from emberline.api.http.body import read_body
from emberline.api.http.errors import Dialect, NoSuchBatch, error_body
from emberline.api.http.exchange import JSON, HttpExchange, Reply, Services, encode
from emberline.api.http.streaming import ByteStream, Chunks, Response
from emberline.api.http.unknown_fields import unknown_field_log
from emberline.api.http.wire import MAX_VALUES, NO_LIMIT, Wire, decode, n_separators, named_model
from emberline.api.workers_ai.encode_request import EncodeInput, encoded_result, encodes_text
from emberline.api.workers_ai.media import TASKS, run_media
from emberline.api.workers_ai.predict import PredictInput, prediction_reply, read_predict_input
from emberline.api.workers_ai.response_body import RunStream, enveloped, result_body, result_reply
from emberline.api.workers_ai.run_request import RunOptions, RunRequest, UniversalRequest
from emberline.api.workers_ai.speech import run_speech
from emberline.catalog.model_card import PREDICTION, SPEECH_RECOGNITION, CogSource
from emberline.jobs.batches.batch import Batch, new_batch_id
from emberline.jobs.queue.job import NewJob
from emberline.protocol.errors import BadInput, EmberlineError, TooLarge, Unsupported
from emberline.protocol.gateway import DYNAMIC

ENDPOINT = "/ai/run"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Json = dict[str, Any]
QueuedBody = RunRequest | EncodeInput | PredictInput


class _RawInput(msgspec.Struct):
    """A universal request, its input as it was sent."""

    model: str
    input: msgspec.Raw


class _Submission(msgspec.Struct):
    """The parts of a body that do not count for the limit on its values: inputs for the queue, which are limited when
    each is read, as a line of a batch, and the bytes of an image."""

    requests: msgspec.Raw = msgspec.Raw()
    image: msgspec.Raw = msgspec.Raw()

    @property
    def max_values(self) -> int:
        return MAX_VALUES + n_separators(bytes(self.requests)) + n_separators(bytes(self.image))


class _UniversalSubmission(msgspec.Struct):
    input: _Submission


class _Reference(msgspec.Struct):
    external_reference: Any = None


class _QueuedInput(RunRequest, kw_only=True):
    external_reference: Any = None


RUN = AnswerForm(
    to_body=result_body,
    to_stream=RunStream,
    envelope=enveloped,
)
ENCODE = AnswerForm(
    to_body=encoded_result,
    envelope=enveloped,
)
_run_decoder = msgspec.json.Decoder(RunRequest)
_encode_decoder = msgspec.json.Decoder(EncodeInput)
_queued_decoder = msgspec.json.Decoder(_QueuedInput)
_universal_decoder = msgspec.json.Decoder(UniversalRequest)
_raw_decoder = msgspec.json.Decoder(_RawInput)
_submission_decoder = msgspec.json.Decoder(_Submission)
_universal_submission_decoder = msgspec.json.Decoder(_UniversalSubmission)
_reference_decoder = msgspec.json.Decoder(_Reference)


async def run(call: HttpExchange) -> Response:
    if call.path_param.startswith(DYNAMIC):
        return await run_model(call, call.path_param, await read_body(call))
    card = call.use_model(call.path_param)  # an unknown model is reported before what is wrong with the body
    raw = await read_body(call, any_type=card.task in (SPEECH_RECOGNITION, PREDICTION))
    return await run_model(call, call.path_param, raw)


async def run_model(call: HttpExchange, model: str, raw: bytes) -> Response:
    """Run the model on its input, `raw`. The model was looked up, unless it is a route of the gateway that it names."""
    if (card := call.card) is None:
        return await _run_input(call, model, raw, encodes=False)
    if card.task == SPEECH_RECOGNITION:
        return await _hear(call, model, raw)
    if (predictor := card.predictor) is not None:
        return await _predict(call, model, raw, predictor)
    if card.task in TASKS:
        return await run_media(call, model, card, raw)
    return await _run_input(call, model, raw, encodes_text(card))


async def run_universal(call: HttpExchange) -> Response:
    raw = await read_body(call)
    if (name := named_model(raw)) is not None and not name.startswith(DYNAMIC):
        call.use_model(name)
    max_values = decode(raw, _universal_submission_decoder, NO_LIMIT).input.max_values
    body = decode(raw, _raw_decoder, max_values)
    card = call.card
    if card is None or card.task in (SPEECH_RECOGNITION, PREDICTION, *TASKS) or encodes_text(card):
        return await run_model(call, body.model, bytes(body.input))
    given = decode(raw, _universal_decoder, max_values)  # names a field that is wrong by its whole path
    return await _run(call, body.model, bytes(body.input), given.input)


async def _run_input(call: HttpExchange, model: str, raw: bytes, encodes: bool) -> Response:
    decoder: msgspec.json.Decoder[Any] = _encode_decoder if encodes else _run_decoder
    body = decode(raw, decoder, decode(raw, _submission_decoder, NO_LIMIT).max_values)
    return await _run(call, model, raw, body)


async def _run(call: HttpExchange, model: str, raw: bytes, body: RunRequest | EncodeInput) -> Response:
    call.wire = Wire(raw)
    call.wire.ignore_all_but(type(body))
    if body.options is not None and body.options.gateway is not None:
        call.use_gateway(body.options.gateway)
    if body.for_queue or _queue_requested(call):
        call.refuse_gateway("queueRequest")
        return await _run_queued(call, model, raw, body)
    if isinstance(body, RunRequest):
        request, call.field_names = body.to_request(call.id, call.session, model)
        return await RUN.answer(call, body, call.run(request), streams=body.stream)
    task, call.field_names = body.to_request(call.id, call.session, model)
    return await ENCODE.encode(call, body, task)


async def _hear(call: HttpExchange, model: str, raw: bytes) -> Reply:
    if _queue_requested(call):
        raise Unsupported(f"{model} has no queue: leave `queueRequest` out", param="queueRequest")
    return await run_speech(call, model, raw)


async def _predict(call: HttpExchange, model: str, raw: bytes, predictor: CogSource) -> Response:
    content_type = call.headers.get("content-type", "").encode("latin-1", "replace").lower()
    body = read_predict_input(raw, predictor, content_type)
    if body.options.gateway is not None:
        call.use_gateway(body.options.gateway)
    if body.for_queue or _queue_requested(call):
        call.refuse_gateway("queueRequest")
        return await _run_queued(call, model, raw, body)
    task = body.to_request(call.id, call.session, model)
    if body.stream:
        return await RUN.answer(call, RunRequest(stream=True), call.run(task), streams=True)
    return await prediction_reply(call, predictor, await call.result(task))


def _queue_requested(call: HttpExchange) -> bool:
    value = call.query.get("queueRequest", "false").lower()
    if value not in ("true", "false"):
        raise BadInput("`queueRequest` must be true or false", param="queueRequest")
    return value == "true"


# --- the queue --------------------------------------------------------------------------------------------------------


async def _run_queued(call: HttpExchange, model: str, raw: bytes, body: QueuedBody) -> Response:
    """Submit, or poll. `raw` is the body as sent: without `requests`, it is the only input."""
    if body.request_id is not None:
        return await _poll(call, body.request_id)
    return await _submit(call, model, raw, body)


async def _submit(call: HttpExchange, model: str, raw: bytes, body: QueuedBody) -> Reply:
    card = call.card or call.use_model(model)
    requests = _requests(call, raw, body, card.id)
    most = call.queue.limits.max_jobs
    if len(requests) > most:
        raise TooLarge(f"{len(requests):,} requests are too many for one call, which takes {most:,}", param="requests")

    async def submit(batch_id: str) -> bytes:
        new = new_batch(call, batch_id, "workers_ai", ENDPOINT, model=card.id)
        batch = await submit_requests(call, new, requests)
        return encode(enveloped(call, {"status": "queued", "request_id": batch.id, "model": model}))

    reply = await submit_once(call, raw, new_batch_id("workers_ai"), submit)
    return reply._replace(headers=[*reply.headers, *call.id_headers])


def _requests(call: HttpExchange, raw: bytes, body: QueuedBody, model: str) -> list[msgspec.Raw]:
    if isinstance(body, PredictInput):
        return [msgspec.Raw(encode(each)) for each in body.requests] if body.requests else [msgspec.Raw(raw)]
    if body.requests is None:
        _, call.field_names = body.to_request(call.id, None, model)  # a single invalid input is refused at once
        if body.stream:
            raise BadInput("`stream` has no meaning in the queue: leave it out", param="stream")
        return [msgspec.Raw(raw)]
    if body.prompt is not None or body.messages is not None:
        raise BadInput("`requests` excludes `prompt` and `messages`: each request has its own", param="requests")
    return body.requests


async def _poll(call: HttpExchange, request_id: str) -> Response:
    if not _UUID.fullmatch(request_id):
        raise NoSuchBatch(f"{request_id[:80]!r} is not a request id", param="request_id")
    batch = await find_batch(call, request_id, "workers_ai")
    if not batch.ended:
        position = await call.queue.position(batch)
        status = "running" if position.running or batch.counts.ended else "queued"
        body: Json = {"status": status, "request_id": batch.id, "model": batch.model}
        return result_reply(call, body | position_body(position))
    return ByteStream(_responses(call, batch), JSON, headers=call.id_headers)


async def _responses(call: HttpExchange, batch: Batch) -> Chunks:
    """The envelope, written around the results as they are read."""
    begin = b'{"result":{' if call.dialect is Dialect.NATIVE else b"{"
    yield begin + b'"responses":['
    separator = b""
    if batch.counts.total:
        async for result in batch_results(call.queue, batch):
            yield separator + _job_result(result)
            separator = b","
    n_in, n_out = batch.input_tokens, batch.output_tokens
    usage = {"prompt_tokens": n_in, "completion_tokens": n_out, "total_tokens": n_in + n_out}
    rest = encode(enveloped(call, {"usage": usage, "request_id": batch.id, "model": batch.model}))
    yield b"]," + rest.removeprefix(begin)


def _job_result(result: Result) -> bytes:
    body: Json = {"id": result.job.number}
    try:
        answer = result.answer()
        if answer.prediction:
            shown: Any = msgspec.Raw(answer.prediction)
        elif answer.encoded is None:
            shown = result_body(result.job.request_id, decode(result.line, _queued_decoder), 0, answer)
        else:
            shown = encoded_result(result.job.request_id, decode(result.line, _encode_decoder), 0, answer)
        body |= {"result": shown, "success": True}
    except EmberlineError as error:
        body |= {"success": False, "error": error_body(error, Dialect.NATIVE, result.job.request_id)["errors"][0]}
    try:
        reference = decode(result.line, _reference_decoder).external_reference
    except EmberlineError:
        reference = None
    return encode(body if reference is None else body | {"external_reference": reference})


def read_input_job(service: Services, batch: Batch, line: FileLine) -> NewJob:
    """The job of one input. The batch names its model, by id."""
    reference, model = "", batch.model
    try:
        card = service.models.find(model, batch.account)
        if (predictor := card.predictor) is not None:
            return _prediction_job(service, batch, read_predict_input(line.content(), predictor))
        encodes = encodes_text(card)
        decoder: msgspec.json.Decoder[Any] = _encode_decoder if encodes else _queued_decoder
        wire = Wire(line.content())
        given: _QueuedInput | EncodeInput = wire.decode(decoder)
        unknown_field_log.add(f"{ENDPOINT} in the queue", wire.unknown)
        if isinstance(given.external_reference, str):
            reference = given.external_reference[:512]
        if given.stream:
            raise BadInput("`stream` has no meaning in the queue: leave it out", param="stream")
        if given.requests is not None or given.request_id is not None:
            wanted = "a `text`, or a `query` and `contexts`" if encodes else "a `prompt` or `messages`"
            raise BadInput(f"an input in `requests` is {wanted}", param="requests")
        _refuse_gateway(given.options)
        task, _ = given.to_request("", None, model)
        return NewJob(reference, line_request(task, service, batch))
    except EmberlineError as error:
        return NewJob(reference, None, error.info())


def _refuse_gateway(options: RunOptions | None) -> None:
    """Refuse an input in `requests` that asks for a gateway, whose rules nobody would apply."""
    if options is not None and options.gateway is not None:
        raise Unsupported("a gateway answers at once: leave `options.gateway` out", param="requests")


def _prediction_job(service: Services, batch: Batch, given: PredictInput) -> NewJob:
    reference = given.external_reference if isinstance(given.external_reference, str) else ""
    if given.stream:
        raise BadInput("`stream` has no meaning in the queue: leave it out", param="stream")
    if given.requests is not None or given.request_id is not None:
        raise BadInput("an input in `requests` has the inputs of the model", param="requests")
    _refuse_gateway(given.options)
    return NewJob(reference[:512], line_request(given.to_request("", None, batch.model), service, batch))
