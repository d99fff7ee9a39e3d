"""OpenAI's embeddings, transcriptions, images, speech and videos, as a provider of its family computes them."""

import asyncio
import secrets
import struct
from base64 import b64decode
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from emberline.protocol import token_ids as tokens
from emberline.protocol.complete_response import Encoded
from emberline.protocol.errors import BadInput, DeadlineExceeded, Unsupported
from emberline.protocol.events import Usage
from emberline.protocol.media import Media, MediaFile, MediaRequest
from emberline.protocol.request import EncodeRequest, SpeechRequest
from emberline.protocol.speech import TimedWord, Transcript, TranscriptSegment
from emberline.upstream.dialects.dialect import Fetch, ProviderCall, UnreadableReply, WholeReply, WholeTask
from emberline.upstream.dialects.sse import read_usage, token_count

VIDEO_POLL_S = 5.0
MAX_VIDEO_S = 1800.0  # for one to be made
_PATHS = {"image": "/images/generations", "image_edit": "/images/edits", "speech": "/audio/speech", "video": "/videos"}
_OPERATIONS = {"image": "generate_image", "image_edit": "generate_image", "speech": "speech", "video": "generate_video"}
_MAX_SECONDS = 24 * 3600


# --- embeddings -------------------------------------------------------------------------------------------------------


def embeddings(model: str, request: EncodeRequest) -> WholeTask[Encoded]:
    refuse_encoding(request)
    given: Any = list(request.texts) or [tokens.unpack(ids) for ids in request.token_ids]
    body: dict[str, Any] = {"model": model, "input": given, "encoding_format": "float"}
    if request.dimensions is not None:
        body["dimensions"] = request.dimensions
    n_rows = request.n_texts
    call = ProviderCall("/embeddings", msgspec.json.encode(body))
    return WholeTask("embeddings", call, lambda reply: _read_embeddings(reply, n_rows))


def refuse_encoding(request: EncodeRequest) -> None:
    for name, value in (("query", request.query), ("pooling", request.pooling)):
        if value is not None:
            raise Unsupported(f"a provider's embeddings have no `{name}`", param=name)
    if request.truncate:
        raise Unsupported("a provider's embeddings cannot be asked to cut texts", param="truncate")


def _read_embeddings(reply: WholeReply, n_rows: int) -> tuple[Encoded, Usage]:
    answer = read_json(reply)
    rows = answer.get("data")
    if not isinstance(rows, list) or len(rows) != n_rows:
        raise UnreadableReply(f"embeddings of {len(rows) if isinstance(rows, list) else 'no'} texts, not of {n_rows}")
    ordered = sorted(rows, key=lambda row: row.get("index", 0)) if all(isinstance(row, dict) for row in rows) else []
    usage = _usage(answer)
    return encoded([row.get("embedding") for row in ordered], n_rows, usage), usage


def encoded(vectors: Sequence[Any], n_rows: int, usage: Usage) -> Encoded:
    """Lists of numbers, or their bytes in base64."""
    try:
        packed = [
            b64decode(vector) if isinstance(vector, str) else struct.pack(f"<{len(vector)}f", *vector)
            for vector in vectors
        ]
    except (TypeError, ValueError, struct.error):
        raise UnreadableReply("vectors that are no numbers") from None
    if len(packed) != n_rows or len({len(row) for row in packed}) != 1 or not packed[0] or len(packed[0]) % 4:
        raise UnreadableReply("vectors of different sizes")
    return Encoded(values=b"".join(packed), n_rows=n_rows, usage=usage, pooling="mean")


# --- speech to text ---------------------------------------------------------------------------------------------------


def transcription(model: str, request: SpeechRequest) -> WholeTask[Transcript]:
    verbose = "transcribe" not in model  # OpenAI's newer models give the text alone
    fields: dict[str, Any] = {"model": model, "response_format": "verbose_json" if verbose else "json"}
    if request.language is not None and not request.translate:
        fields["language"] = request.language
    if request.prompt:
        fields["prompt"] = request.prompt
    if request.temperature:
        fields["temperature"] = request.temperature
    if verbose:
        fields["timestamp_granularities[]"] = ["segment", "word"] if request.words else ["segment"]
    file = MediaFile("file", "audio", "application/octet-stream", request.audio)
    content_type, body = multipart(fields, (file,))
    path = "/audio/translations" if request.translate else "/audio/transcriptions"
    return WholeTask("transcription", ProviderCall(path, body, content_type=content_type), _read_transcript)


def _read_transcript(reply: WholeReply) -> tuple[Transcript, Usage]:
    answer = read_json(reply)
    text, duration = answer.get("text"), answer.get("duration")
    if not isinstance(text, str):
        raise UnreadableReply("a transcript without text")
    told = answer.get("usage")
    counted = told if isinstance(told, dict) else {}
    seconds = _seconds(duration) or _seconds(counted.get("seconds"))
    try:
        segments = tuple(
            TranscriptSegment(start_s=float(row["start"]), end_s=float(row["end"]), text=str(row["text"]))
            for row in answer.get("segments") or ()
        )
        words = tuple(
            TimedWord(str(row["word"]), float(row["start"]), float(row["end"])) for row in answer.get("words") or ()
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UnreadableReply("segments that cannot be read") from None
    if not segments or words:  # words come apart from the segments: then one has all of them
        segments = segments or (TranscriptSegment(start_s=0.0, end_s=seconds, text=text),)
        first = msgspec.structs.replace(segments[0], words=words)
        segments = (first, *segments[1:])
    language = answer.get("language")
    audio_ms = int(seconds * 1000)
    transcript = Transcript(
        language=language if isinstance(language, str) else "", audio_ms=audio_ms, segments=segments
    )
    usage = msgspec.structs.replace(read_usage(counted), audio_ms=audio_ms)
    return transcript, usage


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return 0.0
    return seconds if 0 <= seconds <= _MAX_SECONDS else 0.0


# --- images, speech, video --------------------------------------------------------------------------------------------


def media(model: str, request: MediaRequest) -> WholeTask[Media]:
    fields = {**request.fields, "model": model}
    if request.files:
        content_type, body = multipart(fields, request.files)
    else:
        content_type, body = "application/json", msgspec.json.encode(fields)
    call = ProviderCall(_PATHS[request.task], body, content_type=content_type)
    operation = _OPERATIONS[request.task]
    if request.task == "speech":
        n_chars = len(str(request.fields.get("input", "")))
        return WholeTask(operation, call, lambda reply: _read_bytes(reply, Usage(prompt_tokens=n_chars), "audio/"))
    if request.task == "video":
        return WholeTask(operation, call, _read_video, partial(_wait_for_video, request.video_s))
    return WholeTask(operation, call, _read_images)


def _read_images(reply: WholeReply) -> tuple[Media, Usage]:
    answer = read_json(reply)
    images = answer.get("data")
    if not isinstance(images, list) or not all(isinstance(image, dict) for image in images):
        raise UnreadableReply("no list of images")
    usage = msgspec.structs.replace(_usage(answer), images=min(len(images), 1000))
    return Media(reply.body), usage


def _read_bytes(reply: WholeReply, usage: Usage, kind: str) -> tuple[Media, Usage]:
    content_type = reply.content_type.partition(";")[0].strip().lower()
    if not content_type.startswith((kind, "application/octet-stream")) or not reply.body:
        raise UnreadableReply(f"{content_type[:64] or 'nothing'} in place of {kind.rstrip('/')}")
    return Media(reply.body, content_type), usage


async def _wait_for_video(asked_s: float, reply: WholeReply, fetch: Fetch) -> WholeReply:
    """The provider has begun a job: wait for it, then fetch its file. Its length is put before it: as the provider
    says, or as was asked for."""
    job = read_json(reply)
    name = str(job.get("id") or "")
    if not name.replace("-", "").replace("_", "").isalnum():
        raise UnreadableReply("a video job without an id")
    waited_s = 0.0
    while (status := job.get("status")) not in ("completed", "failed"):
        if status not in ("queued", "in_progress"):
            raise UnreadableReply(f"the status {str(status)[:32]} of a video job")
        if waited_s > MAX_VIDEO_S:
            raise DeadlineExceeded(f"the video was not made within {MAX_VIDEO_S:g} s")
        await asyncio.sleep(VIDEO_POLL_S)
        waited_s += VIDEO_POLL_S
        job = read_json(await fetch(f"/videos/{name}"))
    if status == "failed":
        error = job.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        raise BadInput(f"the video was not made: {message}")
    seconds = _seconds(job.get("seconds")) or asked_s
    content = await fetch(f"/videos/{name}/content")
    return WholeReply(struct.pack("<d", seconds) + content.body, "video/mp4")


def _read_video(reply: WholeReply) -> tuple[Media, Usage]:
    (seconds,) = struct.unpack_from("<d", reply.body)
    if len(reply.body) <= 8:
        raise UnreadableReply("an empty video")
    return Media(reply.body[8:], "video/mp4"), Usage(audio_ms=int(seconds * 1000))


# --- both ways --------------------------------------------------------------------------------------------------------


def read_json(reply: WholeReply) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(reply.body)
    except (msgspec.DecodeError, RecursionError):
        raise UnreadableReply(f"{reply.content_type[:64] or 'something'} that is not JSON") from None
    if not isinstance(answer, dict):
        raise UnreadableReply("JSON that is no object")
    return answer


def _usage(answer: dict[str, Any]) -> Usage:
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return Usage()
    found = read_usage(usage)
    return found if found.prompt_tokens else Usage(prompt_tokens=token_count(usage.get("total_tokens")))


def multipart(fields: dict[str, Any], files: Sequence[MediaFile]) -> tuple[str, bytes]:
    """Content type and body of a form. Names and values were checked: none has a quote or a line end."""
    boundary = f"emberline{secrets.token_hex(16)}"
    parts: list[bytes] = []
    for name, value in fields.items():
        for item in value if isinstance(value, list) else [value]:
            text = item if isinstance(item, str) else msgspec.json.encode(item).decode()
            parts.append(f'--{boundary}\r\ncontent-disposition: form-data; name="{_token(name)}"\r\n\r\n'.encode())
            parts.append(text.encode() + b"\r\n")
    for file in files:
        head = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="{_token(file.field)}"; '
            f'filename="{_token(file.name)}"\r\ncontent-type: {_token(file.content_type)}\r\n\r\n'
        )
        parts += [head.encode(), file.data, b"\r\n"]
    parts.append(f"--{boundary}--\r\n".encode())
    return f"multipart/form-data; boundary={boundary}", b"".join(parts)


def _token(text: str) -> str:
    """Return the text without characters that would end a header early."""
    return "".join(char for char in text if char.isprintable() and char.isascii() and char not in '"\\')[:200]
