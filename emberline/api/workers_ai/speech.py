"""Workers AI's `run` of a speech model: audio as raw bytes, as a list of bytes, or in base64."""

import base64
import binascii
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.transcript import vtt, words_body
from emberline.api.common.unsupported_fields import UnsupportedField, refuse_unsupported
from emberline.api.http.exchange import HttpExchange, Reply
from emberline.api.http.wire import NO_LIMIT, decode
from emberline.api.workers_ai.response_body import result_reply
from emberline.api.workers_ai.run_request import RunOptions
from emberline.protocol.errors import BadInput, TooLarge, Unsupported
from emberline.protocol.request import SpeechRequest
from emberline.protocol.speech import MAX_AUDIO_BYTES, Transcript

Byte = Annotated[int, Meta(ge=0, le=255)]


class SpeechInput(msgspec.Struct, kw_only=True):
    audio: list[Byte] | str  # bytes, or base64
    task: Literal["transcribe", "translate"] = "transcribe"
    language: str | None = None
    initial_prompt: Annotated[str, Meta(max_length=2000)] = ""
    vad_filter: bool | Literal["true", "false"] = False
    options: RunOptions | None = None
    prefix: UnsupportedField = None
    beam_size: UnsupportedField = None

    @property
    def audio_bytes(self) -> bytes:
        if not isinstance(self.audio, str):
            return bytes(self.audio)
        text = self.audio.partition(";base64,")[2] if self.audio.startswith("data:") else self.audio
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise BadInput("`audio` is not valid base64", param="audio") from None


_decoder = msgspec.json.Decoder(SpeechInput)

OUTPUT_SCHEMA = {
    "type": "object",
    "contentType": "application/json",
    "properties": {
        "text": {"type": "string"},
        "word_count": {"type": "number"},
        "words": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "start": {"type": "number"}, "end": {"type": "number"}},
            },
        },
        "vtt": {"type": "string"},
        "transcription_info": {"type": "object"},
        "segments": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["text"],
}


async def run_speech(call: HttpExchange, model: str, raw: bytes) -> Reply:
    """`raw` is JSON if it begins as an object does; clients name all kinds of content types."""
    body = decode(raw, _decoder, NO_LIMIT) if raw.lstrip()[:1] == b"{" else None
    audio = raw if body is None else body.audio_bytes
    if body is not None:
        refuse_unsupported(body)
        if body.vad_filter not in (False, "false"):
            raise BadInput("`vad_filter` is not supported: leave it out", param="vad_filter")
        if body.options is not None and body.options.queue_request:
            raise Unsupported(f"{model} has no queue: leave `queueRequest` out", param="queueRequest")
        if body.options is not None and body.options.gateway is not None:
            call.use_gateway(body.options.gateway)
    if len(audio) > MAX_AUDIO_BYTES:
        raise TooLarge(f"audio has at most {MAX_AUDIO_BYTES // 1_000_000} MB", param="audio")
    request = SpeechRequest(id=call.id, model=model, audio=audio, session=call.session, api="run")
    if body is not None:
        request = msgspec.structs.replace(
            request, language=body.language, translate=body.task == "translate", prompt=body.initial_prompt
        )
    transcript: Transcript = await call.result(request)
    return result_reply(call, result(transcript))


def result(transcript: Transcript) -> dict[str, Any]:
    words = transcript.words
    return {
        "text": transcript.text,
        "word_count": len(words),
        "words": words_body(words),
        "vtt": vtt(transcript),
        "transcription_info": {
            "language": transcript.language,
            "language_probability": transcript.language_probability,
            "duration": transcript.audio_ms / 1000,
        },
        "segments": [
            {
                "start": segment.start_s,
                "end": segment.end_s,
                "text": segment.text,
                "temperature": segment.temperature,
                "avg_logprob": segment.avg_logprob,
                "compression_ratio": segment.compression_ratio,
                "no_speech_prob": segment.no_speech_prob,
                "word_count": len(segment.words),
                "words": words_body(segment.words),
            }
            for segment in transcript.segments
        ],
    }
