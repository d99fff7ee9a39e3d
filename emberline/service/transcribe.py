"""A request to transcribe speech on our own engines."""

from collections.abc import Mapping

import msgspec

from emberline.cluster.engine_client import EngineClient
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.protocol.errors import BadInput, Internal
from emberline.protocol.frames import EngineInfo
from emberline.protocol.request import EngineRequest, Principal, SamplingParams, SpeechRequest
from emberline.protocol.route_request import RouteRequest, route_request
from emberline.protocol.speech import MAX_PROMPT_CHARS, TranscribeParams, Transcript, max_audio_ms
from emberline.service.single_result_request import EngineCall
from emberline.telemetry.request_log import Clock, route_terms

_decoder = msgspec.json.Decoder(Transcript)


def speech_route(request: SpeechRequest, principal: Principal, info: EngineInfo, clock: Clock) -> RouteRequest:
    """The request as admission sees it. Refuses what can be refused without decoding the audio."""
    if not request.audio:
        raise BadInput("there is no audio", param="audio")
    if len(request.prompt) > MAX_PROMPT_CHARS:
        raise BadInput(f"the prompt has more than {MAX_PROMPT_CHARS} characters", param="prompt")
    terms, audio_ms = route_terms(request, clock)._replace(session=None), max_audio_ms(request.audio)
    return route_request(terms, principal, info.model, info.fingerprint, input_tokens=0, max_audio_ms=audio_ms)


class SpeechCall(EngineCall):
    """Transcribes one recording."""

    def __init__(
        self, request: SpeechRequest, engines: Mapping[str, EngineClient], timings: Timings = DEFAULTS
    ) -> None:
        params = TranscribeParams(
            audio=request.audio,
            max_audio_ms=max_audio_ms(request.audio),
            language=request.language,
            translate=request.translate,
            prompt=request.prompt,
            temperature=request.temperature,
            words=request.words,
        )
        sent = EngineRequest(
            id=request.id,
            prompt_ids=b"",
            sampling=SamplingParams(),
            priority=request.priority,
            transcribe=params,
        )
        super().__init__(sent, engines, "transcription", timings)

    def result(self) -> Transcript:
        assert self.values is not None
        try:
            return _decoder.decode(self.values)
        except msgspec.MsgspecError:
            raise Internal("the engine returned no transcript") from None
