"""A prediction of a model that a user brought along, on a worker of its predictor."""

import base64
import mimetypes
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from emberline.catalog.model_card import ModelCard
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.images.request_images import RequestImages
from emberline.protocol.errors import BadInput, EmberlineError, Internal, TooLarge, Unsupported
from emberline.protocol.events import ChoiceDone, Started, TextDelta, TextEvent, TokenDelta, Usage
from emberline.protocol.prediction import MAX_INPUT_BYTES, Prediction, PredictParams, check_input, has_files
from emberline.protocol.request import EngineRequest, PredictRequest, Principal, SamplingParams
from emberline.protocol.route_request import Route, RouteRequest, route_request
from emberline.service.single_result_request import EngineCall
from emberline.telemetry.request_log import Clock, JobContext, in_flight_id, route_terms

MAX_FETCHES = 100  # of files behind URLs, for one request

_decoder = msgspec.json.Decoder(Prediction)
# Media types by a file's first bytes, where the URL has no extension.
_MAGIC = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"%PDF", "application/pdf"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
    (b"OggS", "audio/ogg"),
)


async def with_files(
    request: PredictRequest, card: ModelCard, principal: Principal, files: RequestImages | None
) -> PredictRequest:
    """The request with the files behind its URLs in it, fetched under the egress policy: a predictor has no network.

    Raises an error that names the input."""
    if card.predictor is None:
        return request
    fields = card.predictor.input.get("properties", {})
    listed = {name: _listed(value) for name, value in request.input.items() if has_files(fields.get(name, {}))}
    remote = [name for name, values in listed.items() if any(map(_is_remote, values))]
    if not remote:
        return request
    check_input(request.input, card.predictor.input)
    if files is None:
        raise Unsupported("this server fetches no files: send them as data: URLs", param=min(remote))
    found, left = dict(request.input), [MAX_FETCHES, MAX_INPUT_BYTES]
    for name in sorted(remote):
        try:
            values = [
                await _fetched(each, principal, files, left) if _is_remote(each) else each for each in listed[name]
            ]
        except EmberlineError as error:
            error.message, error.param = f"the file of `{name}` cannot be used: {error.message}", name
            raise
        found[name] = values if isinstance(found[name], list) else values[0]
    return msgspec.structs.replace(request, input=found)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_remote(value: Any) -> bool:
    return isinstance(value, str) and value[:6].lower().startswith(("http:", "https:"))


async def _fetched(url: str, principal: Principal, files: RequestImages, left: list[int]) -> str:
    """The file behind a URL as a data: URL. `left` has the fetches and bytes that the request may still use."""
    left[0] -= 1
    if left[0] < 0:
        raise TooLarge(f"at most {MAX_FETCHES} URLs are fetched for a request")
    data = await files.fetch(url, principal.account)
    left[1] -= len(data)
    if left[1] < 0:
        raise TooLarge(f"an input has at most {MAX_INPUT_BYTES >> 20} MiB")
    kind = mimetypes.guess_type(urlsplit(url).path)[0] or _kind(data)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _kind(data: bytes) -> str:
    if data[:4] == b"RIFF":
        return {b"WAVE": "audio/wav", b"WEBP": "image/webp"}.get(data[8:12], "application/octet-stream")
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), "application/octet-stream")


def prepare_prediction(
    request: PredictRequest,
    card: ModelCard,
    principal: Principal,
    engines: Mapping[str, EngineClient],
    clock: Clock,
    job: JobContext | None,
    timings: Timings = DEFAULTS,
) -> tuple[RouteRequest, "PredictionCall"]:
    """The request as admission sees it, and its transport. Refuses an input that is not as the schema says."""
    if (predictor := card.predictor) is None:
        raise BadInput(f"{card.id} is for {card.task}, and makes no predictions from inputs of its own", param="model")
    if request.stream and not predictor.streams:
        raise Unsupported(f"{card.id} does not stream: its predictor has no `@cog.streaming`", param="stream")
    check_input(request.input, predictor.input)
    encoded = msgspec.json.encode(request.input)
    if len(encoded) > MAX_INPUT_BYTES:
        raise TooLarge(f"an input has at most {MAX_INPUT_BYTES >> 20} MiB")
    route = route_request(
        route_terms(request, clock, job),
        principal,
        card.id,
        card.fingerprint,
        input_tokens=0,
        max_compute_ms=predictor.max_predict_ms,
        predictions=1,
    )
    return route, PredictionCall(request, encoded, engines, job, timings)


class PredictionCall(EngineCall):
    """One prediction: its whole result, or its outputs as they come."""

    def __init__(
        self,
        request: PredictRequest,
        encoded: bytes,
        engines: Mapping[str, EngineClient],
        job: JobContext | None,
        timings: Timings = DEFAULTS,
    ) -> None:
        self._streams = request.stream
        self._events: list[TextEvent] = []
        self._pieces: list[bytes] = []  # of a large output
        self._has_output = False  # of a stream: then another attempt would repeat it
        sent = EngineRequest(
            id=in_flight_id(request.id, job),
            prompt_ids=b"",
            sampling=SamplingParams(),
            priority=request.priority,
            deadline_s=request.deadline_s,
            predict=PredictParams(
                input=encoded,
                stream=request.stream,
                takes_pieces=not request.stream,
                context=msgspec.json.encode(request.context) if request.context else b"",
            ),
        )
        super().__init__(sent, engines, "prediction", timings)

    async def open(self, route: Route, attempt: int, deadline_s: float | None) -> None:
        self._pieces = []
        await super().open(route, attempt, deadline_s)

    async def next(self) -> list[TextEvent] | None:  # type: ignore[override]
        await super().next()
        if not self._streams:
            return None
        events, self._events = self._events, []
        if self.done:
            events.append(ChoiceDone(0, "stop"))
        return events

    def take(self, delta: TokenDelta) -> None:
        """Make events of a delta that is not the last, or keep its piece of the output."""
        if not self._streams:
            self._pieces += [delta.values] if delta.values else []
            return
        if not self._has_output:
            self._events.append(Started(Usage()))
        self._has_output = True
        if delta.values:
            self._events.append(TextDelta(0, output_text(delta.values)))

    def result(self) -> Prediction:
        assert self.values is not None
        try:
            return msgspec.structs.replace(_decoder.decode(self.values), pieces=tuple(self._pieces))
        except msgspec.MsgspecError:
            raise Internal("the worker returned no prediction") from None


def output_text(output: bytes) -> str:
    """An output in JSON as a text: what a string says, or the JSON itself."""
    try:
        value: Any = msgspec.json.decode(output)
    except msgspec.MsgspecError:
        return ""
    return value if isinstance(value, str) else output.decode("utf-8", "replace")
