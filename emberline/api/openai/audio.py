"""The OpenAI API's transcriptions and translations of recorded speech."""

import re
from typing import Any, Literal

import msgspec

from emberline.api.common.response_body import cost_field
from emberline.api.common.transcript import srt, vtt, words_body
from emberline.api.http.body import body_chunks
from emberline.api.http.exchange import HttpExchange, Reply, encode, json_reply
from emberline.net.held_bodies import held_bodies
from emberline.net.multipart import MultipartForm, boundary_of
from emberline.protocol.errors import BadInput, TooLarge, Unsupported
from emberline.protocol.request import SpeechRequest
from emberline.protocol.speech import Transcript

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_FORM_BYTES = 1 << 20  # beside the file
_TEXT = b"text/plain; charset=utf-8"
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})?")
_UNSUPPORTED = ("stream", "include", "chunking_strategy", "known_speaker_names", "known_speaker_references")
Granularity = Literal["word", "segment"]


class TranscriptionForm(msgspec.Struct, kw_only=True):
    """The fields of the form beside its file."""

    model: str
    language: str | None = None
    prompt: str = ""
    response_format: str = "json"
    temperature: float = 0.0
    timestamp_granularities: list[Granularity] = []


async def transcriptions(call: HttpExchange) -> Reply:
    return await _run(call, translate=False)


async def translations(call: HttpExchange) -> Reply:
    """Into English."""
    return await _run(call, translate=True)


async def _run(call: HttpExchange, translate: bool) -> Reply:
    form, audio = await _read(call)
    if translate and form.language is not None:
        raise Unsupported("a translation is always into English: leave `language` out", param="language")
    wants_words = "word" in form.timestamp_granularities
    if wants_words and form.response_format != "verbose_json":
        raise BadInput("times of words come with `response_format` verbose_json", param="timestamp_granularities")
    request = SpeechRequest(
        id=call.id,
        model=form.model,
        audio=audio,
        language=form.language,
        translate=translate,
        prompt=form.prompt,
        temperature=form.temperature,
        words=wants_words,
        session=call.session,
        api="audio",
    )
    transcript: Transcript = await call.result(request)
    return _reply(call, form, transcript, "translate" if translate else "transcribe")


async def _read(call: HttpExchange) -> tuple[TranscriptionForm, bytes]:
    """The fields may come before or after the file."""
    boundary = boundary_of(call.headers.get("content-type", ""))
    max_bytes = call.limits.max_audio_bytes
    form = MultipartForm(body_chunks(call, max_bytes + _FORM_BYTES), boundary)
    fields: dict[str, Any] = {}
    audio: bytearray | None = None
    async for part in form:
        name = part.name.removesuffix("[]")
        if name == "file":
            audio = bytearray()
            async for chunk in form.content():
                held_bodies.add(call, len(chunk))
                audio += chunk
                if len(audio) > max_bytes:
                    raise TooLarge(f"a file of audio has at most {max_bytes // 1_000_000} MB", param="file")
        elif name in _UNSUPPORTED:
            raise Unsupported(f"`{name}` is not supported for transcriptions", param=name)
        elif name == "timestamp_granularities":
            fields.setdefault(name, []).append(await form.field(part))
        else:
            fields[name] = await form.field(part)
    if audio is None:
        raise BadInput("the form has no `file`", param="file")
    if not fields.get("model"):
        fields["model"] = call.only_model()
    return _fields(fields), bytes(audio)


def _fields(fields: dict[str, Any]) -> TranscriptionForm:
    unknown = fields.keys() - set(TranscriptionForm.__struct_fields__)
    if unknown:
        name = min(unknown)
        raise BadInput(f"there is no field `{name[:64]}`", param=name[:64])
    try:
        form = msgspec.convert(
            {name: value for name, value in fields.items() if value}, TranscriptionForm, strict=False
        )
    except msgspec.ValidationError as error:
        raise BadInput(str(error)) from None
    if form.response_format not in FORMATS:
        raise BadInput(f"`response_format` is one of {', '.join(FORMATS)}", param="response_format")
    if not 0 <= form.temperature <= 1:
        raise BadInput("`temperature` lies between 0 and 1", param="temperature")
    if form.language is not None and not _LANGUAGE.fullmatch(form.language):
        raise BadInput("`language` is an ISO 639-1 code such as en", param="language")
    return form


def _reply(call: HttpExchange, form: TranscriptionForm, transcript: Transcript, task: str) -> Reply:
    kind, headers = form.response_format, call.id_headers
    if kind in ("text", "srt", "vtt"):
        text = {"text": f"{transcript.text}\n", "srt": srt(transcript), "vtt": vtt(transcript)}[kind]
        return Reply(200, text.encode(), _TEXT, headers)
    usage = {"type": "duration", "seconds": -(-transcript.audio_ms // 1000), **cost_field(call.usage)}
    if kind == "json":
        return json_reply({"text": transcript.text, "usage": usage}, headers=headers)
    body: dict[str, Any] = {
        "task": task,
        "language": transcript.language,
        "duration": transcript.audio_ms / 1000,
        "text": transcript.text,
    }
    if not form.timestamp_granularities or "segment" in form.timestamp_granularities:
        body["segments"] = [
            {
                "id": number,
                "seek": 0,
                "start": segment.start_s,
                "end": segment.end_s,
                "text": segment.text,
                "tokens": segment.tokens,
                "temperature": segment.temperature,
                "avg_logprob": segment.avg_logprob,
                "compression_ratio": segment.compression_ratio,
                "no_speech_prob": segment.no_speech_prob,
            }
            for number, segment in enumerate(transcript.segments)
        ]
    if "word" in form.timestamp_granularities:
        body["words"] = words_body(transcript.words)
    return Reply(200, encode({**body, "usage": usage}), headers=headers)
