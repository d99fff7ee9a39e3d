"""The step loop of a speech model: each step decodes a part of one request's audio, or transcribes its next segment.

Requests take turns, so a long recording delays others by a segment. A token stands for 20 ms of audio, as Whisper's
encoder has them: it is the measure of load and progress, not of what is billed.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from emberline.engine.core.step_times import smoothed
from emberline.engine.encoders.request_loop import RequestLoop, deadline_s
from emberline.engine.encoders.speech import SAMPLE_RATE, Samples, decode_audio
from emberline.protocol.errors import BadInput, EmberlineError, Internal
from emberline.protocol.events import TokenDelta, Usage
from emberline.protocol.request import EngineRequest, Priority
from emberline.protocol.speech import TranscribeParams, Transcript, TranscriptSegment

MAX_WAITING = 64  # requests, each of which holds its audio
DECODE_S = 60  # of audio decoded in one step
TOKENS_PER_S = 50

_log = logging.getLogger(__name__)


class SpeechModel(Protocol):
    def transcribe(
        self, samples: Samples, params: TranscribeParams
    ) -> tuple[str, float, Iterator[TranscriptSegment]]: ...


@dataclass(slots=True, eq=False)
class _Transcription:
    request: EngineRequest
    params: TranscribeParams
    number: int  # in order of arrival
    deadline_s: float | None  # monotonic
    decoder: Iterator[Samples]
    pieces: list[Samples] = field(default_factory=list)  # of decoded audio, until all is
    n_samples: int = 0
    language: str = ""
    probability: float = 0.0
    rest: Iterator[TranscriptSegment] | None = None  # segments to come; None until the audio is decoded
    segments: list[TranscriptSegment] = field(default_factory=list)
    n_steps: int = 0

    @property
    def running(self) -> bool:
        return self.n_steps > 0

    @property
    def audio_ms(self) -> int:
        return -(-1000 * self.n_samples // SAMPLE_RATE)

    def usage(self) -> Usage:
        return Usage(audio_ms=self.audio_ms)

    def partial_usage(self) -> Usage:
        end_s = self.segments[-1].end_s if self.segments else 0.0
        return Usage(audio_ms=min(self.audio_ms, math.ceil(1000 * end_s)), partial=True)


class SpeechLoop(RequestLoop[_Transcription]):
    def __init__(
        self,
        model: SpeechModel,
        languages: tuple[str, ...] = (),
        *,
        cpu_share: AbstractContextManager[None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(MAX_WAITING, cpu_share, clock)
        self._model = model
        self._languages = languages

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, now_s: float) -> None:
        params = request.transcribe
        if params is None:
            raise BadInput("this engine transcribes speech and does nothing else")
        self._check_room(request)
        if params.language is not None and params.language not in self._languages:
            raise BadInput(
                f"the model does not know the language {params.language[:20]!r}; it knows {', '.join(self._languages)}",
                param="language",
            )
        if params.translate and self._languages == ("en",):
            raise BadInput("the model knows English only: it cannot translate; use one such as whisper-base")
        decoder = decode_audio(params.audio, params.max_audio_ms) if params.audio else iter(())
        self._add(_Transcription(request, params, self._n_submitted, deadline_s(request, now_s), decoder))

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, now_s: float) -> list[TokenDelta]:
        deltas = self._fail_late(now_s)
        if not self._requests:
            return deltas
        item = min(self._requests.values(), key=lambda item: (item.request.priority, item.n_steps, item.number))
        item.n_steps += 1
        self.in_step = True
        began_s = self._clock()
        try:
            with self._cpu_share:
                done = self._advance(item)
        except EmberlineError as error:
            deltas.append(self._failed(item, error))
        except Exception:
            _log.exception("a recording could not be transcribed", extra={"request_id": item.request.id})
            deltas.append(self._failed(item, Internal("the engine could not transcribe this audio")))
        else:
            deltas += self._absorb(item, done)
        self.in_step = False
        took_s = self._clock() - began_s
        self.step_s = smoothed(self.step_s, took_s)
        self._device.add(took_s, item.request.priority == Priority.BATCH)
        self._steps += 1
        self.computed_tokens += 1  # a step is progress, however little audio it has finished
        return deltas

    def _advance(self, item: _Transcription) -> bool:
        """Decode on, or transcribe the next segment; whether that was the last."""
        if item.rest is not None:
            segment = next(item.rest, None)
            if segment is not None:
                item.segments.append(segment)
                self.computed_tokens += int(TOKENS_PER_S * (segment.end_s - segment.start_s))
            return segment is None
        until = item.n_samples + DECODE_S * SAMPLE_RATE
        for piece in item.decoder:
            item.pieces.append(piece)
            item.n_samples += len(piece)
            if item.n_samples >= until:
                return False
        if not item.pieces:
            return True
        samples = np.concatenate(item.pieces)
        item.pieces.clear()
        item.language, item.probability, item.rest = self._model.transcribe(samples, item.params)
        return False

    def _absorb(self, item: _Transcription, done: bool) -> list[TokenDelta]:
        if not done:  # the first delta says that it has begun
            return [TokenDelta(item.request.id, usage=item.usage())] if item.n_steps == 1 else []
        del self._requests[item.request.id]
        transcript = Transcript(
            language=item.language,
            language_probability=item.probability,
            audio_ms=item.audio_ms,
            segments=tuple(item.segments),
        )
        values = msgspec.json.encode(transcript)
        return [TokenDelta(item.request.id, finish="stop", usage=item.usage(), values=values)]
