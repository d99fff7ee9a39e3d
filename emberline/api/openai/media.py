"""The OpenAI API's images and speech, which models of providers make."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.common.sampling_fields import ModelName
from emberline.api.http.body import body_chunks, read_wire
from emberline.api.http.exchange import HttpExchange, Reply, parse_int
from emberline.api.http.wire import Wire, problem
from emberline.net.held_bodies import held_bodies
from emberline.net.multipart import MultipartForm, boundary_of
from emberline.protocol.errors import BadInput, TooLarge, Unsupported
from emberline.protocol.media import MAX_IMAGES, Media, MediaFile, MediaRequest

MAX_FORM_BYTES = 64 << 20
MAX_SPEECH_CHARS = 32_768
_FILES = ("image", "mask")


class ImagesRequest(msgspec.Struct, kw_only=True):
    """Further fields are the provider's, and passed on."""

    model: ModelName = ""
    prompt: str
    n: Annotated[int, Meta(ge=1, le=MAX_IMAGES)] | None = None
    stream: bool | None = None


class SpeechRequestBody(msgspec.Struct, kw_only=True):
    """Further fields are the provider's, and passed on."""

    model: ModelName = ""
    input: Annotated[str, Meta(max_length=MAX_SPEECH_CHARS)]
    voice: Any = None
    stream_format: str | None = None


_images = msgspec.json.Decoder(ImagesRequest)
_speech = msgspec.json.Decoder(SpeechRequestBody)


async def generate_images(call: HttpExchange) -> Reply:
    wire = await read_wire(call)
    body = wire.decode_fields(_images)
    if body.stream:
        raise Unsupported("`stream` is not supported for images", param="stream")
    request = MediaRequest(
        id=call.id, model=body.model, task="image", fields=_passed(wire), session=call.session, api="images"
    )
    return media_reply(call, await make(call, request))


async def edit_images(call: HttpExchange) -> Reply:
    boundary = boundary_of(call.headers.get("content-type", ""))
    form = MultipartForm(body_chunks(call, MAX_FORM_BYTES), boundary)
    fields: dict[str, Any] = {}
    files: list[MediaFile] = []
    async for part in form:
        if part.name.removesuffix("[]") in _FILES:
            data = bytearray()
            async for chunk in form.content():
                held_bodies.add(call, len(chunk))
                data += chunk
                if len(data) > MAX_FORM_BYTES:
                    raise TooLarge("the images are too large", param=part.name)
            files.append(MediaFile(part.name, part.filename or "image.png", _image_type(data), bytes(data)))
        else:
            fields[part.name] = await form.field(part)
    model = fields.pop("model", None) or call.only_model()
    for name, given in (("model", model), ("image", files), ("prompt", fields.get("prompt"))):
        if not given:
            raise BadInput(f"the form has no `{name}`", param=name)
    if fields.get("stream") not in (None, "", "false"):
        raise Unsupported("`stream` is not supported for images", param="stream")
    n = fields.get("n", "1")
    n_images = parse_int(n, "n", 1, MAX_IMAGES)
    request = MediaRequest(
        id=call.id,
        model=str(model),
        task="image_edit",
        fields={**fields, "n": n_images},
        files=tuple(files),
        session=call.session,
        api="images",
    )
    return media_reply(call, await make(call, request))


async def speech(call: HttpExchange) -> Reply:
    wire = await read_wire(call)
    body = wire.decode_fields(_speech)
    if body.stream_format not in (None, "audio"):
        raise Unsupported("`stream_format` is not supported: the audio comes whole", param="stream_format")
    request = MediaRequest(
        id=call.id,
        model=body.model,
        task="speech",
        fields={**_passed(wire), "input": body.input},
        session=call.session,
        api="audio",
    )
    return media_reply(call, await make(call, request))


async def make(call: HttpExchange, request: MediaRequest) -> Media:
    """A client that disconnects cancels the work."""
    made: Media = await call.result(request)
    return made


def media_reply(call: HttpExchange, media: Media) -> Reply:
    return Reply(200, media.body, media.content_type.encode("latin-1", "replace"), call.id_headers)


def _passed(wire: Wire) -> dict[str, Any]:
    """All fields of a body but its model."""
    try:
        return {name: msgspec.json.decode(value) for name, value in wire.fields.items() if name != "model"}
    except msgspec.DecodeError as bad:  # a number that is out of range
        raise problem(bad) from None


def _image_type(data: bytes | bytearray) -> str:
    for magic, kind in ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"RIFF", "image/webp")):
        if data.startswith(magic):
            return kind
    return "application/octet-stream"
