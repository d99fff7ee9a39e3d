"""Gemini's embeddings and images."""

from typing import Any

import msgspec

from emberline.protocol.complete_response import Encoded
from emberline.protocol.errors import Unsupported
from emberline.protocol.events import Usage
from emberline.protocol.media import Media, MediaRequest
from emberline.protocol.request import EncodeRequest
from emberline.upstream.dialects.dialect import ProviderCall, UnreadableReply, WholeReply, WholeTask
from emberline.upstream.dialects.gemini import model_path
from emberline.upstream.dialects.openai_media import encoded, read_json, refuse_encoding
from emberline.upstream.dialects.sse import token_count

_IMAGE_FIELDS = frozenset({"prompt", "n", "response_format", "user"})


def embeddings(model: str, request: EncodeRequest) -> WholeTask[Encoded]:
    refuse_encoding(request)
    if not request.texts:
        raise Unsupported("Gemini embeds texts, not token ids", param="input")
    one: dict[str, Any] = {"model": f"models/{model.removeprefix('models/')}"}
    if request.dimensions is not None:
        one["outputDimensionality"] = request.dimensions
    body = {"requests": [{**one, "content": {"parts": [{"text": text}]}} for text in request.texts]}
    call = ProviderCall(f"{model_path(model)}:batchEmbedContents", msgspec.json.encode(body))
    estimate = Usage(prompt_tokens=sum(len(text.encode("utf-8", "replace")) for text in request.texts) // 4)
    return WholeTask("embeddings", call, lambda reply: _read_embeddings(reply, request.n_texts, estimate))


def _read_embeddings(reply: WholeReply, n_rows: int, estimate: Usage) -> tuple[Encoded, Usage]:
    """The reply has no usage: it is what the texts' bytes amount to."""
    answer = read_json(reply)
    rows = answer.get("embeddings")
    if not isinstance(rows, list) or len(rows) != n_rows:
        raise UnreadableReply(f"no embeddings of {n_rows} texts")
    metadata = answer.get("usageMetadata")
    told = token_count(metadata.get("promptTokenCount")) if isinstance(metadata, dict) else 0
    usage = Usage(prompt_tokens=told) if told else estimate
    return encoded([row.get("values") if isinstance(row, dict) else None for row in rows], n_rows, usage), usage


def media(model: str, request: MediaRequest) -> WholeTask[Media]:
    if request.task != "image":
        raise Unsupported(f"provider gemini has no {request.task.replace('_', ' ')} here", param="model")
    for name, value in request.fields.items():
        if name not in _IMAGE_FIELDS and value is not None:
            raise Unsupported(f"provider gemini has no `{name}` of images", param=name)
    if request.fields.get("response_format") == "url":
        raise Unsupported("provider gemini gives images as b64_json, not as URLs", param="response_format")
    config: dict[str, Any] = {"responseModalities": ["TEXT", "IMAGE"]}
    if request.n_images > 1:
        config["candidateCount"] = request.n_images
    prompt = {"role": "user", "parts": [{"text": str(request.fields.get("prompt", ""))}]}
    body = {"contents": [prompt], "generationConfig": config}
    call = ProviderCall(f"{model_path(model)}:generateContent", msgspec.json.encode(body))
    return WholeTask("generate_image", call, _read_images)


def _read_images(reply: WholeReply) -> tuple[Media, Usage]:
    answer = read_json(reply)
    try:
        parts = [
            part for candidate in answer.get("candidates") or () for part in candidate["content"].get("parts") or ()
        ]
        images = [part["inlineData"]["data"] for part in parts if "inlineData" in part]
        usage: Any = answer.get("usageMetadata") or {}
        prompt, output = token_count(usage.get("promptTokenCount")), token_count(usage.get("candidatesTokenCount"))
    except (KeyError, TypeError, AttributeError):
        raise UnreadableReply("candidates that cannot be read") from None
    if not images:
        raise UnreadableReply("no image: the prompt may have been refused")
    body = {
        "created": 0,
        "data": [{"b64_json": image} for image in images],
        "usage": {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output},
    }
    counted = Usage(prompt_tokens=prompt, completion_tokens=output, images=len(images))
    return Media(msgspec.json.encode(body)), counted
