"""Speech to text: what an engine gets of a request, and the transcript."""

import msgspec

MAX_AUDIO_S = 3600  # of one request
MAX_AUDIO_BYTES = 25_000_000  # as sent; OpenAI's limit
MAX_PROMPT_CHARS = 4000
MIN_BYTES_PER_S = 125  # less than any codec for speech: so the length of audio has a bound before it is decoded


def max_audio_ms(audio: bytes) -> int:
    """Longer audio is refused, so a request cannot cost more than this."""
    return 1000 * min(MAX_AUDIO_S, 1 + len(audio) // MIN_BYTES_PER_S)


class TranscribeParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of an `EngineRequest` with audio for a prompt. The result is a `Transcript`, encoded as JSON."""

    audio: bytes
    max_audio_ms: int
    language: str | None = None
    translate: bool = False
    prompt: str = ""
    temperature: float = 0.0
    words: bool = True


class TimedWord(msgspec.Struct, frozen=True, array_like=True):
    word: str
    start_s: float
    end_s: float


class TranscriptSegment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    start_s: float
    end_s: float
    text: str
    words: tuple[TimedWord, ...] = ()
    tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0


class Transcript(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    language: str
    language_probability: float = 1.0
    audio_ms: int
    segments: tuple[TranscriptSegment, ...] = ()

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def words(self) -> list[TimedWord]:
        return [word for segment in self.segments for word in segment.words]
