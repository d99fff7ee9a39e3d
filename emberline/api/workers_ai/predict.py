"""Workers AI's `run` of models that users brought along: inputs of a model's own schema, files as data URLs."""

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from emberline.api.http.errors import Dialect, HeaderList
from emberline.api.http.exchange import HttpExchange, Reply, encode
from emberline.api.http.wire import decode
from emberline.api.workers_ai.response_body import envelope
from emberline.api.workers_ai.run_request import RunOptions, read_options
from emberline.catalog.model_card import CogSource
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.prediction import Manifest, Prediction, is_file
from emberline.protocol.request import PredictRequest

# Fields of a body that are for us, unless the model has an input of the name.
_CONTROLS = ("stream", "options", "requests", "request_id", "external_reference", "context")
_BYTES = (b"image/", b"audio/", b"video/", b"application/octet-stream", b"application/pdf")
_CONTENT_TYPE = re.compile(r"[A-Za-z0-9.+-]{1,64}/[A-Za-z0-9.+-]{1,128}")
# A predictor's file is no page of ours: a browser runs no script in it, and does not guess at its type.
_NO_PAGE: HeaderList = [(b"content-security-policy", b"sandbox"), (b"x-content-type-options", b"nosniff")]
_INLINE_BYTES = 64 << 10  # of a file's data URL that is decoded on the event loop
_decoder = msgspec.json.Decoder(dict[str, Any])


class PredictInput(msgspec.Struct, kw_only=True):
    """A body: the model's inputs, and fields for us."""

    inputs: dict[str, Any]
    stream: bool = False
    context: dict[str, str] = {}
    options: RunOptions = msgspec.field(default_factory=RunOptions)
    requests: list[Any] | None = None  # inputs for the queue
    request_id: str | None = None  # of queued inputs: asks for their status
    external_reference: Any = None

    @property
    def for_queue(self) -> bool:
        """True if the body submits to the queue or polls it."""
        return bool(self.options.queue_request) or self.requests is not None or self.request_id is not None

    def to_request(self, request_id: str, session: str | None, model: str) -> PredictRequest:
        return PredictRequest(
            id=request_id,
            model=model,
            input=self.inputs,
            stream=self.stream,
            context=self.context,
            session=session,
            reject_if_busy=bool(self.options.reject_if_busy),
            api="run",
        )


def read_predict_input(raw: bytes, predictor: CogSource, content_type: bytes = b"") -> PredictInput:
    """Read a body: JSON whatever its type, else the bytes of the model's only file. Raises BadInput."""
    names = predictor.input.get("properties", {})
    if content_type.startswith(_BYTES) or (raw and raw.lstrip()[:1] != b"{"):
        return PredictInput(inputs={_only_file(predictor): _data_url(raw, content_type)})
    given = decode(raw or b"{}", _decoder)
    controls = {name: given.pop(name) for name in _CONTROLS if name in given and name not in names}
    if "input" not in names and given.keys() == {"input"} and isinstance(given["input"], dict):
        given = given["input"]  # as Cog's own API has it
    for name, kind in (("stream", bool), ("requests", list), ("request_id", str)):
        if not isinstance(controls.get(name), kind | None):
            raise BadInput(f"`{name}` must be of type {kind.__name__}", param=name)
    return PredictInput(
        inputs=given,
        stream=bool(controls.get("stream")),
        context=_read_context(controls.get("context")),
        options=read_options(controls.get("options")),
        requests=controls.get("requests"),
        request_id=controls.get("request_id"),
        external_reference=controls.get("external_reference"),
    )


def _read_context(given: Any) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise BadInput("`context` must be an object of texts", param="context")
    return given


async def prediction_reply(call: HttpExchange, predictor: CogSource, prediction: Prediction) -> Reply:
    """The result in the envelope, with what the predictor measured and logged; a model's only file as its bytes.

    An output is never decoded as JSON, and a large one never copied in one: it would hold up all other requests."""
    pieces = prediction.pieces or (bytes(prediction.output),)
    if is_file(predictor.output) and pieces[0].startswith(b'"data:'):
        is_large = len(pieces[0]) > _INLINE_BYTES
        content_type, parts = await asyncio.to_thread(read_file, pieces) if is_large else read_file(pieces)
        return Reply(200, parts[0], content_type.encode(), [*call.id_headers, *_NO_PAGE], parts[1:])
    further = {name: value for name, value in (("metrics", prediction.metrics), ("logs", prediction.logs)) if value}
    if call.dialect is Dialect.BINDING:
        begin, end = b"", b""
    else:
        begin, _, end = encode(envelope(None, **further)).partition(b"null")
    if not prediction.pieces:
        return Reply(200, b"%b%b%b" % (begin, pieces[0], end), headers=call.id_headers)
    return Reply(200, begin, headers=call.id_headers, rest=(*pieces, end))


def read_file(pieces: Sequence[bytes]) -> tuple[str, list[bytes]]:
    """The media type and the bytes, in parts, of a data URL in JSON. Decodes piece by piece: other threads run in
    between."""
    head, comma, first = pieces[0].partition(b",")
    parts, left = [], b""
    try:
        if not comma or any(b"\\" in piece for piece in pieces):
            raise ValueError
        for piece in (first, *pieces[1:]):
            data = left + piece.removesuffix(b'"')
            n_whole = len(data) & ~3  # characters of base64, of which four are three bytes
            parts.append(binascii.a2b_base64(data[:n_whole], strict_mode=True))
            left = data[n_whole:]
        if left:
            raise ValueError
    except ValueError:  # with white space, or no base64
        content_type, whole = from_data_url(msgspec.json.decode(b"".join(pieces), type=str))
        return content_type, [whole]
    content_type, _ = from_data_url((head + b",")[1:].decode("utf-8", "replace"))
    return content_type, parts


def _only_file(predictor: CogSource) -> str:
    files = Manifest(
        model="", version=0, digest="", reference="", interpreter="", input=predictor.input, output={}
    ).file_inputs
    required = [name for name in files if name in predictor.input.get("required", ())] or files
    if len(required) != 1:
        raise BadInput("this model does not take one file: send its inputs as a JSON object")
    return required[0]


def _data_url(data: bytes, content_type: bytes) -> str:
    kind = content_type.decode("latin-1").partition(";")[0].strip() or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def from_data_url(url: str) -> tuple[str, bytes]:
    head, _, data = url.partition(",")
    kind = head[5:].partition(";")[0]
    try:
        return kind if _CONTENT_TYPE.fullmatch(kind) else "application/octet-stream", base64.b64decode(data)
    except ValueError:  # also for text that is no ASCII
        raise Unsupported("the predictor returned a file that is not in base64") from None
