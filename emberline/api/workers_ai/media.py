"""Workers AI's `run` of models that make images, speech or video, which are providers'."""

from typing import Any, Literal

import msgspec

from emberline.api.http.exchange import HttpExchange, Reply
from emberline.api.http.wire import decode
from emberline.api.openai.media import make, media_reply
from emberline.api.workers_ai.response_body import result_reply
from emberline.api.workers_ai.run_request import read_options
from emberline.catalog.model_card import TEXT_TO_IMAGE, TEXT_TO_SPEECH, TEXT_TO_VIDEO, ModelCard
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.media import MAX_IMAGES, MediaRequest

TASKS: dict[str, Literal["image", "speech", "video"]] = {
    TEXT_TO_IMAGE: "image",
    TEXT_TO_SPEECH: "speech",
    TEXT_TO_VIDEO: "video",
}
_decoder = msgspec.json.Decoder(dict[str, Any])
# Workers AI's names of what OpenAI calls otherwise.
_SPEECH = {"text": "input", "prompt": "input", "speaker": "voice", "encoding": "response_format"}


async def run_media(call: HttpExchange, model: str, card: ModelCard, raw: bytes) -> Reply:
    """An image as `{"image": base64}`; speech and video as bytes. Fields in OpenAI's words are passed on."""
    given = decode(raw, _decoder)
    options = read_options(given.pop("options", None))
    if options.queue_request:
        raise Unsupported(f"{model} has no queue: leave `queueRequest` out", param="queueRequest")
    if options.gateway is not None:
        call.use_gateway(options.gateway)
    task = TASKS[card.task]
    fields = dict(given)
    if task == "speech":
        fields = {_SPEECH.get(name, name): value for name, value in given.items()}
    elif isinstance(given.get("width"), int) and isinstance(given.get("height"), int):
        fields["size"] = f"{fields.pop('width')}x{fields.pop('height')}"
    wanted = "input" if task == "speech" else "prompt"
    if not isinstance(fields.get(wanted), str) or not fields[wanted]:
        raise BadInput(f"`{'text' if task == 'speech' else 'prompt'}` is needed", param="prompt")
    n = fields.get("n")
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_IMAGES):
        raise BadInput(f"`n` is from 1 to {MAX_IMAGES}", param="n")
    if task == "speech":
        fields.setdefault("voice", "alloy")
    request = MediaRequest(id=call.id, model=model, task=task, fields=fields, session=call.session, api="run")
    media = await make(call, request)
    if task != "image":
        return media_reply(call, media)
    images: Any = msgspec.json.decode(media.body)
    first = (images.get("data") or [{}])[0]
    return result_reply(call, {"image": first["b64_json"]} if "b64_json" in first else {"image_url": first.get("url")})
